"""Z-Image's diffusion transformer (arXiv 2511.22699): `ZImageTransformer2DModel` of diffusers in
Flax NNX.

A transformer with one stream: image tokens, then text tokens, with rotary positions along three
axes. Two small stacks refine image and text separately before they meet. The timestep modulates the
scales and gates of every block except those that refine the text. Both sequences are padded to a
multiple of 32 tokens with a learned token, which takes part in the attention.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.embeddings import patchify, sinusoid, unpatchify
from solrl_jax.models.layers.feed_forward import GatedFeedForward
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.rotary import Rotation
from solrl_jax.models.layers.softmax_attention import SelfAttention
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig
from solrl_jax.quant.sequence_parallel import shard_tokens

PATCH = 2  # the side of the square of latent pixels that one token represents
MULTIPLE = 32  # sequences are padded to multiples of this many tokens
MAX_TIME_WIDTH = 256  # the largest number of features of the embedded timestep
TIME_HIDDEN = 1024  # the number of hidden features of the timestep's MLP
HEAD_EPS = 1e-5  # of the norms of queries and keys
FINAL_EPS = 1e-6  # of the last norm


@dataclasses.dataclass(frozen=True)
class ZImageConfig(ReleasedConfig):
    """The configuration of Z-Image's transformer: the fields of a published
    `transformer/config.json`.

    The defaults are those of diffusers. The constructor raises ValueError for a value that is not
    supported; so does `read` for an unknown field.

    Attributes:
        all_patch_size: (2,), the only supported value: side of a patch in latent pixels.
        all_f_patch_size: (1,), the only supported value (the patch size along time).
        in_channels: number of channels of the latents.
        dim: number of features of a token, a multiple of `n_heads`.
        n_layers: number of blocks that process image and text together.
        n_refiner_layers: number of blocks that process the image alone, before those of `n_layers`.
            The same number of further blocks process the text alone.
        n_heads: number of attention heads.
        n_kv_heads: number of heads of keys and values. Must equal `n_heads`.
        norm_eps: epsilon of the norms of the blocks (except those of queries and keys) and of the
            norm before the linear layer that maps the text to `dim` features.
        qk_norm: whether each head of queries and keys is normalized (RMSNorm with epsilon 1e-5).
        cap_feat_dim: number of features of a text token, as the text encoder returns it.
        siglip_feat_dim: number of features of images in the prompt; only None (no such images) is
            supported.
        rope_theta: base of the rotary frequencies.
        t_scale: the network embeds the number `t_scale * (1 - sigma)`.
        axes_dims: rotary embedding: how many features of a head are rotated by each of the three
            coordinates of a position. Positive even numbers with the sum `dim / n_heads`.
        axes_lens: number of values that each of the three coordinates of a position can take. The
            first one limits the text (`max_text_tokens`), and is 34 or more: at least 32 text
            tokens, and two further positions. The others are the greatest numbers of rows and of
            columns of image tokens.
    """

    network = "ZImageTransformer2DModel"

    all_patch_size: tuple[int, ...] = (PATCH,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = 30
    n_refiner_layers: int = 2
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = 1e-5
    qk_norm: bool = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: int | None = None
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def check(self) -> None:
        """Rejects configurations that this port does not implement.

        Raises:
            ValueError: `all_patch_size` is not (2,), `all_f_patch_size` is not (1,), or
                `siglip_feat_dim` is not None; `n_heads` does not divide `dim`; `n_kv_heads` is not
                `n_heads`; `axes_dims` is not three positive even numbers whose sum is `dim /
                n_heads`; or `axes_lens` is not three positive integers, the first one 34 or more
                (32 text tokens and two further positions). The message names the field.
        """
        self.require(self.all_patch_size == (PATCH,), "all_patch_size", f"[{PATCH}]")
        self.require(self.all_f_patch_size == (1,), "all_f_patch_size", "[1]")
        self.require(self.dim % self.n_heads == 0, "n_heads", f"a divisor of dim={self.dim}")
        self.require(self.n_kv_heads == self.n_heads, "n_kv_heads", f"n_heads={self.n_heads}")
        self.require(
            self.siglip_feat_dim is None,
            "siglip_feat_dim",
            "None (images as part of the prompt are not ported)",
        )
        axes = self.axes_dims
        are_even = all(dim > 0 and dim % 2 == 0 for dim in axes)
        self.require(
            len(axes) == 3 and are_even and sum(axes) == self.head_dim,
            "axes_dims",
            f"three positive even numbers whose sum is dim / n_heads={self.head_dim}",
        )
        self.require(
            len(self.axes_lens) == 3 and min(self.axes_lens) > 0 and self.max_text_tokens > 0,
            "axes_lens",
            f"three positive integers, the first one {MULTIPLE + 2} or more",
        )

    @property
    def head_dim(self) -> int:
        """Number of features of one attention head, `dim / n_heads`."""
        return self.dim // self.n_heads

    @property
    def time_width(self) -> int:
        """Number of features of the embedded timestep: `dim` or 256, whichever is smaller."""
        return min(self.dim, MAX_TIME_WIDTH)

    @property
    def max_text_tokens(self) -> int:
        """Greatest number of text tokens: the largest multiple of 32 that is at most `axes_lens[0]
        - 2`.

        Two positions are reserved: text is counted from 1, and the image has the position after the
        text.
        """
        return (self.axes_lens[0] - 2) // MULTIPLE * MULTIPLE


class ZImageTransformer2DModel(nnx.Module):
    """Z-Image's network, which predicts the velocity `noise - x0` of noisy latents.

    Args:
        config: configuration of the network (`ZImageConfig`): its widths, heads, blocks and rotary
            axes.
        gradient_checkpointing: what the backward pass recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError in the call.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self, config: ZImageConfig, *, gradient_checkpointing: str = "none", rngs: nnx.Rngs
    ):
        d = config.dim
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        features = PATCH**2 * config.in_channels

        def modulated_block(rngs: nnx.Rngs) -> Block:
            return Block(config, modulated=True, rngs=rngs)

        def plain_block(rngs: nnx.Rngs) -> Block:
            return Block(config, modulated=False, rngs=rngs)

        self.all_x_embedder = nnx.Dict({f"{PATCH}-1": Linear(features, d, rngs=rngs)})
        self.noise_refiner = stack(config.n_refiner_layers, modulated_block, rngs)
        self.context_refiner = stack(config.n_refiner_layers, plain_block, rngs)
        mlp = {
            "0": Linear(MAX_TIME_WIDTH, TIME_HIDDEN, rngs=rngs),
            "2": Linear(TIME_HIDDEN, config.time_width, rngs=rngs),
        }
        self.t_embedder = nnx.Dict(mlp=nnx.Dict(mlp))
        self.cap_embedder = nnx.List(
            [
                RMSNorm(config.cap_feat_dim, eps=config.norm_eps),
                Linear(config.cap_feat_dim, d, rngs=rngs),
            ]
        )
        self.x_pad_token = param(jnp.zeros((1, d)), "x_pad_token")
        self.cap_pad_token = param(jnp.zeros((1, d)), "cap_pad_token")
        self.layers = stack(config.n_layers, modulated_block, rngs)
        final = FinalLayer(d, features, config.time_width, rngs=rngs)
        self.all_final_layer = nnx.Dict({f"{PATCH}-1": final})

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l e"],
        mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """Predicts the velocity `noise - x0` at `latent`.

        The timestep and the sign of the velocity follow the convention of this package. The
        released network takes `config.t_scale * (1 - sigma)` and predicts `x0 - noise`; both are
        converted here. As in the released network, the sequence is the image, then the text. The
        image and each sample's text are padded to multiples of 32 tokens with learned padding
        tokens, which are attended to. Further padding of the text is not attended to.

        Args:
            latent: noisy latents. Height and width are even.
            text: hidden states of Qwen3, with `config.cap_feat_dim` features. They are cast to the
                dtype of `latent`.
            mask: true on tokens, false on the padding after them. Each sample has at least one
                token.
            timestep: `1000 * sigma` of each latent, in [0, 1000].

        Returns:
            The velocity, of the shape and dtype of `latent`.

        Raises:
            ValueError: height or width is odd; the image has more rows or columns of tokens than
                `config.axes_lens`; l exceeds `config.max_text_tokens`; or the size of the mesh axis
                `sequence` does not divide the number of image tokens, or that of image and text
                tokens together (image and text each padded to a multiple of 32).
            KeyError: `gradient_checkpointing` is not "none", "matmuls" or "blocks".
        """
        batch, height, width, _ = latent.shape
        dtype = latent.dtype
        config = self.config
        rows = height // PATCH
        columns = width // PATCH
        num_image_tokens = rows * columns
        max_rows, max_columns = config.axes_lens[1:]
        if height % PATCH or width % PATCH or rows > max_rows or columns > max_columns:
            raise ValueError(
                f"{config.network}: latents of {height} x {width}; accepted: even sizes up to "
                f"{PATCH * max_rows} x {PATCH * max_columns}"
            )
        if text.shape[1] > config.max_text_tokens:
            raise ValueError(
                f"{config.network}: text of {text.shape[1]} tokens; accepted: up to "
                f"{config.max_text_tokens}"
            )
        # the number of tokens of each text, padded to a multiple of 32
        text_lengths = -(-mask.sum(-1, dtype=jnp.int32) // MULTIPLE) * MULTIPLE
        image_rotation, text_rotation = rotary_tables(
            config, rows, columns, text.shape[1], text_lengths
        )
        condition = self._condition(timestep).astype(dtype)

        def refine_image(condition, x, rotation, _):
            def apply(block, x):
                return block(x, rotation, None, condition)

            return scan_blocks(
                self.noise_refiner, apply, x, gradient_checkpointing=self.gradient_checkpointing
            ), None

        x = patchify(latent, PATCH).reshape(batch, num_image_tokens, -1)
        x = self.all_x_embedder[f"{PATCH}-1"](x)
        padding = _repeat_token(self.x_pad_token, x, -x.shape[1] % MULTIPLE)
        x = jnp.concatenate([x, padding], axis=1)
        x, _ = shard_tokens(refine_image, condition, x, image_rotation)

        def refine_text(block, text):
            return block(text, text_rotation, text_lengths)

        norm, linear = self.cap_embedder
        text = linear(norm(text.astype(dtype)))
        pad_tokens = _repeat_token(self.cap_pad_token, text, text.shape[1])
        text = jnp.where(mask[..., None], text, pad_tokens)
        padding = _repeat_token(self.cap_pad_token, text, -text.shape[1] % MULTIPLE)
        text = jnp.concatenate([text, padding], axis=1)
        text = scan_blocks(
            self.context_refiner,
            refine_text,
            text,
            gradient_checkpointing=self.gradient_checkpointing,
        )

        lengths = x.shape[1] + text_lengths
        image_cos, image_sin = image_rotation
        text_cos, text_sin = text_rotation
        rotation = (
            jnp.concatenate([image_cos, text_cos], axis=1),
            jnp.concatenate([image_sin, text_sin], axis=1),
        )

        def run(shared, x, rotation, _):
            lengths, condition = shared

            def apply(block, x):
                return block(x, rotation, lengths, condition)

            return scan_blocks(
                self.layers, apply, x, gradient_checkpointing=self.gradient_checkpointing
            ), None

        x = jnp.concatenate([x, text], axis=1)
        x, _ = shard_tokens(run, (lengths, condition), x, rotation)
        out = self.all_final_layer[f"{PATCH}-1"](x[:, :num_image_tokens], condition)
        return -unpatchify(out, rows, columns, PATCH)

    def _condition(self, timestep: Float[Array, " b"]) -> Float[Array, "b time"]:
        """Embeds the timestep: 256 sinusoids of `t_scale * (1 - sigma)`, then an MLP with SiLU and
        1024 hidden features, in float32.

        Args:
            timestep: `1000 * sigma` of each sample.

        Returns:
            The embedding [b, `config.time_width`], float32.
        """
        time = (1000 - timestep.astype(jnp.float32)) * (self.config.t_scale / 1000)
        mlp = self.t_embedder.mlp
        return mlp["2"](jax.nn.silu(mlp["0"](sinusoid(time))))


def _repeat_token(
    token: nnx.Param, like: Float[Array, "b s d"], count: int
) -> Float[Array, "b {count} d"]:
    """Returns copies of a learned token for every sample.

    Args:
        token: the token, [1, d].
        like: activations whose batch size and dtype the result gets.
        count: number of copies per sample, possibly 0.

    Returns:
        The copies [b, count, d].
    """
    batch, _, d = like.shape
    return jnp.broadcast_to(token.get_value().astype(like.dtype), (batch, count, d))


class Block(nnx.Module):
    """Attention, then a SiLU-gated MLP. Each has an RMSNorm before and one after it, and its result
    is added to its input.

    The hidden width of the MLP is 8/3 times `dim`, rounded down.

    Args:
        config: configuration of the network (`ZImageConfig`).
        modulated: whether the timestep modulates the block: a linear layer maps it to scale and
            gate of the attention, then of the MLP. The norms before attention and MLP are
            multiplied by `1 + scale`, and those after them by `tanh(gate)`.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: ZImageConfig, *, modulated: bool, rngs: nnx.Rngs):
        d = config.dim
        self.attention = SelfAttention(
            d, config.head_dim, normed=config.qk_norm, bias=False, eps=HEAD_EPS, rngs=rngs
        )
        self.feed_forward = GatedFeedForward(d, int(d / 3 * 8), rngs=rngs)
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (
            RMSNorm(d, eps=config.norm_eps) for _ in range(4)
        )
        modulation = nnx.List([Linear(config.time_width, 4 * d, rngs=rngs)]) if modulated else None
        self.adaLN_modulation = modulation

    def __call__(
        self,
        x: Float[Array, "b s d"],
        rotation: Rotation,
        key_lengths: Int[Array, " b"] | None,
        condition: Float[Array, "b time"] | None = None,
    ) -> Float[Array, "b s d"]:
        """Applies attention, then a gated MLP. Each reads a norm of its input; its normalized
        result is added to the input. With `condition`, the norm before is multiplied by `1 +
        scale`, and the normalized result by `tanh(gate)`.

        Args:
            x: the tokens; under sequence parallelism (`shard_tokens`), those of this device, which
                attend to those of all devices.
            rotation: cosines and sines of the rotary angles of the s positions: two float32 arrays
                [b or 1, s, head_dim / 2].
            key_lengths: the number of leading tokens (of all devices) that each sample's tokens
                attend to, at least 1; None: all. The tokens after them are processed, too.
            condition: the embedded timestep, in the dtype of `x`, which a linear layer (without
                SiLU before it) maps to scales and gates. None: no modulation, even if the block is
                `modulated`. A block that is not `modulated` ignores it.

        Returns:
            The tokens after the block, of the shape and dtype of `x`.
        """
        if self.adaLN_modulation is None or condition is None:
            attended = self.attention(self.attention_norm1.scaled(x), rotation, key_lengths)
            x = x + self.attention_norm2(attended)
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1.scaled(x)))
        vectors = self.adaLN_modulation[0](condition)[:, None]
        scale, gate, scale_ff, gate_ff = jnp.split(vectors, 4, axis=-1)
        h = self.attention_norm1.scaled(x, 1 + scale)
        attended = self.attention(h, rotation, key_lengths)
        x = x + jnp.tanh(gate) * self.attention_norm2(attended)
        h = self.ffn_norm1.scaled(x, 1 + scale_ff)
        return x + jnp.tanh(gate_ff) * self.ffn_norm2(self.feed_forward(h))


class FinalLayer(nnx.Module):
    """The output layer: a layer norm without weights (epsilon 1e-6), whose result is multiplied by
    `1 + linear(silu(embedded timestep))`, and a linear layer to the features of a patch.

    Args:
        d: number of features of the tokens.
        features: number of features of a patch.
        time_width: number of features of the embedded timestep.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, d: int, features: int, time_width: int, *, rngs: nnx.Rngs):
        self.norm_final = LayerNorm(d, eps=FINAL_EPS, affine=False)
        self.linear = Linear(d, features, rngs=rngs)
        self.adaLN_modulation = nnx.Dict({"1": Linear(time_width, d, rngs=rngs)})

    def __call__(
        self, x: Float[Array, "b n d"], condition: Float[Array, "b time"]
    ) -> Float[Array, "b n features"]:
        """Normalizes tokens, scales them by `1 + linear(silu(condition))`, and maps them to the
        features of a patch.

        Args:
            x: the image tokens.
            condition: the embedded timestep, before its SiLU, in the dtype of `x`.

        Returns:
            One vector per token, in the dtype of `x`.
        """
        scale = 1 + self.adaLN_modulation["1"](jax.nn.silu(condition))[:, None]
        return self.linear(self.norm_final.scaled(x, scale))


