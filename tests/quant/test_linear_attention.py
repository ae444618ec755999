"""The kernels of `linear_attention` and their references agree, and so do their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import jit
from solrl_jax.quant import compile_target
from solrl_jax.quant import linear_attention as module
from solrl_jax.quant.lazy import ColumnView, LazyActivation, LazyPart
from solrl_jax.quant.linear_attention import Blocks, mixed_reference, plain_reference
from tests.cases import first_is_quick

SHAPES = {"small": (2, 5, 2, 16), "of two blocks": (1, 200, 3, 32), "SANA's": (1, 1024, 2, 32)}
MIXED = {  # rows and columns of tokens, blocks down and across, heads, features of a head
    "small": ((6, 10), (2, 2), 2, 16),
    "of twelve": ((9, 8), (3, 4), 1, 32),
    "of two groups": ((2, 80), (2, 1), 1, 16),
    "MHLA's": ((32, 32), (4, 4), 2, 32),
}
HARD = {  # of q (0), k (1) and v (2)
    "zeros": lambda i, x: 0 * x,
    "heavy-tailed": lambda i, x: x**7,
    "subnormal": lambda i, x: x if i == 2 else x * 2.0**-130,
    "overflowing": lambda i, x: x * 2.0**62 if i else x,
    "negative queries": lambda i, x: x if i else -jnp.abs(x),
    "negative keys": lambda i, x: -jnp.abs(x) if i == 1 else x,
}


def scaled(y, row, column, bias):
    return y * row * column + bias  # what a quantized linear leaves to its reader


def operands(b, n, heads, head):
    """What `scaled` takes, for q, k and v. The product has more columns than are read."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    def scale(*shape):
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)

    d = heads * head
    return [
        (normal(b, n, d + 7), scale(b, n, 1), scale(1, 1, d), normal(1, 1, d)) for _ in range(3)
    ]


def pending(arrays, exact=False):
    """q, k and v. exact: the products alone, all columns of which are read."""

    def of(y, *more):
        return (
            LazyActivation.from_array(y[..., :-7])
            if exact
            else LazyActivation(
                (LazyPart(scaled, (ColumnView(y, 0, y.shape[2] - 7), *more), False),), y.dtype
            )
        )

    return [of(*one) for one in arrays]


@pytest.fixture
def on_gpu(monkeypatch):
    """The kernels, interpreted."""
    monkeypatch.setattr(compile_target, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "run_kernel", partial(module.run_kernel, interpret=True))


def by_reference(heads, inputs):
    """In float32, of values in BF16."""
    return plain_reference(*(x.value.astype(jnp.float32) for x in inputs), heads)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_its_twin_to_half_a_unit_of_bf16(shape, on_gpu):
    arrays = operands(*shape)
    heads = shape[2]
    ours = jit(lambda arrays: module.linear_attention(*pending(arrays), heads))(arrays)
    assert ours.dtype == jnp.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_target, "platform", lambda: "cpu")
        expected = np.asarray(jit(lambda arrays: by_reference(heads, pending(arrays)))(arrays))
    assert np.abs(expected).max() > 0.2
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=2**-8 + 1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(SHAPES))
def test_so_is_the_gradient(name, on_gpu):
    """Of what the kernel reads, rounded to BF16 once."""
    shape = SHAPES[name]
    arrays = operands(*shape)
    heads = shape[2]
    g = operands(*shape)[2][0][..., :-7] * 3

    def pulled(f, *products):
        def of(*products):
            return f(pending([(y,) for y in products], True))

        return jit(lambda *products: jax.vjp(of, *products)[1](g.astype(products[0].dtype)))(
            *products
        )

    products = [one[0] for one in arrays]
    ours = pulled(lambda inputs: module.linear_attention(*inputs, heads), *products)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_target, "platform", lambda: "cpu")
        expected = pulled(partial(by_reference, heads), *(y.astype(jnp.float32) for y in products))
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        size = np.abs(want).max()
        assert size > 1e-3
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, rtol=2**-8 + 1e-5, atol=1e-5 * size
        )


def mixed(case):
    """The kernel's function and its twin, of m and of q, k and v; random arguments for them."""
    grid, layout, heads, head = case
    blocks = Blocks(layout, grid, 1e-6, 1e-6)
    m = jnp.asarray(
        np.random.default_rng(1).uniform(size=(blocks.count, blocks.count)), jnp.float32
    )
    arrays = [one[0][..., :-7] for one in operands(2, grid[0] * grid[1], heads, head)]

    def attend(m, *arrays):
        return module.linear_attention(*map(LazyActivation.from_array, arrays), heads, blocks, m)

    return (
        attend,
        lambda m, *arrays: mixed_reference(*arrays, heads, blocks=blocks, mix=m),
        (m, *arrays),
    )


