"""The product with arrays, and with an array and a low-rank correction: values and gradients.

Every leaf: `test_leaves.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.quant.matmul import LowRank, matmul

N_IN = 32
N_OUT = 24
RANK = 4
SCALE = 2.0
SHAPES = {"2-D": (6,), "3-D": (2, 3), "4-D": (2, 1, 3)}
TOLERANCE = 1e-6  # largest difference over largest value


def normal(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def x_of(shape):
    return normal(*SHAPES[shape], N_IN, seed=0)


BASE = normal(N_IN, N_OUT, seed=1)
A = normal(N_IN, RANK, seed=2)
B = normal(RANK, N_OUT, seed=3)
ADAPTED = LowRank(BASE, A, B, SCALE)


def dense(x, a, b, base=BASE):
    """The adapted product in float64."""
    return np.asarray(x, np.float64) @ (
        np.asarray(base, np.float64) + SCALE * np.asarray(a, np.float64) @ np.asarray(b)
    )


def relative(got, want):
    return (
        np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max()
        / np.abs(np.asarray(want)).max()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_with_an_array(shape):
    x = x_of(shape)
    got = matmul(x, BASE)
    assert got.shape == (*SHAPES[shape], N_OUT)
    assert relative(got, np.asarray(x, np.float64) @ np.asarray(BASE)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_with_a_low_rank_correction(shape):
    x = x_of(shape)
    got = matmul(x, ADAPTED)
    assert got.shape == (*SHAPES[shape], N_OUT)
    assert relative(got, dense(x, A, B)) < TOLERANCE
    assert relative(got, dense(x, A, 0 * B)) > 0.1  # the correction counts
    assert relative(got, dense(x, A, B / SCALE)) > 0.1  # and so does its scale


def test_the_gradient_reaches_the_adapter_and_is_that_of_the_dense_form():
    x = x_of("3-D")
    weights = jnp.cos(jnp.arange(6 * N_OUT, dtype=jnp.float32)).reshape(2, 3, N_OUT)
    ours = jax.grad(
        lambda a, b, x: (jnp.sin(matmul(x, LowRank(BASE, a, b, SCALE)) / 8) * weights).sum(),
        (0, 1, 2),
    )
    theirs = jax.grad(
        lambda a, b, x: (jnp.sin(x @ (BASE + SCALE * a @ b) / 8) * weights).sum(), (0, 1, 2)
    )
    for got, want in zip(ours(A, B, x), theirs(A, B, x), strict=True):
        assert np.abs(want).max() > 0.1
        assert relative(got, want) < 5 * TOLERANCE  # two float32 forms of one gradient


def test_the_gradient_with_respect_to_every_field_of_the_leaf():
    gradient = jax.grad(lambda w: matmul(x_of("2-D"), w).sum())(ADAPTED)
    assert isinstance(gradient, LowRank)
    assert gradient.scale == SCALE
    for leaf, like in ((gradient.base, BASE), (gradient.a, A), (gradient.b, B)):
        assert leaf.shape == like.shape
        assert np.abs(leaf).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("base", [jnp.float32, jnp.bfloat16])
def test_the_result_has_the_dtype_of_x(dtype, base):
    x = x_of("3-D").astype(dtype)
    assert matmul(x, BASE.astype(base)).dtype == dtype


def test_bfloat16_rounds_and_no_more():
    x = x_of("3-D")
    for w, want in ((BASE, x @ BASE), (ADAPTED, dense(x, A, B))):
        assert 1e-4 < relative(matmul(x.astype(jnp.bfloat16), w).astype(jnp.float32), want) < 2e-2
