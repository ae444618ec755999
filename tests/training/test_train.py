"""The iteration: families, what is trained on, what is recorded, and that nothing recompiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.numerics.matmul import LowRank, dequantize
from solrl_jax.numerics.nvfp4 import QTensor
from solrl_jax.numerics.randomness import seed_numbers
from solrl_jax.policy.lora import flatten
from solrl_jax.policy.update import blend, old_decay, update
from solrl_jax.rewards import registry as rewards
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rollout.generate import decode_chunk, draw_noise, prepare, sample_chunk
from solrl_jax.rollout.select import rank
from solrl_jax.training import experiment as experiments
from solrl_jax.training.iteration import iterate, roll_out
from tests.small import fresh_state, silent, small_config


@pytest.fixture(scope="module")
def experiment():
    return experiments.build(small_config())


@pytest.fixture(scope="module")
def first(experiment):
    """The state and the outcome of one iteration from the beginning."""
    return iterate(experiment, fresh_state(experiment), 1, silent)


def with_rollout(experiment, **changes):
    config = dataclasses.replace(experiment.config, rollout=dataclasses.replace(experiment.config.rollout, **changes))
    return dataclasses.replace(experiment, config=config)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_nothing_is_traced_after_the_first_iteration(experiment):
    programs = (sample_chunk, decode_chunk, score_images, draw_noise, update, experiments.quantize_policy)
    state, outcome = iterate(experiment, fresh_state(experiment), 1, silent)
    assert 0 < outcome.metrics["seconds/compile"] < outcome.metrics["seconds"]
    before = [program._cache_size() for program in programs]
    for iteration in (2, 3):
        state, outcome = iterate(experiment, state, iteration, silent)
        assert outcome.metrics["seconds/compile"] == 0
    assert [program._cache_size() for program in programs] == before
    # and the counts can rise: another number of steps is another program
    prompts = experiment.train_prompts[:2]
    prompted = prepare(experiment.backbone, experiment.reward, prompts, experiment.config.model.max_tokens)
    seeds = experiment.seeds(0, 4, prompts, 4)
    roll_out(experiment, experiment.policy(state.old), experiment.grid(4), prompted, seeds, "regenerate", silent)
    assert sample_chunk._cache_size() > before[0]


def test_the_ledger_tells_the_whole_iteration(experiment, first):
    _, outcome = first
    ledger, rollout = outcome.ledger, experiment.config.rollout
    shape = (experiment.config.train.prompts, rollout.candidates)
    proxy, kept = ledger["proxy_reward"].reshape(shape), ledger["kept"].reshape(shape)
    places = ledger["rank"].reshape(shape)
    np.testing.assert_array_equal(places, rank(proxy))
    np.testing.assert_array_equal(kept, (places < rollout.kept // 2) | (places >= rollout.candidates - rollout.kept // 2))
    regenerated = ledger["regenerated_reward"]
    np.testing.assert_array_equal(np.ma.getmaskarray(regenerated), ~kept.reshape(-1))
    advantage = ledger["advantage"].compressed().reshape(shape[0], rollout.kept)
    reward = regenerated.compressed().reshape(shape[0], rollout.kept)
    expected = (reward - reward.mean(1, keepdims=True)) / ((reward - reward.mean()).std() + 1e-4)
    np.testing.assert_allclose(advantage, np.clip(expected, -5, 5), rtol=1e-4, atol=1e-5)
    assert len(set(ledger["seed"].tolist())) == kept.size
    assert (ledger["precision"], ledger["steps"]) == ("nvfp4", 2)


def test_low_precision_never_enters_the_loss(experiment, monkeypatch):
    """Proxies decide who is kept and nothing else: with the same kept seeds, other proxies give the same adapters."""
    original = experiments.Experiment.exploring_policy
    seen = []

    def spoiled(self, adapters, precision):
        params = original(self, adapters, precision)
        assert precision == "nvfp4"
        seen.append(sum(isinstance(leaf, QTensor) for leaf in flatten(params).values()))
        return params

    monkeypatch.setattr(experiments.Experiment, "exploring_policy", spoiled)
    everything = with_rollout(experiment, kept=8)  # all candidates are kept, whatever their proxy
    a, _ = iterate(everything, fresh_state(experiment), 1, silent)
    monkeypatch.setattr(experiments.Experiment, "exploring_policy", lambda self, adapters, precision: self.policy(adapters))
    b, _ = iterate(everything, fresh_state(experiment), 1, silent)
    assert seen == [len(experiment.quantized)]
    for x, y in zip(leaves(a.adapters), leaves(b.adapters), strict=True):
        np.testing.assert_array_equal(x, y)
    moved = [np.abs(x - y).max() for x, y in zip(leaves(a.adapters), leaves(fresh_state(experiment).adapters), strict=True)]
    assert max(moved) > 1e-5


@pytest.mark.parametrize(
    "family", ["naive_quant", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("diffusionnft", "naive_scaling"))]
)
def test_families_that_do_not_regenerate_train_on_what_they_explored(family):
    overrides = [f"family={family}", "rollout.explore.steps=3"] + (["rollout.candidates=4"] if family == "diffusionnft" else [])
    built = experiments.build(small_config("unused", *overrides))
    state, outcome = iterate(built, fresh_state(built), 1, silent)
    assert outcome.ledger["regenerated_reward"] is None
    assert outcome.metrics["fidelity/spearman"] == pytest.approx(1.0)  # the proxy is what is trained on
    assert outcome.metrics["grad_norm"] > 0
    assert int(state.step) == 1


def test_exploration_merges_adapters_and_keeps_the_rest_exact(experiment):
    """NVFP4 leaves are the quantised merged weights; every other adapted linear keeps base and adapter apart."""
    state = fresh_state(experiment)
    adapters = jax.tree.map(lambda x: x + 0.05, state.adapters)
    params = flatten(experiment.exploring_policy(adapters, "nvfp4"))
    base = flatten(experiment.backbone.transformer)
    for path in experiment.quantized:
        assert isinstance(params[path], QTensor)
        merged = base[path].astype(jnp.float32)
        if path in adapters:
            merged = merged + experiment.scale * adapters[path]["a"] @ adapters[path]["b"]
        error = np.linalg.norm(dequantize(params[path]) - merged) / np.linalg.norm(merged)
        assert error < 0.12
    for path in set(experiment.targets) - set(experiment.quantized):
        assert isinstance(params[path], LowRank)


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
    [(0, (1, 500), (0, 0)), (1, (1, 100, 900), (0.001, 0.1, 0.5)), (2, (75, 76, 175, 900), (0, 0.0075, 0.75, 0.999))],
)
def test_decay_of_the_old_policy(kind, steps, decays):
    assert [float(old_decay(jnp.int32(t), kind)) for t in steps] == pytest.approx(list(decays))


def poisoned(bad) -> Reward:
    """A reward that is the picture's mean, but not finite for pictures that `bad` says."""

    def score(params, images, prepared):
        mean = images.mean((1, 2, 3))
        return {"reward": jnp.where(bad(mean), jnp.nan, mean)}

    return Reward(None, lambda prompts: np.zeros(len(prompts), np.float32), score)


