"""SANA's diffusion transformer (arXiv 2410.10629, section 2): `SanaTransformer2DModel` of diffusers in Flax NNX.

Image tokens attend to each other by linear attention, and to the text by softmax attention. The MLP holds a convolution. The
time modulates every block (adaLN-single, arXiv 2310.00426). The network predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from solrl_jax.models.layers.attention import attention, attention_forward
from solrl_jax.models.layers.embeddings import (
    PatchProjection,
    TextProjection,
    TimestepMLP,
    sincos_positions,
    unpatch,
)
from solrl_jax.models.layers.feed_forward import GLUMBConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.modulation import modulate
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.leaf import Quantized
from solrl_jax.quant.linear_attention import linear_attention


@dataclasses.dataclass(frozen=True)
class SanaConfig(TransformerConfig):
    network = "SanaTransformer2DModel"

    in_channels: int = 32
    out_channels: int | None = 32
    num_attention_heads: int = 70
    attention_head_dim: int = 32
    num_layers: int = 20
    num_cross_attention_heads: int = 20
    cross_attention_head_dim: int = 112
    cross_attention_dim: int = 2240
    caption_channels: int = 2304
    mlp_ratio: float = 2.5
    dropout: float = 0.0
    attention_bias: bool = False
    sample_size: int = 32
    patch_size: int = 1
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None
    guidance_embeds: bool = False
    guidance_embeds_scale: float = 0.1
    qk_norm: str | None = None
    timestep_scale: float = 1.0

    def check(self) -> None:
        self.require_one_of("qk_norm", (None, "rms_norm_across_heads"))
        self.require(not self.dropout, "dropout", "0.0")
        self.require(not self.guidance_embeds, "guidance_embeds", "False")


class SanaTransformer2DModel(nnx.Module):
    """The velocity network.

    remat: what gradients recompute, a key of `models.layers.stack.REMAT`. attention: among image tokens, made as `LinearAttention`
    is; None: that.
    """

    def __init__(
        self,
        config: SanaConfig,
        *,
        remat: str = "none",
        attention: Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        c = config
        d = config.width
        self.config = config
        self.remat = remat
        self.patch_embed = PatchEmbed(c, rngs=rngs)
        self.time_embed = TimeEmbedding(d, rngs=rngs)
        self.caption_projection = TextProjection(c.caption_channels, d, rngs=rngs)
        self.caption_norm = RMSNorm(d, eps=1e-5)
        self.transformer_blocks = stack(
            c.num_layers, lambda r: SanaBlock(c, attention or LinearAttention, rngs=r), rngs
        )
        self.scale_shift_table = param(
            jax.random.normal(rngs.params(), (2, d)) / math.sqrt(d), "scale_shift_table"
        )
        self.norm_out = LayerNorm(d, eps=1e-6, affine=False)
        self.proj_out = Linear(d, c.patch_size**2 * c.features_out, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l caption"],
        text_mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """The velocity at `latent`, in the dtype of `latent`.

        text_mask: true on tokens, false on padding. timestep: `1000 sigma * timestep_scale`.
        """
        (batch, height, width, _), p = latent.shape, self.config.patch_size
        rows = height // p
        columns = width // p
        x = self.patch_embed(latent)
        modulation, embedded = self.time_embed(timestep, x.dtype)
        modulation = modulation.reshape(batch, 6, -1)
        text = self.caption_norm(self.caption_projection(text.astype(x.dtype)))

        x = scan_blocks(
            self.transformer_blocks,
            lambda block, x: block(x, text, text_mask, modulation, (rows, columns)),
            x,
            remat=self.remat,
        )

        shift, scale = jnp.split(
            self.scale_shift_table.get_value().astype(x.dtype) + embedded[:, None], 2, axis=1
        )
        x = self.proj_out(self.norm_out.pending(x).map(modulate, shift, scale))
        return unpatch(x, rows, columns, p)


class SanaBlock(nnx.Module):
    """One layer: linear attention, attention to the text, MLP."""

    def __init__(self, c: SanaConfig, attention: Callable[..., nnx.Module], *, rngs: nnx.Rngs):
        d = c.width
        heads = c.num_cross_attention_heads
        normed = c.qk_norm is not None
        self.norm1 = LayerNorm(d, eps=c.norm_eps, affine=False)
        self.attn1 = attention(
            (d, d, d), c.num_attention_heads, normed=normed, bias=c.attention_bias, rngs=rngs
        )
        widths = (d, c.cross_attention_dim, heads * c.cross_attention_head_dim)
        self.attn2 = CrossAttention(widths, heads, normed=normed, rngs=rngs)
        self.norm2 = LayerNorm(d, eps=c.norm_eps, affine=c.norm_elementwise_affine)
        self.ff = GLUMBConv(d, int(c.mlp_ratio * d), rngs=rngs)
        self.scale_shift_table = param(
            jax.random.normal(rngs.params(), (6, d)) / math.sqrt(d), "scale_shift_table"
        )

    def __call__(
        self,
        x: Float[Array, "b n d"],
        text: Float[Array, "b l d"],
        text_mask: Bool[Array, "b l"],
        modulation: Float[Array, "b 6 d"],
        grid: tuple[int, int],
    ) -> Float[Array, "b n d"]:
        """grid: rows and columns of the n tokens."""
        table = self.scale_shift_table.get_value().astype(x.dtype) + modulation
        shift, scale, gate, shift_ff, scale_ff, gate_ff = jnp.split(table, 6, axis=1)
        x = x + gate * self.attn1(self.norm1.pending(x).map(modulate, shift, scale), grid)
        x = x + self.attn2(x, text, text_mask)  # no norm before it: the text is normalised instead
        return x + gate_ff * self.ff.of(
            self.norm2.pending(x).map(modulate, shift_ff, scale_ff), grid
        )


class Attention(nnx.Module):
    """The linears of an attention from `x` to `source`. widths: of `x`, of `source`, and of all heads together.

    normed: queries and keys are normalised, all heads as one.
    """

    def __init__(
        self,
        widths: tuple[int, int, int],
        heads: int,
        *,
        normed: bool,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        d, source, inner = widths
        self.to_q, self.to_k, self.to_v = (
            Linear(n, inner, bias=bias, rngs=rngs) for n in (d, source, source)
        )
        self.norm_q, self.norm_k = (RMSNorm(inner, eps=1e-5) if normed else None for _ in range(2))
        self.to_out = nnx.List([Linear(inner, d, rngs=rngs)])
        self.heads = heads

    def projected(self, x: LazyActivation, source: LazyActivation) -> list[LazyActivation]:
        """Queries, keys and values, heads side by side."""
        q = self.to_q.pending(x)
        k = self.to_k.pending(source)
        v = self.to_v.pending(source)
        if self.norm_q is not None and self.norm_k is not None:
            q = LazyActivation.of(self.norm_q(q.value))
            k = LazyActivation.of(self.norm_k(k.value))
        return [q, k, v]


class LinearAttention(Attention):
    """Attention with weights `relu(q) . relu(k)` instead of a softmax (arXiv 2410.10629, eq. 1); float32 inside.

    The sums over keys do not depend on the query, so the work is linear in the number of tokens.
    """

    def __call__(self, x: LazyActivation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """grid: rows and columns of the n tokens, of which nothing depends."""
        q, k, v = self.projected(x, x)
        return self.to_out[0](linear_attention(q, k, v, self.heads))


class CrossAttention(Attention):
    """Softmax attention from image tokens to text tokens."""

    def __call__(
        self, x: Float[Array, "b n d"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"]
    ) -> Float[Array, "b n d"]:
        projected = self.projected(LazyActivation.of(x), LazyActivation.of(text))
        heads = [y.value.reshape(*y.value.shape[:2], self.heads, -1) for y in projected]
        attend = (
            attention_forward if isinstance(self.to_q.kernel.get_value(), Quantized) else attention
        )
        out = attend(*heads, mask=mask[:, None, None, :])
        return self.to_out[0](out.reshape(*x.shape[:2], -1))


class PatchEmbed(nnx.Module):
    """Patches to tokens, plus fixed positions if the config has an `interpolation_scale`. The released SANA has none."""

    def __init__(self, c: SanaConfig, *, rngs: nnx.Rngs):
        self.proj = PatchProjection(c.patch_size, c.in_channels, c.width, rngs=rngs)
        self.scale = c.interpolation_scale
        self.base = c.sample_size // c.patch_size

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        x = self.proj(latent)
        _, rows, columns, d = x.shape
        if self.scale is not None:

            def along(count):
                return np.arange(count) / (count / self.base) / self.scale

            x = x + sincos_positions(d, along(rows), along(columns)).astype(x.dtype)
        return x.reshape(x.shape[0], rows * columns, d)


class TimeEmbedding(nnx.Module):
    """The time as six modulation vectors for every block, side by side, and as the embedding that modulates the output."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.emb = nnx.Dict(timestep_embedder=TimestepMLP(d, rngs=rngs))
        self.linear = Linear(d, 6 * d, rngs=rngs)

    def __call__(
        self, timestep: Float[Array, " b"], dtype: DTypeLike
    ) -> tuple[Float[Array, "b d6"], Float[Array, "b d"]]:
        embedded = self.emb.timestep_embedder(timestep, dtype)
        return self.linear(jax.nn.silu(embedded)), embedded
