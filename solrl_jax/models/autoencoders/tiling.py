"""Tiled decoding: the decoder needs memory for one tile instead of the whole image."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def decode_tiled(
    decode: Callable[[Float[Array, "b th tw c"]], Float[Array, "b tH tW k"]],
    latent: Float[Array, "b h w c"],
    tile: int,
    overlap: int,
    compression: int,
) -> Float[Array, "b H W k"]:
    """Decodes a latent in overlapping square tiles, one at a time, and blends them. For use under
    jit.

    Convolutions give the same result as in `decode(latent)`, except near the borders of tiles.
    Normalisation and attention over all pixels see one tile only, so the result differs everywhere.
    A latent no larger than one tile is decoded whole, by one call of `decode`.

    Args:
        decode: maps the latents of a tile, for the whole batch, to images of `compression` times
            its size, with k colours.
        latent: the whole latents.
        tile: side of a tile in latent pixels, at least 1. The latent is not divided along an axis
            along which it has at most so many pixels.
        overlap: number of latent pixels that neighbouring tiles share at least, from 0 to `tile -
            1`, which is not checked. Tiles are spaced evenly, as few as cover the latent. In the
            shared region, one tile fades linearly into the next.
        compression: side of the square of image pixels that one latent pixel stands for.

    Returns:
        The images, H = h * compression and W = w * compression, blended in float32 and cast to the
        dtype of the result of `decode`.
    """
    batch, height, width, channels = latent.shape
    row_starts, row_ramps = _axis(height, tile, overlap, compression)
    column_starts, column_ramps = _axis(width, tile, overlap, compression)
    tile_shape = (batch, min(tile, height), min(tile, width), channels)
    decoded = jax.eval_shape(decode, jax.ShapeDtypeStruct(tile_shape, latent.dtype))

    def empty(rows: int, columns: int) -> Array:
        shape = (batch, rows * compression, columns * compression, decoded.shape[-1])
        return jnp.zeros(shape, jnp.float32)

    # Where four tiles meet, blending is bilinear only if each row of tiles is complete before rows
    # are blended. Hence two nested loops.
    def add_row(image: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        y, y_ramp = row

        def add_tile(strip: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
            x, x_ramp = column
            piece = decode(jax.lax.dynamic_slice(latent, (0, y, x, 0), tile_shape))
            return _blend(strip, piece, x * compression, x_ramp[:, None], axis=2), None

        strip, _ = jax.lax.scan(
            add_tile, empty(tile_shape[1], width), (column_starts, column_ramps)
        )
        return _blend(image, strip, y * compression, y_ramp[:, None, None], axis=1), None

    image, _ = jax.lax.scan(add_row, empty(height, width), (row_starts, row_ramps))
    return image.astype(decoded.dtype)


def _axis(size: int, tile: int, overlap: int, compression: int) -> tuple[Array, Array]:
    """Arranges tiles along one axis.

    There is a single tile if `size` is at most `tile`; otherwise the fewest that cover `size`.

    Args:
        size: size of the latent along the axis.
        tile: side of a tile in latent pixels.
        overlap: latent pixels that neighbouring tiles share at least, less than `tile`.
        compression: side, in image pixels, of the square that one latent pixel stands for.

    Returns:
        The first latent pixel of each of n tiles [n], int32, and the weight of each tile's image
        pixels against the tile before it [n, pixels], float32. Over k pixels that two tiles share,
        the weight rises as 1/2k, 3/2k, ..., (2k-1)/2k. Elsewhere it is 1.
    """
    if size <= tile:
        return jnp.zeros(1, jnp.int32), jnp.ones((1, size * compression))
    count = -((overlap - size) // (tile - overlap))  # the fewest tiles that cover `size`
    starts = np.arange(count) * (size - tile) // (count - 1)
    shared = np.concatenate([[0], starts[:-1] + tile - starts[1:]]) * compression
    pixel = np.arange(tile * compression) + 0.5
    # The lower limit 0.5 makes all weights 1 where nothing is shared.
    ramps = np.minimum(pixel / np.maximum(shared, 0.5)[:, None], 1.0)
    return jnp.asarray(starts, jnp.int32), jnp.asarray(ramps, jnp.float32)


def _blend(canvas: Array, piece: Array, start: Array, ramp: Array, axis: int) -> Array:
    """Blends a piece into a canvas. Equal values blend to exactly the same value.

    Args:
        canvas: the images so far, [batch, height, width, colours].
        piece: the new part of them, as large as the canvas along all axes but `axis`.
        start: first index of the piece in the canvas along `axis`.
        ramp: weight of the piece against the canvas, broadcast to the shape of the piece.
        axis: axis along which the piece is placed: 1 for the height, 2 for the width.

    Returns:
        A new canvas, which is `canvas + ramp * (piece - canvas)` where the piece lies and unchanged
        elsewhere.
    """
    before = jax.lax.dynamic_slice_in_dim(canvas, start, piece.shape[axis], axis)
    blended = before + ramp * (piece - before)
    return jax.lax.dynamic_update_slice_in_dim(canvas, blended, start, axis)
