"""The autoencoders with their encoders, which map images or clips in [-1, 1] to latents.

The package itself has decoders only. Networks, parameters and files are those of `AutoencoderDC`,
`AutoencoderKL` and `AutoencoderKLWan` of diffusers.
"""

from itertools import chain
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders import dc, kl, wan
from solrl_jax.models.autoencoders.dc import AutoencoderDCConfig, make_stages
from solrl_jax.models.autoencoders.kl import (
    GroupNorm,
    KLConfig,
    ResnetBlock2D,
    UNetMidBlock2D,
    norm_silu,
)
from solrl_jax.models.autoencoders.wan import (
    KERNEL,
    ONE,
    TIME,
    AutoencoderKLWanConfig,
    CausalConv,
    MidBlock,
    PixelNorm,
    ResidualBlock,
)
from solrl_jax.models.layers.conv import Conv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.pixel_shuffle import space_to_depth

# Log-variances are clamped to this range, as in the released code, so that exp(logvar) is finite.
LOGVAR_RANGE = (-30.0, 20.0)


class AutoencoderDC(dc.AutoencoderDC):
    """Maps images in [-1, 1] to latents and back. Does not apply `config.scaling_factor`."""

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        self.encoder = DCEncoder(config, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def encode(self, x: Float[Array, "b H W 3"]) -> Float[Array, "b h w c"]:
        """Encodes images: h = H / `config.spatial_compression`.

        Raises ValueError if H or W is not a multiple of `config.spatial_compression`.
        """
        factor = self.config.spatial_compression
        if any(size % factor for size in x.shape[1:3]):
            raise ValueError(f"an image of {x.shape[1:3]} pixels: need multiples of {factor}")
        return self.encoder(x)


class DCEncoder(nnx.Module):
    """Stages from fine to coarse. Each ends with the downsampling to the next."""

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        widths = config.encoder_block_out_channels
        unshuffle = config.downsample_block_type == "pixel_unshuffle"
        stages = make_stages(config, "encoder", ("silu",) * len(widths), rngs)
        for stage, fine, coarse in zip(stages, widths, widths[1:], strict=False):
            stage.append(DownBlock(fine, coarse, unshuffle=unshuffle, rngs=rngs))
        self.conv_in = Conv(config.in_channels, widths[0], 3, rngs=rngs)
        self.down_blocks = nnx.List([nnx.List(stage) for stage in stages])
        self.conv_out = Conv(widths[-1], config.latent_channels, 3, rngs=rngs)
        self.shortcut = config.encoder_out_shortcut

    def __call__(self, x: Float[Array, "b H W 3"]) -> Float[Array, "b h w c"]:
        x = self.conv_in(x)
        for block in chain.from_iterable(self.down_blocks):
            x = block(x)
        y = self.conv_out(x)
        return y + x.reshape(*y.shape, -1).mean(-1) if self.shortcut else y


class DownBlock(nnx.Module):
    """Halves the resolution.

    `unshuffle` selects a convolution followed by `space_to_depth` instead of a strided convolution.
    """

    def __init__(self, n_in: int, n_out: int, *, unshuffle: bool, rngs: nnx.Rngs):
        self.conv = Conv(
            n_in, n_out // 4 if unshuffle else n_out, 3, stride=1 if unshuffle else 2, rngs=rngs
        )
        self.unshuffle = unshuffle

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h/2 w/2 n_out"]:
        y = space_to_depth(self.conv(x)) if self.unshuffle else self.conv(x)
        return y + space_to_depth(x).reshape(*y.shape, -1).mean(-1)


class DiagonalGaussian(NamedTuple):
    """A latent distribution `mean + exp(logvar / 2) * noise` with independent elements."""

    mean: Float[Array, "b *t h w c"]
    logvar: Float[Array, "b *t h w c"]


class AutoencoderKL(kl.AutoencoderKL):
    """Maps images in [-1, 1] to latents and back, without the config's scale and shift."""

    def __init__(self, config: KLConfig, *, rngs: nnx.Rngs):
        self.encoder = KLEncoder(config, rngs=rngs)
        super().__init__(config, rngs=rngs)
        width = 2 * config.latent_channels
        self.quant_conv = (
            Linear(width, width, layout="pointwise", rngs=rngs) if config.use_quant_conv else None
        )

    def encode(self, image: Float[Array, "b H W colors"]) -> DiagonalGaussian:
        """Encodes images: h = floor(H / `config.spatial_compression`), and w likewise.

        Pixels beyond a multiple of the compression affect only latents at the border.

        Raises ValueError for an image smaller than one latent.
        """
        least = self.config.spatial_compression
        if min(image.shape[1:3]) < least:
            raise ValueError(
                f"an image of {image.shape[1:3]} pixels: need {least} or more in both directions"
            )
        y = self.encoder(image)
        mean, logvar = jnp.split(y if self.quant_conv is None else self.quant_conv(y), 2, axis=-1)
        return DiagonalGaussian(mean, jnp.clip(logvar, *LOGVAR_RANGE))


class KLEncoder(nnx.Module):
    """Stages from fine to coarse; each but the last ends with the downsampling to the next.

    Returns means and log-variances, concatenated along the channels.
    """

    def __init__(self, c: KLConfig, *, rngs: nnx.Rngs):
        widths = c.block_out_channels
        self.conv_in = Conv(c.in_channels, widths[0], 3, rngs=rngs)
        self.down_blocks = nnx.List(
            [
                DownStage(pair, c, down=i < len(widths) - 1, rngs=rngs)
                for i, pair in enumerate(zip((widths[0], *widths), widths, strict=False))
            ]
        )
        self.mid_block = UNetMidBlock2D(widths[-1], c, rngs=rngs)
        self.conv_norm_out = GroupNorm(widths[-1], c.norm_num_groups)
        self.conv_out = Conv(widths[-1], 2 * c.latent_channels, 3, rngs=rngs)

    def __call__(self, x: Float[Array, "b H W colors"]) -> Float[Array, "b h w c2"]:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(norm_silu(self.conv_norm_out, self.mid_block(x)))


class DownStage(nnx.Module):
    """Residual blocks, followed by downsampling if `down` is set."""

    def __init__(self, widths: tuple[int, int], c: KLConfig, *, down: bool, rngs: nnx.Rngs):
        n_in, n_out = widths
        inputs = (n_in, *[n_out] * (c.layers_per_block - 1))
        self.resnets = nnx.List(
            [ResnetBlock2D(n, n_out, c.norm_num_groups, rngs=rngs) for n in inputs]
        )
        self.downsamplers = nnx.List([Downsample2D(n_out, rngs=rngs)] if down else [])

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x)
        return x


