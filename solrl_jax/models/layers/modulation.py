"""Modulation of normalized activations by a shift and a scale (arXiv 2212.09748, section 3.2)."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# (x, shift, scale) -> `x (1 + scale) + shift`. Networks differ in how they round it.
Modulate: TypeAlias = Callable[[Array, Array, Array], Array]


def modulate(
    x: Float[Array, "... d"], shift: Float[Array, "... d"], scale: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """Computes `x (1 + scale) + shift`, rounded after each operation, as in the released code of
    SANA and FLUX.

    Args:
        x: normalized activations.
        shift: shift of each feature, which broadcasts to `x`.
        scale: scale of each feature, which broadcasts to `x`.

    Returns:
        An array of the shape of `x`, in the dtype that all three share.
    """
    return x * (1 + scale) + shift


def modulate_rounding_once(
    x: Float[Array, "... d"], shift: Float[Array, "... d"], scale: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """Computes `x (1 + scale) + shift` in float32, and rounds once to the dtype of `x`.

    Args:
        x: normalized activations.
        shift: shift of each feature, which broadcasts to `x`.
        scale: scale of each feature, which broadcasts to `x`.

    Returns:
        An array of the shape and dtype of `x`.
    """
    wide = jnp.float32
    return (x.astype(wide) * (1 + scale.astype(wide)) + shift.astype(wide)).astype(x.dtype)


def silu_rounding_once(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes SiLU, `x sigmoid(x)`, in float32, and rounds once to the dtype of `x`.

    It serves the condition vector, whose rounding error would affect every block.

    Args:
        x: An array of any shape and floating-point dtype.

    Returns:
        An array of the shape and dtype of `x`.
    """
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)
