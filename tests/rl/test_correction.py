"""The principal directions that a correction keeps: those of the inputs that linears really have,
the same in every run.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.matmul import LowRank, dequantize
from solrl_jax.quant.nvfp4 import NVFP4Tensor
from solrl_jax.rl.experiment import build, fresh_state
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.explore.options import correction
from solrl_jax.rl.explore.options.correction import PASSES, Corrected, correct, principal_inputs
from solrl_jax.rl.explore.sync import Quantizer, sync_policy
from solrl_jax.rl.trainable.trainable import flatten
from tests.cases import first_is_quick
from tests.small import small_config
from tests.toys import KERNELS, toy_experiment

RANK = 8
# two steps, as other tests take, make no picture
AS_TINY = (
    "rollout.num_steps=10",
    "rollout.explore.num_steps=6",
    "rollout.per_device_batch_size=16",
)


@pytest.fixture(scope="module")
def experiment():
    return build(small_config("unused", f"rollout.explore.correction_rank={RANK}", *AS_TINY))


@pytest.fixture(scope="module")
def bases(experiment):
    return bases_of(experiment.explorer)


def bases_of(explorer):
    return {
        path: np.asarray(basis)
        for path, (basis,) in explorer.quantizer("nvfp4").extra_arrays.items()
    }


def shared(a, b):
    """How much of the directions `a` [layers, n, r] lies in those of `b`: 1 for the same, or for
    some of them.
    """
    common = np.einsum("lir,lis->lrs", np.float32(a), np.float32(b))
    return np.mean(np.sum(common**2, axis=(-1, -2))) / min(a.shape[-1], b.shape[-1])


@pytest.mark.slow
def test_every_quantized_linear_has_as_many_orthonormal_directions(experiment, bases):
    flat = flatten(experiment.backbone.transformer)
    assert bases.keys() == set(experiment.explorer.quantized)
    for path, basis in bases.items():
        assert basis.shape == (*flat[path].shape[:-1], RANK)
        assert basis.dtype == experiment.backbone.dtype
        gram = np.einsum("lir,lis->lrs", np.float32(basis), np.float32(basis))
        np.testing.assert_allclose(
            gram, np.broadcast_to(np.eye(RANK), gram.shape), atol=0.02
        )  # in BF16


@pytest.mark.parametrize("rank", first_is_quick([16, 20, 1000]))
@pytest.mark.exhaustive
def test_a_linear_has_no_more_directions_than_inputs(rank):
    """Then nothing is left to the format, and the product is the exact one."""
    experiment = toy_experiment(f"rollout.explore.correction_rank={rank}")
    base = flatten(experiment.backbone.transformer)
    directions = bases_of(experiment.explorer)
    assert {path: basis.shape for path, basis in directions.items()} == {
        path: (base[path].shape[0], min(rank, base[path].shape[0])) for path in KERNELS
    }
    policy = flatten(experiment.explorer.policy(fresh_state(experiment).old, "nvfp4"))
    for path in KERNELS:
        error = np.linalg.norm(dequantize(policy[path]) - base[path]) / np.linalg.norm(base[path])
        assert error < (1e-5 if rank >= base[path].shape[0] else 0.12), path


@pytest.mark.exhaustive
def test_directions_are_those_of_the_sigmas_that_are_explored(experiment, bases, monkeypatch):
    """Measured at other sigmas, the directions differ: they hold less energy of these inputs."""
    calibration = experiment.explorer.calibration
    paths = experiment.explorer.quantized
    grid = experiment.explorer.schedule(6)
    latents = calibration.generate(grid, calibration.encode_prompts())
    monkeypatch.setattr(Calibration, "generate", lambda *_: latents)
    directions = {
        start: jax.device_get(principal_inputs(calibration, paths, RANK, grid.slice_steps(start)))
        for start in (0, 5)
    }
    for path, basis in bases.items():
        np.testing.assert_array_equal(directions[0][path], basis)

    def common(a, b):
        return np.mean([shared(a[path], b[path]) for path in paths])

    assert common(directions[5], directions[0]) < 0.99


@pytest.mark.slow
def test_a_run_that_goes_on_finds_those_that_it_began_with(experiment, bases):
    again = dataclasses.replace(experiment.explorer)
    for path, basis in bases_of(again).items():
        np.testing.assert_array_equal(basis, bases[path], err_msg=path)


@pytest.mark.slow
def test_directions_do_not_depend_on_how_rows_are_grouped(experiment, bases):
    """`optimizer.per_device_batch_size` need not divide the sixteen samples; sums of other groups
    differ in their last bits.
    """
    calibration = dataclasses.replace(
        experiment.explorer.calibration, micro_batch=3
    )  # one at a time, here two
    directions = bases_of(dataclasses.replace(experiment.explorer, calibration=calibration))
    assert all(shared(directions[path], bases[path]) > 0.999 for path in bases)


@pytest.mark.exhaustive
def test_they_hold_more_of_what_the_network_sees_than_others_do(experiment, bases):
    """Velocities at noised samples of other prompts than those measured: the error of four bits
    falls by a fifth or more.
    """
    backbone = experiment.backbone
    adapters = fresh_state(experiment).old
    calibration = experiment.explorer.calibration
    prompts = experiment.test_prompts[: len(calibration.seed_batch)]
    conditioning = backbone.encode(prompts, experiment.config.model.max_sequence_length)
    other_prompts = dataclasses.replace(
        calibration,
        encode_prompts=lambda: experiment.encode_prompts(prompts),
        seed_batch=dataclasses.replace(
            calibration.seed_batch, seeds=experiment.seeds("candidate", prompts, 1)[:, 0]
        ),
    )
    # By the program that sampled those measured.
    pictures = other_prompts.generate(
        experiment.explorer.schedule(6), other_prompts.encode_prompts()
    )
    latents = (np.asarray(pictures) + jax.random.normal(jax.random.key(1), pictures.shape)) / 2
    others = {
        path: np.linalg.qr(np.random.default_rng(7).standard_normal(basis.shape))[0].astype(
            basis.dtype
        )
        for path, basis in bases.items()
    }
    quantize = FORMATS["nvfp4"].quantize

    def corrected(kept):
        return Quantizer(
            partial(correct, quantize), {path: (jnp.asarray(u),) for path, u in kept.items()}
        )

    quantizers = {
        "measured": corrected(bases),
        "random": corrected(others),
        "none": Quantizer(quantize),
    }

    @jax.jit
    def predict(params):
        return backbone.velocity(
            params, latents, conditioning, jnp.float32(500), jnp.float32(1)
        ).astype(jnp.float32)

    exact = predict(experiment.policy(adapters))

    def error(params):
        return float(jnp.linalg.norm(predict(params) - exact) / jnp.linalg.norm(exact))

    def explored(quantizer):
        return sync_policy(
            backbone, adapters, experiment.scale, experiment.explorer.quantized, quantizer
        )

    with jax.set_mesh(backbone.mesh):
        errors = {name: error(explored(quantizer)) for name, quantizer in quantizers.items()}
        assert error(experiment.explorer.policy(adapters, "nvfp4")) == errors["measured"]
    print(errors)
    assert errors["measured"] < 0.8 * errors["none"]
    assert errors["measured"] < 0.8 * errors["random"]


@pytest.mark.slow
def test_the_policy_that_explores_is_corrected_and_the_one_that_trains_is_not(experiment):
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    exploring, exact = (
        flatten(p)
        for p in (experiment.explorer.policy(adapters, "nvfp4"), experiment.policy(adapters))
    )
    for path in experiment.explorer.quantized:
        leaf = exploring[path]
        assert isinstance(leaf, Corrected)
        assert isinstance(leaf.remainder, NVFP4Tensor)
        assert not isinstance(exact[path], Corrected)
        merged = np.float32(exact[path].base if isinstance(exact[path], LowRank) else exact[path])
        if isinstance(exact[path], LowRank):
            merged = merged + experiment.scale * np.asarray(exact[path].a @ exact[path].b)
        error = np.linalg.norm(dequantize(leaf) - merged) / np.linalg.norm(merged)
        assert 0.01 < error < 0.12, path


@pytest.mark.exhaustive
def test_more_turns_would_find_little_more(experiment, bases, monkeypatch):
    """The directions found share nine tenths and more with those that twice the turns find, and one
    turn's share less.
    """
    monkeypatch.setattr(correction, "PASSES", 2 * PASSES)
    further = bases_of(dataclasses.replace(experiment.explorer))
    monkeypatch.setattr(correction, "PASSES", 1)
    once = bases_of(dataclasses.replace(experiment.explorer))
    assert bases.keys() == further.keys() == once.keys()
    for path in bases:
        best, ours, first = (b[path] for b in (further, bases, once))
        assert shared(ours, best) > 0.9, path
        assert shared(ours, best) > shared(first, best), path
