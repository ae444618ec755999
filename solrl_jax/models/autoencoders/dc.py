"""DC-AE, the autoencoder of SANA (arXiv 2410.10733; arXiv 2410.10629, section 2.1): diffusers'
`AutoencoderDC` in Flax NNX.

The decoder is a sequence of stages, each at twice the resolution of the one before. With six
stages, one latent pixel becomes 32 x 32 image pixels. The fine stages have residual convolutions.
The coarse stages have linear attention and a gated convolution (EfficientViT, arXiv 2205.14756).
Each change of resolution has a shortcut without parameters, which repeats channels and rearranges
them into pixels, so that the convolution beside it learns only a difference. Only the decoder is
here, because training starts from noise and never encodes an image; `scripts/pretrain/encoders.py`
has the encoder.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.conv import Conv, DepthwiseConv
from solrl_jax.models.layers.feed_forward import GLUMBConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.pixel_shuffle import depth_to_space
from solrl_jax.models.loading.config_file import ReleasedConfig
from solrl_jax.quant import compile_target

NORM_EPS = 1e-5
ATTENTION_EPS = 1e-15
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "relu": jax.nn.relu}
# The configuration fields that have one entry per stage, without their prefix "encoder_" or
# "decoder_".
PER_STAGE = (
    "block_types",
    "block_out_channels",
    "layers_per_block",
    "qkv_multiscales",
    "norm_types",
    "act_fns",
)
# The accepted values of configuration fields, without the prefix "encoder_" or "decoder_".
ACCEPTED = {
    "block_types": ("ResBlock", "EfficientViTBlock"),
    "downsample_block_type": ("Conv", "pixel_unshuffle"),
    "upsample_block_type": ("interpolate", "pixel_shuffle"),
    "norm_types": ("rms_norm",),
    "act_fns": tuple(ACTIVATIONS),
    "conv_act_fn": tuple(ACTIVATIONS),
}

Heads = Float[Array, "b n g d"]  # batch, pixels, heads, features


@dataclasses.dataclass(frozen=True)
class AutoencoderDCConfig(ReleasedConfig):
    """The configuration of a DC-AE: the fields of a released `config.json`.

    Only the decoder is built from it. The fields of the encoder (`encoder_...` and
    `downsample_block_type`) are read and checked, but have no other effect, except that
    `encoder_block_out_channels` determines the number of stages. A stage is a group of blocks at
    one resolution. Tuples have one entry per stage, finest first. In the fields that accept both, a
    string in place of a tuple stands for all stages. The constructor raises ValueError for a value
    that is not supported.

    Attributes:
        in_channels: channels of an image, also of a decoded one.
        latent_channels: channels of a latent.
        attention_head_dim: number of features of one attention head, at most the channels of a
            stage of `EfficientViTBlock`s (not checked).
        encoder_block_types: kind of the blocks of each stage of the encoder: "ResBlock" (residual
            convolutions) or "EfficientViTBlock" (attention and a gated convolution).
        decoder_block_types: kind of the blocks of each stage of the decoder: "ResBlock" or
            "EfficientViTBlock".
        encoder_block_out_channels: number of channels of each stage of the encoder.
        decoder_block_out_channels: number of channels of each stage of the decoder. Here and in
            `encoder_block_out_channels`, every entry after the first must be a multiple of 4 and a
            divisor of 4 times the entry before it, and the last entry a multiple of
            `latent_channels`.
        encoder_layers_per_block: number of blocks in each stage of the encoder, 1 or more.
        decoder_layers_per_block: number of blocks in each stage of the decoder, 1 or more.
        encoder_qkv_multiscales: for each stage of the encoder, the kernel sizes (odd numbers) of
            the depthwise convolutions that give its attention additional heads: one group of heads
            per kernel size. (): no additional heads.
        decoder_qkv_multiscales: for each stage of the decoder, the kernel sizes (odd numbers) of
            these convolutions. (): no additional heads.
        upsample_block_type: how the decoder doubles the resolution: "pixel_shuffle" (a convolution
            to four times the channels, which become pixels) or "interpolate" (nearest-neighbor
            upsampling, then a convolution).
        downsample_block_type: how the encoder halves the resolution: "pixel_unshuffle" or "Conv".
        decoder_norm_types: "rms_norm", the only supported value.
        decoder_act_fns: activation of the residual blocks, "silu" or "relu".
        encoder_out_shortcut: whether the encoder's last convolution has a shortcut beside it.
        decoder_in_shortcut: whether the latent, each channel repeated to fit, is added to the
            result of the decoder's first convolution.
        decoder_conv_act_fn: activation before the last convolution, "silu" or "relu".
        scaling_factor: the diffusion model's latents are those of the autoencoder times this
            factor.
    """

    network = "AutoencoderDC"

    in_channels: int = 3
    latent_channels: int = 32
    attention_head_dim: int = 32
    encoder_block_types: str | tuple[str, ...] = "ResBlock"
    decoder_block_types: str | tuple[str, ...] = "ResBlock"
    encoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    decoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    encoder_layers_per_block: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    decoder_layers_per_block: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    encoder_qkv_multiscales: tuple[tuple[int, ...], ...] = ((), (), (), (5,), (5,), (5,))
    decoder_qkv_multiscales: tuple[tuple[int, ...], ...] = ((), (), (), (5,), (5,), (5,))
    upsample_block_type: str = "pixel_shuffle"
    downsample_block_type: str = "pixel_unshuffle"
    decoder_norm_types: str | tuple[str, ...] = "rms_norm"
    decoder_act_fns: str | tuple[str, ...] = "silu"
    encoder_out_shortcut: bool = True
    decoder_in_shortcut: bool = True
    decoder_conv_act_fn: str = "relu"
    scaling_factor: float = 1.0

    def check(self) -> None:
        """Checks the values of the fields.

        A string that stands for all stages is also replaced, in this object, by a tuple that
        repeats it for every stage. `encoder_block_out_channels` determines the number of stages.

        Raises:
            ValueError: If a value is not supported, such as an even kernel size, a stage without
                layers, or a list whose length is not the number of stages; or if the numbers of
                channels of neighboring stages do not fit each other (`_check_widths`). The message
                names the field and the accepted values.
        """
        num_stages = len(self.encoder_block_out_channels)
        self.require(num_stages > 0, "encoder_block_out_channels", "a list with one or more stages")
        for field in dataclasses.fields(self):
            name = field.name
            kind = name.removeprefix("encoder_").removeprefix("decoder_")
            if kind in PER_STAGE:
                value = getattr(self, name)
                if isinstance(value, str):
                    value = (value,) * num_stages
                    object.__setattr__(self, name, value)
                self.require(
                    len(value) == num_stages,
                    name,
                    f"a list of {num_stages}, as encoder_block_out_channels",
                )
            if kind in ACCEPTED:
                self.require_one_of(name, ACCEPTED[kind])
            if kind == "layers_per_block":
                self.require(min(getattr(self, name)) > 0, name, "one layer or more per stage")
            if kind == "qkv_multiscales":
                odd = all(size % 2 for sizes in getattr(self, name) for size in sizes)
                self.require(odd, name, "odd kernel sizes")
            if kind == "block_out_channels":
                self._check_widths(name)

    def _check_widths(self, name: str) -> None:
        """Checks that the number of channels can change between stages without cutting a channel.

        Shortcuts between stages repeat or average whole channels. So each stage but the finest must
        have a number of channels that is a multiple of 4 and divides 4 times the number of the next
        finer stage. The coarsest stage must have a multiple of `latent_channels`.

        Args:
            name: the field to check: "encoder_block_out_channels" or "decoder_block_out_channels".

        Raises:
            ValueError: a number of channels breaks a rule. The message names the field.
        """
        widths = getattr(self, name)
        # Shortcuts average or repeat whole channels, and a pixel shuffle makes a 2 x 2 square from
        # four channels.
        fits = min(widths) > 0 and all(
            4 * fine % coarse == 0 and coarse % 4 == 0 for fine, coarse in pairwise(widths)
        )
        self.require(
            fits and widths[-1] % self.latent_channels == 0,
            name,
            "positive multiples of 4 that divide 4 times the width before, "
            "the last one a multiple of latent_channels",
        )

    @property
    def spatial_compression(self) -> int:
        """Side of the square of image pixels that one latent pixel stands for: 2 to the power of
        the number of stages less 1.
        """
        return 2 ** (len(self.encoder_block_out_channels) - 1)


class UpBlock(nnx.Module):
    """Upsampling by 2 with a 3x3 convolution with a bias, plus a shortcut without parameters.

    Args:
        n_in: input channels, a divisor of `4 * n_out`.
        n_out: output channels.
        shuffle: True: a convolution to `4 * n_out` channels, in the order (channel, row, column) of
            the 2 x 2 pixels that they become. False: nearest-neighbor upsampling, then a
            convolution.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, *, shuffle: bool, rngs: nnx.Rngs):
        self.conv = Conv(n_in, 4 * n_out if shuffle else n_out, 3, rngs=rngs)
        self.repeats = 4 * n_out // n_in
        self.shuffle = shuffle

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b 2*h 2*w n_out"]:
        """Upsamples `x` by the layer's convolution, and adds the shortcut.

        A pixel shuffle follows the convolution if `shuffle` is set; otherwise nearest-neighbor
        upsampling precedes it. The shortcut repeats each channel of `x` `4 * n_out / n_in` times,
        and reads the result in the order (channel, row, column) as 2 x 2 pixels.

        Args:
            x: images with `n_in` channels.

        Returns:
            Images of twice the height and width with `n_out` channels, in the dtype of `x`.
        """
        y = depth_to_space(self.conv(x)) if self.shuffle else self.conv.apply_upsampled(x)
        return y + depth_to_space(x.repeat(self.repeats, axis=-1))


