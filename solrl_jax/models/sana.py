"""SANA's diffusion transformer (arXiv 2410.10629, section 2): `SanaTransformer2DModel` of diffusers in Flax NNX.

Linear attention over the image tokens, softmax attention to the text, and a convolutional gated MLP; modulated by the time
(adaLN-single, arXiv 2310.00426). It predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from solrl_jax.models.attention import attention
from solrl_jax.models.embeddings import PatchProjection, TextProjection, TimestepMLP
from solrl_jax.models.layers import DepthwiseConv, LayerNorm, Linear, RMSNorm, param, scan_blocks, stack


@dataclasses.dataclass(frozen=True)
class SanaConfig:
    """The fields of a released `transformer/config.json`, under their own names."""

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

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SanaConfig":
        """From a `config.json`. Raises ValueError for a field or value this port does not know."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = {k: v for k, v in fields.items() if not k.startswith("_")}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"SanaTransformer2DModel: unknown config field(s) {unknown}; known are {sorted(known)}")
        config = cls(**given)
        if config.qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"SanaTransformer2DModel: qk_norm={config.qk_norm!r}; accepted: None, 'rms_norm_across_heads'")
        if config.dropout:
            raise ValueError(f"SanaTransformer2DModel: dropout={config.dropout}; accepted: 0.0")
        return config

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class SanaTransformer2DModel(nnx.Module):
    def __init__(self, config: SanaConfig, *, remat: str = "none", rngs: nnx.Rngs):
        c, d = config, config.width
        self.config, self.remat = config, remat
        self.patch_embed = PatchEmbed(c, rngs=rngs)
        self.time_embed = (GuidedTimeEmbedding if c.guidance_embeds else TimeEmbedding)(d, rngs=rngs)
        self.caption_projection = TextProjection(c.caption_channels, d, rngs=rngs)
        self.caption_norm = RMSNorm(d, eps=1e-5)
        self.transformer_blocks = stack(c.num_layers, lambda r: SanaBlock(c, rngs=r), rngs)
        self.scale_shift_table = param(jax.random.normal(rngs.params(), (2, d)) / math.sqrt(d), "scale_shift_table")
        self.norm_out = LayerNorm(d, eps=1e-6, affine=False)
        self.proj_out = Linear(d, c.patch_size**2 * (c.out_channels or c.in_channels), rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l d"],
        text_mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
        guidance: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b h w c"]:
        """The velocity at `latent`, in the dtype of `latent`.

        timestep: `1000 sigma * timestep_scale`; guidance: only for a network with `guidance_embeds`, already scaled.
        """
        (batch, height, width, _), p = latent.shape, self.config.patch_size
        rows, columns = height // p, width // p
        x = self.patch_embed(latent)
        modulation, embedded = self.time_embed(timestep, guidance, x.dtype)
        modulation = modulation.reshape(batch, 6, -1)
        text = self.caption_norm(self.caption_projection(text.astype(x.dtype)))

        x = scan_blocks(
            self.transformer_blocks,
            lambda block, x: block(x, text, text_mask, modulation, (rows, columns)),
            x,
            remat=self.remat,
        )

        shift, scale = jnp.split(self.scale_shift_table.get_value().astype(x.dtype) + embedded[:, None], 2, axis=1)
        x = self.proj_out(self.norm_out(x) * (1 + scale) + shift)
        x = x.reshape(batch, rows, columns, p, p, -1).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(batch, height, width, -1)


class SanaBlock(nnx.Module):
    def __init__(self, c: SanaConfig, *, rngs: nnx.Rngs):
        d = c.width
        self.norm1 = LayerNorm(d, eps=c.norm_eps, affine=False)
        self.attn1 = LinearAttention(c, rngs=rngs)
        self.attn2 = CrossAttention(c, rngs=rngs)
        self.norm2 = LayerNorm(d, eps=c.norm_eps, affine=c.norm_elementwise_affine)
        self.ff = GLUMBConv(d, int(c.mlp_ratio * d), rngs=rngs)
        self.scale_shift_table = param(jax.random.normal(rngs.params(), (6, d)) / math.sqrt(d), "scale_shift_table")

    def __call__(self, x, text, text_mask, modulation, grid):
        """x [b, n, d], text [b, l, d], text_mask [b, l], modulation [b, 6, d], grid = (rows, columns), n = rows * columns."""
        table = self.scale_shift_table.get_value().astype(x.dtype) + modulation
        shift, scale, gate, shift_ff, scale_ff, gate_ff = jnp.split(table, 6, axis=1)
        x = x + gate * self.attn1(self.norm1(x) * (1 + scale) + shift)
        x = x + self.attn2(x, text, text_mask)  # no norm before it: the caption is normalised instead
        h = self.norm2(x) * (1 + scale_ff) + shift_ff
        h = self.ff(h.reshape(h.shape[0], *grid, -1))
        return x + gate_ff * h.reshape(x.shape)


class LinearAttention(nnx.Module):
    """`relu(q) (relu(k)^T [v, 1])`, normalised: linear in the number of tokens (arXiv 2410.10629, eq. 1); float32 inside."""

    def __init__(self, c: SanaConfig, *, rngs: nnx.Rngs):
        d = c.width
        self.heads = c.num_attention_heads
        self.to_q, self.to_k, self.to_v = (Linear(d, d, bias=c.attention_bias, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = _qk_norms(c, d)
        self.to_out = nnx.List([Linear(d, d, rngs=rngs)])

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        heads = lambda t: t.reshape(*t.shape[:2], self.heads, -1).astype(jnp.float32)
        q, k, v = jax.nn.relu(heads(q)), jax.nn.relu(heads(k)), heads(v)
        state = jnp.einsum("bnhk,bnhv->bhkv", k, v)
        numerator = jnp.einsum("bnhk,bhkv->bnhv", q, state)
        denominator = jnp.einsum("bnhk,bhk->bnh", q, k.sum(1))
        out = numerator / (denominator[..., None] + 1e-15)
        return self.to_out[0](out.reshape(x.shape).astype(x.dtype))


class CrossAttention(nnx.Module):
    """Softmax attention from image tokens to text tokens; padding counts for `exp(-10000)`, as in the released model."""

    def __init__(self, c: SanaConfig, *, rngs: nnx.Rngs):
        d, inner = c.width, c.num_cross_attention_heads * c.cross_attention_head_dim
        self.heads = c.num_cross_attention_heads
        self.to_q = Linear(d, inner, rngs=rngs)
        self.to_k, self.to_v = (Linear(c.cross_attention_dim, inner, rngs=rngs) for _ in range(2))
        self.norm_q, self.norm_k = _qk_norms(c, inner)
        self.to_out = nnx.List([Linear(inner, d, rngs=rngs)])

    def __call__(
        self, x: Float[Array, "b n d"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"]
    ) -> Float[Array, "b n d"]:
        q, k, v = self.to_q(x), self.to_k(text), self.to_v(text)
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        heads = lambda t: t.reshape(*t.shape[:2], self.heads, -1)
        out = attention(heads(q), heads(k), heads(v), mask=mask[:, None, None, :])
        return self.to_out[0](out.reshape(*x.shape[:2], -1))


class GLUMBConv(nnx.Module):
    """Gated MLP with a depthwise 3x3 convolution inside (arXiv 2410.10629, section 2.2); 1x1 convolutions are linears."""

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.conv_inverted = Linear(d, 2 * hidden, layout="pointwise", rngs=rngs)
        self.conv_depth = DepthwiseConv(2 * hidden, 3, rngs=rngs)
        self.conv_point = Linear(hidden, d, bias=False, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        x, gate = jnp.split(self.conv_depth(jax.nn.silu(self.conv_inverted(x))), 2, axis=-1)
        return self.conv_point(x * jax.nn.silu(gate))


class PatchEmbed(nnx.Module):
    """Patches to tokens, plus sine-cosine positions if `interpolation_scale` is set (SANA proper has none)."""

    def __init__(self, c: SanaConfig, *, rngs: nnx.Rngs):
        self.proj = PatchProjection(c.patch_size, c.in_channels, c.width, rngs=rngs)
        self.scale, self.base = c.interpolation_scale, c.sample_size // c.patch_size

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        x = self.proj(latent)
        _, rows, columns, d = x.shape
        if self.scale is not None:
            x = x + jnp.asarray(sincos_positions(d, rows, columns, self.base, self.scale), x.dtype)
        return x.reshape(x.shape[0], rows * columns, d)


class TimestepHolder(nnx.Module):
    """Holds the time MLP one level deeper, as the released names have it (`time_embed.emb.timestep_embedder`)."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(d, rngs=rngs)


class TimeEmbedding(nnx.Module):
    """Time to the six modulation vectors of every block, and to the embedding that modulates the output."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.emb = TimestepHolder(d, rngs=rngs)
        self.linear = Linear(d, 6 * d, rngs=rngs)

    def __call__(self, timestep, guidance, dtype):
        embedded = self.emb.timestep_embedder(timestep, dtype)
        return self.linear(jax.nn.silu(embedded)), embedded


class GuidedTimeEmbedding(nnx.Module):
    """As `TimeEmbedding`, plus an embedded guidance scale (SANA-Sprint)."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(d, rngs=rngs)
        self.guidance_embedder = TimestepMLP(d, rngs=rngs)
        self.linear = Linear(d, 6 * d, rngs=rngs)

    def __call__(self, timestep, guidance, dtype):
        embedded = self.timestep_embedder(timestep, dtype) + self.guidance_embedder(guidance, dtype)
        return self.linear(jax.nn.silu(embedded)), embedded


def sincos_positions(d: int, rows: int, columns: int, base: int, scale: float) -> np.ndarray:
    """Fixed positions [rows, columns, d]: the first half of the features encodes the column, the second the row."""
    omega = 1.0 / 10000 ** (np.arange(d // 4) / (d // 4))
    waves = lambda count: np.outer(np.arange(count) / (count / base) / scale, omega)
    encode = lambda angle: np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    by_column, by_row = encode(waves(columns)), encode(waves(rows))
    shape = (rows, columns, d // 2)
    return np.concatenate([np.broadcast_to(by_column[None], shape), np.broadcast_to(by_row[:, None], shape)], axis=-1)


def _qk_norms(c: SanaConfig, features: int) -> tuple[RMSNorm | None, RMSNorm | None]:
    return (None, None) if c.qk_norm is None else (RMSNorm(features, eps=1e-5), RMSNorm(features, eps=1e-5))
