"""Stable Diffusion 3's transformer (MMDiT; arXiv 2403.03206, section 4): `SD3Transformer2DModel` of diffusers in Flax NNX.

Image and text tokens are two streams with weights of their own, which attend as one sequence (`models.mmdit`). Time and pooled
text modulate every block. The network predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.config_file import ReleasedConfig
from solrl_jax.models.embeddings import PatchProjection, sincos_positions, unpatch
from solrl_jax.models.layers import LayerNorm, Linear, param, scan_blocks, stack
from solrl_jax.models.mmdit import EPS, AdaLayerNorm, FeedForward, JointAttention, SelfAttention, TimeTextEmbedding, silu


@dataclasses.dataclass(frozen=True)
class SD3Config(ReleasedConfig):
    """The fields of a released `transformer/config.json`."""

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
        dual = self.dual_attention_layers
        fits = isinstance(dual, tuple) and all(type(i) is int for i in dual)
        self.require(fits, "dual_attention_layers", "a list of integers")
        self.require_one_of("qk_norm", (None, "rms_norm"))
        # both streams have the network's width
        accepted = f"num_attention_heads * attention_head_dim = {self.width}"
        self.require(self.caption_projection_dim == self.width, "caption_projection_dim", accepted)
        self.require(self.width % 4 == 0, "attention_head_dim", "a number that makes the width a multiple of 4")

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class SD3Transformer2DModel(nnx.Module):
    """The velocity network. remat: what gradients recompute, a key of `models.layers.REMAT`.

    The blocks are of up to three kinds (see `JointTransformerBlock`). Each run of equal blocks is a stack. The container
    `transformer_blocks` holds the stacks by their first and last layer: "0-12", "13-22", "23-23".
    """

    def __init__(self, config: SD3Config, *, remat: str = "none", rngs: nnx.Rngs):
        c, d = config, config.width
        self.config, self.remat = config, remat
        self.pos_embed = PatchEmbed(c, rngs=rngs)
        self.time_text_embed = TimeTextEmbedding(d, c.pooled_projection_dim, rngs=rngs)
        self.context_embedder = Linear(c.joint_attention_dim, d, rngs=rngs)
        self.transformer_blocks = nnx.Dict(_runs(c, rngs))
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, c.patch_size**2 * (c.out_channels or c.in_channels), rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """The velocity at `latent`, in the dtype of `latent`.

        text: no token is masked, not even padding, as in the released pipeline. pooled: one vector for the whole prompt.
        timestep: `1000 sigma`.
        Raises ValueError for a size that is no whole number of patches or larger than the stored positions.
        """
        (_, height, width, _), p, dtype = latent.shape, self.config.patch_size, latent.dtype
        condition = silu(self.time_text_embed(timestep, pooled.astype(dtype)))
        streams: Any = self.context_embedder(text.astype(dtype)), self.pos_embed(latent)
        apply = lambda block, streams: block(*streams, condition)
        for key in sorted(self.transformer_blocks, key=lambda key: int(key.split("-")[0])):  # a dict's own order is by letters
            streams = scan_blocks(self.transformer_blocks[key], apply, streams, remat=self.remat)
        x, (scale, shift) = self.norm_out(streams[1], condition)
        return unpatch(self.proj_out(modulate(x, shift, scale)), height // p, width // p, p)


def _runs(c: SD3Config, rngs: nnx.Rngs) -> dict[str, "JointTransformerBlock"]:
    """A stack for each run of equal layers, by its first and last layer."""

    def run(layers: list[int], dual: bool, last: bool) -> JointTransformerBlock:
        make = lambda r: JointTransformerBlock(c, dual=dual, last=last, rngs=r)
        return stack(len(layers), make, rngs, first=layers[0])

    kind = lambda i: (i in c.dual_attention_layers, i == c.num_layers - 1)
    grouped = [(list(layers), *of) for of, layers in itertools.groupby(range(c.num_layers), kind)]
    return {f"{layers[0]}-{layers[-1]}": run(layers, dual, last) for layers, dual, last in grouped}


class JointTransformerBlock(nnx.Module):
    """One layer of both streams (arXiv 2403.03206, figure 2b).

    dual: the image stream also attends to itself, beside the joint attention (SD3.5 Medium). last: the text stream ends here;
    the image attends to it, but nothing is computed from it.
    """

    def __init__(self, c: SD3Config, *, dual: bool, last: bool, rngs: nnx.Rngs):
        d, head, normed = c.width, c.attention_head_dim, c.qk_norm is not None
        self.norm1 = AdaLayerNorm(d, 9 if dual else 6, rngs=rngs)
        self.norm1_context = AdaLayerNorm(d, 2 if last else 6, rngs=rngs)
        self.attn = JointAttention(d, head, normed=normed, last=last, rngs=rngs)
        self.attn2 = SelfAttention(d, head, normed=normed, projected=True, rngs=rngs) if dual else None
        self.norm2 = LayerNorm(d, eps=EPS, affine=False)
        self.ff = FeedForward(d, rngs=rngs)
        self.norm2_context = LayerNorm(d, eps=EPS, affine=False)
        self.ff_context = None if last else FeedForward(d, rngs=rngs)

    def __call__(
        self, text: Float[Array, "b l d"], image: Float[Array, "b n d"], condition: Float[Array, "b d"]
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        normed, (shift, scale, gate, shift_ff, scale_ff, gate_ff, *second) = self.norm1(image, condition)
        text_normed, of_text = self.norm1_context(text, condition)
        # (scale, shift) in the last layer, (shift, scale, gate, shift, scale, gate) in all others
        text_shift, text_scale = of_text[:2] if self.ff_context is not None else of_text[::-1]

        from_text, from_image = self.attn(modulate(text_normed, text_shift, text_scale), modulate(normed, shift, scale))
        image = image + gate * from_image
        if self.attn2 is not None:  # reads the block's input, not the sum
            shift, scale, gate = second
            image = image + gate * self.attn2(modulate(normed, shift, scale))
        image = image + gate_ff * self.ff(modulate(self.norm2(image), shift_ff, scale_ff))

        if self.ff_context is None or from_text is None:
            return text, image
        gate, shift_ff, scale_ff, gate_ff = of_text[2:]
        text = text + gate * from_text
        return text + gate_ff * self.ff_context(modulate(self.norm2_context(text), shift_ff, scale_ff)), image


class PatchEmbed(nnx.Module):
    """Patches to tokens, plus positions. These are the middle of a stored square, `pos_embed_max_size` positions a side.

    `pos_embed` is a parameter because released files hold it under this name. Nothing trains it.
    """

    def __init__(self, c: SD3Config, *, rngs: nnx.Rngs):
        self.side = c.pos_embed_max_size
        self.proj = PatchProjection(c.patch_size, c.in_channels, c.width, rngs=rngs)
        positions = np.arange(self.side) * (c.sample_size // c.patch_size / self.side)
        self.pos_embed = param(sincos_positions(c.width, positions, positions).reshape(1, -1, c.width), "pos_embed")

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        (_, height, width, _), p, side = latent.shape, self.proj.patch, self.side
        rows, columns = height // p, width // p
        if height % p or width % p or max(rows, columns) > side:
            raise ValueError(f"SD3Transformer2DModel: latent {height}x{width}; accepted: multiples of {p} up to {p * side}")
        top, left = (side - rows) // 2, (side - columns) // 2
        square = self.pos_embed.get_value().reshape(side, side, -1)
        x = self.proj(latent)
        x = x + square[top : top + rows, left : left + columns].astype(x.dtype)
        return x.reshape(x.shape[0], rows * columns, -1)


def modulate(x: Float[Array, "b n d"], shift: Float[Array, "b 1 d"], scale: Float[Array, "b 1 d"]) -> Float[Array, "b n d"]:
    """`x (1 + scale) + shift`, rounded once."""
    wide = jnp.float32
    return (x.astype(wide) * (1 + scale.astype(wide)) + shift.astype(wide)).astype(x.dtype)
