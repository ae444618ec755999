"""`Decoder`: from latents to pictures. The autoencoder of a pipeline with its parameters, as one argument of jit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.layers import gather
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.tiling import decode_tiled
from solrl_jax.models.weights import Params


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["pipeline", "dtype", "tile"])
@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes latents [b, h, w, c] to pictures in [0, 1]."""

    params: Params
    pipeline: Pipeline
    dtype: jnp.dtype  # the autoencoder computes in this dtype
    tile: int | None = None  # decode square tiles with sides of this many pixels, one after another; None: the whole picture

    def __call__(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Pictures in [0, 1], float32. For use under jit."""
        decode = partial(self.pipeline.decode, gather(self.params))
        latents = latents.astype(self.dtype)
        if self.tile is None:
            return decode(latents)
        compression = self.pipeline.compression
        side = self.tile // compression  # neighbouring tiles share a quarter of a side
        return decode_tiled(decode, latents, side, side // 4, compression)