class Downsample2D(nnx.Module):
    """Halves the resolution, rounding down. Pads at the right and the bottom only."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels, channels, 3, stride=2, rngs=rngs)
        self.conv.padding = 0  # `__call__` pads asymmetrically

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h//2 w//2 c"]:
        return self.conv(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))))


class AutoencoderKLWan(wan.AutoencoderKLWan):
    """Maps clips in [-1, 1] to latents and back, without the config's means and deviations."""

    def __init__(self, config: AutoencoderKLWanConfig, *, rngs: nnx.Rngs):
        self.encoder = WanEncoder(config, rngs=rngs)
        super().__init__(config, rngs=rngs)
        self.quant_conv = CausalConv(2 * config.z_dim, 2 * config.z_dim, ONE, rngs=rngs)

    def encode(self, clip: Float[Array, "b T H W 3"]) -> DiagonalGaussian:
        """Encodes clips.

        Height and width must be multiples of `config.spatial_compression`, and the number of frames
        one more than a multiple of `config.temporal_compression`. This is not checked.

        diffusers encodes four frames at a time, and caches the last inputs of every convolution.
        Here all frames are encoded at once, with the same result.
        """
        mean, logvar = jnp.split(self.quant_conv(self.encoder(clip)), 2, axis=-1)
        return DiagonalGaussian(mean, jnp.clip(logvar, *LOGVAR_RANGE))


class WanEncoder(nnx.Module):
    """Residual blocks from fine to coarse resolutions, with downsampling in between.

    Returns means and log-variances, concatenated along the channels.
    """

    def __init__(self, c: AutoencoderKLWanConfig, *, rngs: nnx.Rngs):
        widths = [c.base_dim * multiple for multiple in c.dim_mult]
        self.conv_in = CausalConv(3, widths[0], KERNEL, rngs=rngs)
        blocks: list[nnx.Module] = []
        width_in = widths[0]
        for i, width in enumerate(widths):
            for _ in range(c.num_res_blocks):
                blocks.append(ResidualBlock(width_in, width, rngs=rngs))
                width_in = width
            if i < len(widths) - 1:
                blocks.append(WanDownsample(width, temporal=c.temperal_downsample[i], rngs=rngs))
        self.down_blocks = nnx.List(blocks)
        self.mid_block = MidBlock(widths[-1], rngs=rngs)
        self.norm_out = PixelNorm(widths[-1], axes=4)
        self.conv_out = CausalConv(widths[-1], 2 * c.z_dim, KERNEL, rngs=rngs)

    def __call__(self, x: Float[Array, "b T H W 3"]) -> Float[Array, "b t h w c2"]:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(self.norm_out.silu(self.mid_block(x)))


class WanDownsample(nnx.Module):
    """Halves height and width and, if `temporal` is set, the number of frames after the first."""

    def __init__(self, channels: int, *, temporal: bool, rngs: nnx.Rngs):
        # a list in PyTorch, whose index 0 is the padding
        self.resample = nnx.Dict({"1": Conv(channels, channels, 3, stride=2, rngs=rngs)})
        self.resample["1"].padding = 0  # `__call__` pads at the right and the bottom only
        self.time_conv = CausalConv(channels, channels, TIME, rngs=rngs) if temporal else None

    def __call__(self, x: Float[Array, "b T H W c"]) -> Float[Array, "b t H//2 W//2 c"]:
        frames = jnp.pad(x.reshape(-1, *x.shape[2:]), ((0, 0), (0, 1), (0, 1), (0, 0)))
        frames = self.resample["1"](frames)
        x = frames.reshape(*x.shape[:2], *frames.shape[1:])
        if self.time_conv is None:
            return x
        # The first frame is kept. Each further one is made of three, the last of which is the first
        # of the next three.
        return jnp.concatenate([x[:, :1], self.time_conv(x)[:, 2::2]], axis=1)
