"""Rankings: pools of the same candidates in several ways, the figures of a setting by hand, and the
lists of a sweep.
"""

import dataclasses

import numpy as np
import pytest

from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import DeviceInfo
from solrl_jax.rl import rank
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.rank import Pools, explore_and_regenerate, summarize, sweep, with_option_set
from tests.toys import toy_experiment

NAN = np.nan


@pytest.fixture(scope="module")
def toy():
    return toy_experiment("rollout.num_steps=4", "rollout.explore.num_steps=2")


# --- pools ---


@pytest.mark.slow
def test_pools_are_the_same_candidates_explored_and_regenerated(toy):
    ways = (("nvfp4", 2), ("nvfp4", 4), ("bf16", 4), ("nvfp4", 2, "best"))
    short, long, exact, best = settings = [ExplorationSetting(*way) for way in ways]
    calls = []
    pools = explore_and_regenerate(
        toy, fresh_state(toy).ema, 3, settings, lambda *facts: calls.append(facts)
    )
    assert pools.prompts == toy.test_prompts[:3]
    assert pools.true.shape == (3, 8)
    assert list(pools.proxies) == settings
    np.testing.assert_array_equal(pools.proxies[exact], pools.true)  # the regeneration itself
    error = {setting: np.abs(proxy - pools.true).max() for setting, proxy in pools.proxies.items()}
    assert 1e-5 < error[long] < error[short]
    assert error[best] not in (0, error[short])
    assert sum(completed for *_, completed in calls) == 5 * 3 * 8


@pytest.mark.slow
def test_another_recipe_changes_exploration_alone(toy):
    assert with_option_set(toy, "") is toy
    best = with_option_set(toy, "best")
    paper = with_option_set(toy, "paper")
    assert best.config.rollout.explore.exact_steps == 1
    assert best.explorer.explore == best.config.rollout.explore
    assert paper.config == toy.config
    for other in (best, paper):
        for field in dataclasses.fields(other):
            if field.name not in ("config", "explorer"):
                assert getattr(other, field.name) is getattr(toy, field.name)
        assert other.explorer.calibration.backbone is toy.backbone
    adapters = fresh_state(toy).ema

    def segments(experiment):
        return len(experiment.explorer.sampler(adapters, experiment.explorer.settings[0]).segments)

    assert (segments(toy), segments(paper), segments(best)) == (1, 1, 2)


# --- figures ---

TRUE = np.array(
    [[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]]
)


def figures(proxy, true=TRUE, kept=4):
    setting = ExplorationSetting("nvfp4", 6)
    return summarize(
        Pools(("a", "b"), np.asarray(true), {setting: np.asarray(proxy)}), setting, kept
    )


def test_a_perfect_proxy_has_the_perfect_ranks():
    got = figures(10 * TRUE)
    assert (got["spearman"], got["kendall"]) == pytest.approx((1, 1))
    assert (got["top_k_match"], got["bottom_k_match"], got["top_k_regret"]) == (
        0.5,
        0.5,
        pytest.approx(TOP_FOUR_OF_TWO),
    )
    assert (got["true_rank_best"], got["true_rank_worst"]) == (1.5, 7.5)
    assert (got["perfect_rank_best"], got["perfect_rank_worst"]) == (1.5, 7.5)
    assert (got["kept"], got["candidates"], got["prompts"], got["precision"], got["steps"]) == (
        4,
        8,
        2,
        "nvfp4",
        6,
    )


# Two places of four stay empty, and count as the pool's worst: (8+7+6+5)/4 - (8+7+1+1)/4 of 7,
# (9+7+6+5)/4 - (9+7+1+1)/4 of 8.
TOP_FOUR_OF_TWO = ((26 - 17) / 4 / 7 + (27 - 18) / 4 / 8) / 2


