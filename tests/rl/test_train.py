"""The iteration: families, what is trained on, what is recorded, and that nothing recompiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from solrl_jax.diffusion.seeds import seed_numbers
from solrl_jax.quant.nvfp4 import NVFP4Tensor
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl import iteration as iterations
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.explorer import Explorer
from solrl_jax.rl.explore.sync import quantize_policy
from solrl_jax.rl.generate import SeedBatch, decode_chunk, draw_noise, generate, sample_chunk
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.objectives.nft import nft
from solrl_jax.rl.phase_timer import PhaseTimer
from solrl_jax.rl.select import rank_candidates
from solrl_jax.rl.trainable.trainable import flatten
from solrl_jax.rl.update import blend, old_decay, update
from tests.cases import first_is_quick
from tests.small import small_config
from tests.toys import toy_experiment

PROGRAMS = (sample_chunk, decode_chunk, score_images, draw_noise, update, quantize_policy)
REWARD_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def experiment():
    return experiments.build(small_config())


@pytest.fixture(scope="module")
def first(experiment):
    """The state and the outcome of one iteration from the beginning."""
    return iterate(experiment, fresh_state(experiment), 1)


@pytest.fixture(scope="module")
def toy():
    return toy_experiment()


def with_rollout(experiment, **changes):
    config = dataclasses.replace(
        experiment.config, rollout=dataclasses.replace(experiment.config.rollout, **changes)
    )
    return dataclasses.replace(experiment, config=config)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same_bits(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nothing_is_traced_after_the_first_iteration(experiment):
    state, outcome = iterate(experiment, fresh_state(experiment), 1)
    assert 0 < outcome.metrics["seconds/compile"] < outcome.metrics["seconds"]
    before = [program._cache_size() for program in PROGRAMS]
    for iteration in (2, 3):
        state, outcome = iterate(experiment, state, iteration)
        assert outcome.metrics["seconds/compile"] == 0
    assert [program._cache_size() for program in PROGRAMS] == before
    # and the counts can rise: another number of steps is another program
    prompts = experiment.train_prompts[:2]
    prompted = experiment.encode_prompts(prompts, experiment.reward)
    generate(
        experiment.backbone,
        experiment.sampler("regenerate", state.old, 4),
        prompted,
        SeedBatch.from_seeds(experiment.seeds("candidate", prompts, 4)),
        experiment.reward,
    )
    assert sample_chunk._cache_size() > before[0]


def test_the_ledger_tells_the_whole_iteration(experiment, first):
    _, outcome = first
    ledger = outcome.ledger
    rollout = experiment.config.rollout
    shape = (experiment.config.train.num_prompts, rollout.candidates)
    proxy = ledger["proxy_reward"].reshape(shape)
    kept = ledger["kept"].reshape(shape)
    places = ledger["rank"].reshape(shape)
    np.testing.assert_array_equal(places, rank_candidates(proxy))
    np.testing.assert_array_equal(
        kept, (places < rollout.kept // 2) | (places >= rollout.candidates - rollout.kept // 2)
    )
    regenerated = ledger["regenerated_reward"]
    np.testing.assert_array_equal(np.ma.getmaskarray(regenerated), ~kept.reshape(-1))
    advantage = ledger["advantage"].compressed().reshape(shape[0], rollout.kept)
    reward = regenerated.compressed().reshape(shape[0], rollout.kept)
    expected = (reward - reward.mean(1, keepdims=True)) / ((reward - reward.mean()).std() + 1e-4)
    np.testing.assert_allclose(advantage, np.clip(expected, -5, 5), rtol=1e-4, atol=1e-5)
    assert len(set(ledger["seed"].tolist())) == kept.size
    assert (ledger["precision"], ledger["steps"]) == ("nvfp4", 2)
    assert outcome.metrics["fidelity/level"] == 0


@pytest.mark.exhaustive
def test_progress_goes_through_the_phases_and_their_rows(toy):
    calls = []
    iterate(toy, fresh_state(toy), 1, progress=lambda *facts: calls.append(facts))
    rows = {"explore": 16, "regenerate": 8, "update": 8}
    assert list(dict.fromkeys(phase for phase, _, _ in calls)) == list(rows)
    for phase, total in rows.items():
        counts = [(of, completed) for name, of, completed in calls if name == phase]
        assert counts[0] == (total, 0)
        assert {of for of, _ in counts} == {total}
        assert sum(completed for _, completed in counts) == (0 if phase == "update" else total)


@pytest.mark.slow
def test_the_clock_waits_for_the_policy_that_explores(toy, monkeypatch):
    """Else the seconds of sync would be told as those of exploring."""
    waited = []
    original = PhaseTimer.wait

    def wait(timer, arrays):
        waited.extend(jax.tree.leaves(arrays))
        original(timer, arrays)
        assert all(leaf.is_ready() for leaf in waited if isinstance(leaf, jax.Array))

    monkeypatch.setattr(PhaseTimer, "wait", wait)
    iterate(toy, fresh_state(toy), 1)
    scales = [leaf for leaf in waited if getattr(leaf, "dtype", None) == jnp.float8_e4m3fn]
    assert len(scales) == len(toy.explorer.quantized)


@pytest.mark.slow
def test_a_level_is_explored_at_and_told(toy):
    """Levels of two steps of three in NVFP4: three steps, FP8, and the regeneration itself."""
    for level, expected in enumerate([("nvfp4", 2), ("nvfp4", 3), ("fp8", 3), ("bf16", 3)]):
        _, outcome = iterate(toy, fresh_state(toy), 1, level)
        assert (outcome.ledger["precision"], outcome.ledger["steps"]) == expected
        assert outcome.metrics["fidelity/level"] == level
    ledger = outcome.ledger
    np.testing.assert_array_equal(
        ledger["regenerated_reward"].compressed(), ledger["proxy_reward"][ledger["kept"]]
    )


@pytest.mark.slow
def test_low_precision_never_enters_the_loss(toy, monkeypatch):
    """Proxies decide who is kept and nothing else: with the same kept seeds, other proxies give the
    same adapters.
    """
    original = Explorer.policy
    counts = []

    def spied(self, adapters, precision):
        params = original(self, adapters, precision)
        assert precision == "nvfp4"
        counts.append(sum(isinstance(leaf, NVFP4Tensor) for leaf in flatten(params).values()))
        return params

    monkeypatch.setattr(Explorer, "policy", spied)
    everything = with_rollout(toy, kept=8)  # all candidates are kept, whatever their proxy
    a, outcome = iterate(everything, fresh_state(toy), 1)
    monkeypatch.setattr(Explorer, "policy", lambda self, adapters, precision: toy.policy(adapters))
    b, exact = iterate(everything, fresh_state(toy), 1)
    assert counts == [len(toy.explorer.quantized)]
    assert np.abs(outcome.ledger["proxy_reward"] - exact.ledger["proxy_reward"]).max() > 1e-4
    same_bits(a.adapters, b.adapters)
    moved = [
        np.abs(x - y).max()
        for x, y in zip(leaves(a.adapters), leaves(fresh_state(toy).adapters), strict=True)
    ]
    assert max(moved) > 1e-5


FAMILIES = {"naive_quant": ("nvfp4", 8), "naive_scaling": ("bf16", 8), "diffusionnft": ("bf16", 4)}


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_families_that_do_not_regenerate_train_on_what_they_explored(family, monkeypatch):
    precision, candidates = FAMILIES[family]
    toy = toy_experiment(
        f"family={family}", "rollout.explore.num_steps=3", f"rollout.candidates={candidates}"
    )
    pools = []
    batches = []
    make = iterations.policy_batch
    monkeypatch.setattr(
        iterations,
        "generate",
        lambda *a, **k: pools.append(generate(*a, **k)) or pools[-1],
    )
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    state, outcome = iterate(toy, fresh_state(toy), 1)
    assert outcome.ledger["regenerated_reward"] is None
    assert outcome.metrics["fidelity/spearman"] == pytest.approx(
        1.0
    )  # the proxy is what is trained on
    assert outcome.metrics["grad_norm"] > 0
    assert int(state.step) == 1
    assert outcome.ledger["precision"] == precision
    (pool,) = pools
    (batch,) = batches  # nothing else is sampled
    np.testing.assert_array_equal(batch.latents, pool.latents[outcome.ledger["kept"]])
    assert "images_per_second/regenerate" not in outcome.metrics


def test_what_is_regenerated_is_trained_on(toy, monkeypatch):
    pools = []
    batches = []
    make = iterations.policy_batch
    monkeypatch.setattr(
        iterations,
        "generate",
        lambda *a, **k: pools.append(generate(*a, **k)) or pools[-1],
    )
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    _, outcome = iterate(toy, fresh_state(toy), 1)
    explored, regenerated = pools
    (batch,) = batches
    np.testing.assert_array_equal(batch.latents, regenerated.latents)
    kept = outcome.ledger["kept"]
    np.testing.assert_array_equal(
        seed_numbers(np.asarray(batch.seeds)), outcome.ledger["seed"][kept]
    )
    np.testing.assert_array_equal(batch.prompt, np.repeat([0, 1], 4))
    assert np.abs(explored.latents[kept] - regenerated.latents).max() > 1e-4


def test_old_follows_and_ema_averages(experiment, first):
    state, outcome = first
    start = fresh_state(experiment)
    assert outcome.metrics["old_decay"] == pytest.approx(0.001)
    expected = blend(start.old, state.adapters, jnp.float32(0.001))
    for x, y in zip(leaves(state.old), leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    expected = blend(start.ema, state.adapters, jnp.float32(2 / 11))
    for x, y in zip(leaves(state.ema), leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "steps", "decays"),
    [
        (0, (1, 500), (0, 0)),
        (1, (1, 100, 900), (0.001, 0.1, 0.5)),
        (2, (75, 76, 175, 900), (0, 0.0075, 0.75, 0.999)),
    ],
)
def test_decay_of_the_old_policy(kind, steps, decays):
    assert [float(old_decay(jnp.int32(t), kind)) for t in steps] == pytest.approx(list(decays))


def poisoned(bad) -> Reward:
    """A reward that is the picture's mean, but not finite for pictures that `bad` says."""

    def score(params, images, prepared):
        mean = images.mean((1, 2, 3))
        return {"reward": jnp.where(bad(mean), jnp.nan, mean)}

    return Reward(None, lambda prompts: np.zeros(len(prompts), np.float32), score)


