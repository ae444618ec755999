"""Wan's video autoencoder (arXiv 2503.20314, section 4.1): `AutoencoderKLWan` of diffusers in Flax
NNX, of which only the decoder is built.

Its convolutions are causal in time: the output of a frame depends on that frame and the two before
it, and the clip is padded with zeros before its first frame. Temporal upsampling turns every frame
but the first into two. Wan does so twice, so that `k + 1` latent frames become `4 k + 1` frames.

In a clip of one frame, only the last of the three temporal slices of a kernel meets values other
than padding. The convolutions are then two-dimensional, and there is nothing to upsample in time.
Qwen-Image's autoencoder is this network for one frame.

The autoencoder of Wan 2.2 5B (`is_residual`) differs in three places. A stage that upsamples adds
its input, with repeated pixels, to its result. Upsampling does not halve the channels. And the last
convolution returns squares of `patch_size` pixels as channels.

diffusers decodes one latent frame at a time, and caches the last inputs of every convolution for
the next one. Here all frames are decoded at once (`decode`), or in chunks of one or more latent
frames (`decode_in_chunks`), with the same result. In chunks, the decoder needs memory for a chunk
and for the last two input frames of each convolution (`History`).
"""

import dataclasses
from collections.abc import Iterable
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

# Kernel sizes in time, height and width: of most convolutions, of pointwise ones, and of those over
# time alone.
KERNEL = (3, 3, 3)
ONE = (1, 1, 1)
TIME = (3, 1, 1)
# Convolutions over time with at most this number of input and output channels are computed as
# two-dimensional ones. Those of the released autoencoder have more.
NARROW = 64
SMALLEST_NORM = 1e-12  # the smallest divisor of a normalized pixel
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclasses.dataclass(frozen=True)
class VideoAutoencoderConfig(ReleasedConfig):
    """Base class: the fields that the configurations of Wan's and of Qwen-Image's autoencoder have
    in common.

    The defaults are those of diffusers. The constructor raises ValueError for a value that is not
    supported.

    Attributes:
        base_dim: number of channels at the finest resolution of the encoder, and of the decoder
            unless a subclass has a field for it.
        z_dim: number of channels of a latent.
        dim_mult: for each resolution, finest first, its number of channels in the decoder as a
            multiple of the property `decoder_dim` (`base_dim`, unless a subclass has a field for
            it). The numbers of channels of all but the finest one must be even.
        num_res_blocks: number of residual blocks per resolution of the encoder. The decoder has one
            more per resolution.
        attn_scales: ignored, as by diffusers.
        temperal_downsample: (the spelling of the files) for each resolution but the coarsest,
            finest first, whether the encoder halves the number of frames on the way from it to the
            next coarser one, and the decoder doubles it on the way back. One entry less than
            `dim_mult`.
        dropout: ignored, because it has an effect in training only.
        latents_mean: mean of each of the `z_dim` channels of the autoencoder's latents. The
            diffusion model's latents have mean 0.
        latents_std: standard deviation of each of the `z_dim` channels of the autoencoder's
            latents, positive. The diffusion model's latents have standard deviation 1.
    """

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    dropout: float = 0.0
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `dim_mult` is empty, has an entry below 1, or gives an odd number of
                channels to a resolution other than the finest; `temperal_downsample` does not have
                one entry less than `dim_mult`; `latents_mean` or `latents_std` does not have
                `z_dim` entries; or a standard deviation is not positive. The message names the
                field.
        """
        multiples = self.dim_mult
        self.require(
            len(multiples) > 0
            and all(m > 0 for m in multiples)
            and all(m * self.decoder_dim % 2 == 0 for m in multiples[1:]),
            "dim_mult",
            "positive integers which, times the decoder's "
            f"{self.decoder_dim} base channels, are even after the first",
        )
        self.require(
            len(self.temperal_downsample) == len(multiples) - 1,
            "temperal_downsample",
            f"a list of {len(multiples) - 1}, one less than dim_mult",
        )
        for name in ("latents_mean", "latents_std"):
            self.require(
                len(getattr(self, name)) == self.z_dim, name, f"a list of z_dim={self.z_dim}"
            )
        self.require(min(self.latents_std) > 0, "latents_std", "positive numbers")

    @property
    def decoder_dim(self) -> int:
        """Number of channels at the decoder's finest resolution: `base_dim` in this base class."""
        return self.base_dim

    @property
    def residual(self) -> bool:
        """Whether decoder stages that upsample add their input, with repeated pixels, to their
        result. False in this base class; only Wan 2.2 5B has this shortcut.
        """
        return False

    @property
    def patch(self) -> int:
        """Side, in image pixels, of the square whose colors the decoder network returns as the
        channels of one pixel. 1 in this base class: the network returns image pixels.
        """
        return 1

    @property
    def spatial_compression(self) -> int:
        """Side of the square of image pixels that one latent pixel stands for: `patch` times `2 **
        (n - 1)` for n resolutions.
        """
        return self.patch * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_compression(self) -> int:
        """Number of frames that each latent frame but the first stands for: 2 to the power of the
        number of true entries of `temperal_downsample`.
        """
        return 2 ** sum(self.temperal_downsample)

    def unscale(self, latent: Float[Array, "b *thw c"]) -> Float[Array, "b *thw c"]:
        """Converts latents of the diffusion model to the input of the decoder: `latent *
        latents_std + latents_mean`, per channel.

        Args:
            latent: the latents, with the channels in the last axis.

        Returns:
            An array of the shape and dtype of `latent`.
        """
        std = jnp.asarray(self.latents_std, latent.dtype)
        return latent * std + jnp.asarray(self.latents_mean, latent.dtype)


