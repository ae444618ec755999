"""`Decoder`: from latents to pictures. The autoencoder of a pipeline with its parameters, as one argument of jit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders.tiling import decode_tiled
from solrl_jax.models.layers.stack import gather
from solrl_jax.models.loading.pipeline import Pipeline
from solrl_jax.models.loading.weights import Params
from solrl_jax.parallel import sharding

# What a device decodes at once, at most. It bounds memory, and does not depend on the chunk, so that no picture does.
PICTURES = 4
PIXELS = 2**21


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["pipeline", "dtype", "tile"],
)
@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes latents [b, h, w, c] to pictures in [0, 1]."""

    params: Params
    pipeline: Pipeline
    dtype: jnp.dtype  # the autoencoder computes in this dtype
    tile: int | None = (
        None  # decode square tiles with sides of this many pixels, one after another; None: the whole picture
    )

    def __call__(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Pictures in [0, 1], float32. For use under jit."""
        decode = partial(self.pipeline.decode, gather(self.params))
        compression = self.pipeline.compression
        (height, width), tile = latents.shape[1:3], self.tile
        if tile is not None:
            side = tile // compression  # neighbouring tiles share a quarter of a side
            decode = partial(
                decode_tiled, decode, tile=side, overlap=side // 4, compression=compression
            )
            height = min(height, side)
            width = min(width, side)
        at_once = max(1, min(PICTURES, PIXELS // (height * width * compression**2)))
        return sharding.map_rows(decode, latents.astype(self.dtype), at_once)
