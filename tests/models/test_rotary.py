"""Rotary embedding as a TPU computes it, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.models.layers.rotary import rotate_by_matmul, rotate_pairs, rotation_table
from tests.lowering import tpu_text

AXES = (4, 6, 6)  # features per coordinate: 16 per head


def tables() -> tuple[jax.Array, jax.Array]:
    cos, sin = rotation_table(np.mgrid[0:1, 0:3, 0:5].reshape(3, -1).astype(float), AXES, 1e4)
    return jnp.asarray(cos), jnp.asarray(sin)


def queries(dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, 15, 48)).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_product_rotates_as_the_definition_does(dtype):
    x = queries(dtype)
    # Without jit, no compiler contracts a multiplication and an addition.
    assert (rotate_by_matmul(x, *tables()) == rotate_pairs(x, *tables())).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradients_are_the_same(dtype):
    x = queries(dtype)
    cotangent = jax.random.normal(jax.random.key(1), x.shape).astype(dtype)

    def gradient(rotate):
        return jax.vjp(lambda x: rotate(x, *tables()), x)[1](cotangent)[0]

    assert (gradient(rotate_by_matmul) == gradient(rotate_pairs)).all()


def test_a_rotation_keeps_lengths():
    x = queries("float32")
    rotated = rotate_by_matmul(x, *tables())
    assert not np.allclose(rotated, x, atol=0.1)
    lengths = (jnp.linalg.norm(y.reshape(2, 15, 3, 16), axis=-1) for y in (x, rotated))
    np.testing.assert_allclose(*lengths, rtol=1e-6)


def test_a_tpu_rotates_by_a_product():
    text = tpu_text(jax.jit(rotate_pairs), queries("bfloat16"), *tables())
    assert "dot_general" in text
    assert (
        "dot_general" not in jax.jit(rotate_pairs).lower(queries("bfloat16"), *tables()).as_text()
    )