class ResBlock(nnx.Module):
    """Two 3x3 convolutions (the second without a bias) with an activation between them and RMS
    normalization over the channels (with weight and bias) after them, added to the input.

    Args:
        channels: input and output channels.
        activation: name of the activation function, "silu" or "relu".
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, activation: str, rngs: nnx.Rngs):
        self.conv1 = Conv(channels, channels, 3, rngs=rngs)
        self.conv2 = Conv(channels, channels, 3, bias=False, rngs=rngs)
        self.norm = RMSNorm(channels, eps=NORM_EPS, bias=True)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies convolution, activation, convolution and RMS normalization, and adds the result
        to the input.

        Args:
            x: images with the block's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return x + self.norm(self.conv2(self.activation(self.conv1(x))))


class MultiscaleProjection(nnx.Module):
    """Makes the queries, keys and values of an additional group of attention heads, by convolving
    those of the first group.

    It is a depthwise `kernel` x `kernel` convolution, then a 1x1 convolution within each group of
    `size` channels. Both have no bias.

    Args:
        channels: number of channels of queries, keys and values together, a multiple of `size`.
        size: number of features of a head, and of consecutive channels in each group of the 1x1
            convolution.
        kernel: size of the depthwise convolution's kernel, an odd number.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, size: int, kernel: int, *, rngs: nnx.Rngs):
        self.proj_in = DepthwiseConv(channels, kernel, bias=False, rngs=rngs)
        weight = jax.random.normal(rngs.params(), (1, 1, size, channels)) * size**-0.5
        self.proj_out = nnx.Dict(kernel=param(weight, "weight", "conv"))
        self.size = size

    def __call__(self, qkv: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Convolves queries, keys and values.

        Args:
            qkv: queries, keys and values of all heads: c is `channels`, in the order (head; query,
                key or value; feature). The convolution pads the images with zeros.

        Returns:
            The queries, keys and values of the additional heads, with the shape, order of channels
            and dtype of `qkv`.
        """
        x = self.proj_in(qkv).reshape(*qkv.shape[:-1], -1, self.size)
        kernel = self.proj_out.kernel.get_value().reshape(self.size, -1, self.size).astype(x.dtype)
        return jnp.einsum("bhwgi,igo->bhwgo", x, kernel).reshape(qkv.shape)


def relu_attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Computes linear attention: the weight of a key for a query is `relu(q) . relu(k)`, divided by
    the sum over all keys.

    Every pixel attends to all pixels of its image. 1e-15 (`ATTENTION_EPS`) is added to each sum of
    weights, so a query whose weights are all zero gets zeros. With more pixels than features, the
    time is linear in the number of pixels, and the sums over keys (of `relu(k) v` and of `relu(k)`)
    are in float32. Otherwise the weight of each pair of pixels is computed, divided by the sum in
    float32, and then rounded to the dtype of `v`.

    Args:
        q: queries, [batch, pixels, heads, features].
        k: keys, of the shape and dtype of `q`.
        v: values, of the shape and dtype of `q`.

    Returns:
        The attended values, of the shape and dtype of `q`.
    """
    q = jax.nn.relu(q)
    k = jax.nn.relu(k)
    if q.shape[1] <= q.shape[-1]:
        scores = jnp.einsum("bngd,bmgd->bgnm", q, k).astype(jnp.float32)
        weights = scores / (scores.sum(-1, keepdims=True) + ATTENTION_EPS)
        return jnp.einsum("bgnm,bmgd->bngd", weights.astype(v.dtype), v)
    # The sums over keys are in float32, because they grow with the image, beyond the range of half
    # precision.
    q32 = q.astype(jnp.float32)
    key_sum = k.sum(1, dtype=jnp.float32)
    if compile_target.platform() == "cpu":
        # CPUs have no matmul with BF16 inputs and float32 output. Elsewhere it is exact.
        k = k.astype(jnp.float32)
        v = v.astype(jnp.float32)
    einsum = partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    key_value_sum = einsum("bngd,bnge->bgde", k, v)
    numerator = einsum("bngd,bgde->bnge", q32, key_value_sum)
    denominator = einsum("bngd,bgd->bng", q32, key_sum)[..., None]
    return (numerator / (denominator + ATTENTION_EPS)).astype(q.dtype)


class MultiscaleAttention(nnx.Module):
    """Linear attention over all pixels (`relu_attention`), with additional heads that see
    neighborhoods.

    The queries, keys and values of the first heads come from single pixels. Those of the additional
    heads are convolutions of these (`MultiscaleProjection`). The results of all heads are
    concatenated, projected, normalized (RMSNorm with weight and bias) and added to the input. The
    projections have no biases.

    Args:
        channels: input and output channels, `head_dim` or more.
        head_dim: number of features per head. The first heads are `channels // head_dim` in number.
        scales: kernel sizes of the convolutions, odd numbers. Each adds `channels // head_dim`
            heads. (): no additional heads.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, head_dim: int, scales: tuple[int, ...], rngs: nnx.Rngs):
        inner = channels // head_dim * head_dim
        self.to_q = Linear(channels, inner, bias=False, rngs=rngs)
        self.to_k = Linear(channels, inner, bias=False, rngs=rngs)
        self.to_v = Linear(channels, inner, bias=False, rngs=rngs)
        self.to_qkv_multiscale = nnx.List(
            [MultiscaleProjection(3 * inner, head_dim, k, rngs=rngs) for k in scales]
        )
        self.to_out = Linear(inner * (1 + len(scales)), channels, bias=False, rngs=rngs)
        self.norm_out = RMSNorm(channels, eps=NORM_EPS, bias=True)
        self.head_dim = head_dim

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Attends over all pixels, projects and normalizes the result, and adds it to the input.

        Args:
            x: images with the layer's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        b, h, w, _ = x.shape
        qkv = jnp.concatenate([self.to_q(x), self.to_k(x), self.to_v(x)], axis=-1)
        qkv = jnp.concatenate([qkv, *(project(qkv) for project in self.to_qkv_multiscale)], axis=-1)
        # The channels are ordered (head, q or k or v, feature). The released layers to_q, to_k and
        # to_v are consecutive thirds in this order, so that with several heads, one layer may
        # compute all three parts of a head.
        q, k, v = jnp.moveaxis(qkv.reshape(b, h * w, -1, 3, self.head_dim), 3, 0)
        return x + self.norm_out(self.to_out(relu_attention(q, k, v).reshape(b, h, w, -1)))


class ResidualGLUMBConv(GLUMBConv):
    """A gated MLP with a depthwise 3x3 convolution inside (`GLUMBConv`), then RMSNorm, added to the
    input. It has `8 * channels` channels before the gate and `4 * channels` after it.

    Args:
        channels: input and output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        super().__init__(channels, 4 * channels, rngs=rngs)
        self.norm = RMSNorm(channels, eps=NORM_EPS, bias=True)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        """Applies the gated MLP with a convolution, normalizes the result, and adds it to the
        input.

        Args:
            x: images with the layer's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return x + self.norm(super().__call__(x))


class EfficientViTBlock(nnx.Module):
    """Linear attention over all pixels, then a gated MLP with a convolution, each with a residual
    connection.

    Args:
        channels: input and output channels, `head_dim` or more.
        head_dim: number of features per attention head.
        scales: kernel sizes (odd numbers) of the convolutions that give the attention additional
            heads (`MultiscaleAttention`). (): no additional heads.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, head_dim: int, scales: tuple[int, ...], rngs: nnx.Rngs):
        self.attn = MultiscaleAttention(channels, head_dim=head_dim, scales=scales, rngs=rngs)
        self.conv_out = ResidualGLUMBConv(channels, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies the attention, then the gated MLP. Each adds its result to its input.

        Args:
            x: images with the block's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return self.conv_out(self.attn(x))


def make_stages(
    config: AutoencoderDCConfig, side: str, activations: Sequence[str], rngs: nnx.Rngs
) -> list[list]:
    """Builds the blocks of every stage. The layers that change the resolution between stages are
    not included.

    Args:
        config: configuration of the autoencoder.
        side: "encoder" or "decoder": which fields of the configuration (`encoder_...` or
            `decoder_...`) give the kind, number and width of the blocks. The encoder itself is in
            `scripts/pretrain/encoders.py`.
        activations: activation of the `ResBlock`s of each stage, finest first: "silu" or "relu". It
            has no effect in a stage of `EfficientViTBlock`s.
        rngs: random number generators of the initial parameters.

    Returns:
        One list of blocks (`ResBlock` or `EfficientViTBlock`) per stage, finest stage first.
    """
    depths = getattr(config, f"{side}_layers_per_block")
    kinds = getattr(config, f"{side}_block_types")
    widths = getattr(config, f"{side}_block_out_channels")
    scales = getattr(config, f"{side}_qkv_multiscales")

    def make_block(stage: int) -> nnx.Module:
        if kinds[stage] == "ResBlock":
            return ResBlock(widths[stage], activation=activations[stage], rngs=rngs)
        return EfficientViTBlock(
            widths[stage], head_dim=config.attention_head_dim, scales=scales[stage], rngs=rngs
        )

    return [[make_block(stage) for _ in range(depth)] for stage, depth in enumerate(depths)]


class Decoder(nnx.Module):
    """The decoder network: a convolution, the stages from coarse to fine, then RMS norm, the
    activation `config.decoder_conv_act_fn` and a convolution.

    Each stage but the coarsest begins with upsampling by 2. If `decoder_in_shortcut` is set, the
    latent, each channel repeated to fit, is added to the result of the first convolution.

    Args:
        config: configuration of the autoencoder (`AutoencoderDCConfig`). The fields that begin with
            `encoder_` have no effect on the network.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        widths = config.decoder_block_out_channels
        shuffle = config.upsample_block_type == "pixel_shuffle"
        stages = make_stages(config, "decoder", config.decoder_act_fns, rngs)
        for stage, (fine, coarse) in zip(stages, pairwise(widths), strict=False):
            stage.insert(0, UpBlock(coarse, fine, shuffle=shuffle, rngs=rngs))
        self.conv_in = Conv(config.latent_channels, widths[-1], 3, rngs=rngs)
        self.up_blocks = nnx.List([nnx.List(stage) for stage in stages])
        self.norm_out = RMSNorm(widths[0], eps=NORM_EPS, bias=True)
        self.conv_out = Conv(widths[0], config.in_channels, 3, rngs=rngs)
        self.activation = ACTIVATIONS[config.decoder_conv_act_fn]
        self.repeats = widths[-1] // config.latent_channels
        self.shortcut = config.decoder_in_shortcut

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [-1, 1], not clipped, in the dtype of `latent`.

        Args:
            latent: latents on the scale of the autoencoder, with `config.latent_channels` channels:
                the caller has divided the diffusion model's latents by `config.scaling_factor`.

        Returns:
            The images with `config.in_channels` channels: H is `h * config.spatial_compression`,
            and W is `w * config.spatial_compression`.
        """
        x = self.conv_in(latent)
        if self.shortcut:
            x = x + latent.repeat(self.repeats, axis=-1)
        for block in chain.from_iterable(reversed(self.up_blocks)):
            x = block(x)
        return self.conv_out(self.activation(self.norm_out(x)))


class AutoencoderDC(nnx.Module):
    """Decodes latents to images in [-1, 1] but for overshoots, which are not clipped.

    The configured `scaling_factor` is not applied: the caller divides the diffusion model's latents
    by it.

    Args:
        config: configuration of the autoencoder (`AutoencoderDCConfig`). The fields that begin with
            `encoder_` have no effect on the network.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs=rngs)
        self.config = config

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [-1, 1] but for overshoots, which are not clipped.

        Args:
            latent: latents on the scale of the autoencoder, with `config.latent_channels` channels:
                the caller has divided the diffusion model's latents by `config.scaling_factor`.

        Returns:
            The images, in the dtype of `latent`, with `config.in_channels` channels: H is `h *
            config.spatial_compression`, and W is `w * config.spatial_compression`.
        """
        return self.decoder(latent)
