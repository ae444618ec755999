"""The KL autoencoder of latent diffusion (arXiv 2112.10752, section 3.1): `AutoencoderKL` of
diffusers in Flax NNX.

FLUX.1, Stable Diffusion 3 and Z-Image use it with 16 latent channels; Stable Diffusion 1 uses it
with 4 and a 1x1 convolution before the decoder. The decoder applies attention over all pixels at
the coarsest resolution, then residual convolutions at increasing resolutions. Only the decoder is
here, because training starts from noise and never encodes an image; `scripts/pretrain/encoders.py`
has the encoder.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.conv import Conv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.loading.config_file import ReleasedConfig

NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class KLConfig(ReleasedConfig):
    """Base class: the configuration fields that all KL autoencoders share (`AutoencoderKL` and
    FLUX.2's `AutoencoderKLFlux2`).

    A stage is a group of blocks at one resolution. Tuples have one entry per stage, finest first.
    Only the decoder is built; the fields of the encoder are read and checked. The constructor
    raises ValueError for a value that is not supported.

    Attributes:
        in_channels: channels of an image at the input of the encoder.
        out_channels: channels of a decoded image.
        down_block_types: "DownEncoderBlock2D" for every stage, the only supported value.
        up_block_types: "UpDecoderBlock2D" for every stage, the only supported value.
        block_out_channels: channels of each stage, multiples of `norm_num_groups`.
        layers_per_block: number of residual blocks in each stage of the encoder. Each stage of the
            decoder has one more.
        act_fn: "silu", the only supported value.
        latent_channels: channels of a latent.
        norm_num_groups: number of groups of channels in every group normalization.
        sample_size: side, or height and width, of the training images in pixels. It has no effect.
        force_upcast: whether the network needs float32. True makes the property `required_dtype`
            float32, the dtype in which pipelines then decode.
        use_quant_conv: whether the released network has a 1x1 convolution after its encoder. It has
            no effect here.
        use_post_quant_conv: whether there is a 1x1 convolution before the decoder.
        mid_block_add_attention: whether the coarsest resolution has attention.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    act_fn: str = "silu"
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, ...] = 32
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @property
    def decoder_config(self) -> "KLConfig":
        """The configuration in which `block_out_channels` are the channels of the decoder's stages.

        It is `self`, except for a subclass with separate numbers of channels for encoder and
        decoder.
        """
        return self

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `act_fn` is not "silu"; an entry of `down_block_types` is not
                "DownEncoderBlock2D"; an entry of `up_block_types` is not "UpDecoderBlock2D";
                `block_out_channels` is empty or has an entry that is not a positive multiple of
                `norm_num_groups`; or one of the lists of block types does not have as many entries
                as `block_out_channels`. The message names the field.
        """
        self.require_one_of("act_fn", ("silu",))
        self.require_one_of("down_block_types", ("DownEncoderBlock2D",))
        self.require_one_of("up_block_types", ("UpDecoderBlock2D",))
        widths = self.block_out_channels
        groups = self.norm_num_groups
        self.require(
            len(widths) > 0 and all(width > 0 and width % groups == 0 for width in widths),
            "block_out_channels",
            f"a list of positive multiples of norm_num_groups={groups}",
        )
        for name in ("down_block_types", "up_block_types"):
            self.require(
                len(getattr(self, name)) == len(widths),
                name,
                f"a list of {len(widths)}, one for each of block_out_channels",
            )

    @property
    def required_dtype(self) -> jnp.dtype | None:
        """The dtype that the network must run in: float32 if `force_upcast` is set; None if it runs
        in any dtype.
        """
        return jnp.dtype(jnp.float32) if self.force_upcast else None

    @property
    def spatial_compression(self) -> int:
        """Side of the square of image pixels that one latent pixel stands for: 2 to the power of
        the number of stages less 1.
        """
        return 2 ** (len(self.block_out_channels) - 1)


@dataclasses.dataclass(frozen=True)
class AutoencoderKLConfig(KLConfig):
    """The configuration of a KL autoencoder: the fields of a released `config.json`.

    A stage is a group of blocks at one resolution. Tuples have one entry per stage, finest first.
    Only the decoder is built; the fields of the encoder are read and checked. The defaults are
    those of diffusers. The constructor raises ValueError for a value that is not supported.

    Attributes:
        in_channels: channels of an image at the input of the encoder.
        out_channels: channels of a decoded image.
        down_block_types: "DownEncoderBlock2D" for every stage, the only supported value.
        up_block_types: "UpDecoderBlock2D" for every stage, the only supported value.
        block_out_channels: number of channels of each stage, a multiple of `norm_num_groups`.
        layers_per_block: number of residual blocks in each stage of the encoder. Each stage of the
            decoder has one more.
        act_fn: "silu", the only supported value.
        latent_channels: channels of a latent.
        norm_num_groups: number of groups of channels in every group normalization.
        sample_size: side, or height and width, of the training images in pixels. It has no effect.
        force_upcast: whether the network needs float32. True makes the property `required_dtype`
            float32, the dtype in which pipelines then decode.
        use_quant_conv: whether the released network has a 1x1 convolution after its encoder. It has
            no effect here.
        use_post_quant_conv: whether there is a 1x1 convolution before the decoder.
        mid_block_add_attention: whether the coarsest resolution has attention.
        scaling_factor: factor of the diffusion model's latents, which are `(latent - shift_factor)
            * scaling_factor` for a `latent` of the autoencoder.
        shift_factor: the shift in this formula; None: zero.
        latents_mean: mean of each channel of the latents; only None is supported
            (`ReleasedConfig.from_dict` checks it, the constructor does not).
        latents_std: standard deviation of each channel of the latents; likewise only None.
    """

    network = "AutoencoderKL"

    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    latents_mean: None = None
    latents_std: None = None

    def unscale(self, latent: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts latents of the diffusion model to the input of `AutoencoderKL.decode`: `latent /
        scaling_factor + shift_factor`.

        Args:
            latent: latents of the diffusion model, of any shape.

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return latent / self.scaling_factor + (self.shift_factor or 0.0)


class AutoencoderKL(nnx.Module):
    """A KL autoencoder, of which only the decoder is built. The configured scale and shift of
    latents are not applied.

    Args:
        config: configuration of the autoencoder (`KLConfig`), whose `decoder_config` gives the
            channels of the decoder.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: KLConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config.decoder_config, rngs=rngs)
        channels = config.latent_channels
        self.post_quant_conv = (
            Linear(channels, channels, layout="pointwise", rngs=rngs)
            if config.use_post_quant_conv
            else None
        )
        self.config = config

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W colors"]:
        """Decodes latents to images in [-1, 1] but for overshoots, which are not clipped. The 1x1
        convolution before the decoder is applied, if there is one.

        Args:
            latent: latents on the scale of the autoencoder: the caller has undone the scale and
                shift of the diffusion model's latents (e.g. with `AutoencoderKLConfig.unscale`).

        Returns:
            The images, in the dtype of `latent`, with `config.out_channels` colors: H is `h *
            config.spatial_compression`, and W is `w * config.spatial_compression`.
        """
        if self.post_quant_conv is not None:
            latent = self.post_quant_conv(latent)
        return self.decoder(latent)


class Decoder(nnx.Module):
    """The decoder network: a convolution, the blocks of the coarsest resolution, stages from coarse
    to fine, then norm, SiLU and a convolution. All stages but the last end with upsampling.

    Args:
        config: configuration of the autoencoder (`KLConfig`) whose `block_out_channels` are the
            channels of the decoder's stages, finest first.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: KLConfig, *, rngs: nnx.Rngs):
        widths = config.block_out_channels[::-1]
        self.conv_in = Conv(config.latent_channels, widths[0], 3, rngs=rngs)
        self.mid_block = UNetMidBlock2D(widths[0], config, rngs=rngs)
        stages = []
        width_in = widths[0]
        for i, width_out in enumerate(widths):
            upsample = i < len(widths) - 1
            stages.append(Stage(width_in, width_out, config, upsample=upsample, rngs=rngs))
            width_in = width_out
        self.up_blocks = nnx.List(stages)
        self.conv_norm_out = GroupNorm(widths[-1], config.norm_num_groups)
        self.conv_out = Conv(widths[-1], config.out_channels, 3, rngs=rngs)

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W colors"]:
        """Decodes latents to images in [-1, 1], not clipped, in the dtype of `latent`.

        Args:
            latent: latents on the scale of the autoencoder, after the 1x1 convolution if there is
                one.

        Returns:
            The images: H and W are h and w doubled once for every stage but the last.
        """
        x = self.mid_block(self.conv_in(latent))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(norm_silu(self.conv_norm_out, x))


class Stage(nnx.Module):
    """Residual blocks at one resolution, then upsampling by 2 if `upsample` is set.

    There are `config.layers_per_block + 1` blocks.

    Args:
        n_in: input channels.
        n_out: output channels.
        config: configuration of the autoencoder (`KLConfig`), for the number of blocks and of
            groups in their norms.
        upsample: whether the stage doubles height and width at its end.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, config: KLConfig, *, upsample: bool, rngs: nnx.Rngs):
        groups = config.norm_num_groups
        widths_in = [n_in] + [n_out] * config.layers_per_block
        self.resnets = nnx.List(
            [ResnetBlock2D(width, n_out, groups, rngs=rngs) for width in widths_in]
        )
        self.upsamplers = nnx.List([Upsample2D(n_out, rngs=rngs)] if upsample else [])

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        """Applies the residual blocks, then the upsampling by 2 if there is one.

        Args:
            x: images with the stage's input channels.

        Returns:
            Images with the stage's output channels, in the dtype of `x`: with upsampling twice as
            high and wide as `x`, otherwise as high and wide.
        """
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class UNetMidBlock2D(nnx.Module):
    """The coarsest resolution: a residual block, attention (if the configuration has it), and a
    residual block.

    Args:
        channels: input and output channels.
        config: configuration of the autoencoder (`KLConfig`), for the number of groups in the norms
            and whether there is attention.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, config: KLConfig, *, rngs: nnx.Rngs):
        groups = config.norm_num_groups
        has_attention = config.mid_block_add_attention
        self.attentions = nnx.List(
            [Attention(channels, groups, rngs=rngs)] if has_attention else []
        )
        self.resnets = nnx.List(
            [ResnetBlock2D(channels, channels, groups, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies a residual block, attention over all pixels (if the configuration has it), and a
        residual block.

        Args:
            x: images with the block's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        first, last = self.resnets
        for layer in (first, *self.attentions, last):
            x = layer(x)
        return x


class ResnetBlock2D(nnx.Module):
    """A residual block: group normalization, SiLU and 3x3 convolution, twice, added to the input.

    If the number of channels changes, a 1x1 convolution maps the input before it is added.

    Args:
        n_in: input channels.
        n_out: output channels.
        groups: number of groups of both group normalizations; it divides `n_in` and `n_out`.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, n_in: int, n_out: int, groups: int, *, rngs: nnx.Rngs):
        self.norm1 = GroupNorm(n_in, groups)
        self.conv1 = Conv(n_in, n_out, 3, rngs=rngs)
        self.norm2 = GroupNorm(n_out, groups)
        self.conv2 = Conv(n_out, n_out, 3, rngs=rngs)
        self.conv_shortcut = (
            Linear(n_in, n_out, layout="pointwise", rngs=rngs) if n_in != n_out else None
        )

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h w n_out"]:
        """Applies group normalization, SiLU and convolution twice, and adds the result to the
        input.

        If the number of channels changes, a 1x1 convolution maps the input before it is added.

        Args:
            x: images with the block's input channels.

        Returns:
            Images as high and wide as `x` with `n_out` channels, in the dtype of `x`.
        """
        y = self.conv1(norm_silu(self.norm1, x))
        y = self.conv2(norm_silu(self.norm2, y))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Softmax attention over all pixels with a single head, after group normalization, added to the
    input.

    Args:
        channels: number of input channels, of output channels, and of features of the head.
        groups: number of groups of the normalization.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, groups: int, *, rngs: nnx.Rngs):
        self.group_norm = GroupNorm(channels, groups)
        self.to_q = Linear(channels, channels, rngs=rngs)
        self.to_k = Linear(channels, channels, rngs=rngs)
        self.to_v = Linear(channels, channels, rngs=rngs)
        self.to_out = nnx.List([Linear(channels, channels, rngs=rngs)])

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalizes the input, attends over all pixels with one softmax head, projects, and adds
        the result to the input.

        Args:
            x: images with the layer's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        tokens = (x.shape[0], -1, 1, x.shape[-1])  # [b, h w, one head, c]
        y = self.group_norm(x)
        q = self.to_q(y).reshape(tokens)
        k = self.to_k(y).reshape(tokens)
        v = self.to_v(y).reshape(tokens)
        return x + self.to_out[0](attention(q, k, v).reshape(x.shape))


class Upsample2D(nnx.Module):
    """Doubles height and width: nearest-neighbor upsampling, then a 3x3 convolution.

    Args:
        channels: input and output channels.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels, channels, 3, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 2*h 2*w c"]:
        """Repeats each pixel 2 x 2 times, and convolves the result.

        Args:
            x: images with the layer's number of channels.

        Returns:
            Images of twice the height and width with as many channels, in the dtype of `x`.
        """
        return self.conv.apply_upsampled(x)


class GroupNorm(nnx.Module):
    """Group normalization (arXiv 1803.08494) over all pixels and the channels of a group, computed
    in float32.

    1e-6 (`NORM_EPS`) is added to the variance. The weight `scale` is 1 and the bias 0 at first;
    both have one entry per channel.

    Args:
        channels: number of channels.
        groups: number of groups of consecutive channels, a divisor of `channels`.
    """

    def __init__(self, channels: int, groups: int):
        self.scale = param(jnp.ones(channels), "weight")
        self.bias = param(jnp.zeros(channels), "bias")
        self.groups = groups

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalizes images in float32, applies weight and bias, and rounds once.

        Args:
            x: images of any floating-point dtype, with the layer's number of channels.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return self.in_float32(x).astype(x.dtype)

    def in_float32(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Applies the layer, weight and bias included, without rounding its float32 result.

        Args:
            x: images of any floating-point dtype, with the layer's number of channels.

        Returns:
            A float32 array of the shape of `x`.
        """
        grouped = x.astype(jnp.float32).reshape(*x.shape[:3], self.groups, -1)
        # Both sums take one pass over memory. They are sums of differences from the first pixel's
        # mean, which is close to the mean of all pixels, so that few digits cancel.
        first_pixel = x[:, :1, :1].astype(jnp.float32).reshape(len(x), 1, 1, self.groups, -1)
        origin = first_pixel.mean(-1, keepdims=True)
        centered = grouped - origin
        mean = centered.mean((1, 2, 4), keepdims=True)
        variance = (centered**2).mean((1, 2, 4), keepdims=True) - mean**2
        scale = jax.lax.rsqrt(jnp.maximum(variance, 0.0) + NORM_EPS)
        y = ((grouped - (origin + mean)) * scale).reshape(x.shape)
        weight = self.scale.get_value().astype(jnp.float32)
        return y * weight + self.bias.get_value().astype(jnp.float32)


def norm_silu(norm: GroupNorm, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """Applies group normalization and then SiLU, both in float32.

    Args:
        norm: the normalization, with its weight and bias.
        x: images with the number of channels of `norm`.

    Returns:
        An array of the shape and dtype of `x`. It is rounded to this dtype only once, after SiLU.
    """
    return jax.nn.silu(norm.in_float32(x)).astype(x.dtype)
