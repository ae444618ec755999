"""The principal directions that a correction keeps: those of the inputs that linears really have, the same in every run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax import calibrate
from solrl_jax import experiment as experiments
from solrl_jax.calibrate import PASSES
from solrl_jax.experiment import build
from solrl_jax.files import InputError
from solrl_jax.flow.solver import solver_table
from solrl_jax.numerics.matmul import LowRank, dequantize
from solrl_jax.numerics.nvfp4 import QTensor
from solrl_jax.numerics.principal import Corrected
from solrl_jax.policy.lora import flatten
from solrl_jax.rank import with_exact_steps
from solrl_jax.rollout.generate import generate, prepare
from tests.small import fresh_state, small_config

RANK = 8
# two steps, as other tests take, make no picture
AS_TINY = ("rollout.steps=10", "rollout.explore.steps=6", "rollout.explore.sigmas=first")


@pytest.fixture(scope="module")
def experiment():
    return build(small_config("unused", f"rollout.explore.correction={RANK}", *AS_TINY))


def test_a_preview_is_fitted_to_what_the_base_does_and_the_same_in_every_run(experiment):
    """On prompts and seeds that it was not fitted on, it ends nearer to all ten steps than the solver on its sigmas does."""
    whole, grid, backbone = experiment.grid(10), experiment.exploring_grid(6), experiment.backbone
    np.testing.assert_array_equal(grid.sigmas, whole.sigmas[[0, 1, 2, 3, 5, 8]])
    np.testing.assert_array_equal(grid.times, whole.times[[0, 1, 2, 3, 5, 8]])
    np.testing.assert_array_equal(grid.table[:3], whole.table[:3])
    np.testing.assert_array_equal(dataclasses.replace(experiment).exploring_grid(6).table, grid.table)
    assert experiment.exploring_grid(6) is grid  # worked out once
    unfitted = dataclasses.replace(grid, table=solver_table("euler", np.append(grid.sigmas, 0)))
    prompts, size = experiment.test_prompts[:8], experiment.size
    prompted = prepare(backbone, None, prompts, experiment.config.model.max_tokens)
    index, seeds = np.arange(16) % 8, experiment.seeds(0, 1, prompts, 2).swapaxes(0, 1).reshape(-1, 2)
    end = lambda grid: generate(backbone, backbone.transformer, grid, prompted, index, seeds, size, 16, None).latents
    want = end(whole)
    distance = {name: np.sqrt(np.mean((end(g) - want) ** 2)) for name, g in (("fitted", grid), ("not", unfitted))}
    print(distance)
    assert distance["fitted"] < 0.9 * distance["not"]
    assert distance["not"] < 0.2 * want.std()  # and both are previews of it


def test_what_there_is_to_calibrate(experiment):
    shown = lambda *overrides: build(small_config("unused", *AS_TINY, *overrides)).calibration_prompts
    assert shown() == shown("rollout.explore.precision=bf16") == experiment.train_prompts[:16]
    assert not shown("rollout.explore.sigmas=own")
    assert shown("rollout.explore.sigmas=own", "rollout.explore.correction=8")
    assert not shown("rollout.explore.sigmas=own", "rollout.explore.correction=8", "rollout.explore.precision=bf16")
    assert not shown("rollout.explore.steps=10")


def test_every_quantised_linear_has_orthonormal_directions(experiment):
    flat = flatten(experiment.backbone.transformer)
    assert experiment.bases.keys() == set(experiment.quantized)
    for path, basis in experiment.bases.items():
        assert basis.shape == (*flat[path].shape[:-1], RANK)
        assert basis.dtype == experiment.backbone.dtype
        gram = np.einsum("lir,lis->lrs", np.float32(basis), np.float32(basis))
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(RANK), gram.shape), atol=0.02)  # in BF16


def test_directions_are_those_of_the_steps_that_are_quantised(experiment, monkeypatch):
    """Those of other steps are others: they hold less of what these steps see."""
    told, original = [], calibrate.turn
    monkeypatch.setattr(calibrate, "turn", lambda *a: told.append(np.asarray(a[-3])) or original(*a))
    bases, grid = {}, experiment.exploring_grid(6)
    for exact in (0, 1, 5):
        there = with_exact_steps(dataclasses.replace(experiment), exact)
        bases[exact], told[:] = there.bases, told[-1:]
        np.testing.assert_array_equal(told[0], grid.sigmas[exact:])
    for path in experiment.quantized:
        np.testing.assert_array_equal(bases[1][path], experiment.bases[path])
    shared = lambda a, b: np.mean(np.sum(np.einsum("lir,lis->lrs", np.float32(a), np.float32(b)) ** 2, axis=(-1, -2))) / RANK
    common = lambda a, b: np.mean([shared(a[path], b[path]) for path in experiment.quantized])
    assert common(bases[5], bases[0]) < common(bases[1], bases[0]) < 0.99


def test_a_run_that_goes_on_finds_those_that_it_began_with(experiment):
    again = dataclasses.replace(experiment)
    assert "bases" not in vars(again)
    for path, basis in again.bases.items():
        np.testing.assert_array_equal(basis, experiment.bases[path], err_msg=path)


def test_they_hold_more_of_what_the_network_sees_than_others_do(experiment):
    """Velocities at noised samples of other prompts than those measured: the error of four bits falls by a fifth or more."""
    backbone, adapters = experiment.backbone, fresh_state(experiment).old
    prompts, size = experiment.test_prompts[:4], experiment.size
    conditioning = backbone.encode(prompts, experiment.config.model.max_tokens)
    prompted = prepare(backbone, None, prompts, experiment.config.model.max_tokens)
    seeds, grid = experiment.seeds(0, 1, prompts, 1)[:, 0], experiment.grid(10)
    pictures = generate(backbone, backbone.transformer, grid, prompted, np.arange(4), seeds, size, 4, None).latents
    latents = (np.asarray(pictures) + jax.random.normal(jax.random.key(1), pictures.shape)) / 2
    other = {
        path: jnp.linalg.qr(jax.random.normal(jax.random.key(7), basis.shape))[0].astype(basis.dtype)
        for path, basis in experiment.bases.items()
    }
    elsewhere, without = dataclasses.replace(experiment), dataclasses.replace(experiment)
    vars(elsewhere)["bases"], vars(without)["bases"] = other, {}

    @jax.jit
    def predict(params):
        return backbone.velocity(params, latents, conditioning, 500.0, 1.0).astype(jnp.float32)

    with jax.set_mesh(backbone.mesh):
        exact = predict(experiment.policy(adapters))
        errors = {
            name: float(jnp.linalg.norm(predict(there.exploring_policy(adapters, "nvfp4")) - exact) / jnp.linalg.norm(exact))
            for name, there in (("measured", experiment), ("random", elsewhere), ("none", without))
        }
    print(errors)
    assert errors["measured"] < 0.8 * errors["none"]
    assert errors["measured"] < 0.8 * errors["random"]


def test_the_policy_that_explores_is_corrected_and_the_one_that_trains_is_not(experiment):
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    exploring, exact = (flatten(p) for p in (experiment.exploring_policy(adapters, "nvfp4"), experiment.policy(adapters)))
    for path in experiment.quantized:
        leaf = exploring[path]
        assert isinstance(leaf, Corrected)
        assert isinstance(leaf.remainder, QTensor)
        assert not isinstance(exact[path], Corrected)
        merged = np.float32(exact[path].base if isinstance(exact[path], LowRank) else exact[path])
        if isinstance(exact[path], LowRank):
            merged = merged + experiment.scale * np.asarray(exact[path].a @ exact[path].b)
        error = np.linalg.norm(dequantize(leaf) - merged) / np.linalg.norm(merged)
        assert 0.01 < error < 0.12, path


@pytest.mark.parametrize("rank", [128, 1000])
def test_a_correction_that_leaves_nothing_to_quantise_is_refused_before_anything_is_loaded(rank, monkeypatch):
    monkeypatch.setattr(experiments, "load_backbone", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(InputError, match=rf"^rollout\.explore\.correction={rank}: must be less than 128, the inputs of "):
        build(small_config("unused", f"rollout.explore.correction={rank}"))


def test_more_turns_would_find_little_more(experiment, monkeypatch):
    """The directions found share nine tenths and more with those that twice the turns find, and one turn's share less."""
    found = experiment.bases  # before the turns are others: they are measured when first asked for
    monkeypatch.setattr("solrl_jax.calibrate.PASSES", 2 * PASSES)
    further = dataclasses.replace(experiment).bases
    monkeypatch.setattr("solrl_jax.calibrate.PASSES", 1)
    once = dataclasses.replace(experiment).bases
    for path in experiment.quantized:
        best, ours, first = (np.float32(b[path]) for b in (further, found, once))
        common = lambda a, b: np.mean(np.sum(np.einsum("lir,lis->lrs", a, b) ** 2, axis=(-1, -2))) / RANK
        assert common(ours, best) > 0.9, path
        assert common(ours, best) > common(first, best), path
