"""`gated_conv` beside XLA's grouped convolution."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.parallel.sharding import jit
from solrl_jax.quant import compile_target, int8, lazy
from solrl_jax.quant.gated_conv import gated_conv
from solrl_jax.quant.lazy import LazyActivation

GRID = (9, 20)
CHANNELS = 64


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.slow
def test_it_is_a_depthwise_convolution_between_silus():
    x = normal(2, *GRID, CHANNELS, seed=1)
    taps = normal(3, 3, 1, CHANNELS, seed=2)
    bias = normal(CHANNELS, seed=3)
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": CHANNELS}
    convolved = jax.lax.conv_general_dilated(jax.nn.silu(x), taps, (1, 1), "SAME", **layout) + bias
    y, gate = jnp.split(convolved, 2, axis=-1)
    pixels = LazyActivation.from_array(x.reshape(2, -1, CHANNELS))
    result = gated_conv(pixels, GRID, taps, bias)
    expected = (y * jax.nn.silu(gate)).reshape(result.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_tpu_convolves_in_groups_to_the_same_result(monkeypatch):
    """Forwards and backwards, to a unit of BF16 in the last place: sums are in another order."""
    count = GRID[0] * GRID[1]
    x = normal(1, count, CHANNELS, dtype=jnp.bfloat16, seed=1)
    offset = normal(1, 1, CHANNELS, dtype=jnp.bfloat16, seed=2)
    taps = normal(3, 3, 1, CHANNELS, dtype=jnp.bfloat16, seed=3)
    bias = normal(CHANNELS, dtype=jnp.bfloat16, seed=4)
    g = normal(1, count, CHANNELS // 2, dtype=jnp.bfloat16, seed=5)

    def conv(x, offset):
        return gated_conv(LazyActivation.from_array(x).map(jnp.add, offset), GRID, taps, bias)

    results = {}
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(compile_target, "platform", lambda platform=platform: platform)
        jaxpr = str(jax.make_jaxpr(lambda *arrays: conv(*arrays))(x, offset))
        assert (f"feature_group_count={CHANNELS}" in jaxpr) == (platform == "tpu")
        pulled = jit(lambda *arrays: (conv(*arrays), *jax.vjp(conv, *arrays)[1](g)))
        results[platform] = [np.asarray(y, np.float32) for y in pulled(x, offset)]
    for ours, theirs in zip(results["tpu"], results["cpu"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-3 * np.abs(theirs).max())


def test_int8_before_it_multiplies_images_on_a_tpu(monkeypatch):
    """Sums of INT8 products are exact, so that the result is the same to the bit."""
    monkeypatch.setattr(lazy, "fits_tpu_kernel", lambda *_: False)  # the kernel needs a TPU
    x = normal(2, math.prod(GRID), 32, dtype=jnp.bfloat16)
    weight = int8.quantize(normal(32, CHANNELS, seed=1))

    def product(x, grid=GRID):
        pixels = dataclasses.replace(LazyActivation.from_array(x), grid=grid)
        return weight.lazy_matmul(pixels).value

    results = [product(x, grid=None)]
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(compile_target, "platform", lambda platform=platform: platform)
        jaxpr = str(jax.make_jaxpr(lambda x: product(x))(x))
        assert (f"i32[2,{GRID[0]},{GRID[1]},{CHANNELS}]" in jaxpr) == (platform == "tpu")
        results.append(product(x))
    chex.assert_trees_all_equal(*results)
