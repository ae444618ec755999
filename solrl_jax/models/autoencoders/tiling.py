"""Decoding an image tile by tile: the decoder needs memory for one tile instead of the whole image."""

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
    """`decode(latent)`, computed from overlapping square tiles, one at a time. H = h * compression. For use under `jit`.

    tile: side of a tile, in latent pixels. A direction in which the latent fits into one tile is not divided. overlap: latent
    pixels that neighbouring tiles share at least, fewer than `tile`; tiles are spread evenly. Over what they share, one tile
    fades linearly into the next.

    The decoder sees one tile at a time. So normalisation and attention over all pixels give a result that differs everywhere
    from the untiled one. Convolutions give the same result, except near the borders of tiles.
    """
    batch, height, width, channels = latent.shape
    ys, y_ramps = _axis(height, tile, overlap, compression)
    xs, x_ramps = _axis(width, tile, overlap, compression)
    rows = min(tile, height)
    columns = min(tile, width)

    out = jax.eval_shape(
        decode, jax.ShapeDtypeStruct((batch, rows, columns, channels), latent.dtype)
    )

    def empty(h, w):
        return jnp.zeros((batch, h * compression, w * compression, out.shape[-1]), jnp.float32)

    # Two loops: where four tiles meet, blending is bilinear only if each row of tiles is complete before rows blend.
    def add_row(image: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        y, y_ramp = row

        def add_tile(strip: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
            x, x_ramp = column
            part = jax.lax.dynamic_slice(latent, (0, y, x, 0), (batch, rows, columns, channels))
            return _blend(strip, decode(part), x * compression, x_ramp[:, None], axis=2), None

        strip = jax.lax.scan(add_tile, empty(rows, width), (xs, x_ramps))[0]
        return _blend(image, strip, y * compression, y_ramp[:, None, None], axis=1), None

    return jax.lax.scan(add_row, empty(height, width), (ys, y_ramps))[0].astype(out.dtype)


def _axis(size: int, tile: int, overlap: int, compression: int) -> tuple[Array, Array]:
    """Where the tiles start along one axis [n], and the weight of each tile's pixels against the tile before it [n, pixels].

    Over n pixels that two tiles share, the weight rises as 1/2n, 3/2n, ..., (2n-1)/2n. Elsewhere it is 1.
    """
    if size <= tile:
        return jnp.zeros(1, jnp.int32), jnp.ones((1, size * compression))
    count = -(
        (overlap - size) // (tile - overlap)
    )  # the fewest tiles that share `overlap` and cover `size`
    starts = np.arange(count) * (size - tile) // (count - 1)
    shared = np.concatenate([[0], starts[:-1] + tile - starts[1:]]) * compression
    pixel = np.arange(tile * compression) + 0.5
    ramps = np.minimum(
        pixel / np.maximum(shared, 0.5)[:, None], 1.0
    )  # with 0.5, all weights are 1 where nothing is shared
    return jnp.asarray(starts, jnp.int32), jnp.asarray(ramps, jnp.float32)


def _blend(canvas: Array, piece: Array, start: Array, ramp: Array, axis: int) -> Array:
    """`canvas` with `piece` over it from `start` on. Equal values blend to exactly the same value."""
    before = jax.lax.dynamic_slice_in_dim(canvas, start, piece.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(
        canvas, before + ramp * (piece - before), start, axis
    )