def test_a_reward_that_is_not_finite_is_counted_and_never_trained_on(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "some", rewards.shipped(lambda: poisoned(lambda m: jnp.modf(m * 1000)[0] < 0.3)))
    built = experiments.build(small_config("unused", "reward.weights={some: 1}", "rollout.kept=2"))
    state, outcome = iterate(built, fresh_state(built), 1, silent)
    bad = ~np.isfinite(outcome.ledger["proxy_reward"])
    assert bad.any()
    assert outcome.metrics["nonfinite_rewards"] >= bad.sum()
    assert not (outcome.ledger["kept"] & bad).any()
    assert all(np.isfinite(x).all() for x in leaves(state))


@pytest.mark.exhaustive
def test_if_every_reward_fails_the_policy_stays(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "none", rewards.shipped(lambda: poisoned(lambda m: m > -1)))
    built = experiments.build(small_config("unused", "reward.weights={none: 1}", "optimizer.weight_decay=0"))
    start = fresh_state(built)
    before = leaves(start.adapters)
    state, outcome = iterate(built, start, 1, silent)
    assert outcome.metrics["nonfinite_rewards"] == 16 + 8
    assert not outcome.ledger["kept"].any()
    for x, y in zip(leaves(state.adapters), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.exhaustive
def test_several_optimizer_steps_an_iteration():
    built = experiments.build(small_config("unused", "optimizer.steps_per_iteration=2"))
    state, outcome = iterate(built, fresh_state(built), 1, silent)
    assert int(state.step) == 2
    assert outcome.metrics["old_decay"] == pytest.approx(0.002)


def test_seeds_in_the_ledger_are_those_that_were_drawn(experiment, first):
    _, outcome = first
    seeds = experiment.seeds(0, 1, outcome.ledger["prompt"][:: experiment.config.rollout.candidates], 8)
    np.testing.assert_array_equal(outcome.ledger["seed"], seed_numbers(seeds).reshape(-1))