@pytest.mark.slow
def test_a_reward_that_is_not_finite_is_counted_and_never_trained_on():
    toy = dataclasses.replace(
        toy_experiment("rollout.kept=2"), reward=poisoned(lambda m: jnp.modf(m * 1000)[0] < 0.3)
    )
    state, outcome = iterate(toy, fresh_state(toy), 1)
    bad = ~np.isfinite(outcome.ledger["proxy_reward"])
    assert 0 < bad.sum() < len(bad)
    assert outcome.metrics["nonfinite_rewards"] >= bad.sum()
    assert not (outcome.ledger["kept"] & bad).any()
    assert all(np.isfinite(x).all() for x in leaves(state))


@pytest.mark.slow
def test_a_prompt_with_too_few_rewards_is_left_out_and_the_others_are_trained_on(monkeypatch):
    """The first prompt has no reward; its padding has weight 0 and no part in the metrics, and the
    update is that of the second prompt's samples.
    """
    toy = toy_experiment()
    batches = []
    make = iterations.policy_batch

    def score(params, images, prompt):
        return {"reward": jnp.where(prompt == 0, jnp.nan, images.mean((1, 2, 3)))}

    first_only = Reward(None, lambda prompts: np.arange(len(prompts), dtype=np.int32), score)
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    _, outcome = iterate(dataclasses.replace(toy, reward=first_only), fresh_state(toy), 1)
    (batch,) = batches
    assert batch.weight.tolist() == [0] * 4 + [1] * 4
    assert outcome.ledger["kept"].reshape(2, 8).sum(1).tolist() == [0, 4]
    assert np.ma.getmaskarray(outcome.ledger["advantage"]).reshape(2, 8).all(1).tolist() == [
        True,
        False,
    ]
    assert outcome.metrics["grad_norm"] > 0
    assert outcome.metrics["skipped_micro_batches"] == 0
    assert outcome.metrics["unusable_prompts"] == 1
    assert outcome.metrics["nonfinite_rewards"] == 8  # all candidates of the first prompt
    regenerated = outcome.ledger["regenerated_reward"].compressed()
    assert outcome.metrics["kept/reward"] == pytest.approx(regenerated.mean(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "count"),
    [((), 16), (("rollout.regenerate=false", "rollout.explore.num_steps=3"), 16)],
)
def test_if_every_reward_fails_the_policy_stays(settings, count):
    toy = dataclasses.replace(
        toy_experiment("optimizer.weight_decay=0", *settings),
        reward=poisoned(lambda m: m > -1),
    )
    start = fresh_state(toy)
    before = leaves(start.adapters)
    state, outcome = iterate(toy, start, 1)
    assert outcome.metrics["nonfinite_rewards"] == count
    assert not outcome.ledger["kept"].any()
    same_bits(state.adapters, before)


