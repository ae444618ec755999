"""Tiled decoding: the decoder needs memory for one tile instead of the whole image."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def decode_tiled(
    decode: Callable[[Float[Array, "b ... th tw c"]], Float[Array, "b ... tH tW k"]],
    latent: Float[Array, "b ... h w c"],
    tile: int,
    overlap: int,
    compression: int,
) -> Float[Array, "b ... H W k"]:
    """Decodes a latent in overlapping square tiles, one at a time, and blends the images. For use
    under jit.

    The result differs slightly from `decode(latent)`: near the borders of tiles, where convolutions
    see one tile only, and everywhere if the decoder has normalization or attention over all pixels.
    A latent that fits into one tile is decoded whole. A gradient decodes each tile once more.

    Args:
        decode: a function that maps latents of the size of a tile, the whole batch at once, to
            images (or clips) that are `compression` times as high and wide.
        latent: the whole latents [b, h, w, c], or [b, t, h, w, c] of clips, whose frames are not
            divided.
        tile: side of a tile in latent pixels, at least 1. An axis of the latent with at most `tile`
            pixels is not divided.
        overlap: minimum number of latent pixels that neighboring tiles share, from 0 to `tile - 1`
            (not checked). There are as few tiles as this allows, evenly spaced. In the shared
            region, one tile fades linearly into the next.
        compression: side of the square of image pixels that one latent pixel stands for.

    Returns:
        The images (or clips, with as many frames as the result of `decode`): H is h * compression,
        W is w * compression, and k is the number of colors. They are blended in float32 and have
        the dtype of the result of `decode`.
    """
    *batch, height, width, channels = latent.shape  # samples, and frames of clips
    row_starts, row_ramps = _place_tiles(height, tile, overlap, compression)
    column_starts, column_ramps = _place_tiles(width, tile, overlap, compression)
    tile_shape = (*batch, min(tile, height), min(tile, width), channels)
    decode = jax.checkpoint(decode, prevent_cse=False)
    decoded = jax.eval_shape(decode, jax.ShapeDtypeStruct(tile_shape, latent.dtype))

    def empty(rows: int, columns: int) -> Array:
        *decoded_batch, _, _, colors = decoded.shape
        shape = (*decoded_batch, rows * compression, columns * compression, colors)
        return jnp.zeros(shape, jnp.float32)

    # Where four tiles meet, blending is bilinear only if each row of tiles is complete before rows
    # are blended. Hence two nested loops.
    def add_row(image: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        y, y_ramp = row

        def add_tile(strip: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
            x, x_ramp = column
            piece = decode(jax.lax.dynamic_slice(latent, (*[0] * len(batch), y, x, 0), tile_shape))
            return _blend(strip, piece, x * compression, x_ramp[:, None], axis=-2), None

        strip, _ = jax.lax.scan(
            add_tile, empty(tile_shape[-3], width), (column_starts, column_ramps)
        )
        return _blend(image, strip, y * compression, y_ramp[:, None, None], axis=-3), None

    image, _ = jax.lax.scan(add_row, empty(height, width), (row_starts, row_ramps))
    return image.astype(decoded.dtype)


def _place_tiles(size: int, tile: int, overlap: int, compression: int) -> tuple[Array, Array]:
    """Places tiles along one axis, as few as cover it, and computes the weights that blend each
    into the one before.

    Args:
        size: size of the latent along the axis, in latent pixels. If it is at most `tile`, there is
            a single tile of this size.
        tile: side of a tile in latent pixels.
        overlap: minimum number of latent pixels that neighboring tiles share, less than `tile`.
        compression: side, in image pixels, of the square that one latent pixel stands for.

    Returns:
        Two arrays for the n tiles. starts, [n], int32: the first latent pixel of each tile. ramps,
        [n, pixels], float32: the weight of each image pixel of the tile (there are `compression`
        per latent pixel); the blend of the tiles before it has the weight 1 - weight. Over k pixels
        shared with the tile before, the weight rises from `1 / (2 k)` in steps of `1 / k`.
        Elsewhere it is 1.
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
    """Blends one tile, or one row of tiles, into the image. Equal values blend to exactly the same
    value.

    Args:
        canvas: the image so far, float32 [batch, height, width, colors], or the clip so far, with
            an axis of frames after the first.
        piece: the image of the tile or row, with the shape of `canvas` except along `axis`.
        start: index in `canvas`, along `axis`, where the piece begins.
        ramp: weight of the piece in the blend, from 0 to 1; it broadcasts to the shape of the
            piece.
        axis: axis along which the piece is placed: -3 for the height, -2 for the width.

    Returns:
        A new canvas: `canvas + ramp * (piece - canvas)` where the piece lies, unchanged elsewhere.
    """
    axis += canvas.ndim
    before = jax.lax.dynamic_slice_in_dim(canvas, start, piece.shape[axis], axis)
    blended = before + ramp * (piece - before)
    return jax.lax.dynamic_update_slice_in_dim(canvas, blended, start, axis)
