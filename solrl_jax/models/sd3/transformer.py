"""Stable Diffusion 3's transformer (MMDiT; arXiv 2403.03206, section 4): `SD3Transformer2DModel` of diffusers in Flax NNX.

Image and text tokens are two streams with weights of their own, which attend as one sequence (`models.layers.mmdit`). Time and pooled
text modulate every block. The network predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.embeddings import PatchProjection, sincos_positions, unpatch
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import AdaLayerNorm, JointBlock, TimeTextEmbedding, silu
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig


@dataclasses.dataclass(frozen=True)
class SD3Config(TransformerConfig):
    network = "SD3Transformer2DModel"

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    def check(self) -> None:
        self.require_one_of("qk_norm", (None, "rms_norm"))
        # both streams have the network's width
        accepted = f"num_attention_heads * attention_head_dim = {self.width}"
        self.require(self.caption_projection_dim == self.width, "caption_projection_dim", accepted)
        self.require(
            self.width % 4 == 0,
            "attention_head_dim",
            "a number that makes the width a multiple of 4",
        )


class SD3Transformer2DModel(nnx.Module):
    """The velocity network. remat: what gradients recompute, a key of `models.layers.stack.REMAT`.

    The blocks are of up to three kinds (see `models.layers.mmdit.JointBlock`). Each run of equal blocks is a stack. The container
    `transformer_blocks` holds the stacks by their first and last layer: "0-12", "13-22", "23-23".
    """

    def __init__(self, config: SD3Config, *, remat: str = "none", rngs: nnx.Rngs):
        c = config
        d = config.width
        self.config = config
        self.remat = remat
        self.pos_embed = PatchEmbed(c, rngs=rngs)
        self.time_text_embed = TimeTextEmbedding(d, c.pooled_projection_dim, rngs=rngs)
        self.context_embedder = Linear(c.joint_attention_dim, d, rngs=rngs)
        self.transformer_blocks = nnx.Dict(_runs(c, rngs))
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, c.patch_size**2 * c.features_out, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """The velocity at `latent`, in the dtype of `latent`.

        text: no token is masked, not even padding, as in the released pipeline. pooled: one vector for the whole prompt.
        timestep: `1000 sigma`.
        Raises ValueError for a size that is no whole number of patches or larger than the stored positions.
        """
        (_, height, width, _), p, dtype = latent.shape, self.config.patch_size, latent.dtype
        condition = silu(self.time_text_embed(timestep, pooled.astype(dtype)))
        streams: Any = self.context_embedder(text.astype(dtype)), self.pos_embed(latent)

        def apply(block, streams):
            return block(*streams, condition, fp8_attention=fp8_attention)

        for key in sorted(
            self.transformer_blocks, key=lambda key: int(key.split("-")[0])
        ):  # a dict's own order is by letters
            streams = scan_blocks(self.transformer_blocks[key], apply, streams, remat=self.remat)
        x, (scale, shift) = self.norm_out(streams[1], condition)
        return unpatch(self.proj_out(x.map(modulate, shift, scale)), height // p, width // p, p)


def _runs(c: SD3Config, rngs: nnx.Rngs) -> dict[str, JointBlock]:
    """A stack for each run of equal layers, by its first and last layer."""

    def run(layers: list[int], dual: bool, last: bool) -> JointBlock:
        normed = c.qk_norm is not None

        def make(r):
            return JointBlock(
                c.width, c.attention_head_dim, modulate, normed=normed, dual=dual, last=last, rngs=r
            )

        return stack(len(layers), make, rngs, first=layers[0])

    def kind(i):
        return (i in c.dual_attention_layers, i == c.num_layers - 1)

    grouped = [(list(layers), *of) for of, layers in itertools.groupby(range(c.num_layers), kind)]
    return {f"{layers[0]}-{layers[-1]}": run(layers, dual, last) for layers, dual, last in grouped}


class PatchEmbed(nnx.Module):
    """Patches to tokens, plus positions. These are the middle of a stored square, `pos_embed_max_size` positions a side.

    `pos_embed` is a parameter because released files hold it under this name. Nothing trains it.
    """

    def __init__(self, c: SD3Config, *, rngs: nnx.Rngs):
        self.side = c.pos_embed_max_size
        self.proj = PatchProjection(c.patch_size, c.in_channels, c.width, rngs=rngs)
        positions = np.arange(self.side) * (c.sample_size // c.patch_size / self.side)
        self.pos_embed = param(
            sincos_positions(c.width, positions, positions).reshape(1, -1, c.width), "pos_embed"
        )

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        (_, height, width, _), p, side = latent.shape, self.proj.patch, self.side
        rows = height // p
        columns = width // p
        if height % p or width % p or max(rows, columns) > side:
            raise ValueError(
                f"SD3Transformer2DModel: latent {height}x{width}; accepted: multiples of {p} up to {p * side}"
            )
        top = (side - rows) // 2
        left = (side - columns) // 2
        square = self.pos_embed.get_value().reshape(side, side, -1)
        x = self.proj(latent)
        x = x + square[top : top + rows, left : left + columns].astype(x.dtype)
        return x.reshape(x.shape[0], rows * columns, -1)


def modulate(
    x: Float[Array, "... d"], shift: Float[Array, "... d"], scale: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """`x (1 + scale) + shift`, rounded once."""
    wide = jnp.float32
    return (x.astype(wide) * (1 + scale.astype(wide)) + shift.astype(wide)).astype(x.dtype)