@pytest.mark.exhaustive
def test_several_optimizer_steps_an_iteration():
    toy = toy_experiment("optimizer.steps_per_iteration=2")
    state, outcome = iterate(toy, fresh_state(toy), 1)
    assert int(state.step) == 2
    assert outcome.metrics["old_decay"] == pytest.approx(0.002)


def doubled(velocities, target, algorithm):
    return jax.tree.map(lambda x: 2 * x, nft(velocities, target, algorithm))


@pytest.mark.slow
def test_an_objective_outside_the_package_trains_by_its_own_loss(toy):
    """It is named in the configuration, as a reward outside the package is."""
    plugin = toy_experiment(f"objective={__name__}:doubled")
    _, usual = iterate(toy, fresh_state(toy), 1)
    _, other = iterate(plugin, fresh_state(plugin), 1)
    for name in ("loss", "loss/policy", "grad_norm"):
        assert other.metrics[name] == pytest.approx(2 * usual.metrics[name], rel=1e-5)
    np.testing.assert_array_equal(other.ledger["proxy_reward"], usual.ledger["proxy_reward"])


def test_seeds_in_the_ledger_are_those_that_were_drawn(experiment, first):
    _, outcome = first
    prompts = outcome.ledger["prompt"][:: experiment.config.rollout.candidates]
    seeds = experiment.seeds("candidate", prompts, 8, iteration=1)
    np.testing.assert_array_equal(outcome.ledger["seed"], seed_numbers(seeds).reshape(-1))


