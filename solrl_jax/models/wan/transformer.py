"""The diffusion transformer for clips of Wan 2.1 and 2.2 (arXiv 2503.20314, section 4.2):
`WanTransformer3DModel` of diffusers in Flax NNX.

Every token is a patch of one latent frame, and attends to all tokens of the clip, then to the text.
Rotary positions have three coordinates: frame, row and column. The timestep modulates the blocks by
one projection that they share and by a table of each block. The network predicts the velocity `v =
noise - x0` of a flow.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.embeddings import TextProjection, TimestepMLP, patchify, unpatchify
from solrl_jax.models.layers.feed_forward import FeedForward
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.linear_attention import AttentionProjections, CrossAttention
from solrl_jax.models.layers.modulation import modulate_rounding_once
from solrl_jax.models.layers.norm import LayerNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.rotary import Rotation, rotate, rotation_table
from solrl_jax.models.layers.softmax_attention import attend
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.matmul import matmul
from solrl_jax.quant.sequence_parallel import shard_tokens

THETA = 10000.0  # the base of the rotary frequencies
SINUSOIDS = 256  # features of a timestep


@dataclasses.dataclass(frozen=True)
class WanConfig(TransformerConfig):
    """The configuration of Wan's transformer: the fields of a published `transformer/config.json`.

    The defaults are those of diffusers. A token has `num_attention_heads * attention_head_dim`
    features. The constructor raises ValueError for a value that is not supported; so does `read`
    for an unknown field.

    Attributes:
        patch_size: size of a patch in latent frames, rows and columns: (1, p, p) for a positive
            number p.
        num_attention_heads: number of attention heads.
        attention_head_dim: number of features of one attention head, an even number of at least 6.
        in_channels: number of channels of the latents.
        out_channels: number of channels of the output; None: as many as `in_channels`.
        text_dim: number of features of a text token, as the text encoder returns it.
        freq_dim: 256, the only supported value: number of features of the sinusoidal embedding of
            the timestep.
        ffn_dim: number of hidden features of the MLPs.
        num_layers: number of blocks.
        cross_attn_norm: whether tokens are normalized before they attend to the text.
        qk_norm: "rms_norm_across_heads", the only supported value: queries and keys of both
            attentions are normalized, over all heads together.
        eps: epsilon of all norms, those of queries and keys included.
        image_dim: number of features of an image with which the clip begins; only None (no such
            image) is supported.
        added_kv_proj_dim: number of features of keys and values of such an image; only None is
            supported.
        rope_max_seq_len: greatest number of patches along each axis of a clip: frames, rows and
            columns.
        pos_embed_seq_len: number of positions for the tokens of such an image; only None is
            supported.
    """

    network = "WanTransformer3DModel"

    patch_size: tuple[int, ...] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int | None = 16
    text_dim: int = 4096
    freq_dim: int = SINUSOIDS
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None

    def check(self) -> None:
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `patch_size` is not 1 and twice the same positive number;
                `attention_head_dim` is odd or less than 6; `freq_dim` is not 256; `qk_norm` is not
                "rms_norm_across_heads"; or `image_dim`, `added_kv_proj_dim` or `pos_embed_seq_len`
                is not None. The message names the field.
        """
        patch = self.patch_size
        self.require(
            len(patch) == 3 and patch[0] == 1 and 0 < patch[1] == patch[2],
            "patch_size",
            "1 and twice the same positive number",
        )
        head_dim = self.attention_head_dim
        self.require(
            head_dim % 2 == 0 and head_dim >= 6, "attention_head_dim", "an even number from 6 on"
        )
        self.require(self.freq_dim == SINUSOIDS, "freq_dim", str(SINUSOIDS))
        self.require_one_of("qk_norm", ("rms_norm_across_heads",))
        for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
            self.require(getattr(self, name) is None, name, "None")

    @property
    def patch_side(self) -> int:
        """Side of a patch in latent pixels: the number of its rows, and of its columns."""
        return self.patch_size[1]

    @property
    def axes_dims(self) -> tuple[int, int, int]:
        """The number of features of an attention head that the rotary embedding rotates by each
        coordinate of a token: (frame, row, column).

        Row and column each get a third of the features, rounded down to an even number. The frame
        gets the remaining ones. A head of 128 features gives (44, 42, 42).
        """
        third = 2 * (self.attention_head_dim // 6)
        return self.attention_head_dim - 2 * third, third, third


class WanTransformer3DModel(nnx.Module):
    """The network that predicts the velocity `noise - x0` of the noisy latents of clips.

    Args:
        config: configuration of the network (`WanConfig`): its widths, heads, blocks and patches.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError in the call.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: WanConfig, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs):
        d = config.width
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.patch_embedding = PatchEmbedding(config, rngs=rngs)
        self.condition_embedder = ConditionEmbedding(d, config.text_dim, rngs=rngs)
        self.blocks = stack(config.num_layers, lambda rngs: WanBlock(config, rngs=rngs), rngs)
        table = jax.random.normal(rngs.params(), (1, 2, d)) / math.sqrt(d)
        self.scale_shift_table = param(table, "scale_shift_table")
        self.norm_out = LayerNorm(d, eps=config.eps, affine=False)
        self.proj_out = Linear(d, config.patch_side**2 * config.num_out_channels, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b t h w c"],
        text: Float[Array, "b l text"],
        timestep: Float[Array, " b"],
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b t h w out"]:
        """Predicts the velocity `noise - x0` at `latent`.

        Args:
            latent: noisy latents of clips. Height and width are multiples of the side of a patch.
            text: hidden states of UMT5, zeros on padding. They are cast to the dtype of `latent`.
                Padding is attended to.
            timestep: `1000 * sigma` of each latent, in [0, 1000]. It is embedded in float32.
            fp8_attention: whether the attention among the tokens of the clip is computed in FP8:
                queries, keys, values and result are in E4M3. No gradient may be taken. Accelerators
                without FP8 attention compute in BF16 from the rounded inputs. The attention to the
                text is not in FP8.

        Returns:
            The velocity, in the dtype of `latent`, with `config.num_out_channels` channels.

        Raises:
            ValueError: height or width is not a multiple of the side of a patch; there are more
                frames, rows or columns of patches than `rope_max_seq_len`; or the size of the mesh
                axis `sequence` does not divide the number of tokens (patches) of a clip.
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        config = self.config
        batch, frames, height, width, _ = latent.shape
        dtype = latent.dtype
        side = config.patch_side
        if height % side or width % side:
            raise ValueError(
                f"{config.network}: latents of {height} x {width}; accepted: multiples of {side}"
            )
        rows = height // side
        columns = width // side
        if max(frames, rows, columns) > config.rope_max_seq_len:
            raise ValueError(
                f"{config.network}: latents of {frames} frames of {height} x {width}; accepted: "
                f"up to {config.rope_max_seq_len} frames, rows and columns of patches"
            )
        embedded, modulation = self.condition_embedder.condition(timestep, dtype)
        text = self.condition_embedder.text_embedder(text.astype(dtype))
        rotation = rotary_table(frames, rows, columns, config.axes_dims)

        def run(shared, x, rotation, _):
            text, modulation = shared

            def apply(block, x):
                return block(x, text, modulation, rotation, fp8_attention)

            return scan_blocks(
                self.blocks, apply, x, gradient_checkpointing=self.gradient_checkpointing
            ), None

        x, _ = shard_tokens(run, (text, modulation), self.patch_embedding(latent), rotation)
        table = self.scale_shift_table.get_value().astype(jnp.float32) + embedded[:, None]
        shift, scale = jnp.split(table, 2, axis=1)
        x = self.proj_out(self.norm_out.modulated(x, shift, scale, modulate_rounding_once))
        out = unpatchify(x.reshape(batch * frames, rows * columns, -1), rows, columns, side)
        return out.reshape(batch, frames, height, width, -1)


class PatchEmbedding(nnx.Module):
    """Maps each patch of each latent frame, as a vector of (row, column, channel), to one token by
    a linear layer. In checkpoints it is a convolution whose stride is its kernel size.

    Args:
        config: configuration of the network (`WanConfig`), for the patches, the channels of the
            latents and the width of the tokens.
        rngs: random number generators for the initial weight. The bias is zero at first.
    """

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        d = config.width
        side = config.patch_side
        init = nnx.initializers.xavier_uniform()
        kernel = init(rngs.params(), (side**2 * config.in_channels, d))
        shape = (1, side, side, config.in_channels, d)
        self.kernel = param(kernel.reshape(shape), "weight", "conv3d")
        self.bias = param(jnp.zeros(d), "bias")
        self.side = side

    def __call__(self, latent: Float[Array, "b t h w c"]) -> Float[Array, "b n d"]:
        """Returns the tokens of clips: frame by frame, and row by row in each frame.

        Args:
            latent: latents of clips. Height and width are multiples of the side of a patch.

        Returns:
            The n tokens of each clip, one per patch, in the dtype of `latent`.
        """
        kernel = self.kernel.get_value()
        squares = patchify(latent.reshape(-1, *latent.shape[2:]), self.side)
        tokens = squares.reshape(len(latent), -1, squares.shape[-1])
        y = matmul(tokens, kernel.reshape(-1, kernel.shape[-1]))
        return y + self.bias.get_value().astype(y.dtype)


class ConditionEmbedding(nnx.Module):
    """The layers that embed the timestep (by the method `condition`) and project the text (by the
    module `text_embedder`: a linear layer, GELU in its tanh form and a linear layer).

    Args:
        d: number of features of a token of the network.
        text_dim: number of features of a text token, as the text encoder returns it.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, d: int, text_dim: int, *, rngs: nnx.Rngs):
        self.time_embedder = TimestepMLP(d, rngs=rngs)
        self.time_proj = Linear(d, 6 * d, rngs=rngs)
        self.text_embedder = TextProjection(text_dim, d, rngs=rngs)

    def condition(
        self, timestep: Float[Array, " b"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "b d"], Float[Array, "b 6 d"]]:
        """Embeds the timestep by sinusoids and an MLP in float32, and projects the SiLU of the
        embedding to six modulation vectors.

        Args:
            timestep: `1000 * sigma` of each sample.
            dtype: dtype of the network. As in the released code, the embedding is rounded to it,
                and the projection to the six vectors is computed in it.

        Returns:
            (embedding, vectors), both rounded to `dtype` and then cast to float32. The embedding
            [b, d] modulates the output of the network. All blocks share the six vectors [b, 6, d]:
            shift, scale and gate of the attention among the tokens, then of the MLP.
        """
        embedded = self.time_embedder(timestep, jnp.float32).astype(dtype)
        vectors = self.time_proj(jax.nn.silu(embedded)).astype(jnp.float32)
        return embedded.astype(jnp.float32), vectors.reshape(len(timestep), 6, -1)


class WanBlock(nnx.Module):
    """A block: attention among the tokens of the clip, attention to the text, and an MLP (GELU in
    its tanh form).

    Args:
        config: configuration of the network (`WanConfig`), for widths, heads and norms.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        d = config.width
        heads = config.num_attention_heads
        self.norm1 = LayerNorm(d, eps=config.eps, affine=False)
        self.attn1 = ClipAttention((d, d, d), heads, normed=True, eps=config.eps, rngs=rngs)
        self.norm2 = LayerNorm(d, eps=config.eps) if config.cross_attn_norm else None
        self.attn2 = CrossAttention((d, d, d), heads, normed=True, eps=config.eps, rngs=rngs)
        self.norm3 = LayerNorm(d, eps=config.eps, affine=False)
        self.ffn = FeedForward(d, config.ffn_dim, rngs=rngs)
        table = jax.random.normal(rngs.params(), (1, 6, d)) / math.sqrt(d)
        self.scale_shift_table = param(table, "scale_shift_table")

    def __call__(
        self,
        x: Float[Array, "b n d"],
        text: Float[Array, "b l d"],
        modulation: Float[Array, "b 6 d"],
        rotation: Rotation,
        fp8_attention: bool = False,
    ) -> Float[Array, "b n d"]:
        """Applies attention among the tokens, attention to the text and an MLP, and adds the result
        of each to the tokens (that of the text without a gate). The modulation `norm * (1 + scale)
        + shift` and the gated sums `x + gate * result` are computed in float32 and rounded to the
        dtype of `x`.

        Args:
            x: the tokens of the clip, frame by frame; under sequence parallelism (`shard_tokens`),
                those of this device, which attend to those of all devices.
            text: the projected text tokens, all of which are attended to.
            modulation: six vectors per sample in float32: shift, scale and gate of the attention
                among the tokens, then of the MLP. The block's learned table is added to them here.
            rotation: cosines and sines of the rotary angles of the n tokens: two float32 arrays [1,
                n, head_dim / 2].
            fp8_attention: whether the attention among the tokens of the clip is computed in FP8:
                queries, keys, values and result are in E4M3. No gradient may be taken. Accelerators
                without FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The tokens after the block, of the shape and dtype of `x`.
        """
        table = self.scale_shift_table.get_value().astype(jnp.float32) + modulation
        shift, scale, gate, shift_ff, scale_ff, gate_ff = jnp.split(table, 6, axis=1)
        hidden = self.norm1.modulated(x, shift, scale, modulate_rounding_once)
        x = _add_gated(x, gate, self.attn1(hidden, rotation, fp8_attention=fp8_attention))
        x = x + self.attn2(x if self.norm2 is None else self.norm2(x), text)
        hidden = self.norm3.modulated(x, shift_ff, scale_ff, modulate_rounding_once)
        return _add_gated(x, gate_ff, self.ffn(hidden))


class ClipAttention(AttentionProjections):
    """Softmax attention of the tokens of a clip to each other. Queries and keys are normalized, if
    `normed` is set, and then rotated by the positions of the tokens.

    Args:
        widths: `(d, d, inner)`: the number of features of a token, given twice because the tokens
            attend to each other, and the number of features of all heads together.
        heads: The number of heads, a divisor of the third width.
        normed: Whether queries and keys are normalized (RMSNorm), over the features of all heads
            together.
        bias: Whether the linear layers to queries, keys and values have biases, by default True.
            The output layer always has one.
        eps: The epsilon of the norms, 1e-5 by default.
        rngs: Random number generators for the initial weights.
    """

    def __call__(
        self, x: Activation, rotation: Rotation, *, fp8_attention: bool = False
    ) -> Float[Array, "b n d"]:
        """Applies softmax attention of the tokens to each other, and the output layer. Under
        sequence parallelism (`shard_tokens`), the tokens of this device attend to those of all
        devices.

        Args:
            x: the tokens [b, n, d], an array or a lazy activation (one that is computed when it is
                read).
            rotation: cosines and sines of the rotary angles of the n tokens: two float32 arrays [1,
                n, head_dim / 2].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken. Accelerators without FP8 attention compute in
                BF16 from the rounded inputs.

        Returns:
            The output [b, n, d], in the dtype of `x`. The input is not added.
        """
        x = as_lazy(x)
        q, k, v = self.project(x, x)
        streams = [rotate(q, rotation), rotate(k, rotation), v]
        out = attend(self.head_dim, streams, fp8_attention=fp8_attention)
        return self.to_out[0](as_lazy(out, x.dtype))


def _add_gated(
    x: Float[Array, "b n d"], gate: Float[Array, "b 1 d"], y: Float[Array, "b n d"]
) -> Float[Array, "b n d"]:
    """Returns `x + gate * y`, computed in float32 and rounded once to the dtype of `x`.

    Args:
        x: the tokens.
        gate: factor of each sample and feature, float32.
        y: the output of a sublayer, in the dtype of `x`.
    """
    return (x.astype(jnp.float32) + gate * y.astype(jnp.float32)).astype(x.dtype)


def rotary_table(frames: int, rows: int, columns: int, axes_dims: tuple[int, ...]) -> Rotation:
    """Returns the cosines and sines of the rotary angles of the tokens of a clip, frame by frame
    and row by row.

    The coordinates of a token are its frame, row and column, each counted from 0. Pair i of the
    `dim` features that a coordinate rotates has the frequency `10000 ** (-2 i / dim)` (`THETA`).

    Args:
        frames: number of latent frames.
        rows: number of rows of tokens in a frame.
        columns: number of columns of tokens in a frame.
        axes_dims: number of features of a head that each coordinate rotates: three even numbers.

    Returns:
        Cosines and sines, two float32 NumPy arrays [1, frames * rows * columns, head_dim / 2],
        where head_dim is the sum of `axes_dims`. Along the last axis, the angles of the frame come
        first, then those of the row, then those of the column.
    """
    positions = np.indices((frames, rows, columns)).reshape(3, -1).astype(float)
    return rotation_table(positions, axes_dims, THETA)