@pytest.mark.parametrize("kept", [2, 4, 6, 8])
def test_perfect_ranks_are_what_a_perfect_proxy_reaches(kept):
    got = figures(TRUE, kept=kept)
    assert got["true_rank_best"] == got["perfect_rank_best"] == (kept // 2 + 1) / 2
    assert got["true_rank_worst"] == got["perfect_rank_worst"] == 8 - (kept // 2 - 1) / 2


def test_figures_by_hand():
    """The best and third of the first prompt change places; the second prompt is reversed."""
    proxy = np.array([[6.0, 7.0, 8.0, 5.0, 4.0, 3.0, 2.0, 1.0], -TRUE[1]])
    got = figures(proxy)
    first, second = got["per_prompt"]
    assert (first["prompt"], second["prompt"]) == ("a", "b")
    assert first["spearman"] == pytest.approx(1 - 6 * 8 / (8 * 63))
    assert first["kendall"] == pytest.approx((25 - 3) / 28)
    assert (first["true_rank_best"], first["true_rank_worst"]) == (
        2.5,
        7.5,
    )  # the third and the second
    assert (second["true_rank_best"], second["true_rank_worst"]) == (7.5, 1.5)
    assert (got["true_rank_best"], got["true_rank_worst"]) == (5.0, 4.5)
    assert (got["perfect_rank_best"], got["perfect_rank_worst"]) == (1.5, 7.5)
    assert (first["top_k_match"], second["top_k_match"]) == (0.5, 0.0)


def test_rewards_that_are_not_finite_are_left_out():
    proxy = TRUE.copy()
    true = TRUE.copy()
    proxy[0, 0] = NAN
    true[0, 1] = np.inf
    true[1] = NAN
    got = figures(proxy, true)
    first, second = got["per_prompt"]
    # the proxy's two best are the second, which has no true reward, and the third; true ranks are
    # of seven
    assert (first["true_rank_best"], first["true_rank_worst"]) == (2.0, 6.5)
    assert first["spearman"] == pytest.approx(1)
    assert all(np.isnan(value) for name, value in second.items() if name != "prompt")
    for name in ("spearman", "true_rank_best", "top_k_regret"):
        assert got[name] == first[name]


def test_the_table_has_a_row_a_setting_and_for_a_single_one_a_row_a_prompt():
    settings = [ExplorationSetting("nvfp4", 6), ExplorationSetting("bf16", 10, "best")]
    pools = Pools(("a", "b"), TRUE, dict.fromkeys(settings, TRUE))
    results = [summarize(pools, setting, 4) for setting in settings]
    both = rank.format_table(results, settings).splitlines()
    single = rank.format_table(results[:1], settings[:1]).splitlines()
    assert both[1].startswith("nvfp4, 6 steps ")
    assert both[2].startswith("best: bf16, 10 steps ")
    assert [line.split()[0] for line in single[1:3]] == ["a", "b"]
    assert both[-1] == single[-1] == "4 of 8 kept; true ranks of a perfect proxy: 1.5, 7.5"


# --- the lists of a sweep ---


def test_without_lists_there_is_the_runs_own_setting(toy):
    assert sweep(toy.config) == [ExplorationSetting("nvfp4", 2)]


def test_a_sweep_is_every_combination_each_once(toy):
    got = sweep(
        toy.config,
        explore=["paper", "best"],
        formats=np.array(["nvfp4", "bf16", "nvfp4"]),
        steps=(steps for steps in (2, 4)),  # read once
    )
    assert got == [
        ExplorationSetting(precision, steps, recipe)
        for recipe in ("paper", "best")
        for precision in ("nvfp4", "bf16")
        for steps in (2, 4)
    ]


def test_auto_stands_for_a_format(toy, monkeypatch):
    monkeypatch.setattr(rank, "first_device_info", lambda: DeviceInfo("gpu", "NVIDIA H200", (9, 0)))
    assert [s.precision for s in sweep(toy.config, formats=["auto", "fp8", "nvfp4"])] == [
        "fp8",
        "nvfp4",
    ]


def test_a_format_that_quantizes_nothing_is_the_training_precision(toy):
    """BF16 is that of `toy`, and exploring in float32 would be the same computation."""
    assert [s.precision for s in sweep(toy.config, formats=["fp32", "bf16"])] == ["bf16"]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"formats": ["nvfp4", "fp5"]},
            r"^formats=fp5: expected one of fp32, bf16, .*nvfp4, auto$",
        ),
        ({"steps": [2, 0]}, r"^steps=0: expected an integer from 1 to 1000$"),
        (
            {"explore": ["best", ""]},
            r"^explore='': expected the name of a set of exploration options$",
        ),
        ({"explore": ["best", "papr"]}, r"^unknown explore 'papr': did you mean 'paper'\?$"),
    ],
)
def test_lists_that_cannot_be_are_refused_in_one_line(toy, lists, message):
    with pytest.raises((InputError, ConfigError), match=message) as error:
        sweep(toy.config, **lists)
    assert "\n" not in str(error.value)
