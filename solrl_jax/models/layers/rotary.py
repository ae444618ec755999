"""Rotary position embeddings (RoPE, arXiv 2104.09864) with several coordinates per position."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.models.layers.heads import split_heads
from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import LazyActivation

# Cosines and sines of the rotation angles: two float32 arrays [b or 1, positions, head_dim / 2].
Rotation: TypeAlias = tuple[Array | np.ndarray, Array | np.ndarray]


def rotation_table(
    positions: Float[np.ndarray, "axes s"], axes_dims: tuple[int, ...], theta: float
) -> Rotation:
    """Computes cosines and sines of the angles of rotary position embedding for positions with
    several coordinates (arXiv 2104.09864, section 3.3).

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
        (cosines, sines) of the angles: two float32 NumPy arrays [1, s, head_dim / 2], with one
        angle per position and pair of features, axis by axis.

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
    equation 34). On TPUs `rotate_by_matmul` computes it, without a gradient of `cos` and `sin`.

    Args:
        x: Queries or keys [..., d]. The last axis holds heads of `2 * half` features side by side.
        cos: The cosines of the angles of each position [..., half]: one angle per pair of features
            of a head, the same for all heads. The leading axes broadcast against those of `x`.
        sin: The sines of the angles of each position, of the shape of `cos`.

    Returns:
        The rotated array, of the shape and dtype of `x`.
    """
    if compile_target.platform() == "tpu":
        return rotate_by_matmul(x, cos, sin)
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, cos.shape[-1], 2)
    first, second = jnp.unstack(pairs, axis=-1)
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


@jax.custom_vjp
def rotate_by_matmul(
    x: Float[Array, "... d"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... d"]:
    """Rotates each pair of neighboring features of each head as `rotate_pairs` does, with a matmul
    that swaps the features of each pair.

    TPUs keep the last axis in registers of 128 lanes, so that an axis for the two features of a
    pair would leave 126 of them empty. The swap is exact: its matrix has one 1 or -1 per column.
    Results and gradients are those of `rotate_pairs`, to the bit.

    Args:
        x: Queries or keys [..., d]. The last axis holds heads of `2 * half` features side by side.
        cos: The cosines of the angles of each position [..., half]: one angle per pair of features
            of a head, the same for all heads. The leading axes broadcast against those of `x`. No
            gradient is computed for the cosines.
        sin: The sines of the angles, of the shape of `cos`. No gradient is computed for them.

    Returns:
        The rotated array, of the shape and dtype of `x`. Where a feature is not finite, more
        features of its head may be NaN than with `rotate_pairs`.
    """
    features = 2 * cos.shape[-1]
    # Computed in the program: kernels may not capture constants.
    row = jax.lax.broadcasted_iota(jnp.int32, (features, features), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (features, features), 1)
    sign = jnp.where(column % 2 == 0, -1, 1)
    swap = jnp.where(row == column - sign, sign, 0)
    heads = split_heads(x, features)
    swapped = jnp.matmul(
        heads,
        swap.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,  # exact for float32, too
        preferred_element_type=jnp.float32,
    )
    cos, sin = (split_heads(jnp.repeat(table, 2, axis=-1), features) for table in (cos, sin))
    rotated = heads.astype(jnp.float32) * cos + swapped * sin
    return rotated.reshape(x.shape).astype(x.dtype)


def _rotate_forward(x: Array, cos: Array, sin: Array) -> tuple[Array, tuple[Array, Array]]:
    """Computes `rotate_by_matmul`: its forward rule for `jax.custom_vjp`. Returns its result, and
    the tables (cos, sin), which `_rotate_backward` needs.
    """
    return rotate_by_matmul(x, cos, sin), (cos, sin)


def _rotate_backward(tables: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, Array]:
    """Computes the gradient of `rotate_by_matmul`: its backward rule for `jax.custom_vjp`. Returns
    the cotangent of its result, rotated by the opposite angles, and zeros for the tables (cos,
    sin), which get no gradient.
    """
    cos, sin = tables
    inverse = rotate_by_matmul(cotangent, cos, -sin)
    return inverse, jnp.zeros_like(cos), jnp.zeros_like(sin)


rotate_by_matmul.defvjp(_rotate_forward, _rotate_backward)


def rotate(x: LazyActivation, rotation: Rotation | None, start: int = 0) -> LazyActivation:
    """Rotates each pair of neighboring features of queries or keys by the angles of their positions
    (rotary embedding, `rotate_pairs`).

    Args:
        x: Queries or keys [b, s, d], heads side by side.
        rotation: (cosines, sines) of the angles of all positions of the sequence (of its part on
            this device, under sequence parallelism): two float32 arrays [b or 1, positions,
            head_dim / 2]. None leaves `x` as it is.
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
