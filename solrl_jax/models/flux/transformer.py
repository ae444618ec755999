"""FLUX.1's diffusion transformer (Black Forest Labs, 2024): diffusers' `FluxTransformer2DModel` in
NNX.

A multimodal diffusion transformer (arXiv 2403.03206, section 4) with rotary positions (arXiv
2104.09864). In the first blocks, text and image are two streams (`models.layers.mmdit`). The later
blocks treat both as one sequence, and run attention and MLP side by side (arXiv 2302.05442, section
2). Timestep, guidance scale and pooled text modulate all blocks. The network predicts the velocity
`v = noise - x0` of a flow.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import concat_features
from solrl_jax.models.layers.ada_layer_norm import AdaLayerNorm
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import JointBlock, TimeTextEmbedding
from solrl_jax.models.layers.modulation import modulate
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
from solrl_jax.models.layers.rotary import Rotation, rotation_table
from solrl_jax.models.layers.softmax_attention import SelfAttention
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig, unsupported
from solrl_jax.quant.sequence_parallel import shard_tokens

PATCH = 2  # the side of the square of latent pixels that one token represents
THETA = 10000.0  # the base of the rotary frequencies


@dataclasses.dataclass(frozen=True)
class FluxConfig(TransformerConfig):
    """The configuration of FLUX.1's transformer: the fields of a published
    `transformer/config.json`.

    The defaults are those of diffusers. A token has `attention_head_dim * num_attention_heads`
    features. The constructor raises ValueError for a value that is not supported; so does `read`
    for an unknown field.

    Attributes:
        patch_size: 1, the only supported value. (It has no effect: the network always merges 2 x 2
            latent pixels into one token.)
        in_channels: number of input features of an image token: four times the channels of a
            latent.
        out_channels: number of output features of an image token, four times the channels of the
            output; None: as many as `in_channels`.
        num_layers: number of blocks with two streams, which have separate weights for text and
            image.
        num_single_layers: number of blocks with one stream, which treat text and image alike.
        attention_head_dim: number of features of one attention head.
        num_attention_heads: number of attention heads.
        joint_attention_dim: number of features of a text token (T5).
        pooled_projection_dim: number of features of the pooled text embedding (CLIP).
        guidance_embeds: whether the network takes the guidance scale as an input (FLUX.1-dev).
        axes_dims_rope: rotary embedding: how many features of a head are rotated by each of the
            three coordinates of a position. Positive even numbers with the sum
            `attention_head_dim`.
    """

    network = "FluxTransformer2DModel"

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def check(self) -> None:
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `patch_size` is not 1; `in_channels`, or `out_channels` unless it is None,
                is not a multiple of 4; or `axes_dims_rope` is not three positive even integers
                whose sum is `attention_head_dim`. The message names the field.
        """
        self.require(
            self.patch_size == 1, "patch_size", "1 (latents are packed two by two before it)"
        )
        channels = {"in_channels": self.in_channels, "out_channels": self.num_out_channels}
        for name, count in channels.items():
            self.require(count % PATCH**2 == 0, name, f"a positive multiple of {PATCH**2}")
        axes = self.axes_dims_rope
        head_dim = self.attention_head_dim
        are_even = all(type(dim) is int and dim > 0 and dim % 2 == 0 for dim in axes)
        self.require(
            len(axes) == 3 and are_even and sum(axes) == head_dim,
            "axes_dims_rope",
            f"three positive even numbers whose sum is attention_head_dim={head_dim}",
        )


