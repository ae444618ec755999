"""`gated_conv`: the kernel and its twin are one function, and so are their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.numerics import gated_conv as module
from solrl_jax.numerics.gated_conv import in_one_pass, twin, with_gradient
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import jit

SHAPES = {"small": (2, 3, 5, 64), "rows that do not fill a block": (1, 9, 20, 64), "SANA's": (1, 32, 32, 192)}
kernel = with_gradient(partial(in_one_pass, interpret=True))


def operands(b, h, w, c, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return 3 * normal(b, h, w, c), normal(3, 3, 1, c), normal(c)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernel_is_its_twin_bit_for_bit(shape, dtype):
    arrays = operands(*shape, dtype)
    ours = jit(kernel)(*arrays)
    assert ours.dtype == dtype
    assert np.abs(ours.astype(jnp.float32)).max() > 10
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(jit(twin)(*arrays), np.float32))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_so_is_the_gradient(shape):
    """Equal to a unit in the last place: XLA may sum up the gradient of SiLU in another order."""
    arrays = operands(*shape)
    g = operands(*shape[:3], shape[3] // 2)[0]
    pulled = lambda f: jit(lambda *arrays: jax.vjp(f, *arrays)[1](g))(*arrays)
    for ours, theirs in zip(pulled(kernel), pulled(twin), strict=True):
        size = np.abs(np.asarray(theirs, np.float32))
        assert size.max() > 1
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2**-7, atol=2e-3)


def test_the_twin_is_a_depthwise_convolution_between_silus():
    x, taps, bias = operands(2, 6, 5, 8, jnp.float32)
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 8}
    y, gate = jnp.split(jax.lax.conv_general_dilated(jax.nn.silu(x), taps, (1, 1), "SAME", **layout) + bias, 2, axis=-1)
    np.testing.assert_allclose(twin(x, taps, bias), y * jax.nn.silu(gate), rtol=1e-5, atol=1e-5)


def test_rows_are_divided_over_devices_and_so_are_those_that_vmap_maps(monkeypatch):
    """As in the update, where groups of rows are mapped. No device is sent the rows of another."""
    monkeypatch.setattr(module.target, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "in_one_pass", partial(in_one_pass, interpret=True))
    x, taps, bias = operands(4, 8, 16, 64)
    whole = jit(twin)(x, taps, bias)
    mesh = sharding.make_mesh(2, 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding.rows(mesh))
        plain = jit(module.gated_conv).lower(placed, taps, bias).compile()
        groups = jax.device_put(x[:, None], sharding.rows(mesh))
        mapped = jit(jax.vmap(module.gated_conv, in_axes=(0, None, None), spmd_axis_name=sharding.AXES[:2]))
        compiled = mapped.lower(groups, taps, bias).compile()
        results = plain(placed, taps, bias), compiled(groups, taps, bias)[:, 0]
    for program, result in zip((plain, compiled), results, strict=True):
        assert "all-gather" not in program.as_text()
        assert result.sharding.shard_shape(result.shape)[0] == 1
        np.testing.assert_array_equal(np.asarray(result, np.float32), np.asarray(whole, np.float32))