def rotary_tables(
    config: ZImageConfig, rows: int, columns: int, length: int, text_lengths: Int[Array, " b"]
) -> tuple[Rotation, Rotation]:
    """Returns the cosines and sines of the rotary angles of the image tokens and of the text
    tokens.

    Both sequences include their padding to multiples of 32. A position has three coordinates: (i,
    0, 0) for text token i, counted from 1, padding included; (p + 1, row, column) for an image
    token, where p is the sample's entry of `text_lengths` and rows and columns count from 0; and
    (0, 0, 0) for the padding of the image.

    Args:
        config: configuration of the network.
        rows: number of rows of image tokens.
        columns: number of columns of image tokens.
        length: number of text tokens in the batch's arrays, before padding to a multiple of 32.
        text_lengths: number of text tokens of each sample, rounded up to a multiple of 32.

    Returns:
        Two pairs (cosines, sines), first for the image, then for the text: float32 arrays [b,
        positions, head_dim / 2].
    """

    def waves(axis: int, coordinates: np.ndarray) -> np.ndarray:
        """Returns cosines and sines [2, positions, features / 2] of the angles along one axis.

        Angles are rounded to float32 before their cosines and sines are taken, as in the released
        code.
        """
        dim = config.axes_dims[axis]
        frequencies = config.rope_theta ** (-np.arange(0, dim, 2) / dim)
        angle = np.outer(coordinates, frequencies).astype(np.float32).astype(np.float64)
        return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)

    def zero_waves(axes: tuple[int, ...], count: int) -> np.ndarray:
        return np.concatenate([waves(axis, np.zeros(count)) for axis in axes], axis=-1)

    batch = len(text_lengths)

    def per_sample(x: Array | np.ndarray, *positions: int) -> Array:
        return jnp.broadcast_to(x, (2, batch, *positions, x.shape[-1]))

    length = length + -length % MULTIPLE
    text_index = waves(0, np.arange(1, length + 1))
    text_waves = np.concatenate([text_index, zero_waves((1, 2), length)], axis=-1)

    count = rows * columns
    padding = -count % MULTIPLE
    row, column = np.indices((rows, columns))
    within_image = np.concatenate([waves(1, row.ravel()), waves(2, column.ravel())], axis=-1)
    after_text = jnp.asarray(waves(0, np.arange(length + 2)))[:, text_lengths + 1]
    image = jnp.concatenate(
        [per_sample(after_text[:, :, None], count), per_sample(within_image[:, None], count)],
        axis=-1,
    )
    zeros = per_sample(zero_waves((0, 1, 2), padding)[:, None], padding)
    image = jnp.concatenate([image, zeros], axis=2)
    text = per_sample(text_waves[:, None], length)
    return (image[0], image[1]), (text[0], text[1])