@dataclasses.dataclass(frozen=True)
class AutoencoderKLWanConfig(VideoAutoencoderConfig):
    """The configuration of Wan's autoencoder: the fields of a released `vae/config.json` of Wan 2.1
    or of Wan 2.2 5B.

    The defaults are those of diffusers. The attributes below are in addition to those of
    `VideoAutoencoderConfig`. The constructor raises ValueError for a value that is not supported.

    Attributes:
        decoder_base_dim: number of channels at the decoder's finest resolution; None: `base_dim`.
        is_residual: whether decoder stages that upsample add their input, with repeated pixels
            (`repeat_pixels`), to their result, and upsampling keeps the number of channels (Wan 2.2
            5B). Otherwise upsampling halves it.
        in_channels: number of channels of the encoder's input. Ignored, because only the decoder is
            built.
        out_channels: number of channels that the decoder network returns: 3 colors of each pixel
            in a square of `patch_size`.
        patch_size: side, in image pixels, of the square whose colors the decoder network returns as
            the channels of one pixel (Wan 2.2 5B: 2). None: 1.
        scale_factor_temporal: must equal `temporal_compression`; None is read as 4.
        scale_factor_spatial: must equal `spatial_compression`; None is read as 8.
    """

    network = "AutoencoderKLWan"
    # A field of the released file of Wan 2.2 5B that diffusers does not have: it always clips.
    ignored_fields = ("clip_output",)

    decoder_base_dim: int | None = None
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int | None = 4
    scale_factor_spatial: int | None = 8

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: If a common field has an unsupported value (`VideoAutoencoderConfig.check`);
                if a scale factor is not the compression that follows from `dim_mult`, `patch_size`
                or `temperal_downsample`; if `out_channels` is not 3 times the square of
                `patch_size`; or if `is_residual` is set and neighboring entries of `dim_mult` do
                not fit. For each index i from 2 on, the entry `dim_mult[i]` must divide 4 times
                `dim_mult[i - 1]`, or 8 times if `temperal_downsample[i - 2]` is true. (The two
                entries give the input and output channels of the stage that upsamples from
                resolution i - 1.) The message names the field.
        """
        super().check()
        colors = 3 * self.patch**2
        self.require(
            self.out_channels == colors,
            "out_channels",
            f"{colors}, which follows from patch_size",
        )
        if self.is_residual:
            coarse_to_fine = self.dim_mult[::-1]
            inputs = (coarse_to_fine[0], *coarse_to_fine)
            pixels = [8 if temporal else 4 for temporal in reversed(self.temperal_downsample)]
            self.require(
                all(
                    fine * count % coarse == 0
                    for coarse, fine, count in zip(inputs, coarse_to_fine, pixels, strict=False)
                ),
                "dim_mult",
                "with is_residual, each entry from the third on divides 4 times the one before it "
                "(8 times, where temperal_downsample is true)",
            )
        spatial = self.spatial_compression
        temporal = self.temporal_compression
        self.require(
            (self.scale_factor_spatial or 8) == spatial,
            "scale_factor_spatial",
            f"{spatial}, which follows from dim_mult and patch_size",
        )
        self.require(
            (self.scale_factor_temporal or 4) == temporal,
            "scale_factor_temporal",
            f"{temporal}, which follows from temperal_downsample",
        )

    @property
    def decoder_dim(self) -> int:
        """Number of channels at the decoder's finest resolution: `decoder_base_dim`, or `base_dim`
        if that is None.
        """
        return self.base_dim if self.decoder_base_dim is None else self.decoder_base_dim

    @property
    def residual(self) -> bool:
        """Whether decoder stages that upsample add their input, with repeated pixels, to their
        result: `is_residual`.
        """
        return self.is_residual

    @property
    def patch(self) -> int:
        """Side, in image pixels, of the square whose colors the decoder network returns as the
        channels of one pixel: `patch_size`, or 1 if that is None.
        """
        return self.patch_size or 1


def open_autoencoder(folder: Path, config: AutoencoderKLWanConfig) -> Component:
    """Makes a component of the decoder of Wan's autoencoder. No file is read, and the folder need
    not exist yet.

    The weight files also hold the encoder, which is ignored when they are loaded.

    Args:
        folder: the folder of the autoencoder in a model directory, usually `vae`.
        config: configuration of the autoencoder whose weights are in the folder, or will be.

    Returns:
        The network `AutoencoderKLWan` without its parameters. `Component.load` reads them from
        `folder`.
    """
    return Component.from_builder(
        folder,
        lambda rngs: AutoencoderKLWan(config, rngs=rngs),
        partial(locate_tensors, unused=ENCODER_PREFIXES),
    )


class AutoencoderKLWan(nnx.Module):
    """Decodes latents [b, t, h, w, c] to clips [b, T, H, W, 3] in [-1, 1], not clipped. Only the
    decoder of the autoencoder is built.

    Args:
        config: configuration of the autoencoder. Its means and standard deviations are not applied
            here (`VideoAutoencoderConfig.unscale`).
        temporal: whether the network has the temporal upsampling of the configuration (the
            default). False (Qwen-Image's autoencoder) is for clips of one frame only, which is not
            checked.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: VideoAutoencoderConfig, *, temporal: bool = True, rngs: nnx.Rngs):
        self.post_quant_conv = CausalConv(config.z_dim, config.z_dim, ONE, rngs=rngs)
        self.decoder = Decoder(config, temporal=temporal, rngs=rngs)
        self.patch = config.patch

    def decode(self, latent: Float[Array, "b t h w c"]) -> Float[Array, "b T H W 3"]:
        """Decodes latents to clips in [-1, 1]. Values beyond this range are not clipped.

        Args:
            latent: latents on the scale of the autoencoder, the result of `config.unscale`.

        Returns:
            The clips, in the dtype of `latent`: T is `(t - 1) * config.temporal_compression + 1`, H
            is `h * config.spatial_compression`, and W is `w * config.spatial_compression`.
        """
        return unpatch(self.decoder(self.post_quant_conv(latent)), self.patch)

    def decode_in_chunks(
        self, latent: Float[Array, "b t h w c"], chunk: int
    ) -> Float[Array, "b T H W 3"]:
        """Decodes latents as `decode` does, a few latent frames at a time to save memory.

        The first latent frame is decoded by itself, and the others in a scan over equal chunks. A
        gradient decodes each chunk once more. It stores the state between the chunks, the last two
        input frames of every convolution over time, so its memory grows with the number of chunks.

        Args:
            latent: latents on the scale of the autoencoder, the result of `config.unscale`.
            chunk: the largest number of latent frames in a chunk, at least 1. The chunks after the
                first frame have a length that divides `t - 1`, the largest one up to this number.

        Returns:
            The clips as `decode` returns them: in [-1, 1] but not clipped, in the dtype of
            `latent`. T is `(t - 1) * config.temporal_compression + 1`, H is `h *
            config.spatial_compression`, and W is `w * config.spatial_compression`.
        """
        batch, frames, *rest = latent.shape

        def step(
            before: list[Array] | None, latent: Float[Array, "b t h w c"]
        ) -> tuple[list[Array], Float[Array, "b T H W 3"]]:
            history = History(before)
            clip = self.decoder(self.post_quant_conv(latent), history)
            return history.after, unpatch(clip, self.patch)

        # Outside of the scan, XLA could merge the two evaluations and keep what they compute.
        state, first = jax.checkpoint(step)(None, latent[:, :1])
        if frames == 1:
            return first
        size = next(n for n in range(min(chunk, frames - 1), 0, -1) if (frames - 1) % n == 0)
        chunks = jnp.moveaxis(latent[:, 1:].reshape(batch, -1, size, *rest), 1, 0)
        _, clips = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, chunks)
        others = jnp.moveaxis(clips, 0, 1).reshape(batch, -1, *first.shape[2:])
        return jnp.concatenate([first, others], axis=1)


