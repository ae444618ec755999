"""`linear_attention`: the kernels and their twin are one function, and so are their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.numerics import linear_attention as module
from solrl_jax.numerics.linear_attention import twin
from solrl_jax.numerics.pending import Columns, Part, Pending
from solrl_jax.parallel.sharding import jit

SHAPES = {"small": (2, 5, 2, 16), "of two blocks": (1, 200, 3, 32), "SANA's": (1, 1024, 2, 32)}
scaled = lambda y, row, column, bias: y * row * column + bias  # what a quantised linear leaves to its reader


def operands(b, n, heads, head):
    """What `scaled` takes, for q, k and v. The product has more columns than are read."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    scale = lambda *shape: jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)
    d = heads * head
    return [(normal(b, n, d + 7), scale(b, n, 1), scale(1, 1, d), normal(1, 1, d)) for _ in range(3)]


def pending(arrays, exact=False):
    """q, k and v. exact: the products alone, all columns of which are read."""
    of = lambda y, *more: (
        Pending.of(y[..., :-7]) if exact else Pending((Part(scaled, (Columns(y, 0, y.shape[2] - 7), *more), False),), y.dtype)
    )
    return [of(*one) for one in arrays]


@pytest.fixture
def on_gpu(monkeypatch):
    """The kernels, interpreted."""
    monkeypatch.setattr(module.target, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "in_one_pass", partial(module.in_one_pass, interpret=True))


def by_twin(heads, inputs):
    """In float32, of values in BF16."""
    return twin(*(x.value.astype(jnp.float32) for x in inputs), heads)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_its_twin_to_half_a_unit_of_bf16(shape, on_gpu):
    arrays, heads = operands(*shape), shape[2]
    ours = jit(lambda arrays: module.linear_attention(*pending(arrays), heads))(arrays)
    assert ours.dtype == jnp.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.target, "platform", lambda: "cpu")
        wanted = np.asarray(jit(lambda arrays: by_twin(heads, pending(arrays)))(arrays))
    assert np.abs(wanted).max() > 0.2
    np.testing.assert_allclose(np.asarray(ours, np.float32), wanted, rtol=2**-8 + 1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_so_is_the_gradient(shape, on_gpu):
    """Of what the kernel reads, rounded to BF16 once."""
    arrays, heads = operands(*shape), shape[2]
    g = operands(*shape)[2][0][..., :-7] * 3
    products = [one[0] for one in arrays]

    def pulled(f):
        of = lambda *products: f([(y, *one[1:]) for y, one in zip(products, arrays, strict=True)])
        return jit(lambda *products: jax.vjp(of, *products)[1](g.astype(jax.eval_shape(of, *products).dtype)))(*products)

    ours = pulled(lambda arrays: module.linear_attention(*pending(arrays, True), heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.target, "platform", lambda: "cpu")
        wide = [y.astype(jnp.float32) for y in products]
        products = wide
        wanted = pulled(lambda arrays: by_twin(heads, pending(arrays, True)))
    for got, want in zip(ours, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        size = np.abs(want).max()
        assert size > 1e-3
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-8 + 1e-5, atol=1e-5 * size)


def test_queries_that_see_nothing_give_zeros(on_gpu):
    nothing = [(jnp.full((1, 20, 39), -1, jnp.bfloat16),)] * 3
    assert not jit(lambda x: module.linear_attention(*pending(x, True), 2))(nothing).astype(jnp.float32).any()
