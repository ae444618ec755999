"""The principal directions that a correction keeps: those of the inputs that linears really have, the same in every run."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solrl_jax.explore.calibrate import PASSES, TOGETHER, dealt_ranks

from solrl_jax.explore import calibrate
from solrl_jax.explore.levers.correction import Corrected
from solrl_jax.explore.linears import most_rank
from solrl_jax.flow.solver import solver_table
from solrl_jax.numerics.matmul import LowRank, dequantize
from solrl_jax.numerics.nvfp4 import QTensor
from solrl_jax.policy.lora import flatten
from solrl_jax.rollout.generate import generate, prepare
from solrl_jax.storage.errors import InputError
from solrl_jax.training import experiment as experiments
from solrl_jax.training.experiment import build
from solrl_jax.training.rank import with_exact_steps
from tests.small import fresh_state, small_config

RANK = 8
# two steps, as other tests take, make no picture
AS_TINY = ("rollout.steps=10", "rollout.explore.steps=6", "rollout.explore.sigmas=first")


@pytest.fixture(scope="module")
def experiment():
    return build(small_config("unused", f"rollout.explore.correction={RANK}", *AS_TINY))


def shared(a, b):
    """How much of the directions `a` [layers, n, r] lies in those of `b`: 1 for the same, or for some of them."""
    common = np.einsum("lir,lis->lrs", np.float32(a), np.float32(b))
    return np.mean(np.sum(common**2, axis=(-1, -2))) / min(a.shape[-1], b.shape[-1])


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
    assert experiment.bases.keys() <= set(experiment.quantized)
    for path, basis in experiment.bases.items():
        assert basis.shape[:-1] == flat[path].shape[:-1]
        assert basis.dtype == experiment.backbone.dtype
        gram = np.einsum("lir,lis->lrs", np.float32(basis), np.float32(basis))
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(basis.shape[-1]), gram.shape), atol=0.02)  # in BF16
    numbers = lambda path: np.prod(flat[path].shape[:-2]) * sum(flat[path].shape[-2:])
    held = sum(basis.shape[-1] * numbers(path) for path, basis in experiment.bases.items())
    budget = RANK * sum(map(numbers, experiment.quantized))
    assert budget - TOGETHER * max(map(numbers, experiment.quantized)) < held <= budget
    ranks = experiment.correction_ranks
    assert ranks.keys() == set(experiment.quantized)
    assert {path: rank for path, rank in ranks.items() if rank} == {p: basis.shape[-1] for p, basis in experiment.bases.items()}
    assert build(small_config("unused")).correction_ranks == {}


def test_directions_are_dealt_to_where_they_take_off_most():
    """By the share of the energy that a number of the correction holds: what is cheap and what falls slowly goes first."""
    falling = np.repeat([0.5, 0.25, 0.01, 0.001], TOGETHER) / TOGETHER
    slow = np.repeat([0.3, 0.2, 0.1, 0.05], TOGETHER) / TOGETHER
    square, wide = (64, 64), (64, 192)
    assert dealt_ranks({"a": falling, "b": slow}, {"a": square, "b": square}, 16) == {"a": 16, "b": 16}
    assert dealt_ranks({"a": falling, "b": falling / 10}, {"a": square, "b": square}, 8) == {"a": 16, "b": 0}
    assert dealt_ranks({"a": slow, "b": slow}, {"a": square, "b": wide}, 8) == {"a": 16, "b": 0}
    assert dealt_ranks({"a": slow, "b": slow}, {"a": square, "b": wide}, 16) == {"a": 16, "b": 16}  # half of a linear: 16, 24
    stack = {"a": (2, *square), "b": square}  # a stack costs what its layers do, and its shares are their mean
    assert dealt_ranks({"a": slow, "b": slow}, stack, 8) == {"a": 8, "b": 8}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_dealt_takes_off_no_less_than_the_same_rank_everywhere(data):
    """Linears of one shape, any falling shares; never more numbers, never more than twice the rank or half of a linear."""
    rank, count = data.draw(st.integers(1, 4 * TOGETHER)), data.draw(st.integers(1, 5))
    side = data.draw(st.sampled_from([4 * rank, 6 * rank, 16 * rank]))
    energy = st.lists(st.floats(0, 1), min_size=3 * rank, max_size=3 * rank)
    shares = {str(i): np.sort(data.draw(energy))[::-1] for i in range(count)}
    ranks = dealt_ranks(shares, dict.fromkeys(shares, (3, side, side)), rank)
    assert ranks.keys() == shares.keys()
    assert sum(ranks.values()) == rank * count  # of linears of one shape, all of it
    assert all(
        dealt % math.gcd(TOGETHER, rank) == 0 and dealt <= min(2 * rank, most_rank(side, side)) for dealt in ranks.values()
    )
    held = lambda chosen: sum(shares[path][: chosen[path]].sum() for path in shares)
    assert held(ranks) >= held(dict.fromkeys(shares, rank)) - 1e-9


def test_the_energy_of_all_inputs_is_known_from_a_few_random_directions():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((500, 64)) * np.geomspace(1, 0.05, 64)
    basis = np.linalg.qr(rng.standard_normal((64, 24)))[0]
    assert calibrate._trace(basis, rows.T @ rows @ basis) == pytest.approx(np.sum(rows**2), rel=0.2)
    every = np.eye(64)
    assert calibrate._trace(every, rows.T @ rows @ every) == pytest.approx(np.sum(rows**2), rel=1e-9)


def test_directions_are_those_of_the_steps_that_are_quantised(experiment, monkeypatch):
    """Those of other steps are others: they hold less of what these steps see."""
    told, original = [], calibrate.turn
    monkeypatch.setattr(calibrate, "turn", lambda *a: told.append(np.asarray(a[-3])) or original(*a))
    bases, grid = {}, experiment.exploring_grid(6)
    for exact in (0, 1, 5):
        there = with_exact_steps(dataclasses.replace(experiment), exact)
        bases[exact], told[:] = there.bases, told[-1:]
        np.testing.assert_array_equal(told[0], grid.sigmas[exact:])
    for path in experiment.bases:
        np.testing.assert_array_equal(bases[1][path], experiment.bases[path])
    common = lambda a, b: np.mean([shared(a[path], b[path]) for path in a.keys() & b.keys()])
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
        assert isinstance(leaf, Corrected) == (path in experiment.bases)
        assert isinstance(leaf.remainder if isinstance(leaf, Corrected) else leaf, QTensor)
        assert not isinstance(exact[path], Corrected)
        merged = np.float32(exact[path].base if isinstance(exact[path], LowRank) else exact[path])
        if isinstance(exact[path], LowRank):
            merged = merged + experiment.scale * np.asarray(exact[path].a @ exact[path].b)
        error = np.linalg.norm(dequantize(leaf) - merged) / np.linalg.norm(merged)
        assert 0.01 < error < 0.12, path


@pytest.mark.parametrize("rank", [128, 1000])
def test_a_correction_of_more_than_half_of_every_linear_is_refused_before_anything_is_loaded(rank, monkeypatch):
    monkeypatch.setattr(experiments, "load_backbone", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(
        InputError, match=rf"^rollout\.explore\.correction={rank}: must be at most \d+, where it is half of a linear$"
    ):
        build(small_config("unused", f"rollout.explore.correction={rank}"))


def test_more_turns_would_find_little_more(experiment, monkeypatch):
    """The directions found share nine tenths and more with those that twice the turns find, and one turn's share less."""
    found = experiment.bases  # before the turns are others: they are measured when first asked for
    monkeypatch.setattr("solrl_jax.explore.calibrate.PASSES", 2 * PASSES)
    further = dataclasses.replace(experiment).bases
    monkeypatch.setattr("solrl_jax.explore.calibrate.PASSES", 1)
    once = dataclasses.replace(experiment).bases
    assert found.keys() == further.keys() == once.keys()
    for path in found:
        best, ours, first = (b[path] for b in (further, found, once))
        assert shared(ours, best) > 0.9, path
        assert shared(ours, best) > shared(first, best), path
