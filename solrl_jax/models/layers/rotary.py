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
    """Computes the angles of rotary position embedding for positions with several coordinates
    (arXiv 2104.09864, section 3.3).

    The features of a head are divided among the axes, and each pair of features of an axis is
    rotated by the coordinate times a frequency.

    Args:
        positions: The coordinates of s positions, one row per axis: for example the rows and the
            columns of image tokens.
        axes_dims: For each axis, the number of features of a head that its coordinate rotates, an
            even number. Their sum is the number of features of a head.
        theta: The base of the frequencies: `theta ** (-2 i / dim)` for pair i of an axis with `dim`
            features.

    Returns:
        (cosines, sines) of the angles, float32, each [1, s, head_dim / 2]: one per position and
        pair of features, axis by axis.

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
    """Rotates queries or keys by the angles of their positions (rotary embedding).

    Args:
        x: Queries or keys [b, s, d], heads side by side.
        rotation: (cosines, sines) of the angles of all positions of the sequence: two float32
            arrays [b or 1, positions, head_dim / 2]. None leaves `x` as it is.
        start: The position of the first token of `x` in the sequence, an index into `rotation`.

    Returns:
        The rotated activation [b, s, d], still lazy (not computed until a layer reads it).

    Raises:
        ValueError: `x` was made by `LazyActivation.concat`, and `rotation` is not None.
    """
    if rotation is None:
        return x
    cos, sin = rotation
    stop = start + x.num_rows
    if start > 0 or stop < cos.shape[1]:
        cos = cos[:, start:stop]
        sin = sin[:, start:stop]
    return x.map(rotate_pairs, jnp.asarray(cos), jnp.asarray(sin))
