"""`reward.combine=advantages` against plain loops in float64, and through whole iterations: which
candidates it keeps, and that the scale of a score changes nothing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.values import ConfigError
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl import iteration as iterations
from solrl_jax.rl.advantages import MODES
from solrl_jax.rl.combine import combined_advantages, ranking_values, weighted_advantages
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.rank import explore_and_regenerate, summarize
from tests.small import small_config
from tests.toys import toy_experiment

TOLERANCE = 1e-9
CLIP = 2.0
WEIGHTS = {"a": 1.0, "b": 0.5, "c": -2.0}


def reference(scores, weights):
    """One prompt and one candidate at a time; None for a candidate without a value."""
    first = next(iter(scores.values()))
    out = [[0.0] * len(row) for row in first]
    for p, row in enumerate(first):
        counted = [
            n for n in range(len(row)) if all(math.isfinite(s[p][n]) for s in scores.values())
        ]
        for name, weight in weights.items():
            r = [float(scores[name][p][n]) for n in counted]
            mean = math.fsum(r) / len(r) if r else 0.0
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / len(r)) if r else 0.0
            for n, x in zip(counted, r, strict=True):
                out[p][n] += weight * (x - mean) / std if std else 0.0
        for n in range(len(row)):
            if n not in counted:
                out[p][n] = math.nan
    return np.array(out)


def scores(seed=0, prompts=3, candidates=8):
    """Three scores of different scale and offset."""
    rng = np.random.default_rng(seed)
    draws = rng.standard_normal((3, prompts, candidates)).astype(np.float32)
    return {
        "a": draws[0],
        "b": np.float32(0.01) * draws[1] + np.float32(0.25),
        "c": 30 * draws[2] + 100,
    }


def with_holes():
    data = scores()
    data["a"][0, 2] = np.nan
    data["b"][0, 5] = np.inf
    data["c"][1, 0] = -np.inf
    data["b"][2] = np.nan
    data["a"][1, 3] = 3e38
    return data


@pytest.mark.parametrize("data", [scores(), with_holes()], ids=["finite", "holes"])
def test_values_equal_the_formula(data):
    got = weighted_advantages(data, WEIGHTS)
    finite = {name: np.where(abs(x) < 1e18, x, np.nan) for name, x in data.items()}
    np.testing.assert_allclose(got, reference(finite, WEIGHTS), rtol=TOLERANCE, atol=TOLERANCE)
    assert np.nanmax(abs(got)) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("global_std", [True, False])
def test_advantages_equal_the_formula(global_std, mode):
    values = weighted_advantages(with_holes(), WEIGHTS)
    want = np.where(np.isfinite(values), values, 0.0)
    if global_std:
        want /= math.sqrt(math.fsum(want.reshape(-1) ** 2) / np.isfinite(values).sum())
    want = np.clip(want, -CLIP, CLIP)
    want = {
        "all": want,
        "positive_only": np.maximum(want, 0),
        "negative_only": np.minimum(want, 0),
        "one_only": np.where(want > 0, 1, 0),
        "binary": np.sign(want),
    }[mode]
    got = combined_advantages("advantages", values, clip=CLIP, global_std=global_std, mode=mode)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(want).max() >= 1


@pytest.mark.parametrize("factor", [2.0, 2.0**-9, 2.0**40, 2.0**-40, 3.7, 1e-6])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_scale_of_a_score_changes_nothing(name, factor):
    """To the last bit for powers of two. For others float32 rounds the scores themselves."""
    data = with_holes()
    scaled = {**data, name: data[name] * np.float32(factor)}
    before = weighted_advantages(data, WEIGHTS)
    after = weighted_advantages(scaled, WEIGHTS)
    if math.log2(factor).is_integer():
        np.testing.assert_array_equal(after, before)
    else:
        np.testing.assert_allclose(after, before, atol=2e-4)
    by_sum = [sum(w * x[key] for key, w in WEIGHTS.items()) for x in (data, scaled)]
    assert not np.allclose(*by_sum, equal_nan=True)


def test_a_score_without_deviation_has_no_say():
    data = scores()
    data["b"][:] = np.float32(0.3) * (1 + np.float32(1.2e-7) * np.arange(-4, 4))  # rounding
    others = {name: WEIGHTS[name] for name in "ac"}
    np.testing.assert_array_equal(
        weighted_advantages(data, WEIGHTS), weighted_advantages(data, others)
    )
    flat = {name: np.full((2, 4), 7.0, np.float32) for name in WEIGHTS}
    values = weighted_advantages(flat, WEIGHTS)
    assert not values.any()
    for global_std in (True, False):
        got = combined_advantages(
            "advantages", values, clip=CLIP, global_std=global_std, mode="binary"
        )
        assert not np.asarray(got).any()


def test_scores_that_disagree_tie():
    """A sum that cancels up to rounding is 0, so that no sign is drawn from rounding."""
    data = scores()
    opposite = {"a": data["a"], "b": np.float32(-0.1) * data["a"]}
    assert not weighted_advantages(opposite, {"a": 1.0, "b": 1.0}).any()
    assert weighted_advantages(opposite, {"a": 1.0, "b": 0.999}).all()


def test_a_sum_is_the_reward_itself():
    flat = {"reward": np.arange(6, dtype=np.float32)}
    np.testing.assert_array_equal(
        ranking_values("sum", flat, WEIGHTS, 2), flat["reward"].reshape(2, 3)
    )


def test_one_score_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^reward.combine='advantages': must be sum with one score in reward.weights "
        r"\(shapes\)",
    ):
        small_config("unused", "reward.combine=advantages")


# --- whole iterations ---


def two_scores(factor):
    """The brightness of a picture, and how far its red is from its green, times a factor."""

    def reward(score):
        return Reward(
            None, lambda prompts: np.zeros(len(prompts)), lambda _, x, __: {"reward": score(x)}
        )

    return mixture(
        {"bright": 1.0, "red": 0.5},
        {
            "bright": reward(lambda x: x.mean((1, 2, 3))),
            "red": reward(lambda x: factor * (x[..., 0] - x[..., 1]).mean((1, 2))),
        },
        None,
    )


def experiment_of(factor=1.0, *overrides, combine="advantages", mesh=(1, 1)):
    toy = toy_experiment(
        "reward.weights={bright: 1, red: 0.5}",
        f"reward.combine={combine}",
        "rollout.candidates=8",
        *overrides,
        mesh=mesh,
    )
    return dataclasses.replace(toy, reward=two_scores(factor))


def same_bits(a, b):
    return all(map(np.array_equal, *map(jax.tree.leaves, jax.device_get((a, b)))))


@pytest.mark.exhaustive
def test_an_iteration_depends_on_no_scale():
    """Who is kept, the advantages and the new policy, to the bit; and the metric "reward" is still
    the weighted sum.
    """
    outcomes = {}
    for combine in ("advantages", "sum"):
        outcomes[combine] = []
        for factor in (1.0, 1024.0):
            toy = experiment_of(factor, combine=combine)
            state, outcome = iterate(toy, fresh_state(toy), 1)
            outcomes[combine].append((state, outcome))
            metrics = outcome.metrics
            for where in ("pool", "kept"):
                parts = metrics[f"{where}/bright"] + 0.5 * metrics[f"{where}/red"]
                assert metrics[f"{where}/reward"] == pytest.approx(parts, rel=1e-5)
    for combine, ((state, before), (scaled_state, after)) in outcomes.items():
        equal = [
            np.array_equal(before.ledger[column], after.ledger[column])
            for column in ("rank", "kept", "advantage")
        ]
        assert all(equal) == (combine == "advantages")
        assert same_bits(state, scaled_state) == (combine == "advantages")


@pytest.fixture
def spied(monkeypatch):
    """Samples of each call of `generate`, and batches."""
    pools = []
    batches = []
    generate = iterations.generate
    make = iterations.policy_batch
    monkeypatch.setattr(
        iterations, "generate", lambda *a, **k: pools.append(generate(*a, **k)) or pools[-1]
    )
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    return pools, batches


TRAINED = {"bright": 1.0, "red": 0.5}


def values_of(samples, count, weights=TRAINED):
    rows = {name: samples.scores[name].reshape(2, count) for name in weights}
    return reference(rows, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranked_by",
    [TRAINED, pytest.param({"bright": -1.0, "red": 2.0}, marks=pytest.mark.exhaustive)],
)
def test_the_pool_selects_and_the_kept_samples_have_the_advantages(ranked_by, spied):
    """Also with weights of its own for the pool, `rollout.explore.reward`."""
    pools, _ = spied
    toy = experiment_of(100.0, "algorithm.global_std=false")
    if ranked_by is not TRAINED:
        explore = f"rollout.explore.reward={ranked_by}"
        toy = experiment_of(100.0, "algorithm.global_std=false", explore)
        toy = dataclasses.replace(toy, exploration_reward=two_scores(100.0))
    _, outcome = iterate(toy, fresh_state(toy), 1)
    explored, kept = pools
    pool = values_of(explored, 8, ranked_by)
    ranks = np.argsort(np.argsort(-pool, axis=1), axis=1)
    np.testing.assert_array_equal(outcome.ledger["rank"].reshape(2, 8), ranks)
    extremes = (ranks < 2) | (ranks >= 6)
    np.testing.assert_array_equal(outcome.ledger["kept"].reshape(2, 8), extremes)
    got = outcome.ledger["advantage"].compressed().reshape(2, 4)
    np.testing.assert_allclose(got, values_of(kept, 4), atol=1e-5)
    np.testing.assert_allclose(
        outcome.ledger["regenerated_reward"].compressed(), kept.reward, rtol=1e-6
    )


@pytest.mark.slow
def test_pairs_are_ordered_by_the_combined_advantages(spied):
    pools, batches = spied
    toy = experiment_of(100.0, "objective=dpo")
    iterate(toy, fresh_state(toy), 1)
    kept = pools[1]
    batch = batches[0]
    values = values_of(kept, 4).reshape(-1)
    rows = [
        int(np.flatnonzero((kept.latents == x).all((1, 2, 3)))[0])
        for x in np.asarray(batch.latents)
    ]
    assert (values[rows[::2]] > values[rows[1::2]]).all()
    assert np.asarray(batch.weight).all()


@pytest.mark.exhaustive
def test_an_exact_exploration_has_fidelity_one():
    """The kept samples are compared with themselves, not with their place in the pool."""
    exact = ("rollout.explore.precision=bf16", "rollout.explore.num_steps=3")
    toy = experiment_of(100.0, *exact)
    _, outcome = iterate(toy, fresh_state(toy), 1)
    assert outcome.metrics["fidelity/spearman"] == pytest.approx(1)
    settings = [toy.explorer.settings[0]]
    pools = explore_and_regenerate(toy, fresh_state(toy).old, 2, settings, lambda *_: None)
    assert summarize(pools, settings[0], 4)["spearman"] == pytest.approx(1)
    assert np.abs(pools.true.mean(1)).max() < 1e-9  # sums of advantages, not rewards


@pytest.mark.exhaustive
def test_a_mesh_of_eight_devices_keeps_and_trains_the_same():
    results = []
    for mesh in ((1, 1), (2, 2, 2)):
        toy = experiment_of(100.0, mesh=mesh)
        state, outcome = iterate(toy, fresh_state(toy), 1)
        results.append((jax.device_get(state.adapters), outcome.ledger))
    (one, ledger), (eight, other) = results
    np.testing.assert_array_equal(ledger["kept"], other["kept"])
    np.testing.assert_allclose(ledger["advantage"], other["advantage"], atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one, eight)


@pytest.mark.exhaustive
def test_a_candidate_without_one_of_its_scores_is_not_kept():
    toy = experiment_of()

    def holes(params, images, prepared):
        mean = images.mean((1, 2, 3))
        score = two_scores(1.0).score(params, images, prepared)
        return score | {"red": jnp.where(mean > jnp.median(mean), score["red"], jnp.nan)}

    toy = dataclasses.replace(toy, reward=dataclasses.replace(toy.reward, score=holes))
    _, outcome = iterate(toy, fresh_state(toy), 1)
    kept = outcome.ledger["kept"]
    assert np.isfinite(outcome.metrics["loss"])
    assert not kept.all()
    assert np.isfinite(outcome.ledger["proxy_reward"][kept]).all()