def unpatch(x: Float[Array, "b t h w c"], patch: int) -> Float[Array, "b t H W colors"]:
    """Turns channels into pixels: each pixel becomes a square of `patch` by `patch` pixels.

    Args:
        x: clips. Their channels are ordered (color, column, row), where column and row are those
            within the square.
        patch: side of a square in pixels.

    Returns:
        Clips in the dtype of `x`, `patch` times as high and wide.
    """
    batch, frames, height, width, channels = x.shape
    squares = x.reshape(batch, frames, height, width, channels // patch**2, patch, patch)
    pixels = squares.transpose(0, 1, 2, 6, 3, 5, 4)
    return pixels.reshape(batch, frames, height * patch, width * patch, -1)


class History:
    """The frames that the causal convolutions read before those of a chunk, while a clip is decoded
    in chunks.

    One object serves one pass of a chunk through the decoder, in which the convolutions take their
    frames in the order in which they are applied.

    Args:
        before: the attribute `after` of the object for the chunk before. None: the chunk is the
            first latent frame of the clip.

    Attributes:
        is_first_chunk: whether the chunk is the first latent frame of the clip.
        after: for the next chunk: a list with the last two input frames [b, 2, h, w, c] of each
            convolution over time that was applied so far, in the order of application. Where the
            chunk has fewer frames, frames of `before` (for the first chunk: zeros) precede them.
            The method `skip` puts zeros here for a convolution that is not applied to the first
            chunk.
    """

    def __init__(self, before: Iterable[Array] | None):
        self.is_first_chunk = before is None
        self.after: list[Array] = []
        self._before = iter(before or ())

    def extend(self, x: Float[Array, "b t h w c"], count: int) -> Float[Array, "b T h w c"]:
        """Returns the input of the next convolution over time with the frames before it.

        Also appends the last `count` frames of the result to the list `after`, for the next chunk.
        The method must be called for the same convolutions in the same order in every chunk. For a
        convolution that is not applied to the first chunk, `skip` is called there instead.

        Args:
            x: the input frames of the chunk.
            count: number of earlier frames that the convolution reads for each frame: the size of
                its kernel in time less 1, which is 2 in this decoder.

        Returns:
            `t + count` frames. Those before the beginning of a clip are zeros.
        """
        batch, _, *rest = x.shape
        before = (
            jnp.zeros((batch, count, *rest), x.dtype) if self.is_first_chunk else next(self._before)
        )
        extended = jnp.concatenate([before, x], axis=1)
        self.after.append(extended[:, -count:])
        return extended

    def skip(self, x: Float[Array, "b t h w c"], count: int) -> None:
        """Appends zeros, `count` frames of the size of `x`, to the list `after` of frames for the
        next chunk, for a convolution that is not applied to the first chunk.

        Args:
            x: an array of the shape and dtype that the convolution's input would have; the number
                of frames does not matter.
            count: number of earlier frames that the convolution reads for each frame.
        """
        batch, _, *rest = x.shape
        self.after.append(jnp.zeros((batch, count, *rest), x.dtype))


class Decoder(nnx.Module):
    """The decoder network: a convolution, the blocks of the coarsest resolution (`MidBlock`), the
    stages from coarse to fine (`Stage`, or `ResidualStage` if `config.residual`), then norm, SiLU
    and a convolution. All stages but the last end with upsampling.

    Args:
        config: configuration of the autoencoder.
        temporal: whether the network has the temporal upsampling of the configuration. False is for
            clips of one frame only.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: VideoAutoencoderConfig, *, temporal: bool, rngs: nnx.Rngs):
        widths = [config.decoder_dim * multiple for multiple in reversed(config.dim_mult)]
        upsample_time = [*reversed(config.temperal_downsample), False]
        self.conv_in = CausalConv(config.z_dim, widths[0], KERNEL, rngs=rngs)
        self.mid_block = MidBlock(widths[0], rngs=rngs)
        stages = []
        width_in = widths[0]
        for i, width in enumerate(widths):
            stage = (ResidualStage if config.residual else Stage)(
                width_in,
                width,
                config.num_res_blocks + 1,
                upsample=i < len(widths) - 1,
                temporal=temporal and upsample_time[i],
                rngs=rngs,
            )
            stages.append(stage)
            width_in = width if config.residual else width // 2
        self.up_blocks = nnx.List(stages)
        self.norm_out = PixelNorm(widths[-1], axes=4)
        self.conv_out = CausalConv(widths[-1], 3 * config.patch**2, KERNEL, rngs=rngs)

    def __call__(
        self, latent: Float[Array, "b t h w c"], history: History | None = None
    ) -> Float[Array, "b T H W colors"]:
        """Decodes latents to clips in [-1, 1]. Values beyond this range are not clipped.

        Args:
            latent: latents on the scale of the autoencoder, after `post_quant_conv`.
            history: for a chunk of a clip: the frames before it. The call stores the frames for the
                next chunk in `history.after`. Each chunk has an object of its own: `History(None)`
                for the first chunk, which must be the first frame alone (not checked), then
                `History(previous.after)` with the object of the chunk before. None: the latents are
                whole clips.

        Returns:
            The clips, in the dtype of `latent`. Their channels are the colors of the pixels in a
            square of `config.patch` by `config.patch` pixels (`unpatch`). Every stage but the last
            doubles height and width, and every temporal upsampling doubles the number of frames
            after the first of the clip.
        """
        x = self.mid_block(self.conv_in(latent, history), history)
        for block in self.up_blocks:
            x = block(x, history)
        return self.conv_out(self.norm_out.silu(x), history)


class Stage(nnx.Module):
    """The residual blocks of one resolution, followed by upsampling if `upsample` is set.

    Args:
        n_in: number of input channels.
        n_out: number of output channels of the residual blocks. Upsampling halves it.
        blocks: number of residual blocks.
        upsample: whether the stage ends by doubling height and width.
        temporal: whether the upsampling also doubles the number of frames after the first. Ignored
            if `upsample` is False.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        blocks: int,
        *,
        upsample: bool,
        temporal: bool,
        rngs: nnx.Rngs,
    ):
        widths_in = [n_in] + [n_out] * (blocks - 1)
        self.resnets = nnx.List([ResidualBlock(width, n_out, rngs=rngs) for width in widths_in])
        self._add_upsampling(n_out, upsample=upsample, temporal=temporal, rngs=rngs)

    def _add_upsampling(
        self, n_out: int, *, upsample: bool, temporal: bool, rngs: nnx.Rngs
    ) -> None:
        """Sets the attribute `upsamplers`: a list with the upsampling layer, or an empty one.

        Args:
            n_out: number of channels at the input of the upsampling, which halves it.
            upsample: whether there is upsampling.
            temporal: whether it also doubles the number of frames after the first.
            rngs: random number generators for the initial weights.
        """
        upsamplers = [Upsample(n_out, n_out // 2, temporal=temporal, rngs=rngs)] if upsample else []
        self.upsamplers = nnx.List(upsamplers)

    def __call__(
        self, x: Float[Array, "b t h w n_in"], history: History | None
    ) -> Float[Array, "b T H W c"]:
        """Applies the residual blocks, then the upsampling if there is one.

        Args:
            x: clips with `n_in` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. The first chunk must be the
                first frame alone, which is not checked. None: `x` is whole clips.

        Returns:
            Clips in the dtype of `x`. Without upsampling they have the size of `x` and `n_out`
            channels. With it, height and width are twice as large, and there are `n_out / 2`
            channels; with temporal upsampling there are two frames for each but the first of the
            clip.
        """
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x, history)
        return x


class ResidualStage(Stage):
    """A stage of Wan 2.2 5B, which is a `Stage` with two differences: if it upsamples, its input,
    with repeated pixels, is added to its result, and upsampling keeps the number of channels.

    Args:
        n_in: number of input channels. If the stage upsamples, a divisor of `4 * n_out`, or of
            `8 * n_out` if `temporal` is set.
        n_out: number of output channels.
        blocks: number of residual blocks.
        upsample: whether the stage ends by doubling height and width.
        temporal: whether the upsampling also doubles the number of frames after the first. Ignored
            if `upsample` is False.
        rngs: random number generators for the initial weights.
    """

    def _add_upsampling(
        self, n_out: int, *, upsample: bool, temporal: bool, rngs: nnx.Rngs
    ) -> None:
        """Sets the attributes `upsampler` (the upsampling layer, or None), `temporal` and `n_out`.

        Args:
            n_out: number of channels at the input of the upsampling, which keeps it.
            upsample: whether there is upsampling.
            temporal: whether it also doubles the number of frames after the first. It has no effect
                if `upsample` is False.
            rngs: random number generators for the initial weights.
        """
        self.upsampler = Upsample(n_out, n_out, temporal=temporal, rngs=rngs) if upsample else None
        self.temporal = temporal
        self.n_out = n_out

    def __call__(
        self, x: Float[Array, "b t h w n_in"], history: History | None
    ) -> Float[Array, "b T H W n_out"]:
        """Applies the residual blocks, then the upsampling if there is one.

        With upsampling, the input with repeated pixels (`repeat_pixels`) is added to the result.
        With temporal upsampling, `repeat_pixels` makes two copies of a clip's first frame, which
        becomes a single frame of the result; only the second copy is added.

        Args:
            x: clips with `n_in` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. The first chunk must be the
                first frame alone, which is not checked. None: `x` is whole clips.

        Returns:
            Clips in the dtype of `x` with `n_out` channels. Without upsampling they have the size
            of `x`. With it, height and width are twice as large; with temporal upsampling there are
            two frames for each but the first of the clip.
        """
        y = x
        for block in self.resnets:
            y = block(y, history)
        if self.upsampler is None:
            return y
        y = self.upsampler(y, history)
        # The first frame of a clip becomes one frame, the last of its repetitions.
        return y + repeat_pixels(x, self.n_out, 2 if self.temporal else 1)[:, -y.shape[1] :]


def repeat_pixels(
    x: Float[Array, "b t h w n_in"], n_out: int, frames: int
) -> Float[Array, "b T 2*h 2*w c"]:
    """Upsamples clips without parameters: each pixel becomes a square of two by two pixels in each
    of `frames` frames.

    Each channel of a pixel is repeated `4 * frames * n_out / n_in` times. The result is read in the
    order (channel, frame, row, column).

    Args:
        x: clips. Their number of channels n_in divides `4 * frames * n_out`.
        n_out: number of output channels.
        frames: number of frames that a frame becomes.

    Returns:
        Clips with `n_out` channels, in the dtype of `x`: T is `t * frames`.
    """
    batch, count, height, width, n_in = x.shape
    repeated = jnp.repeat(x, 4 * frames * n_out // n_in, axis=-1)
    pixels = repeated.reshape(batch, count, height, width, n_out, frames, 2, 2)
    pixels = pixels.transpose(0, 1, 5, 2, 6, 3, 7, 4)
    return pixels.reshape(batch, count * frames, 2 * height, 2 * width, n_out)


class MidBlock(nnx.Module):
    """The coarsest resolution: a residual block, attention and a residual block.

    Args:
        channels: number of input channels and of output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.attentions = nnx.List([Attention(channels, rngs=rngs)])
        self.resnets = nnx.List([ResidualBlock(channels, channels, rngs=rngs) for _ in range(2)])

    def __call__(
        self, x: Float[Array, "b t h w c"], history: History | None = None
    ) -> Float[Array, "b t h w c"]:
        """Applies a residual block, attention over all pixels of each frame, and a residual block.

        Args:
            x: clips with `channels` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. None: `x` is whole clips.

        Returns:
            An array of the shape and dtype of `x`.
        """
        first, last = self.resnets
        x = first(x, history)
        for layer in self.attentions:
            x = layer(x)
        return last(x, history)


class ResidualBlock(nnx.Module):
    """A residual block: norm, SiLU and 3x3x3 convolution that is causal in time (`CausalConv`),
    twice, added to the input.

    If the number of channels changes, a 1x1x1 convolution maps the input before it is added.

    Args:
        n_in: number of input channels.
        n_out: number of output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs):
        self.norm1 = PixelNorm(n_in, axes=4)
        self.conv1 = CausalConv(n_in, n_out, KERNEL, rngs=rngs)
        self.norm2 = PixelNorm(n_out, axes=4)
        self.conv2 = CausalConv(n_out, n_out, KERNEL, rngs=rngs)
        self.conv_shortcut = CausalConv(n_in, n_out, ONE, rngs=rngs) if n_in != n_out else None

    def __call__(
        self, x: Float[Array, "b t h w n_in"], history: History | None = None
    ) -> Float[Array, "b t h w n_out"]:
        """Applies norm, SiLU and convolution twice, and adds the result to the input.

        If the number of channels changes, a 1x1x1 convolution maps the input before it is added.

        Args:
            x: clips with `n_in` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. None: `x` is whole clips.

        Returns:
            Clips of the size of `x` with `n_out` channels, in the dtype of `x`.
        """
        y = self.conv1(self.norm1.silu(x), history)
        y = self.conv2(self.norm2.silu(y), history)
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Softmax attention with a single head among the pixels of each frame, after a norm
    (`PixelNorm`). Its result is added to the input.

    Args:
        channels: number of input channels, of output channels, and of features of the head.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.norm = PixelNorm(channels, axes=3)
        self.to_qkv = Linear(channels, 3 * channels, layout="pointwise", rngs=rngs)
        self.proj = Linear(channels, channels, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t h w c"]:
        """Normalizes the input, attends over all pixels of each frame with one head, projects, and
        adds the result to the input.

        Args:
            x: clips with `channels` channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        tokens = (x.shape[0] * x.shape[1], -1, 1, x.shape[-1])  # [b t, h w, one head, c]
        qkv = jnp.split(self.to_qkv(self.norm(x)), 3, axis=-1)
        q, k, v = (y.reshape(tokens) for y in qkv)
        return x + self.proj(attention(q, k, v).reshape(x.shape))


class Upsample(nnx.Module):
    """Upsampling in space and, if `temporal` is set, in time.

    In time, a convolution over three frames of each pixel (`CausalConv`), to twice the channels,
    turns every frame but the first into two. In space, height and width are doubled by
    nearest-neighbor interpolation, and a 3x3 convolution follows.

    Args:
        n_in: number of input channels.
        n_out: number of output channels.
        temporal: whether the number of frames after the first is doubled.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, *, temporal: bool, rngs: nnx.Rngs):
        # a list in PyTorch, whose index 0 is the interpolation
        self.resample = nnx.Dict({"1": Conv(n_in, n_out, 3, rngs=rngs)})
        self.time_conv = CausalConv(n_in, 2 * n_in, TIME, rngs=rngs) if temporal else None

    def __call__(
        self, x: Float[Array, "b t h w n_in"], history: History | None
    ) -> Float[Array, "b T 2*h 2*w n_out"]:
        """Upsamples in time, if the layer is temporal, and then in space.

        Args:
            x: clips with `n_in` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. The first chunk must be the
                first frame alone, which is not checked. None: `x` is whole clips.

        Returns:
            Clips with `n_out` channels, in the dtype of `x`. T is t if the layer is not temporal.
            Otherwise there are two frames for each but the first of the clip: T is `2 t - 1` for
            whole clips, 1 for the first chunk, and `2 t` for later chunks.
        """
        if self.time_conv is not None:
            if history is None and x.shape[1] > 1:
                x = jnp.concatenate([x[:, :1], self._double_frames(x[:, 1:], None)], axis=1)
            elif history is not None and history.is_first_chunk:
                history.skip(x, TIME[0] - 1)
            elif history is not None:
                x = self._double_frames(x, history)
        frames = self.resample["1"].apply_upsampled(x.reshape(-1, *x.shape[2:]))
        return frames.reshape(*x.shape[:2], *frames.shape[1:])

    def _double_frames(
        self, x: Float[Array, "b t h w c"], history: History | None
    ) -> Float[Array, "b 2*t h w c"]:
        """Turns each frame into two by the convolution over time: the first half of its output
        channels is the earlier frame.

        Args:
            x: frames of clips, without the first one of a clip. The convolution does not read that
                frame either: it sees zeros before the second one.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs. None: `x` is whole clips but
                for their first frame.

        Returns:
            Twice as many frames, in the dtype of `x`.
        """
        assert self.time_conv is not None, "only temporal layers double frames"
        batch, count, *rest = x.shape
        pairs = self.time_conv(x, history).reshape(batch, count, *rest[:2], 2, rest[2])
        return jnp.moveaxis(pairs, 4, 2).reshape(batch, 2 * count, *rest)


class CausalConv(nnx.Module):
    """A convolution over time, height and width that is causal: the output of a frame depends on
    this frame and earlier ones only.

    Clips are padded with zeros: in time by `kernel[0] - 1` frames before the first one, and on all
    sides of the frames by half a kernel, so that clips keep their size.

    Args:
        n_in: number of input channels.
        n_out: number of output channels.
        kernel: size of the kernel in time, height and width. The last two are odd.
        rngs: random number generators for the initial weight, which has the distribution of
            PyTorch's default. The bias is initially zero.
    """

    def __init__(self, n_in: int, n_out: int, kernel: tuple[int, int, int], *, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        shape = (*kernel, n_in, n_out)
        self.kernel = param(init(rngs.params(), shape, jnp.float32), "weight", "conv3d")
        self.bias = param(jnp.zeros(n_out), "bias")

    def __call__(
        self, x: Float[Array, "b t h w n_in"], history: History | None = None
    ) -> Float[Array, "b t h w n_out"]:
        """Convolves clips, and adds the bias.

        Args:
            x: clips with `n_in` channels.
            history: for a chunk of a clip: the frames before it. The call appends to
                `history.after` the frames that the next chunk needs (none if the kernel has one
                slice in time). None: `x` is whole clips, with zeros before them.

        Returns:
            Clips of the size of `x` with `n_out` channels, in the dtype of `x`.
        """
        kernel = self.kernel.get_value().astype(x.dtype)
        time, *sides = kernel.shape[:3]
        padding = [(side // 2, side // 2) for side in sides]
        is_first_chunk = history is None or history.is_first_chunk
        if history is not None and time > 1:
            extended = history.extend(x, time - 1)
            x = x if is_first_chunk else extended
        before = time - 1 if is_first_chunk else 0  # zero frames in front
        if is_first_chunk and x.shape[1] == 1:  # the other slices of the kernel would read zeros
            y = jax.lax.conv_general_dilated(
                x[:, 0],
                kernel[-1],
                window_strides=(1, 1),
                padding=padding,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )[:, None]
        elif time > 1 and max(kernel.shape[3:]) <= NARROW:
            y = _convolve_joined_frames(x, kernel, before, padding)
        else:
            y = jax.lax.conv_general_dilated(
                x,
                kernel,
                window_strides=(1, 1, 1),
                padding=[(before, 0), *padding],
                dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
            )
        return y + self.bias.get_value().astype(x.dtype)


def _convolve_joined_frames(
    x: Float[Array, "b t h w n_in"],
    kernel: Float[Array, "time rows columns n_in n_out"],
    before: int,
    padding: list[tuple[int, int]],
) -> Float[Array, "b T h w n_out"]:
    """Computes a convolution over time, rows and columns as a two-dimensional one.

    The input channels of the two-dimensional convolution are those of a frame and of the frames
    before it. This takes memory for `time` copies of the input. On CPUs it is faster than a
    three-dimensional convolution if there are few channels.

    Args:
        x: Feature maps of clips, of at least `time - before` frames.
        kernel: The kernel, whose last slice in time meets the frame itself.
        before: The number of zero frames that are put before those of `x`.
        padding: The numbers of zeros (before, after): one pair for the rows, one for the columns.

    Returns:
        Feature maps with `n_out` channels, in the dtype of `x`, without the bias: T is `t + before
        - time + 1`.
    """
    batch = len(x)
    time = kernel.shape[0]
    frames = x.shape[1] + before - time + 1
    padded = jnp.pad(x, ((0, 0), (before, 0), (0, 0), (0, 0), (0, 0)))
    joined = jnp.concatenate([padded[:, i : i + frames] for i in range(time)], axis=-1)
    y = jax.lax.conv_general_dilated(
        joined.reshape(batch * frames, *joined.shape[2:]),
        jnp.moveaxis(kernel, 0, 2).reshape(*kernel.shape[1:3], -1, kernel.shape[-1]),
        window_strides=(1, 1),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(batch, frames, *y.shape[1:])


class PixelNorm(nnx.Module):
    """RMS normalization over the channels of each pixel, `sqrt(channels) * x / max(norm, 1e-12)`
    with the Euclidean norm of the pixel, times one weight per channel.

    The weight `gamma` is initially 1.

    Args:
        channels: number of channels.
        axes: number of axes that the weight has here and in the released files: its shape is
            [channels, 1, 1, ...]. The released files have 3 in `Attention` and 4 elsewhere.
    """

    def __init__(self, channels: int, *, axes: int):
        self.gamma = param(jnp.ones((channels, *[1] * (axes - 1))), "gamma")

    def __call__(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t h w c"]:
        """Applies RMS normalization over the channels, and the weight, in float32, and rounds once,
        to the dtype of `x`.

        Args:
            x: clips with `channels` channels, of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return self._in_float32(x).astype(x.dtype)

    def silu(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t h w c"]:
        """Applies norm, weight and SiLU in float32, and rounds once, to the dtype of `x`.

        Args:
            x: clips with `channels` channels, of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return jax.nn.silu(self._in_float32(x)).astype(x.dtype)

    def _in_float32(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t h w c"]:
        """Applies norm and weight, without rounding to the dtype of `x`.

        Args:
            x: clips with `channels` channels, of any floating-point dtype.

        Returns:
            A float32 array of the shape of `x`.
        """
        x32 = x.astype(jnp.float32)
        # bounded before the root, whose gradient at 0 is infinite
        norm = jnp.sqrt(jnp.maximum((x32**2).sum(-1, keepdims=True), SMALLEST_NORM**2))
        weight = self.gamma.get_value().astype(jnp.float32).reshape(-1)
        return x32 / norm * (x.shape[-1] ** 0.5 * weight)
