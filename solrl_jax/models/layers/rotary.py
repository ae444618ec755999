"""Rotary position embeddings (RoPE, arXiv 2104.09864) with several coordinates per position."""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.quant.lazy import LazyActivation

# Cosines and sines of the rotation angles: two float32 arrays [b or 1, positions, head_dim / 2].
Rotation: TypeAlias = tuple[Array | np.ndarray, Array | np.ndarray]


def rotation_table(
    positions: Float[np.ndarray, "axes s"], axes_dims: tuple[int, ...], theta: float
) -> Rotation:
    """The rotation angles of positions that have one coordinate per axis (arXiv 2104.09864, section
    3.3).

    Args:
        positions: The coordinates of each of s positions, one row per axis, such as the row and the
            column of an image token.
        axes_dims: The number of features of a head that each coordinate rotates (even numbers), one
            per axis. Their sum is the number of features of a head.
        theta: The base of the rotation frequencies, `theta ** (-2 i / dim)` for pair i of an axis
            with `dim` features.

    Returns:
        Cosines and sines [1, s, sum of axes_dims / 2], float32, the pairs of the first axis first.

    Raises:
        ValueError: `positions` and `axes_dims` have different numbers of axes.
    """
    # computed in float64 and rounded once, as in the released code
    angles = []
    for coordinate, dim in zip(positions, axes_dims, strict=True):
        frequencies = theta ** (-np.arange(0, dim, 2) / dim)
        angles.append(np.outer(coordinate, frequencies))
    angle = np.concatenate(angles, axis=-1)[None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate_pairs(
    x: Float[Array, "... d"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... d"]:
    """Rotates each pair of neighboring features of each head, in float32 (arXiv 2104.09864,
    equation 34).

    Args:
        x: Queries or keys [..., d]. The last axis holds heads of `2 * half` features side by side.
        cos: The cosines of the angles of each position [..., half]: one angle per pair of features
            of a head, the same for all heads. The leading axes broadcast against those of `x`.
        sin: The sines of the angles of each position, of the shape of `cos`.

    Returns:
        The rotated array, of the shape and dtype of `x`.
    """
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, cos.shape[-1], 2)
    first, second = jnp.unstack(pairs, axis=-1)
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def rotate(x: LazyActivation, rotation: Rotation | None, start: int = 0) -> LazyActivation:
    """Rotates queries or keys by the angles of their positions.

    Args:
        x: Queries or keys [b, s, d], heads side by side.
        rotation: The cosines and sines of the angles of all positions of the sequence, from 0 on:
            two float32 arrays [b or 1, positions, head_dim / 2]. None leaves `x` as it is.
        start: The position in the sequence of the first token of `x`, whose angles are the ones at
            this index of `rotation`.

    Returns:
        The rotated activation [b, s, d], which stays lazy.

    Raises:
        ValueError: `x` has several parts (`LazyActivation.concat`), and `rotation` is not None.
    """
    if rotation is None:
        return x
    cos, sin = rotation
    stop = start + x.num_rows
    if start > 0 or stop < cos.shape[1]:
        cos = cos[:, start:stop]
        sin = sin[:, start:stop]
    return x.map(rotate_pairs, jnp.asarray(cos), jnp.asarray(sin))
