"""FLUX.2's diffusion transformer (Black Forest Labs, 2025): `Flux2Transformer2DModel` of diffusers
in NNX.

It has FLUX.1's two kinds of blocks (`models.flux.transformer`), with four differences. All blocks
of a kind share their modulation. The MLPs are SiLU-gated (arXiv 2002.05202). In a block with one
stream, one linear layer computes queries, keys, values and the MLP's input. Positions have four
coordinates, and text tokens have positions, too. No linear layer has a bias. The network predicts
the velocity `v = noise - x0` of a flow, from text alone: reference images are not ported.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.ada_layer_norm import EPS, AdaLayerNorm
from solrl_jax.models.layers.embeddings import TimestepMLP
from solrl_jax.models.layers.feed_forward import FusedGatedFeedForward
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm
from solrl_jax.models.layers.rotary import Rotation, rotation_table
from solrl_jax.models.layers.softmax_attention import JointAttention, ParallelAttention
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.sequence_parallel import shard_tokens

# The values of configuration fields that this port implements.
ACCEPTED = {
    "patch_size": (1,),
    "timestep_guidance_channels": (256,),
    "eps": (EPS,),
    "guidance_embeds": (False,),
}


@dataclasses.dataclass(frozen=True)
class Flux2Config(TransformerConfig):
    """The configuration of FLUX.2's transformer: the fields of a published
    `transformer/config.json`.

    The defaults are those of diffusers. The default of `guidance_embeds` (True) is not supported,
    so a file or a call of the constructor has to set it to False. A token has `attention_head_dim *
    num_attention_heads` features. The constructor raises ValueError for a value that is not
    supported; so does `read` for an unknown field.

    Attributes:
        patch_size: 1, the only supported value.
        in_channels: number of channels of a latent. Each latent pixel is one image token.
        out_channels: number of output features of an image token; None: as many as `in_channels`.
        num_layers: number of blocks with two streams, which have separate weights for text and
            image.
        num_single_layers: number of blocks with one stream, which treat text and image alike.
        attention_head_dim: number of features of one attention head.
        num_attention_heads: number of attention heads.
        joint_attention_dim: number of features of a text token, as the text encoder returns it.
        timestep_guidance_channels: 256, the only supported value: number of features of the
            sinusoidal embedding of the timestep.
        mlp_ratio: hidden width of the MLPs (after their gate), divided by the number of features of
            a token.
        axes_dims_rope: rotary embedding: how many features of a head are rotated by each of the
            four coordinates of a position (reference image, row, column, place in the text).
            Positive even numbers with the sum `attention_head_dim`.
        rope_theta: base of the rotary frequencies.
        eps: 1e-6, the only supported value: epsilon of all norms.
        guidance_embeds: whether the network takes the guidance scale as an input; only False is
            supported.
    """

    network = "Flux2Transformer2DModel"

    patch_size: int = 1
    in_channels: int = 128
    out_channels: int | None = None
    num_layers: int = 8
    num_single_layers: int = 48
    attention_head_dim: int = 128
    num_attention_heads: int = 48
    joint_attention_dim: int = 15360
    timestep_guidance_channels: int = 256
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: int = 2000
    eps: float = EPS
    guidance_embeds: bool = True

    def check(self) -> None:
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `patch_size` is not 1, `timestep_guidance_channels` is not 256, `eps` is not
                1e-6, or `guidance_embeds` is true; `axes_dims_rope` is not four positive even
                integers whose sum is `attention_head_dim`; or `mlp_ratio` times the width of the
                tokens is less than 1. The message names the field.
        """
        for name, accepted in ACCEPTED.items():
            self.require_one_of(name, accepted)
        axes = self.axes_dims_rope
        head_dim = self.attention_head_dim
        are_even = all(type(dim) is int and dim > 0 and dim % 2 == 0 for dim in axes)
        self.require(
            len(axes) == 4 and are_even and sum(axes) == head_dim,
            "axes_dims_rope",
            f"four positive even numbers whose sum is attention_head_dim={head_dim}",
        )
        self.require(
            self.mlp_width > 0, "mlp_ratio", "a number that gives the MLP a width of 1 or more"
        )

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLPs (after their gate): `mlp_ratio` times the number of features of
        a token, rounded down.
        """
        return int(self.width * self.mlp_ratio)


class Flux2Transformer2DModel(nnx.Module):
    """The network that predicts the velocity `noise - x0` of noisy latents.

    Blocks with two streams (separate weights for text and image) come first, then blocks with one
    stream. Each kind is one module with stacked parameters, and no linear layer has a bias. The
    shift, scale and gate vectors that modulate the blocks are computed once: one set for the text
    and one for the image in all two-stream blocks, and one set for all one-stream blocks.

    Args:
        config: configuration of the network (`Flux2Config`): its widths, heads and blocks of both
            kinds.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError when the network is called.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self, config: Flux2Config, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs
    ):
        d = config.width
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing

        def linear(n_in: int, n_out: int) -> Linear:
            return Linear(n_in, n_out, bias=False, rngs=rngs)

        self.time_guidance_embed = nnx.Dict(timestep_embedder=TimestepMLP(d, bias=False, rngs=rngs))
        self.double_stream_modulation_img = nnx.Dict(linear=linear(d, 6 * d))
        self.double_stream_modulation_txt = nnx.Dict(linear=linear(d, 6 * d))
        self.single_stream_modulation = nnx.Dict(linear=linear(d, 3 * d))
        self.x_embedder = linear(config.in_channels, d)
        self.context_embedder = linear(config.joint_attention_dim, d)
        self.transformer_blocks = stack(
            config.num_layers, lambda rngs: Flux2Block(config, rngs=rngs), rngs
        )
        self.single_transformer_blocks = stack(
            config.num_single_layers, lambda rngs: Flux2SingleBlock(config, rngs=rngs), rngs
        )
        self.norm_out = AdaLayerNorm(d, 2, bias=False, rngs=rngs)
        self.proj_out = linear(d, config.num_out_channels)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        timestep: Float[Array, " b"],
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """Predicts the velocity `noise - x0` at `latent`. The network takes no guidance scale.

        Args:
            latent: noisy latents of any height and width; c is `in_channels`. Each pixel becomes
                one token.
            text: hidden states of the text encoder. They are cast to the dtype of `latent`. Padding
                is attended to.
            timestep: `1000 * sigma` of each latent, in [0, 1000].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, in the dtype of `latent`: out is `config.out_channels`, or
            `config.in_channels` if that is None.

        Raises:
            ValueError: the size of the mesh axis `sequence` does not divide the number of image
                tokens, or that of text and image tokens together.
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        batch, height, width, channels = latent.shape
        dtype = latent.dtype
        length = text.shape[1]
        # In float32, because the condition modulates every token of every block, so that its
        # rounding error would not average out.
        embedded = self.time_guidance_embed.timestep_embedder(timestep, jnp.float32)
        condition = jax.nn.silu(embedded).astype(dtype)
        image_vectors = _modulation_vectors(self.double_stream_modulation_img.linear, condition, 6)
        text_vectors = _modulation_vectors(self.double_stream_modulation_txt.linear, condition, 6)
        single_vectors = _modulation_vectors(self.single_stream_modulation.linear, condition, 3)
        rotation = rotary_table(length, height, width, self.config)

        text = self.context_embedder(text.astype(dtype))
        image = self.x_embedder(latent.reshape(batch, -1, channels))

        def run_joint(vectors, image, rotation, text):
            text_vectors, image_vectors = vectors

            def apply(block, streams):
                return block(
                    *streams, text_vectors, image_vectors, rotation, fp8_attention=fp8_attention
                )

            streams = (text, image)
            text, image = scan_blocks(
                self.transformer_blocks,
                apply,
                streams,
                gradient_checkpointing=self.gradient_checkpointing,
            )
            return image, text

        def run_single(vectors, x, rotation, _):
            def apply(block, x):
                return block(x, vectors, rotation, fp8_attention=fp8_attention)

            return scan_blocks(
                self.single_transformer_blocks,
                apply,
                x,
                gradient_checkpointing=self.gradient_checkpointing,
            ), None

        vectors = (text_vectors, image_vectors)
        image, text = shard_tokens(run_joint, vectors, image, rotation, text, start=length)
        x = jnp.concatenate([text, image], axis=1)
        x, _ = shard_tokens(run_single, single_vectors, x, rotation)
        x = x[:, length:]
        scale, shift = self.norm_out.vectors(condition)
        x = self.proj_out(self.norm_out(x, shift, scale))
        return x.reshape(batch, height, width, -1)


def _modulation_vectors(
    linear: Linear, condition: Float[Array, "b d"], count: int
) -> list[Float[Array, "b 1 d"]]:
    """Computes modulation vectors (shifts, scales and gates) from the embedded timestep.

    Args:
        linear: linear layer from d to `count * d` features: all vectors side by side.
        condition: embedding of the timestep, after its SiLU.
        count: number of vectors.

    Returns:
        A list of `count` arrays [b, 1, d], in the order of the layer's output and the dtype of
        `condition`.
    """
    return jnp.split(linear(condition)[:, None], count, axis=-1)


class Flux2Block(nnx.Module):
    """A block with two streams: joint attention of text and image, then a SiLU-gated MLP for each
    stream.

    The modulation vectors are arguments of the call, because all such blocks share them.

    Args:
        config: configuration of the network (`Flux2Config`), for the features of a token, of a head
            and of the MLP.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Flux2Config, *, rngs: nnx.Rngs):
        d = config.width
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.attn = JointAttention(d, config.attention_head_dim, normed=True, bias=False, rngs=rngs)
        self.ff, self.ff_context = (
            FusedGatedFeedForward(d, config.mlp_width, rngs=rngs) for _ in range(2)
        )

    def __call__(
        self,
        text: Float[Array, "b l d"],
        image: Float[Array, "b n d"],
        text_vectors: list[Float[Array, "b 1 d"]],
        image_vectors: list[Float[Array, "b 1 d"]],
        rotation: Rotation,
        *,
        fp8_attention: bool = False,
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        """Applies joint attention of text and image, then an MLP to each stream.

        Attention and MLP read modulated norms; their results, times gates, are added to the
        streams.

        Args:
            text: the text tokens.
            image: the image tokens; under sequence parallelism, the n of this device. Every device
                has all of the text.
            text_vectors: six vectors that modulate the text: shift, scale and gate of the
                attention, then of the MLP.
            image_vectors: six vectors that modulate the image: shift, scale and gate of the
                attention, then of the MLP.
            rotation: cosines and sines of the rotary angles of the l + n tokens in `text` and
                `image`, text first: two float32 arrays [b or 1, l + n, head_dim / 2].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The text tokens and the image tokens after the block, each with the shape and dtype of
            its input.
        """
        text_shift, text_scale, text_gate, text_shift_ff, text_scale_ff, text_gate_ff = text_vectors
        shift, scale, gate, shift_ff, scale_ff, gate_ff = image_vectors
        text_attended, image_attended = self.attn(
            self.norm.modulated(text, text_shift, text_scale),
            self.norm.modulated(image, shift, scale),
            rotation,
            fp8_attention=fp8_attention,
        )
        assert text_attended is not None  # only a `last` layer returns None
        text = text + text_gate * text_attended
        image = image + gate * image_attended
        text_hidden = self.norm.modulated(text, text_shift_ff, text_scale_ff)
        text = text + text_gate_ff * self.ff_context(text_hidden)
        image_hidden = self.norm.modulated(image, shift_ff, scale_ff)
        return text, image + gate_ff * self.ff(image_hidden)


class Flux2SingleBlock(nnx.Module):
    """A block with one stream, text before image: attention and a SiLU-gated MLP side by side.

    The modulation vectors are arguments of the call, because all such blocks share them.

    Args:
        config: configuration of the network (`Flux2Config`), for the features of a token, of a head
            and of the MLP.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Flux2Config, *, rngs: nnx.Rngs):
        d = config.width
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.attn = ParallelAttention(d, config.attention_head_dim, config.mlp_width, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        vectors: list[Float[Array, "b 1 d"]],
        rotation: Rotation,
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b s d"]:
        """Applies attention and a gated MLP side by side to the modulated norm of the tokens,
        projects both results together, and adds them, times a gate, to the input.

        Args:
            x: the text tokens, then the image tokens; under sequence parallelism, the s consecutive
                ones that this device has.
            vectors: three vectors that modulate the tokens: shift and scale of the norm, and gate
                of the result.
            rotation: cosines and sines of the rotary angles of the s positions: two float32 arrays
                [b or 1, s, head_dim / 2].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The tokens after the block, of the shape and dtype of `x`.
        """
        shift, scale, gate = vectors
        h = self.norm.modulated(x, shift, scale)
        return x + gate * self.attn(h, rotation, fp8_attention=fp8_attention)


def rotary_table(length: int, rows: int, columns: int, config: Flux2Config) -> Rotation:
    """Returns the cosines and sines of the rotary angles of the text tokens, then of the image
    tokens, row by row.

    A position has four coordinates: (0, row, column, 0) for image tokens, and (0, 0, 0, index) for
    text tokens, all counted from 0. The first coordinate would distinguish reference images, which
    are not supported.

    Args:
        length: number of text tokens.
        rows: number of rows of image tokens.
        columns: number of columns of image tokens.
        config: configuration of the network: `axes_dims_rope` says how many features of a head each
            coordinate rotates, and `rope_theta` is the base of the frequencies.

    Returns:
        (cosines, sines) of the angles, two float32 NumPy arrays [1, length + rows * columns,
        head_dim / 2]. The last axis has the angles of the first coordinate, then those of the
        others in their order.
    """
    positions = np.zeros((4, length + rows * columns))
    positions[3, :length] = np.arange(length)
    positions[1:3, length:] = np.indices((rows, columns)).reshape(2, -1)
    return rotation_table(positions, config.axes_dims_rope, config.rope_theta)
