"""`Decoder`: the decoder of a pipeline's autoencoder with its parameters, as one argument of
jit.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders.tiling import decode_tiled
from solrl_jax.models.layers.stack import gather
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import sharding

# Limits on the images that a device decodes at once, which bound its memory. They do not depend on
# the batch size, so that the decoded images do not depend on it either.
MAX_IMAGES = 4
MAX_PIXELS = 2**21


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["pipeline", "dtype", "tile", "max_pixels"],
)
@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes latents to images or clips in [0, 1].

    A pytree, so that it can be an argument of jit: `params` are its leaves, and the other
    attributes are static.

    Attributes:
        params: parameters of the autoencoder: nested dictionaries keyed by module name. They may be
            sharded; every call gathers them.
        pipeline: the model that the autoencoder belongs to. Its `decode` maps latents to images,
            and its `compression` is the side of a latent pixel in image pixels.
        dtype: dtype in which the autoencoder computes. Latents are cast to it.
        tile: side, in pixels, of the square tiles that are decoded one after another to save
            memory: a multiple of `pipeline.compression`. None: images are decoded whole, as are
            images that fit into one tile.
        max_pixels: the most image pixels, over all images and frames together, that a device
            decodes at once, 2**21 by default. Each latent frame of a clip, the first one too,
            counts as `pipeline.temporal_compression` frames. One image, one latent frame, or one
            tile of either is decoded even if it has more.
    """

    params: Params
    pipeline: Pipeline
    dtype: jnp.dtype
    tile: int | None = None
    max_pixels: int = MAX_PIXELS

    def __call__(
        self, latents: Float[Array, "b ... c"], first_frame: bool = False
    ) -> Float[Array, "b ... 3"]:
        """Decodes latents to images or clips in [0, 1], float32. For use under jit.

        If `tile` is set, images that exceed a tile are decoded in tiles. Neighboring tiles overlap
        by at least a quarter of a tile, rounded down to latent pixels, and fade linearly into each
        other there.

        Each device decodes four images (or one tile of each of four) at a time. It decodes fewer,
        but at least one, if all their frames together (`pipeline.temporal_compression` for each
        latent frame) would have more than `max_pixels` pixels. An incomplete group is filled up
        with copies, which take time too. A clip, or a tile of it, with more than `max_pixels`
        pixels is decoded in chunks of as many latent frames as `max_pixels` allows, or fewer, but
        at least one. Tiles change the result; chunks change only its rounding. For a gradient, each
        group is decoded again.

        Args:
            latents: the transformer's latents [b, h, w, c], or [b, t, h, w, c] of clips, of any
                dtype. `Pipeline.unscale` is applied here. If a mesh is set (`jax.set_mesh`), it
                must have no sequence or tensor parallelism, and the number of latents b must be a
                multiple of its number of devices.
            first_frame: whether to decode only the first frame of each clip. This frame depends on
                the first latent frame alone, because the convolutions of video autoencoders are
                causal. No effect on images.

        Returns:
            The images [b, H, W, 3] or clips [b, T, H, W, 3], in the order of the latents,
            `pipeline.compression` times as high and wide. T is `1 + (t - 1) *
            pipeline.temporal_compression`, or 1 for `first_frame`. Values beyond [0, 1] are
            clipped; NaN stays NaN.
        """
        if first_frame and latents.ndim == 5:
            latents = latents[:, :1]
        decode = partial(self.pipeline.decode, gather(self.params))
        compression = self.pipeline.compression
        height, width = latents.shape[-3:-1]
        tile = None if self.tile is None else self.tile // compression
        if tile is not None:
            height = min(height, tile)
            width = min(width, tile)
        pixels = height * width * compression**2
        if latents.ndim == 5:
            pixels *= self.pipeline.temporal_compression or 1  # of a latent frame
            chunk = max(1, self.max_pixels // pixels)
            if latents.shape[1] > chunk:
                decode = partial(decode, chunk=chunk)
            pixels *= latents.shape[1]
        if tile is not None:
            decode = partial(
                decode_tiled, decode, tile=tile, overlap=tile // 4, compression=compression
            )
        batch_size = max(1, min(MAX_IMAGES, self.max_pixels // pixels))
        return sharding.map_rows(decode, latents.astype(self.dtype), batch_size)
