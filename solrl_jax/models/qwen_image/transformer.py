"""Qwen-Image's diffusion transformer (arXiv 2508.02324, section 2.4): `QwenImageTransformer2DModel`
of diffusers in Flax NNX.

A multimodal diffusion transformer (arXiv 2403.03206, section 4) in which text and image are two
streams in every block. Rotary positions count rows and columns from the middle of the image, and
the text follows on the diagonal. Only the timestep modulates the blocks. The network predicts the
velocity `v = noise - x0` of a flow.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.ada_layer_norm import EPS, AdaLayerNorm
from solrl_jax.models.layers.embeddings import TimestepMLP
from solrl_jax.models.layers.feed_forward import FeedForward
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
from solrl_jax.models.layers.rotary import Rotation, rotation_table
from solrl_jax.models.layers.softmax_attention import JointAttention, attend, project_qkv
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.sequence_parallel import shard_tokens

PATCH = 2  # the side of the square of latent pixels that one token represents
THETA = 10000.0  # the base of the rotary frequencies
POSITIONS = 4096  # the released code has rotary angles for this many, in each direction


@dataclasses.dataclass(frozen=True)
class QwenImageConfig(TransformerConfig):
    """The configuration of Qwen-Image's transformer: the fields of a published
    `transformer/config.json`.

    The defaults are those of diffusers. A token has `attention_head_dim * num_attention_heads`
    features. The constructor raises ValueError for a value that is not supported; so does `read`
    for an unknown field (`pooled_projection_dim` is ignored).

    Attributes:
        patch_size: 2, the only supported value: side of a patch in latent pixels.
        in_channels: number of input features of an image token: four times the channels of a
            latent.
        out_channels: number of channels of the output latents; None: `in_channels`, so four times
            as many as the input latents have.
        num_layers: number of blocks.
        attention_head_dim: number of features of one attention head.
        num_attention_heads: number of attention heads.
        joint_attention_dim: number of features of a text token, as the text encoder returns it.
        guidance_embeds: whether the network takes the guidance scale as an input; only False is
            supported.
        axes_dims_rope: rotary embedding: how many features of a head are rotated by each of the
            three coordinates of a position. Positive even numbers with the sum
            `attention_head_dim`.
        zero_cond_t: only False is supported (a feature of Qwen-Image-Edit-2511).
        use_additional_t_cond: only False is supported (a feature of layered images).
        use_layer3d_rope: only False is supported (a feature of layered images).
    """

    network = "QwenImageTransformer2DModel"
    # A field of the released files that diffusers ignores: there are no pooled text embeddings.
    ignored_fields = ("pooled_projection_dim",)

    patch_size: int = PATCH
    in_channels: int = 64
    out_channels: int | None = 16
    num_layers: int = 60
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 3584
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False

    def check(self) -> None:
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `patch_size` is not 2; `in_channels` is not a multiple of 4;
                `guidance_embeds`, `zero_cond_t`, `use_additional_t_cond` or `use_layer3d_rope` is
                true; or `axes_dims_rope` is not three positive even numbers whose sum is
                `attention_head_dim`. The message names the field.
        """
        self.require(self.patch_size == PATCH, "patch_size", str(PATCH))
        self.require(
            self.in_channels % PATCH**2 == 0, "in_channels", f"a positive multiple of {PATCH**2}"
        )
        for name in (
            "guidance_embeds",
            "zero_cond_t",
            "use_additional_t_cond",
            "use_layer3d_rope",
        ):
            self.require(not getattr(self, name), name, "False")
        axes = self.axes_dims_rope
        are_even = all(dim > 0 and dim % 2 == 0 for dim in axes)
        self.require(
            len(axes) == 3 and are_even and sum(axes) == self.attention_head_dim,
            "axes_dims_rope",
            "three positive even numbers whose sum is "
            f"attention_head_dim={self.attention_head_dim}",
        )