@pytest.mark.slow
def test_an_iteration_is_a_function_of_its_arguments(toy):
    """Other chunks and micro-batches, which divide nothing, change rounding alone; another seed or
    iteration changes all.
    """
    want, expected_outcome = iterate(toy, fresh_state(toy), 1)
    uneven = toy_experiment("rollout.per_device_batch_size=3", "optimizer.per_device_batch_size=5")
    assert uneven.sampler("regenerate", want.old, 3).samples_per_device == 3
    got, outcome = iterate(uneven, fresh_state(uneven), 1)
    np.testing.assert_array_equal(outcome.ledger["kept"], expected_outcome.ledger["kept"])
    for name in ("proxy_reward", "regenerated_reward"):
        np.testing.assert_allclose(
            outcome.ledger[name], expected_outcome.ledger[name], atol=REWARD_TOLERANCE
        )
    assert gradient_distance(got, want) < GRADIENT_TOLERANCE
    for other in (
        iterate(toy, fresh_state(toy), 2),
        iterate(toy_experiment("seed=1"), fresh_state(toy), 1),
    ):
        assert not set(other[1].ledger["seed"].tolist()) & set(
            expected_outcome.ledger["seed"].tolist()
        )
        assert gradient_distance(other[0], want) > 1e3 * GRADIENT_TOLERANCE


def gradient_distance(a, b):
    """How far apart the first moments of two states are, of the size of the second.

    Adam makes much of tiny gradients.
    """

    def norm(arrays):
        return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays))

    x, y = (leaves(optax.tree.get(state.opt_state, "mu")) for state in (a, b))
    return norm([p - q for p, q in zip(x, y, strict=True)]) / norm(y)


@pytest.mark.exhaustive
def test_an_uneven_chunk_and_micro_batch_train_a_real_network_the_same(experiment, first):
    """In BF16 and NVFP4."""
    state, expected_outcome = first
    variant = with_rollout(experiment, per_device_batch_size=3)
    optimizer = dataclasses.replace(variant.config.optimizer, per_device_batch_size=3)
    variant = dataclasses.replace(
        variant, config=dataclasses.replace(variant.config, optimizer=optimizer)
    )
    got, outcome = iterate(variant, fresh_state(variant), 1)
    np.testing.assert_array_equal(outcome.ledger["kept"], expected_outcome.ledger["kept"])
    np.testing.assert_allclose(
        outcome.ledger["proxy_reward"],
        expected_outcome.ledger["proxy_reward"],
        atol=REWARD_TOLERANCE,
    )
    assert gradient_distance(got, state) < 10 * GRADIENT_TOLERANCE


@pytest.mark.slow
def test_a_chunk_is_no_larger_than_what_an_iteration_explores():
    """Of sixteen candidates: on one device, and on two that share the rows."""
    for chunk, mesh, expected in (
        (2, (1, 1), 2),
        (100, (1, 1), 16),
        (100, (2, 1), 8),
        (7, (2, 1), 7),
        (100, (1, 2, 2), 8),
    ):
        toy = toy_experiment(f"rollout.per_device_batch_size={chunk}", mesh=mesh)
        adapters = fresh_state(toy).old
        assert (
            toy.sampler("regenerate", adapters, 3).samples_per_device
            == toy.explorer.sampler(adapters, toy.explorer.settings[0]).samples_per_device
            == expected
        )


@pytest.mark.slow
def test_the_reward_of_a_toy_differs_between_candidates():
    """So that the tests above see something."""
    toy = toy_experiment()
    _, outcome = iterate(toy, fresh_state(toy), 1)
    assert np.ptp(outcome.ledger["proxy_reward"].reshape(2, 8), axis=1).min() > 1e-3
