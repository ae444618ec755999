"""SANA's diffusion transformer (arXiv 2410.10629, section 2): `SanaTransformer2DModel` of diffusers
in NNX.

Image tokens attend to each other by linear attention, and to the text by softmax attention. The MLP
contains a convolution. The timestep modulates every block (adaLN-single, arXiv 2310.00426). The
network predicts the velocity `v = noise - x0` of a flow.
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

from solrl_jax.models.layers.embeddings import (
    PatchProjection,
    TextProjection,
    TimestepMLP,
    sincos_positions,
    unpatchify,
)
from solrl_jax.models.layers.feed_forward import GLUMBConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.linear_attention import CrossAttention, LinearAttention
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.mesh_axes import SEQUENCE, axis_size
from solrl_jax.quant.sequence_parallel import shard_tokens


@dataclasses.dataclass(frozen=True)
class SanaConfig(TransformerConfig):
    """The configuration of SANA's transformer: the fields of a published `transformer/config.json`.

    The defaults are those of diffusers. A token has `num_attention_heads * attention_head_dim`
    features. The constructor raises ValueError for a value that is not supported; so does `read`
    for an unknown field.

    Attributes:
        in_channels: number of channels of the latents.
        out_channels: number of channels of the output; None: as many as `in_channels`.
        num_attention_heads: number of heads of the attention among image tokens.
        attention_head_dim: number of features of one head of the attention among image tokens.
        num_layers: number of blocks.
        num_cross_attention_heads: number of heads of the attention to the text.
        cross_attention_head_dim: number of features of one head of the attention to the text. Times
            `num_cross_attention_heads`, it may differ from the features of a token.
        cross_attention_dim: number of features of a text token after it is projected for the
            attention to the text. Must be that of an image token, which the pipeline checks.
        caption_channels: number of features of a text token as the text encoder returns it.
        mlp_ratio: hidden width of the MLP (after its gate) divided by the number of features of a
            token; the hidden width is rounded down.
        dropout: 0.0, the only supported value.
        attention_bias: whether the linear layers to queries, keys and values of the attention among
            image tokens have biases.
        sample_size: side, in latent pixels, of the latents that the model was made for. It gives
            the default image size, and scales positions if there are any (`interpolation_scale`).
        patch_size: side of a patch in latent pixels.
        norm_elementwise_affine: whether the norm before the MLP has learned weights.
        norm_eps: epsilon of the layer norms of the blocks (not of those that `qk_norm` adds).
        interpolation_scale: divides the coordinates of the positions that are added to the image
            tokens; None: no positions are added.
        guidance_embeds: whether the network takes the guidance scale as an input; only False is
            supported.
        guidance_embeds_scale: has no effect.
        qk_norm: "rms_norm_across_heads" to normalize queries and keys of both attentions, over all
            heads together; None: no norm.
        timestep_scale: factor of the timestep that the network embeds, `1000 * sigma *
            timestep_scale`.
    """

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
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `qk_norm` is neither None nor "rms_norm_across_heads", `dropout` is not 0,
                or `guidance_embeds` is true. The message names the field.
        """
        self.require_one_of("qk_norm", (None, "rms_norm_across_heads"))
        self.require(not self.dropout, "dropout", "0.0")
        self.require(not self.guidance_embeds, "guidance_embeds", "False")