def in_float32(f, *arrays):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_target, "platform", lambda: "cpu")
        return jit(f)(*(x.astype(jnp.float32) for x in arrays))


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(MIXED))
def test_mixed_sums_are_their_twin_and_so_are_the_gradients(name, on_gpu):
    """m's gradient is in float32, of as many products as there are features."""
    attend, plain, arrays = mixed(MIXED[name])
    assert "pallas_call" in str(jax.make_jaxpr(attend)(*arrays))
    g = 3 * arrays[3]

    def both(f, g):
        return lambda *arrays: (f(*arrays), *jax.vjp(f, *arrays)[1](g))

    ours = jit(both(attend, g))(*arrays)
    expected = in_float32(both(plain, g.astype(jnp.float32)), *arrays)
    for got, want, dtype in zip(
        ours, expected, [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3], strict=True
    ):
        assert got.dtype == dtype
        size = np.abs(want).max()
        assert size > 1e-2
        rounding = 2**-8 if dtype == jnp.bfloat16 else 0
        np.testing.assert_allclose(
            np.asarray(got, np.float32), want, rtol=rounding + 1e-5, atol=1e-5 * size
        )


@pytest.mark.slow
@pytest.mark.parametrize("hard", HARD.values(), ids=HARD)
def test_mixed_sums_are_their_twin_where_numbers_are_hard(hard, on_gpu):
    """To a unit of BF16, in which both round features and results.

    Next to the largest number, one may overflow alone.
    """
    attend, plain, (m, *arrays) = mixed(MIXED["small"])
    q, k, v = (hard(i, x.astype(jnp.float32)).astype(jnp.bfloat16) for i, x in enumerate(arrays))
    ours = np.asarray(jit(attend)(m, q, k, v), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_target, "platform", lambda: "cpu")
        expected = np.asarray(jit(plain)(m, q, k, v), np.float32)
    assert (np.isfinite(ours) != np.isfinite(expected)).mean() < 0.005
    mask = np.isfinite(ours) & np.isfinite(expected)
    assert mask.mean() > 0.5
    np.testing.assert_allclose(
        ours[mask], expected[mask], rtol=2**-7, atol=1e-5 * np.abs(expected[mask]).max(initial=0)
    )


@pytest.mark.slow
def test_equal_weights_are_one_block(on_gpu):
    """To the rounding of BF16."""
    _, _, (_, *arrays) = mixed(MIXED["MHLA's"])
    inputs = [LazyActivation.from_array(x) for x in arrays]
    blocks = Blocks((4, 4), (32, 32))
    one, many = (
        jit(f)()
        for f in (
            lambda: module.linear_attention(*inputs, 2),
            lambda: module.linear_attention(*inputs, 2, blocks, jnp.ones((16, 16))),
        )
    )
    np.testing.assert_allclose(
        np.asarray(many, np.float32), np.asarray(one, np.float32), rtol=2**-7, atol=1e-6
    )


@pytest.mark.slow
def test_queries_that_see_nothing_give_zeros(on_gpu):
    nothing = [(jnp.full((1, 20, 39), -1, jnp.bfloat16),)] * 3
    assert (
        not jit(lambda x: module.linear_attention(*pending(x, True), 2))(nothing)
        .astype(jnp.float32)
        .any()
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, Blocks((1, 5), (1, 5), 1e-6, 1e-6)], ids=["one", "five"])
def test_rows_are_divided_over_devices_and_so_are_those_that_vmap_maps(blocks, on_gpu):
    """As in the update, where groups of rows are mapped.

    No device is sent the rows of another. m is whole on each.
    """
    arrays = [one[0] for one in operands(4, 5, 2, 16)]
    m = jnp.asarray(np.random.default_rng(1).uniform(size=(5, 5)))

    def mixing(m):
        return () if blocks is None else (blocks, m)

    def attend(m, *arrays):
        return module.linear_attention(*pending([(y,) for y in arrays], True), 2, *mixing(m))

    def pulled(*arrays):
        return jax.vjp(attend, m, *arrays)[1](arrays[0][..., :-7])

    of_m, *alone = jit(pulled)(*arrays)
    mesh = sharding.make_mesh(2, 2)
    assert np.abs(of_m).max() > 0.1 or blocks is None
    with jax.set_mesh(mesh):
        placed = jax.device_put([y[:, None] for y in arrays], sharding.rows(mesh))
        program = jit(jax.vmap(pulled, spmd_axis_name=sharding.AXES[:2])).lower(*placed).compile()
        assert "all-gather" not in program.as_text()
        of_groups, *results = program(*placed)
        np.testing.assert_allclose(of_groups.sum(0), of_m, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(results, alone, strict=True):
            assert ours.sharding.shard_shape(ours.shape)[0] == 1
            np.testing.assert_array_equal(
                np.asarray(ours[:, 0], np.float32), np.asarray(theirs, np.float32)
            )
