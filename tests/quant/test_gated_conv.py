"""`gated_conv`: the kernel and its reference are one function, and so are their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import jit
from solrl_jax.quant import gated_conv as module
from solrl_jax.quant.gated_conv import reference, triton_kernel, with_gradient
from solrl_jax.quant.lazy import ColumnView, LazyActivation, LazyPart

SHAPES = {"small": (2, 3, 5, 64), "of odd sizes": (1, 9, 20, 64), "SANA's": (1, 32, 32, 192)}
MORE = 6  # as cuDNN's product fills up what it makes


def scaled(y, row, column, bias):
    return y * row * column + bias  # what a quantised linear leaves to its reader


def operands(b, h, w, c, dtype=jnp.bfloat16):
    """A convolution's kernel and bias, and what `scaled` takes. The product `x` has `MORE` channels that nothing reads."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def scale(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x = 3 * normal(b, h, w, c + MORE)
    return (
        normal(1, 3, 3, 1, c),
        normal(1, c),
        x,
        scale(b, h, w, 1),
        scale(1, 1, 1, c),
        normal(1, 1, 1, c),
    )


def by_twin(kernel, bias, *pictures):
    read = [a.astype(jnp.float32)[..., : bias.shape[-1]] for a in pictures]
    return reference(scaled(*read).astype(pictures[0].dtype), kernel[0], bias[0])


def by_kernel(kernel, bias, *pictures):
    dtype = pictures[0].dtype
    return with_gradient(partial(triton_kernel, scaled, dtype, interpret=True), scaled, dtype)(
        kernel, bias, *pictures
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernel_is_its_twin_bit_for_bit(shape, dtype):
    arrays = operands(*shape, dtype)
    ours = jit(by_kernel)(*arrays)
    assert ours.dtype == dtype
    assert np.abs(ours.astype(jnp.float32)).max() > 10
    np.testing.assert_array_equal(
        np.asarray(ours, np.float32), np.asarray(jit(by_twin)(*arrays), np.float32)
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_so_is_the_gradient(shape):
    """To a unit in the last place, of each operand's largest: XLA may sum up in another order."""
    arrays = operands(*shape)
    g = operands(*shape[:3], shape[3] // 2)[2][..., :-MORE]

    def pulled(f):
        return jit(lambda *arrays: jax.vjp(f, *arrays)[1](g))(*arrays)

    for ours, theirs in zip(pulled(by_kernel), pulled(by_twin), strict=True):
        assert ours.dtype == theirs.dtype
        size = np.abs(np.asarray(theirs, np.float32)).max()
        assert size > 1
        np.testing.assert_allclose(
            np.asarray(ours, np.float32),
            np.asarray(theirs, np.float32),
            rtol=2**-7,
            atol=1e-4 * size,
        )


def test_the_twin_is_a_depthwise_convolution_between_silus():
    taps, bias, x, *_ = operands(2, 6, 5, 8, jnp.float32)
    x = x[..., :-MORE]
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 8}
    y, gate = jnp.split(
        jax.lax.conv_general_dilated(jax.nn.silu(x), taps[0], (1, 1), "SAME", **layout) + bias[0],
        2,
        axis=-1,
    )
    np.testing.assert_allclose(
        reference(x, taps[0], bias[0]), y * jax.nn.silu(gate), rtol=1e-5, atol=1e-5
    )


def test_a_tpu_convolves_in_groups_to_the_same_result(monkeypatch):
    """Forwards and backwards, to a unit of BF16 in the last place: sums are in another order."""
    taps, bias, x, *_, offset = operands(*SHAPES["of odd sizes"])
    b, h, w, c = *x.shape[:3], bias.shape[-1]
    x = x[..., :c]
    g = operands(b, 1, h * w, c // 2)[2][:, 0, :, : c // 2]

    def conv(x, offset):
        pending = LazyActivation.from_array(x.reshape(b, h * w, c)).map(
            jnp.add, offset.reshape(1, 1, c)
        )
        return module.gated_conv(pending, (h, w), taps[0], bias[0])

    results = {}
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(module.target, "platform", lambda platform=platform: platform)
        pulled = jit(lambda *arrays: (conv(*arrays), *jax.vjp(conv, *arrays)[1](g)))
        assert (
            f"feature_group_count={c}"
            in str(jax.make_jaxpr(lambda *arrays: conv(*arrays))(x, offset))
        ) == (platform == "tpu")
        results[platform] = [np.asarray(y, np.float32) for y in pulled(x, offset)]
    for ours, theirs in zip(results["tpu"], results["cpu"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-3 * np.abs(theirs).max())


def test_rows_are_divided_over_devices_and_so_are_those_that_vmap_maps(monkeypatch):
    """As in the update, where groups of rows are mapped. No device is sent the rows of another."""
    monkeypatch.setattr(module.target, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "triton_kernel", partial(triton_kernel, interpret=True))
    taps, bias, x, row, column, offset = operands(4, 8, 16, 64)
    whole = jit(by_twin)(taps, bias, x, row, column, offset)

    def flat(a):
        return a.reshape(*a.shape[:-3], -1, a.shape[-1])

    def conv(x, row):
        part = LazyPart(
            scaled,
            (ColumnView(flat(x), 0, x.shape[-1] - MORE), flat(row), flat(column), flat(offset)),
            exact=False,
        )
        return module.gated_conv(LazyActivation((part,), x.dtype), (8, 16), taps[0], bias[0])

    mesh = sharding.make_mesh(2, 2)
    with jax.set_mesh(mesh):

        def place(*arrays):
            return jax.device_put(arrays, sharding.rows(mesh))

        plain = jit(conv).lower(*place(x, row)).compile()
        mapped = (
            jit(jax.vmap(conv, spmd_axis_name=sharding.AXES[:2]))
            .lower(*place(x[:, None], row[:, None]))
            .compile()
        )
        results = plain(*place(x, row)), mapped(*place(x[:, None], row[:, None]))[:, 0]
    for program, result in zip((plain, mapped), results, strict=True):
        assert "all-gather" not in program.as_text()
        assert result.sharding.shard_shape(result.shape)[0] == 1
        np.testing.assert_array_equal(
            np.asarray(result, np.float32), np.asarray(flat(whole), np.float32)
        )
