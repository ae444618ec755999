"""Attention heads as an axis of their own, in the order in which TPUs store them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant import compile_target

# A TPU stores the last two axes of an array in tiles of 8 rows and 128 columns.
TILE_ROWS = 8


def split_heads(x: Float[Array, "... d"], head_dim: int) -> Float[Array, "..."]:
    """Gives the heads of queries or keys an axis of their own, for operations on single heads.

    In a program for TPUs (`compile_target.platform`), the rows are also divided into groups of 8 if
    s is a multiple of 8. A head of 128 features is then stored as it is in `x`, so that no data
    moves. With one axis for all rows, the compiler transposes the array twice.

    Args:
        x: Queries or keys [..., s, d], heads side by side; or a single row [d].
        head_dim: The number of features of a head, which divides d.

    Returns:
        The values of `x`, [..., s, d / head_dim, head_dim] or, divided into groups, [..., s / 8, 8,
        d / head_dim, head_dim]; [d / head_dim, head_dim] for a single row. `reshape(x.shape)` is
        the inverse.
    """
    *leading, features = x.shape
    if compile_target.platform() == "tpu" and leading and leading[-1] % TILE_ROWS == 0:
        leading = [*leading[:-1], leading[-1] // TILE_ROWS, TILE_ROWS]
    return x.reshape(*leading, features // head_dim, head_dim)


def heads_first(x: Float[Array, "b s d"], head_dim: int) -> Float[Array, "b n s h"]:
    """Moves the heads before the rows, by a transpose that moves whole tiles of a TPU.

    Args:
        x: Queries, keys or values [b, s, n * head_dim], heads side by side. s is a multiple of 8.
        head_dim: The number of features of a head.

    Returns:
        The same values [b, n, s, head_dim].
    """
    batch, rows, features = x.shape
    shape = (batch, rows // TILE_ROWS, TILE_ROWS, features // head_dim, head_dim)
    tiles = jnp.transpose(x.reshape(shape), (0, 3, 1, 2, 4))
    return tiles.reshape(batch, features // head_dim, rows, head_dim)


def heads_last(x: Float[Array, "b n s h"]) -> Float[Array, "b s d"]:
    """Moves the heads behind the rows: the inverse of `heads_first`.

    Args:
        x: Attended values [b, n, s, h]: samples, heads, rows (a multiple of 8), features of a head.

    Returns:
        The same values [b, s, n * h], heads side by side.
    """
    batch, heads, rows, head_dim = x.shape
    shape = (batch, heads, rows // TILE_ROWS, TILE_ROWS, head_dim)
    return jnp.transpose(x.reshape(shape), (0, 2, 3, 1, 4)).reshape(batch, rows, -1)
