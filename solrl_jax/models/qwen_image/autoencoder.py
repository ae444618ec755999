"""Qwen-Image's autoencoder for single images: `AutoencoderKLQwenImage` of diffusers in Flax NNX.

It is the video autoencoder of Wan 2.1 (arXiv 2503.20314, section 4.1), whose decoder was trained
further. Its convolutions are causal in time: those of a frame read that frame and two before it,
and zeros before the first one. A single image is the first frame, so that only the last of the
three temporal slices of each kernel meets numbers other than zero, and every convolution is
two-dimensional. The temporal upsampling skips the first frame, and its weights are not read.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.conv import Conv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import ReleasedConfig
from solrl_jax.models.loading.weights import ENCODER_PREFIXES, locate_tensors

SMALLEST_NORM = 1e-12  # the smallest divisor of a normalised pixel
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclasses.dataclass(frozen=True)
class AutoencoderKLQwenImageConfig(ReleasedConfig):
    """The fields of a released `config.json`. The defaults are those of diffusers.

    Attributes:
        base_dim: channels of the finest resolution.
        z_dim: channels of a latent.
        dim_mult: channels of each resolution, as multiples of `base_dim`, finest first. The
            channels of all but the finest one are even.
        num_res_blocks: residual blocks per resolution of the encoder. The decoder has one more.
        attn_scales: ignored, as by diffusers.
        temperal_downsample: whether the encoder halves the number of frames after each resolution
            but the last. A single image has one frame, so that only the number of entries counts,
            one less than in `dim_mult`.
        dropout: ignored, because it acts in training only.
        input_channels: 3, the only supported value: colours of an image.
        latents_mean: mean of each of the `z_dim` latent channels; the diffusion model's latents
            have mean 0.
        latents_std: standard deviation of each of the `z_dim` latent channels, positive; that of
            the diffusion model's latents is 1.
    """

    network = "AutoencoderKLQwenImage"

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    dropout: float = 0.0
    input_channels: int = 3
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `dim_mult` is empty, or has an entry below 1, or one after the first whose
                product with `base_dim` is odd; `temperal_downsample` has not one entry less;
                `input_channels` is not 3; `latents_mean` or `latents_std` has not `z_dim` entries;
                or a standard deviation is not positive. The message names the field.
        """
        multiples = self.dim_mult
        self.require(
            len(multiples) > 0
            and all(m > 0 for m in multiples)
            and all(m * self.base_dim % 2 == 0 for m in multiples[1:]),
            "dim_mult",
            f"positive integers which, times base_dim={self.base_dim}, are even after the first",
        )
        self.require(
            len(self.temperal_downsample) == len(multiples) - 1,
            "temperal_downsample",
            f"a list of {len(multiples) - 1}, one less than dim_mult",
        )
        self.require(self.input_channels == 3, "input_channels", "3")
        for name in ("latents_mean", "latents_std"):
            self.require(
                len(getattr(self, name)) == self.z_dim, name, f"a list of z_dim={self.z_dim}"
            )
        self.require(min(self.latents_std) > 0, "latents_std", "positive numbers")

    @property
    def spatial_compression(self) -> int:
        """Side of the square of image pixels that one latent pixel stands for: 2 to the power of
        the number of resolutions less 1.
        """
        return 2 ** (len(self.dim_mult) - 1)

    def unscale(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Converts latents of the diffusion model to the input of `AutoencoderKLQwenImage.decode`:
        `latent * latents_std + latents_mean`, per channel.

        Args:
            latent: the latents.

        Returns:
            An array of the shape and dtype of `latent`.
        """
        std = jnp.asarray(self.latents_std, latent.dtype)
        return latent * std + jnp.asarray(self.latents_mean, latent.dtype)


def open_autoencoder(folder: Path, config: AutoencoderKLQwenImageConfig) -> Component:
    """Opens the decoder of a released folder. No weight is read.

    The files also hold the encoder and the temporal upsampling, which are ignored.

    Args:
        folder: the autoencoder's folder.
        config: configuration of the autoencoder. Its `dim_mult` has one entry per resolution, each
            of which may have a temporal upsampling to ignore.

    Returns:
        The network `AutoencoderKLQwenImage` without its parameters, with `folder` as their source.
    """
    temporal = (
        f"decoder.up_blocks.{i}.upsamplers.0.time_conv." for i in range(len(config.dim_mult))
    )
    return Component.from_builder(
        folder,
        lambda rngs: AutoencoderKLQwenImage(config, rngs=rngs),
        partial(locate_tensors, unused=(*ENCODER_PREFIXES, *temporal)),
    )


class AutoencoderKLQwenImage(nnx.Module):
    """Decodes latents to images in [-1, 1]. The configured means and standard deviations are not
    applied.

    Args:
        config: configuration of the autoencoder, of which only the decoder is built.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderKLQwenImageConfig, *, rngs: nnx.Rngs):
        self.post_quant_conv = FirstFrameConv(config.z_dim, config.z_dim, 1, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [-1, 1] but for overshoots, which are not clipped.

        Args:
            latent: latents on the scale of the autoencoder (`AutoencoderKLQwenImageConfig.unscale`
                is not applied here).

        Returns:
            The images, in the dtype of `latent`: H is `h * config.spatial_compression`, and W is
            `w * config.spatial_compression`.
        """
        return self.decoder(self.post_quant_conv(latent))


class Decoder(nnx.Module):
    """The decoder network: resolutions from coarse to fine, of which all but the last end with
    upsampling.

    Args:
        config: configuration of the autoencoder, of which only the decoder is built.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderKLQwenImageConfig, *, rngs: nnx.Rngs):
        widths = [config.base_dim * multiple for multiple in reversed(config.dim_mult)]
        self.conv_in = FirstFrameConv(config.z_dim, widths[0], 3, rngs=rngs)
        self.mid_block = MidBlock(widths[0], rngs=rngs)
        stages = []
        width_in = widths[0]
        for i, width in enumerate(widths):
            upsample = i < len(widths) - 1
            blocks = config.num_res_blocks + 1
            stages.append(Stage(width_in, width, blocks, upsample=upsample, rngs=rngs))
            width_in = width // 2  # upsampling halves the channels
        self.up_blocks = nnx.List(stages)
        self.norm_out = PixelNorm(widths[-1], axes=4)
        self.conv_out = FirstFrameConv(widths[-1], config.input_channels, 3, rngs=rngs)

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [-1, 1], not clipped, in the dtype of `latent`.

        Args:
            latent: latents on the scale of the autoencoder, after the 1x1 convolution.

        Returns:
            The images: H and W are h and w doubled once for every resolution but the last.
        """
        x = self.mid_block(self.conv_in(latent))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.norm_out.silu(x))


class Stage(nnx.Module):
    """The residual blocks of one resolution, followed by upsampling if `upsample` is set.

    Args:
        n_in: input channels.
        n_out: channels of the residual blocks. With upsampling, the output has half as many.
        blocks: number of residual blocks.
        upsample: whether the stage ends with twice the height and width.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, blocks: int, *, upsample: bool, rngs: nnx.Rngs):
        widths_in = [n_in] + [n_out] * (blocks - 1)
        self.resnets = nnx.List([ResidualBlock(width, n_out, rngs=rngs) for width in widths_in])
        self.upsamplers = nnx.List([Upsample(n_out, rngs=rngs)] if upsample else [])

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        """Applies the residual blocks, then the upsampling if there is one.

        Args:
            x: images with the stage's input channels.

        Returns:
            Images in the dtype of `x`. With upsampling, they have twice the height and width, and
            half of the channels of the residual blocks.
        """
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class MidBlock(nnx.Module):
    """The coarsest resolution: a residual block, attention and a residual block.

    Args:
        channels: input and output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.attentions = nnx.List([Attention(channels, rngs=rngs)])
        self.resnets = nnx.List([ResidualBlock(channels, channels, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies a residual block, attention over all pixels, and a residual block.

        Args:
            x: images with the block's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        first, last = self.resnets
        for layer in (first, *self.attentions, last):
            x = layer(x)
        return x


class ResidualBlock(nnx.Module):
    """Twice norm, SiLU and 3x3 convolution, added to the input.

    If the number of channels changes, a 1x1 convolution maps the input before it is added.

    Args:
        n_in: input channels.
        n_out: output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs):
        self.norm1 = PixelNorm(n_in, axes=4)
        self.conv1 = FirstFrameConv(n_in, n_out, 3, rngs=rngs)
        self.norm2 = PixelNorm(n_out, axes=4)
        self.conv2 = FirstFrameConv(n_out, n_out, 3, rngs=rngs)
        self.conv_shortcut = FirstFrameConv(n_in, n_out, 1, rngs=rngs) if n_in != n_out else None

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h w n_out"]:
        """Applies norm, SiLU and convolution twice, and adds the result to the input.

        If the number of channels changes, a 1x1 convolution maps the input before it is added.

        Args:
            x: images with the block's input channels.

        Returns:
            Images as high and wide as `x` with `n_out` channels, in the dtype of `x`.
        """
        y = self.conv1(self.norm1.silu(x))
        y = self.conv2(self.norm2.silu(y))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Softmax attention over all pixels with a single head, after a norm, added to the input.

    Args:
        channels: number of input channels, of output channels, and of features of the head.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.norm = PixelNorm(channels, axes=3)
        self.to_qkv = Linear(channels, 3 * channels, layout="pointwise", rngs=rngs)
        self.proj = Linear(channels, channels, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalises the input, attends over all pixels with one head, projects, and adds the
        result to the input.

        Args:
            x: images with the layer's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        tokens = (x.shape[0], -1, 1, x.shape[-1])  # [b, h w, one head, c]
        qkv = jnp.split(self.to_qkv(self.norm(x)), 3, axis=-1)
        q, k, v = (y.reshape(tokens) for y in qkv)
        return x + self.proj(attention(q, k, v).reshape(x.shape))


class Upsample(nnx.Module):
    """Doubles height and width by nearest-neighbor interpolation, then convolves to half of the
    channels.

    Args:
        channels: input channels, an even number.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        # a list in PyTorch, whose index 0 is the interpolation
        self.resample = nnx.Dict({"1": Conv(channels, channels // 2, 3, rngs=rngs)})

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 2*h 2*w c/2"]:
        """Doubles height and width, and convolves the result with a 3x3 kernel.

        Args:
            x: images [b, h, w, channels].

        Returns:
            Images [b, 2 h, 2 w, channels / 2] in the dtype of `x`.
        """
        return self.resample["1"].apply_upsampled(x)


class FirstFrameConv(nnx.Module):
    """A causal convolution over time, rows and columns, applied to the first frame alone.

    The kernel [time, rows, columns, in, out] is that of the video network. All its temporal slices
    but the last meet the zeros before the first frame and are not read. Rows and columns are padded
    with zeros, so that images keep their size.

    Args:
        n_in: input channels.
        n_out: output channels.
        kernel: side of the kernel in all three directions, an odd number.
        rngs: random number generators for the initial weight, which has PyTorch's default
            distribution. The bias is zero at first.
    """

    def __init__(self, n_in: int, n_out: int, kernel: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        shape = (kernel, kernel, kernel, n_in, n_out)
        self.kernel = param(init(rngs.params(), shape, jnp.float32), "weight", "conv3d")
        self.bias = param(jnp.zeros(n_out), "bias")
        self.padding = kernel // 2

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h w n_out"]:
        """Convolves images with the last temporal slice of the kernel, and adds the bias.

        Args:
            x: images [b, h, w, n_in], each taken as the first frame of a video.

        Returns:
            Images [b, h, w, n_out] in the dtype of `x`.
        """
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel.get_value()[-1].astype(x.dtype),
            window_strides=(1, 1),
            padding=[(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + self.bias.get_value().astype(x.dtype)


class PixelNorm(nnx.Module):
    """Divides each pixel by the root mean square of its channels, and multiplies each channel by a
    weight.

    The divisor is the pixel's Euclidean norm, at least 1e-12 (`SMALLEST_NORM`), and the square root
    of the number of channels is multiplied in; so zeros stay zeros. The weight `gamma` is 1 at
    first.

    Args:
        channels: number of channels.
        axes: number of axes of the weight, as in PyTorch. All but the first have the size 1.
    """

    def __init__(self, channels: int, *, axes: int):
        self.gamma = param(jnp.ones((channels, *[1] * (axes - 1))), "gamma")

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalises images in float32, applies the weight, and rounds once.

        Args:
            x: images [b, h, w, channels] of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return self._in_float32(x).astype(x.dtype)

    def silu(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies the norm and then SiLU in float32, and rounds once.

        Args:
            x: images [b, h, w, channels] of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return jax.nn.silu(self._in_float32(x)).astype(x.dtype)

    def _in_float32(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Returns the result of the norm before it is rounded, with the weight applied.

        Args:
            x: images [b, h, w, channels] of any floating-point dtype.

        Returns:
            A float32 array of the shape of `x`.
        """
        x32 = x.astype(jnp.float32)
        norm = jnp.sqrt((x32**2).sum(-1, keepdims=True))
        weight = self.gamma.get_value().astype(jnp.float32).reshape(-1)
        return x32 / jnp.maximum(norm, SMALLEST_NORM) * (x.shape[-1] ** 0.5 * weight)
