"""Sync: adapters merged into the base in float32, quantized a layer at a time; everything else
stays as it is.
"""

import gc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.matmul import LowRank, dequantize
from solrl_jax.quant.nvfp4 import NVFP4Tensor, quantize
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.sync import Quantizer, quantize_policy, sync_policy
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import attach, flatten, init_adapters
from tests.rl.test_lora import OUT, RANK, SCALE, K, Q, adapters, base
from tests.toys import KERNELS, toy_backbone, toy_experiment

MESH = make_mesh(1, 1)


def merge_and_quantize(params, adapters, paths, quantizer=None):
    with jax.set_mesh(MESH):
        return quantize_policy(
            MESH, params, adapters, SCALE, tuple(paths), quantizer or Quantizer(quantize)
        )


def same(got: NVFP4Tensor, want: NVFP4Tensor):
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(
        np.asarray(got.scales).view(np.uint8), np.asarray(want.scales).view(np.uint8)
    )
    np.testing.assert_array_equal(got.tensor_scale, want.tensor_scale)
    assert got.n_in == want.n_in


def test_a_quantized_copy_takes_the_place_of_base_and_adapter():
    params = base()
    ab = adapters()
    quantized = merge_and_quantize(params, ab, [Q, K])
    flat = flatten(attach(params, ab, SCALE, quantized))
    assert flat[Q] is quantized[Q]
    assert flat[K] is quantized[K]
    assert isinstance(flat[OUT], LowRank)


def test_merging_then_quantizing_is_quantizing_the_merged_matrix():
    params = base()
    ab = adapters()
    got = merge_and_quantize(params, ab, (Q, K, OUT))
    assert set(got) == {Q, K, OUT}
    flat = {path: np.asarray(leaf.astype(jnp.float32)) for path, leaf in flatten(params).items()}
    for path, ab_of in ab.items():
        merged = flat[path] + SCALE * np.asarray(ab_of["a"]) @ np.asarray(ab_of["b"])
        same(got[path], jax.jit(quantize)(merged))
        assert np.abs(dequantize(got[path]) - flat[path]).max() > 1  # the adapter is in it
        assert np.abs(dequantize(got[path]) - merged).max() < 0.2 * np.abs(merged).max()
    same(got[K], jax.jit(quantize)(flat[K]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_adapters_change_no_code(dtype):
    params = base(dtype)
    fresh = init_adapters(jax.random.key(3), params, [Q, OUT], RANK)
    for path, q in merge_and_quantize(params, fresh, [Q, K, OUT]).items():
        same(q, jax.jit(quantize)(flatten(params)[path]))


def shifted(w, by):
    """A quantizer that takes an array beside the weight."""
    return quantize(w + by)


@pytest.mark.slow
def test_each_layer_gets_its_own_of_the_arrays_beside():
    """[layers, ...] for a stack; none for a path that has none is a mistake of the quantizer's
    author.
    """
    params = base()
    ab = adapters()
    by = {Q: jnp.asarray([3.0, -5.0])[:, None, None], OUT: jnp.asarray(2.0)}
    got = merge_and_quantize(
        params, ab, (Q, OUT), Quantizer(shifted, {path: (x,) for path, x in by.items()})
    )
    for path in (Q, OUT):
        whole = flatten(params)[path].astype(jnp.float32) + SCALE * ab[path]["a"] @ ab[path]["b"]
        same(got[path], jax.jit(quantize)(whole + by[path]))
    with pytest.raises(TypeError, match="by"):
        merge_and_quantize(params, ab, (K,), Quantizer(shifted, {}))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (2, 1, 2)])
def test_the_policy_of_a_backbone_is_merged_where_it_is_told(mesh):
    backbone = toy_backbone(*mesh)
    fresh = init_adapters(jax.random.key(0), backbone.transformer, list(KERNELS), 2)
    trained = jax.tree.map(lambda x: x + 0.1, fresh)
    flat = flatten(sync_policy(backbone, trained, SCALE, KERNELS[:1], Quantizer(quantize)))
    assert isinstance(flat[KERNELS[0]], NVFP4Tensor)
    assert isinstance(flat[KERNELS[1]], LowRank)
    assert flat[KERNELS[1]].base is flatten(backbone.transformer)[KERNELS[1]]  # nothing is copied
    one = flatten(sync_policy(toy_backbone(), trained, SCALE, KERNELS[:1], Quantizer(quantize)))
    same(flat[KERNELS[0]], one[KERNELS[0]])  # to the bit on any mesh


def test_a_program_is_compiled_for_one_quantizer_and_not_for_the_arrays_beside_it():
    params = base()
    ab = adapters()
    before = quantize_policy._cache_size()
    other = partial(shifted)
    for quantizer, value, programs in (
        (shifted, 1.0, 1),
        (shifted, 2.0, 1),
        (other, 2.0, 2),
        (other, 1.0, 2),
    ):
        merge_and_quantize(params, ab, (OUT,), Quantizer(quantizer, {OUT: (jnp.asarray(value),)}))
        assert quantize_policy._cache_size() - before == programs


def test_merging_needs_room_for_a_layer_and_not_for_the_stack():
    """Of a base in float32: XLA's CPU backend alone turns a whole stack of BF16 into float32 before
    it loops over it.
    """
    layers = 24
    n = 256
    stack = {"blocks": {"kernel": jax.ShapeDtypeStruct((layers, n, n), jnp.float32)}}
    ab = {
        name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32)
        for name, shape in (("a", (n, RANK)), ("b", (RANK, n)))
    }
    paths = ("blocks/kernel",)
    with jax.set_mesh(MESH):
        lowered = quantize_policy.lower(
            MESH, stack, {paths[0]: ab}, SCALE, paths, Quantizer(quantize)
        )
    memory = lowered.compile().memory_analysis()
    assert memory.output_size_in_bytes < 0.57 * layers * n * n  # 4.5 bits a weight
    assert memory.temp_size_in_bytes < 5 * n * n * 4


def test_the_copy_is_freed_before_regeneration():
    """Plans of memory (`planning.plan`) rely on it."""
    experiment = toy_experiment("rollout.explore.precision=nvfp4")
    gc.collect()

    def count_scales() -> int:
        return sum(x.dtype == jnp.float8_e4m3fn for x in jax.live_arrays())

    others = count_scales()
    copied = {}

    def progress(phase: str, total: int, done: int) -> None:
        copied[phase] = count_scales() > others

    iterate(experiment, fresh_state(experiment), 1, progress=progress)
    assert copied == {"explore": True, "regenerate": False, "update": False}