class SanaTransformer2DModel(nnx.Module):
    """SANA's network, which predicts the velocity `noise - x0` of noisy latents.

    Args:
        config: configuration of the network (`SanaConfig`): its widths, heads, blocks and patches.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError in the call.
        attention: function that builds the attention among the image tokens. It is called like the
            constructor of `LinearAttention`: `attention((d, d, d), heads, normed=..., bias=...,
            rngs=...)`. The first argument holds the numbers of features of an attending token, of
            an attended token and of all heads together, all equal to d (`config.width`); `normed`
            is whether queries and keys are normalized, and `bias` is `config.attention_bias`. The
            module that it returns is called as `module(tokens, (rows, columns))` with a lazy
            activation [b, n, d] (one that is computed when it is read), and returns an array of
            this shape. None: `LinearAttention`.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self,
        config: SanaConfig,
        *,
        gradient_checkpointing: str = "none",
        attention: Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        d = config.width
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.patch_embed = PatchEmbed(config, rngs=rngs)
        self.time_embed = TimeEmbedding(d, rngs=rngs)
        self.caption_projection = TextProjection(config.caption_channels, d, rngs=rngs)
        self.caption_norm = RMSNorm(d, eps=1e-5)
        self.transformer_blocks = stack(
            config.num_layers,
            lambda rngs: SanaBlock(config, attention or LinearAttention, rngs=rngs),
            rngs,
        )
        table = jax.random.normal(rngs.params(), (2, d)) / math.sqrt(d)
        self.scale_shift_table = param(table, "scale_shift_table")
        self.norm_out = LayerNorm(d, eps=1e-6, affine=False)
        self.proj_out = Linear(d, config.patch_size**2 * config.num_out_channels, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l caption"],
        text_mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """Predicts the velocity `noise - x0` at `latent`.

        Args:
            latent: noisy latents. Height and width are multiples of the patch size.
            text: hidden states of the text encoder. They are cast to the dtype of `latent`.
            text_mask: true on tokens, false on padding, which is not attended to.
            timestep: `1000 * sigma * timestep_scale` of each latent: the caller has applied the
                scale.

        Returns:
            The velocity, in the dtype of `latent`, with `config.num_out_channels` channels.

        Raises:
            ValueError: the size of the mesh axis `sequence` does not divide the number of rows of
                tokens; or it exceeds 1, and the attention among the image tokens is MHLA,
                token-level multi-head linear attention (`BlockMixing`).
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        batch, height, width, _ = latent.shape
        patch = self.config.patch_size
        rows = height // patch
        columns = width // patch
        x = self.patch_embed(latent)
        modulation, embedded = self.time_embed(timestep, x.dtype)
        modulation = modulation.reshape(batch, 6, -1)
        text = self.caption_norm(self.caption_projection(text.astype(x.dtype)))

        shards = axis_size(SEQUENCE)
        if rows % shards:
            raise ValueError(
                f"mesh.sequence={shards}: must divide the {rows} rows of tokens, because the "
                "MLP has a convolution"
            )

        def run(shared, x, *_):
            text, text_mask, modulation = shared

            def apply(block, x):
                grid = (x.shape[1] // columns, columns)
                return block(x, text, text_mask, modulation, grid)

            return scan_blocks(
                self.transformer_blocks,
                apply,
                x,
                gradient_checkpointing=self.gradient_checkpointing,
            ), None

        x, _ = shard_tokens(run, (text, text_mask, modulation), x)
        table = self.scale_shift_table.get_value().astype(x.dtype) + embedded[:, None]
        shift, scale = jnp.split(table, 2, axis=1)
        x = self.proj_out(self.norm_out.modulated(x, shift, scale))
        return unpatchify(x, rows, columns, patch)


class SanaBlock(nnx.Module):
    """A block: attention among image tokens, attention to the text, and an MLP with a convolution.

    Args:
        config: configuration of the network (`SanaConfig`), for widths, heads, norms, biases and
            the ratio of the MLP.
        attention: function that builds the attention among the image tokens. It is called like the
            constructor of `LinearAttention`: `attention((d, d, d), heads, normed=..., bias=...,
            rngs=...)`. The first argument holds the numbers of features of an attending token, of
            an attended token and of all heads together, all equal to d (`config.width`); `normed`
            is whether queries and keys are normalized, and `bias` is `config.attention_bias`. The
            module that it returns is called as `module(tokens, (rows, columns))` with a lazy
            activation [b, n, d] (one that is computed when it is read), and returns an array of
            this shape.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: SanaConfig, attention: Callable[..., nnx.Module], *, rngs: nnx.Rngs):
        d = config.width
        heads = config.num_cross_attention_heads
        normed = config.qk_norm is not None
        self.norm1 = LayerNorm(d, eps=config.norm_eps, affine=False)
        self.attn1 = attention(
            (d, d, d),
            config.num_attention_heads,
            normed=normed,
            bias=config.attention_bias,
            rngs=rngs,
        )
        widths = (d, config.cross_attention_dim, heads * config.cross_attention_head_dim)
        self.attn2 = CrossAttention(widths, heads, normed=normed, rngs=rngs)
        self.norm2 = LayerNorm(d, eps=config.norm_eps, affine=config.norm_elementwise_affine)
        self.ff = GLUMBConv(d, int(config.mlp_ratio * d), rngs=rngs)
        table = jax.random.normal(rngs.params(), (6, d)) / math.sqrt(d)
        self.scale_shift_table = param(table, "scale_shift_table")

    def __call__(
        self,
        x: Float[Array, "b n d"],
        text: Float[Array, "b l d"],
        text_mask: Bool[Array, "b l"],
        modulation: Float[Array, "b 6 d"],
        grid: tuple[int, int],
    ) -> Float[Array, "b n d"]:
        """Applies attention among image tokens, attention to the text, and an MLP with a
        convolution. Each result is added to the tokens. The results of the attention among image
        tokens and of the MLP are first multiplied by gates.

        Args:
            x: the image tokens, row by row.
            text: the projected and normalized text tokens.
            text_mask: true on tokens, false on padding.
            modulation: six vectors per sample from the timestep: shift, scale and gate of the
                attention among image tokens, then of the MLP. The block adds its own learned
                vectors to them.
            grid: (rows, columns) of the image tokens in `x`, whose product is n. Under sequence
                parallelism, `x` and `grid` describe the rows that this device has.

        Returns:
            The image tokens after the block, of the shape and dtype of `x`.
        """
        table = self.scale_shift_table.get_value().astype(x.dtype) + modulation
        shift, scale, gate, shift_ff, scale_ff, gate_ff = jnp.split(table, 6, axis=1)
        x = x + gate * self.attn1(self.norm1.modulated(x, shift, scale), grid)
        x = x + self.attn2(x, text, text_mask)  # no norm before it: the text is normalized instead
        hidden = self.norm2.modulated(x, shift_ff, scale_ff)
        return x + gate_ff * self.ff.on_tokens(hidden, grid)


class PatchEmbed(nnx.Module):
    """Maps patches of latents to tokens, and adds fixed sinusoidal positions if the configuration
    has an `interpolation_scale`.

    The positions are not a parameter. The released SANA models have none.

    Args:
        config: configuration of the network (`SanaConfig`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: SanaConfig, *, rngs: nnx.Rngs):
        self.proj = PatchProjection(config.patch_size, config.in_channels, config.width, rngs=rngs)
        self.scale = config.interpolation_scale
        self.base = config.sample_size // config.patch_size

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Returns the tokens of latents, row by row. n is the number of patches.

        The coordinates of positions, if there are any, run from 0 up to `sample_size // patch_size
        / interpolation_scale` (exclusive) for latents of every size.

        Args:
            latent: latents. Height and width are multiples of the patch size.

        Returns:
            The tokens, in the dtype of `latent`.
        """
        x = self.proj(latent)
        batch, rows, columns, d = x.shape
        if self.scale is not None:
            row_coordinates = np.arange(rows) / (rows / self.base) / self.scale
            column_coordinates = np.arange(columns) / (columns / self.base) / self.scale
            x = x + sincos_positions(d, row_coordinates, column_coordinates).astype(x.dtype)
        return x.reshape(batch, rows * columns, d)


class TimeEmbedding(nnx.Module):
    """Embeds the timestep, and computes from it the six modulation vectors of d features that all
    blocks share.

    Args:
        d: number of features of a token.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.emb = nnx.Dict(timestep_embedder=TimestepMLP(d, rngs=rngs))
        self.linear = Linear(d, 6 * d, rngs=rngs)

    def __call__(
        self, timestep: Float[Array, " b"], dtype: DTypeLike
    ) -> tuple[Float[Array, "b d6"], Float[Array, "b d"]]:
        """Embeds the timestep by sinusoids and an MLP, and computes the modulation vectors from the
        SiLU of the embedding.

        Args:
            timestep: `1000 * sigma * timestep_scale` of each sample.
            dtype: dtype of both results, in which all but the float32 sinusoids are computed.

        Returns:
            (modulation, embedding). modulation [b, 6 d]: side by side, the shift, scale and gate of
            the attention among image tokens, then those of the MLP. All blocks share them, and add
            learned vectors of their own. embedding [b, d]: the embedding before the SiLU, from
            which the network gets the shift and scale of its last norm.
        """
        embedded = self.emb.timestep_embedder(timestep, dtype)
        return self.linear(jax.nn.silu(embedded)), embedded