class QwenImageTransformer2DModel(nnx.Module):
    """Qwen-Image's network, which predicts the velocity `noise - x0` of noisy latents.

    Args:
        config: configuration of the network (`QwenImageConfig`): its widths, heads, blocks and
            rotary axes.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError in the call.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self, config: QwenImageConfig, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs
    ):
        d = config.width
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.time_text_embed = nnx.Dict(timestep_embedder=TimestepMLP(d, rngs=rngs))
        self.txt_norm = RMSNorm(config.joint_attention_dim, eps=EPS)
        self.img_in = Linear(config.in_channels, d, rngs=rngs)
        self.txt_in = Linear(config.joint_attention_dim, d, rngs=rngs)
        self.transformer_blocks = stack(
            config.num_layers,
            lambda rngs: QwenImageBlock(d, config.attention_head_dim, rngs=rngs),
            rngs,
        )
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, PATCH**2 * config.num_out_channels, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w out"]:
        """Predicts the velocity `noise - x0` at `latent`.

        Args:
            latent: noisy latents of even height and width: c is `in_channels / 4`.
            text: hidden states of Qwen2.5-VL. They are cast to the dtype of `latent`.
            mask: true on tokens, false on the padding after them, which is not attended to.
            timestep: `1000 * sigma` of each latent, in [0, 1000].

        Returns:
            The velocity, in the dtype of `latent`, with `config.num_out_channels` channels.

        Raises:
            ValueError: height or width is odd; half of the larger side in image tokens, rounded
                down, plus the number of text tokens, padding included, exceeds 4096 (`POSITIONS`);
                or the size of the mesh axis `sequence` does not divide the number of image tokens.
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        batch, height, width, _ = latent.shape
        dtype = latent.dtype
        if height % PATCH or width % PATCH:
            raise ValueError(
                f"{self.config.network}: latents of {height} x {width}; accepted: even sizes"
            )
        rows = height // PATCH
        columns = width // PATCH
        length = text.shape[1]
        if max(rows // 2, columns // 2) + length > POSITIONS:
            raise ValueError(
                f"{self.config.network}: latents of {height} x {width} with {length} text tokens; "
                f"accepted: half of the larger side in tokens plus the text up to {POSITIONS}"
            )
        # In float32, because the condition modulates every token of every block, so that its
        # rounding error would not average out.
        embedded = self.time_text_embed.timestep_embedder(timestep, jnp.float32)
        condition = jax.nn.silu(embedded).astype(dtype)
        rotation = rotary_table(rows, columns, length, self.config.axes_dims_rope)
        key_lengths = rows * columns + mask.sum(-1, dtype=jnp.int32)

        squares = space_to_depth(latent)
        image = self.img_in(squares.reshape(batch, rows * columns, -1))
        text = self.txt_in(self.txt_norm(text.astype(dtype)))

        def run(shared, image, rotation, text):
            condition, key_lengths = shared

            def apply(block, streams):
                return block(*streams, condition, rotation, key_lengths)

            return scan_blocks(
                self.transformer_blocks,
                apply,
                (image, text),
                gradient_checkpointing=self.gradient_checkpointing,
            )

        image, _ = shard_tokens(run, (condition, key_lengths), image, rotation, text)
        scale, shift = self.norm_out.vectors(condition)
        x = self.proj_out(self.norm_out(image, shift, scale))
        return depth_to_space(x.reshape(batch, rows, columns, -1))


class QwenImageBlock(nnx.Module):
    """A block with two streams, text and image: joint attention, then an MLP for each stream.

    Args:
        d: number of features of the tokens, a multiple of `head_dim`.
        head_dim: number of features of one attention head.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, d: int, head_dim: int, *, rngs: nnx.Rngs):
        # a list in PyTorch, whose index 0 is the SiLU
        self.img_mod, self.txt_mod = (
            nnx.Dict({"1": Linear(d, 6 * d, rngs=rngs)}) for _ in range(2)
        )
        self.img_norm1, self.img_norm2, self.txt_norm1, self.txt_norm2 = (
            LayerNorm(d, eps=EPS, affine=False) for _ in range(4)
        )
        self.attn = MaskedJointAttention(d, head_dim, normed=True, rngs=rngs)
        self.img_mlp, self.txt_mlp = (FeedForward(d, rngs=rngs) for _ in range(2))

    def __call__(
        self,
        image: Float[Array, "b n d"],
        text: Float[Array, "b l d"],
        condition: Float[Array, "b d"],
        rotation: Rotation,
        key_lengths: Int[Array, " b"],
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b l d"]]:
        """Applies joint attention of image and text, then an MLP to each stream.

        Attention and MLP read modulated norms; their results, times gates, are added to the
        streams.

        Args:
            image: the image tokens; under sequence parallelism (`shard_tokens`), those of this
                device.
            text: the text tokens, padding last. Every device has all of them.
            condition: the embedded timestep after its SiLU, from which the block computes shift,
                scale and gate of attention and MLP for each stream.
            rotation: cosines and sines of the rotary angles of the n + l tokens that this device
                has, image first: two float32 arrays [b or 1, n + l, head_dim / 2].
            key_lengths: the number of leading tokens of the sequence (image, then text) that each
                sample attends to: the image tokens of all devices and the text tokens without
                padding.

        Returns:
            The image tokens and the text tokens after the block, each with the shape and dtype of
            its input. Text tokens that are padding have no meaning.
        """

        def split(modulation: nnx.Dict) -> list[Array]:
            return jnp.split(modulation["1"](condition)[:, None], 6, axis=-1)

        shift, scale, gate, shift_ff, scale_ff, gate_ff = split(self.img_mod)
        text_vectors = split(self.txt_mod)
        text_shift, text_scale, text_gate, text_shift_ff, text_scale_ff, text_gate_ff = text_vectors

        attended, text_attended = self.attn.image_first(
            self.img_norm1.modulated(image, shift, scale),
            self.txt_norm1.modulated(text, text_shift, text_scale),
            rotation,
            key_lengths,
        )
        image = image + gate * attended
        text = text + text_gate * text_attended
        hidden = self.img_norm2.modulated(image, shift_ff, scale_ff)
        image = image + gate_ff * self.img_mlp(hidden)
        hidden = self.txt_norm2.modulated(text, text_shift_ff, text_scale_ff)
        return image, text + text_gate_ff * self.txt_mlp(hidden)


class MaskedJointAttention(JointAttention):
    """Softmax attention over image and text as one sequence, in which the padding of the text is
    not attended to.

    Call the method `image_first`, not the module itself, which attends to padding. The image comes
    first, so that the padding is at the end of the sequence.

    Args:
        d: number of features of the tokens, and of all heads together, a multiple of `head_dim`.
        head_dim: number of features of one head.
        normed: whether each head of queries and keys is normalized (RMSNorm).
        bias: whether the linear layers, the output layers included, have biases; True by default.
        last: must be False, the default. True would leave out the output layer of the text, and
            `image_first` would raise AssertionError.
        rngs: random number generators for the initial weights.
    """

    def image_first(
        self,
        image: Activation,
        text: Activation,
        rotation: Rotation,
        key_lengths: Int[Array, " b"],
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b l d"]]:
        """Applies softmax attention over image and text as one sequence, and a separate output
        layer for each.

        Args:
            image: the image tokens [b, n, d], an array or a lazy activation (one that is computed
                when it is read). Under sequence parallelism (`shard_tokens`), they are those of
                this device.
            text: the text tokens [b, l, d], padding last, likewise an array or a lazy activation.
                Every device has all of them.
            rotation: cosines and sines of the rotary angles of the n + l tokens that this device
                has, image first: two float32 arrays [b or 1, n + l, head_dim / 2].
            key_lengths: the number of leading tokens of the sequence (image, then text) that each
                sample attends to: the image tokens of all devices and the text tokens without
                padding.

        Returns:
            The outputs for the image and for the text, each in the dtype of its stream. The inputs
            are not added.
        """
        assert self.to_add_out is not None, "every block has an output for the text"
        image = as_lazy(image)
        text = as_lazy(text)
        count = image.num_rows
        text_qkv = project_qkv(
            text,
            self.add_q_proj,
            self.add_k_proj,
            self.add_v_proj,
            self.norm_added_q,
            self.norm_added_k,
            rotation,
            start=count,
        )
        image_qkv = self.project(image, rotation)
        out = attend(self.head_dim, image_qkv, text_qkv, key_lengths=key_lengths, replicated=1)
        image_rows = LazyActivation.from_array(out, (0, count), image.dtype)
        text_rows = LazyActivation.from_array(out, (count, out.shape[1]), text.dtype)
        return self.to_out[0](image_rows), self.to_add_out(text_rows)


def rotary_table(rows: int, columns: int, length: int, axes_dims: tuple[int, ...]) -> Rotation:
    """Returns the cosines and sines of the rotary angles of the image tokens, row by row, then of
    the text tokens.

    A position has three coordinates. Image tokens have (0, row, column), counted from the middle of
    the image: rows run from `-ceil(rows / 2)` to `floor(rows / 2) - 1`, and columns likewise. Text
    token i, counted from 0, has `max(rows // 2, columns // 2) + i` for all three.

    Args:
        rows: number of rows of image tokens.
        columns: number of columns of image tokens.
        length: number of text tokens, padding included.
        axes_dims: how many features of a head are rotated by each of the three coordinates: even
            numbers, whose sum is `head_dim`.

    Returns:
        (cosines, sines) of one angle per pair of neighboring features of a head: two float32 arrays
        [1, rows * columns + length, head_dim / 2]. For pair i, from 0, of the `dim` features of a
        coordinate, the angle is the coordinate times `10000 ** (-2 i / dim)`.
    """
    count = rows * columns
    positions = np.zeros((3, count + length))
    row, column = np.indices((rows, columns)).reshape(2, -1)
    positions[1, :count] = row - (rows - rows // 2)
    positions[2, :count] = column - (columns - columns // 2)
    positions[:, count:] = max(rows // 2, columns // 2) + np.arange(length)
    return rotation_table(positions, axes_dims, THETA)