class FluxTransformer2DModel(nnx.Module):
    """The network that predicts the velocity `noise - x0` of noisy latents.

    Blocks with two streams (text and image apart) come first, then blocks with one stream. Each
    kind is one module with stacked parameters.

    Args:
        config: configuration of the network (`FluxConfig`): its widths, heads and blocks of both
            kinds.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError when the network is called.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: FluxConfig, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs):
        d = config.width
        head_dim = config.attention_head_dim
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.time_text_embed = TimeTextEmbedding(
            d, config.pooled_projection_dim, guided=config.guidance_embeds, rngs=rngs
        )
        self.context_embedder = Linear(config.joint_attention_dim, d, rngs=rngs)
        self.x_embedder = Linear(config.in_channels, d, rngs=rngs)
        self.transformer_blocks = stack(
            config.num_layers,
            lambda rngs: JointBlock(d, head_dim, modulate, normed=True, rngs=rngs),
            rngs,
        )
        self.single_transformer_blocks = stack(
            config.num_single_layers, lambda rngs: FluxSingleBlock(d, head_dim, rngs=rngs), rngs
        )
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, config.num_out_channels, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
        guidance: Float[Array, " b"] | None = None,
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """Predicts the velocity `noise - x0` at `latent`.

        Args:
            latent: noisy latents of even height and width: c is `in_channels / 4`.
            text: last hidden states of T5. They are cast to the dtype of `latent`. Padding is
                attended to.
            pooled: CLIP's embedding of the whole prompt, [b, `pooled_projection_dim`].
            timestep: `1000 * sigma` of each latent, in [0, 1000].
            guidance: guidance scale of each latent, for example 3.5, if the configuration sets
                `guidance_embeds`; otherwise None.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, in the dtype of `latent`: out is a quarter of the output features of a
            token.

        Raises:
            ValueError: height or width is odd; `guidance` is missing or unexpected; or the size of
                the mesh axis `sequence` does not divide the number of image tokens, or that of text
                and image tokens together.
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        _, height, width, _ = latent.shape
        dtype = latent.dtype
        if height % PATCH or width % PATCH:
            raise ValueError(
                f"FluxTransformer2DModel: latents of {height} x {width}; accepted: even sizes"
            )
        if self.config.guidance_embeds != (guidance is not None):
            expected = "a scale" if self.config.guidance_embeds else "None"
            raise unsupported(
                "FluxTransformer2DModel", "guidance", guidance, f"{expected}, with this config"
            )
        rows = height // PATCH
        columns = width // PATCH
        length = text.shape[1]
        # In float32, because the condition modulates every token of every block, so that its
        # rounding error would not average out.
        embedded = self.time_text_embed(timestep, pooled.astype(jnp.float32), guidance)
        condition = jax.nn.silu(embedded).astype(dtype)
        rotation = rotary_table(length, rows, columns, self.config.axes_dims_rope)

        text = self.context_embedder(text.astype(dtype))
        # one image token for each 2 x 2 pixels, row by row
        squares = space_to_depth(latent)
        image = self.x_embedder(squares.reshape(len(latent), -1, squares.shape[-1]))

        def run_joint(condition, image, rotation, text):
            def apply(block, streams):
                return block(*streams, condition, rotation, fp8_attention=fp8_attention)

            streams = (text, image)
            text, image = scan_blocks(
                self.transformer_blocks,
                apply,
                streams,
                gradient_checkpointing=self.gradient_checkpointing,
            )
            return image, text

        def run_single(condition, x, rotation, _):
            def apply(block, x):
                return block(x, condition, rotation, fp8_attention=fp8_attention)

            return scan_blocks(
                self.single_transformer_blocks,
                apply,
                x,
                gradient_checkpointing=self.gradient_checkpointing,
            ), None

        image, text = shard_tokens(run_joint, condition, image, rotation, text, start=length)
        x = jnp.concatenate([text, image], axis=1)
        x, _ = shard_tokens(run_single, condition, x, rotation)
        x = x[:, length:]
        scale, shift = self.norm_out.vectors(condition)
        x = self.proj_out(self.norm_out(x, shift, scale))
        return depth_to_space(x.reshape(len(latent), rows, columns, -1))


class FluxSingleBlock(nnx.Module):
    """A block with one stream, text before image.

    Attention and MLP (four times the width, tanh GELU) read the same modulated norm of the input,
    and one linear layer reads the results of both. Its output, times a gate, is added to the input.

    Args:
        d: number of features of the tokens, a multiple of `head_dim`.
        head_dim: number of features of one attention head.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, d: int, head_dim: int, *, rngs: nnx.Rngs):
        self.norm = AdaLayerNorm(d, 3, rngs=rngs)
        self.attn = SelfAttention(d, head_dim, normed=True, projected=False, rngs=rngs)
        self.proj_mlp = Linear(d, 4 * d, rngs=rngs)
        self.proj_out = Linear(5 * d, d, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        condition: Float[Array, "b d"],
        rotation: Rotation,
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b s d"]:
        """Applies attention and an MLP side by side to the modulated norm of the tokens, projects
        both results together, and adds them, times a gate, to the input.

        Args:
            x: the text tokens, then the image tokens; under sequence parallelism (`shard_tokens`),
                the s consecutive ones that this device has.
            condition: the sum of the embedded timestep, guidance scale and pooled text, after its
                SiLU. From it the block computes the shift, scale and gate of its norm.
            rotation: cosines and sines of the rotary angles of these s tokens: two float32 arrays
                [b or 1, s, head_dim / 2].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The tokens after the block, of the shape and dtype of `x`.
        """
        shift, scale, gate = self.norm.vectors(condition)
        h = self.norm(x, shift, scale)
        attended = self.attn(h, rotation, fp8_attention=fp8_attention)
        hidden = self.proj_mlp.activated(h, jax.nn.gelu)
        return x + gate * self.proj_out(concat_features(attended, hidden, dtype=x.dtype))


def rotary_table(length: int, rows: int, columns: int, axes_dims: tuple[int, ...]) -> Rotation:
    """Returns the cosines and sines of the rotary angles of the text tokens, then of the image
    tokens, row by row.

    A position has three coordinates: (0, row, column) for image tokens, and (0, 0, 0) for text
    tokens, which are thus not rotated.

    Args:
        length: number of text tokens.
        rows: number of rows of image tokens.
        columns: number of columns of image tokens.
        axes_dims: number of features of a head that each coordinate rotates: three even numbers,
            whose sum is `head_dim`.

    Returns:
        (cosines, sines) of the angles, whose frequencies have the base 10000 (`THETA`): two float32
        NumPy arrays [1, length + rows * columns, head_dim / 2]. The last axis has the angles of the
        first coordinate, then those of the second and third.
    """
    positions = np.zeros((3, length + rows * columns))
    positions[1:, length:] = np.indices((rows, columns)).reshape(2, -1)
    return rotation_table(positions, axes_dims, THETA)
