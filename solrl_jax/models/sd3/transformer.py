"""Stable Diffusion 3's transformer (MMDiT): `SD3Transformer2DModel` of diffusers in Flax NNX.

Image and text tokens are two streams with weights of their own, which attend as one sequence (arXiv
2403.03206, section 4; `models.layers.mmdit`). Timestep and pooled text modulate every block. The
network predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.ada_layer_norm import AdaLayerNorm
from solrl_jax.models.layers.embeddings import PatchProjection, sincos_positions, unpatchify
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import JointBlock, TimeTextEmbedding
from solrl_jax.models.layers.modulation import modulate_rounding_once, silu_rounding_once
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.sequence_parallel import shard_tokens


@dataclasses.dataclass(frozen=True)
class SD3Config(TransformerConfig):
    """The configuration of Stable Diffusion 3's transformer: the fields of a published
    `transformer/config.json`.

    The defaults are those of diffusers. A token has `num_attention_heads * attention_head_dim`
    features, a multiple of 4. The constructor raises ValueError for a value that is not supported;
    so does `read` for an unknown field.

    Attributes:
        sample_size: side, in latent pixels, of the latents that the model was made for. It gives
            the default image size, and scales the initial values of the positions.
        patch_size: side of a patch in latent pixels.
        in_channels: number of channels of the latents.
        num_layers: number of blocks.
        attention_head_dim: number of features of one attention head.
        num_attention_heads: number of attention heads.
        joint_attention_dim: number of features of a text token, as the text encoders return it.
        caption_projection_dim: number of features of a projected text token. Must be
            `num_attention_heads * attention_head_dim`, as many as an image token has.
        pooled_projection_dim: number of features of the pooled text embedding.
        out_channels: number of channels of the output; None: as many as `in_channels`.
        pos_embed_max_size: greatest height and width of latents, in patches: positions are stored
            for a square of this side.
        dual_attention_layers: indices, from 0, of the blocks in which image tokens also attend to
            each other in a second attention (SD3.5 Medium). Indices beyond the last block are
            ignored.
        qk_norm: "rms_norm" to normalize each head of queries and keys; None: no norm.
    """

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
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `qk_norm` is neither None nor "rms_norm"; `caption_projection_dim` is not
                the width, `num_attention_heads * attention_head_dim`; or the width is not a
                multiple of 4. The message names the field, `attention_head_dim` for the width.
        """
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
    """Stable Diffusion 3's network, which predicts the velocity `noise - x0` of noisy latents.

    Blocks of `dual_attention_layers` and all others are different kinds, and the last block, whose
    text stream ends, is always a kind of its own. Consecutive blocks of one kind form a stack: one
    module, whose parameters have a leading axis of blocks. The dictionary `transformer_blocks`
    holds the stacks under their first and last block: "0-12", "13-22", "23-23".

    Args:
        config: configuration of the network (`SD3Config`): its widths, heads, blocks, patches and
            positions.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError in the call.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: SD3Config, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs):
        d = config.width
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.pos_embed = PatchEmbed(config, rngs=rngs)
        self.time_text_embed = TimeTextEmbedding(d, config.pooled_projection_dim, rngs=rngs)
        self.context_embedder = Linear(config.joint_attention_dim, d, rngs=rngs)
        self.transformer_blocks = nnx.Dict(_stacks(config, rngs))
        self.norm_out = AdaLayerNorm(d, 2, modulate=modulate_rounding_once, rngs=rngs)
        self.proj_out = Linear(d, config.patch_size**2 * config.num_out_channels, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """Predicts the velocity `noise - x0` at `latent`.

        Args:
            latent: noisy latents. Height and width are multiples of the patch size, up to
                `pos_embed_max_size` patches.
            text: hidden states of the text encoders. They are cast to the dtype of `latent`.
                Padding is attended to.
            pooled: one embedding of the whole prompt, [b, `pooled_projection_dim`], cast to the
                dtype of `latent`.
            timestep: `1000 * sigma` of each latent, in [0, 1000].
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, in the dtype of `latent`: out is `config.num_out_channels`.

        Raises:
            ValueError: height or width is not a whole number of patches or exceeds the stored
                positions, or the size of the mesh axis `sequence` does not divide the number of
                image tokens.
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        _, height, width, _ = latent.shape
        dtype = latent.dtype
        patch = self.config.patch_size
        condition = silu_rounding_once(self.time_text_embed(timestep, pooled.astype(dtype)))
        text = self.context_embedder(text.astype(dtype))

        def run(condition, image, _, text):
            def apply(block, streams):
                return block(*streams, condition, fp8_attention=fp8_attention)

            streams: Any = (text, image)
            # by the index of the first layer: the dict itself is ordered alphabetically
            for key in sorted(self.transformer_blocks, key=lambda key: int(key.split("-")[0])):
                blocks = self.transformer_blocks[key]
                streams = scan_blocks(
                    blocks, apply, streams, gradient_checkpointing=self.gradient_checkpointing
                )
            text, image = streams
            return image, text

        image, _ = shard_tokens(run, condition, self.pos_embed(latent), text=text)
        scale, shift = self.norm_out.vectors(condition)
        x = self.proj_out(self.norm_out(image, shift, scale))
        return unpatchify(x, height // patch, width // patch, patch)


def _stacks(config: SD3Config, rngs: nnx.Rngs) -> dict[str, JointBlock]:
    """Builds the blocks: one stack for each run of consecutive blocks of one kind.

    The kinds are: blocks in `dual_attention_layers`, and all others. The last block of the network,
    of either kind, is a stack of its own, because its text stream ends.

    Args:
        config: configuration of the network.
        rngs: random number generators of the initial parameters.

    Returns:
        The stacks in order, under the indices of their first and last block, such as "0-12", or
        "23-23" for one block. Each is one `JointBlock` whose parameters have a leading axis of
        blocks, even for one block.
    """

    def make_block(rngs: nnx.Rngs, dual: bool, last: bool) -> JointBlock:
        return JointBlock(
            config.width,
            config.attention_head_dim,
            modulate_rounding_once,
            normed=config.qk_norm is not None,
            dual=dual,
            last=last,
            rngs=rngs,
        )

    def kind(layer: int) -> tuple[bool, bool]:
        return layer in config.dual_attention_layers, layer == config.num_layers - 1

    stacks = {}
    for (dual, last), run in itertools.groupby(range(config.num_layers), kind):
        layers = list(run)
        make = functools.partial(make_block, dual=dual, last=last)
        stacks[f"{layers[0]}-{layers[-1]}"] = stack(len(layers), make, rngs, first=layers[0])
    return stacks


class PatchEmbed(nnx.Module):
    """Maps patches of latents to tokens, and adds positions.

    Positions are stored for a square of `pos_embed_max_size` patches on each side; smaller latents
    use its center. The square is a parameter [1, patches, features] because checkpoints hold it:
    LoRA adapters leave it as it is, but training of all parameters changes it.

    Args:
        config: configuration of the network (`SD3Config`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: SD3Config, *, rngs: nnx.Rngs):
        self.side = config.pos_embed_max_size
        self.proj = PatchProjection(config.patch_size, config.in_channels, config.width, rngs=rngs)
        spacing = config.sample_size // config.patch_size / self.side
        coordinates = np.arange(self.side) * spacing
        positions = sincos_positions(config.width, coordinates, coordinates)
        self.pos_embed = param(positions.reshape(1, -1, config.width), "pos_embed")

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Returns the tokens of latents with their positions, row by row. n is the number of
        patches.

        Args:
            latent: latents. Height and width are multiples of the patch size.

        Returns:
            The tokens, in the dtype of `latent`.

        Raises:
            ValueError: height or width is not a whole number of patches, or exceeds the stored
                positions.
        """
        _, height, width, _ = latent.shape
        patch = self.proj.patch
        side = self.side
        rows = height // patch
        columns = width // patch
        if height % patch or width % patch or max(rows, columns) > side:
            raise ValueError(
                f"SD3Transformer2DModel: latents of {height} x {width}; accepted: multiples of "
                f"{patch} up to {patch * side}"
            )
        top = (side - rows) // 2
        left = (side - columns) // 2
        square = self.pos_embed.get_value().reshape(side, side, -1)
        x = self.proj(latent)
        x = x + square[top : top + rows, left : left + columns].astype(x.dtype)
        return x.reshape(x.shape[0], rows * columns, -1)
