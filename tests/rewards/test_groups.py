"""Rewards that compare the candidates of a prompt: groupwise and pairwise ones, outside JAX and
inside.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest

from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError, RunError
from solrl_jax.rewards import host
from solrl_jax.rewards.groups import group_slices, ordered_pairs, round_robin, win_rates
from solrl_jax.rewards.host import open_scoring
from solrl_jax.rewards.protocol import HostRewards
from solrl_jax.runs import trainer
from solrl_jax.runs.progress import TerminalProgress
from tests.comparing import ranks
from tests.rewards.opening import open_reward
from tests.toys import toy_config

PICTURES = np.random.default_rng(0).random((12, 8, 8, 3), np.float32)
PROMPTS = [Prompt(f"prompt {i // 6}") for i in range(12)]
WORKERS = (2, 30.0)


@pytest.fixture(autouse=True, scope="module")
def _closed():
    yield
    host.shared_workers(*WORKERS).close()


def test_groups_are_even_and_of_one_prompt():
    assert group_slices("aaaaabb", 5) == [slice(0, 5), slice(5, 7)]
    assert group_slices("aaaaabb", 3) == [slice(0, 2), slice(2, 5), slice(5, 7)]
    assert group_slices("a", 2) == [slice(0, 1)]
    assert group_slices("", 2) == []
    for size in range(2, 9):
        lengths = [s.stop - s.start for s in group_slices("a" * 17, size)]
        assert (sum(lengths), max(lengths) <= size, max(lengths) - min(lengths) <= 1) == (
            17,
            True,
            True,
        )


def test_win_rates_average_both_orders():
    p = np.random.default_rng(0).random((4, 4))
    expected = [
        np.mean([(p[i, j] + 1 - p[j, i]) / 2 for j in range(4) if j != i]) for i in range(4)
    ]
    np.testing.assert_allclose(win_rates(p), expected, rtol=1e-6)
    assert win_rates(p).mean() == pytest.approx(0.5)  # one wins what the other loses
    # A preference for a position cancels.
    np.testing.assert_allclose(win_rates(np.full((3, 3), 0.9)), 0.5)
    assert win_rates(np.array([[np.nan]])).tolist() == [0.5]
    p[0, 1] = np.nan
    assert np.isfinite(win_rates(p)).all()
    p[0] = np.nan
    assert np.isnan(win_rates(p)).tolist() == [True, False, False, False]
    assert ordered_pairs(3).tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]


def test_a_round_robin_inside_jax_equals_win_rates():
    rng = np.random.default_rng(0)
    x = rng.random((5, 2), np.float32)

    def prefer(params, first, second, prepared):
        return (first[:, 0] * second[:, 1] + 0.1) / 2

    p = np.array([[(a[0] * b[1] + 0.1) / 2 for b in x] for a in x])
    got = round_robin(prefer)((), x, np.zeros(5))["reward"]
    np.testing.assert_allclose(got, win_rates(p), rtol=1e-5)
    assert round_robin(prefer)((), x[:1], np.zeros(1))["reward"].tolist() == [0.5]


def scores(name, chunk=5, group_size=4, pictures=PICTURES, **options):
    reward = open_reward({name: 1.0}, options={name: options} if options else {}).rewards[name]
    settings = HostRewards((reward,), {}, *WORKERS, False, group_size)
    with open_scoring(settings, PROMPTS) as run:
        for start in range(0, 12, chunk):
            run.add(pictures[start : start + chunk])
        return run.finish()[name]


def expected_wins(size):
    brightness = PICTURES.mean((1, 2, 3))
    groups = group_slices(PROMPTS, size)
    wins = [
        [
            0.5 + 0.4 * np.mean([np.sign(b - c) for c in brightness[g] if c != b])
            for b in brightness[g]
        ]
        for g in groups
    ]
    return np.concatenate(wins)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_groups_do_not_depend_on_chunks(chunk):
    expected = [ranks(PICTURES[g], PROMPTS[g], []) for g in group_slices(PROMPTS, 4)]
    np.testing.assert_allclose(scores("tests.comparing:ranks", chunk), np.concatenate(expected))
    got = scores("tests.comparing:brighter", chunk, 6, bias=0.1)
    np.testing.assert_allclose(got, expected_wins(6), rtol=1e-5)


def test_an_image_that_is_not_finite_costs_the_others_nothing():
    pictures = PICTURES.copy()
    pictures[7, 0, 0, 0] = np.nan
    got = scores("tests.comparing:brighter", group_size=6, pictures=pictures)
    assert np.flatnonzero(np.isnan(got)).tolist() == [7]
    np.testing.assert_allclose(got[:6], expected_wins(6)[:6], rtol=1e-5)


def test_other_entries_of_a_pairwise_reward_are_ignored():
    plain = scores("tests.comparing:brighter", group_size=6)
    np.testing.assert_array_equal(scores("tests.comparing:brighter_and_why", group_size=6), plain)


def test_preferences_before_a_call_without_any_count():
    """The groups of six images are called with the first 16 of 30 pairs, which have an answer, and
    with the other 14, which have none. In groups of three, no pair has an answer.
    """
    name = "tests.comparing:brighter_while_it_lasts"
    reward = open_reward({name: 1.0}).rewards[name]
    wins = {}
    failed = {}
    for size in (6, 3):
        with open_scoring(HostRewards((reward,), {}, *WORKERS, True, size), PROMPTS) as run:
            run.add(PICTURES)
            wins[size] = run.finish()[name]
            failed[size] = run.failed[name]
    brightness = PICTURES.mean((1, 2, 3))
    for start in (0, 6):
        values = brightness[start : start + 6]
        preferences = np.full((6, 6), np.nan)
        first, second = ordered_pairs(6)[:16].T
        preferences[first, second] = 0.5 + 0.4 * np.sign(values[first] - values[second])
        np.testing.assert_allclose(
            wins[6][start : start + 6], win_rates(preferences), rtol=1e-5, equal_nan=True
        )
    assert np.isfinite(wins[6]).sum() == 8
    assert np.isnan(wins[3]).all()
    assert failed == {6: 4, 3: 12}


def train(tmp_path, *overrides):
    config = toy_config(tmp_path / "run", "train.iterations=1", *overrides)
    with TerminalProgress() as progress:
        trainer.run(config, progress)
    return pq.read_table(tmp_path / "run" / "ledger").to_pydict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "ranks",
        "brighter_inside",
        pytest.param("brighter", marks=pytest.mark.exhaustive),
        pytest.param("ranks_inside", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("toy_model")
def test_a_reward_of_yours_that_compares_candidates_trains(name, tmp_path):
    """Two groups of four make a pool, and the kept four are one group."""
    ledger = train(tmp_path, f"reward=tests.comparing:{name}", "reward.group_size=4")
    proxy = np.array(ledger["proxy_reward"]).reshape(2, 2, 4)
    kept = np.array([x for x in ledger["regenerated_reward"] if x is not None]).reshape(2, 4)
    for rewards in (proxy, kept):
        np.testing.assert_allclose(rewards.mean(-1), 0.5, atol=1e-6)
        assert (np.ptp(rewards, axis=-1) > 0.2).all()


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_weighted_sum_of_rewards_that_compare_and_that_do_not(tmp_path):
    weights = (
        "reward.weights={'tests.comparing:ranks': 1, 'tests.comparing:ranks_inside': 2,"
        " 'tests.outside:in_jax': 1, 'tests.outside:mean': 1}"
    )
    train(tmp_path, weights, "reward.group_size=8")
    row = trainer.read_metrics(tmp_path / "run")[-1]
    assert row["pool/tests.comparing:ranks"] == pytest.approx(0.5)
    parts = [f"pool/{name}" for name in ("tests.outside:in_jax", "tests.outside:mean")]
    assert row["pool/reward"] == pytest.approx(1.5 + sum(row[part] for part in parts), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrong", "{how: length}", r"wrong': returned shape \(1,\) for 2 images"),
        ("wrong", "{how: range}", r"returned 1.5 as a preference: expected numbers in \[0, 1\]"),
        ("wrong", "{how: words}", "no numbers"),
        ("of_one", "{}", r"called as \(first, second, prompts, metadata\): too many positional"),
        ("short", "{}", r"short': returned shape \(1,\) for 2 images"),
        ("brighter_inside", "{shape: wrong}", r"returned shape \(1,\) for 2 pairs"),
    ],
)
@pytest.mark.usefixtures("toy_model")
def test_one_that_is_broken_is_one_line(name, options, message, tmp_path):
    full = f"tests.comparing:{name}"
    with pytest.raises((InputError, RunError), match=message) as error:
        train(tmp_path, f"reward={full}", f"reward.options={{'{full}': {options}}}")
    assert "\n" not in str(error.value)
