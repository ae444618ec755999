"""The KL autoencoder of latent diffusion (arXiv 2112.10752, section 3.1): `AutoencoderKL` of diffusers in Flax NNX.

FLUX.1 and Stable Diffusion 3 use it with 16 latent channels. With 4, and a 1x1 convolution before the decoder, it is the
autoencoder of Stable Diffusion 1. Attention over all pixels at the coarsest resolution, residual convolutions at ever finer
ones. Training makes latents and never reads a picture: the encoder is not here (`scripts/pretrain/encoders.py` has it).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.conv import Conv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.loading.config_file import MOST_BUILT, MOST_STAGES, ReleasedConfig

NORM_EPS = 1e-6
ACCEPTED: dict[
    str, tuple[Any, ...]
] = {  # values of these fields; of block types, the values of every stage
    "act_fn": ("silu",),
    "down_block_types": ("DownEncoderBlock2D",),
    "up_block_types": ("UpDecoderBlock2D",),
}


@dataclasses.dataclass(frozen=True)
class KLConfig(ReleasedConfig):
    """The fields that autoencoders of this kind share. Tuples have one entry for each stage, finest first."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1  # in the encoder; the decoder has one more
    act_fn: str = "silu"
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, ...] = 32  # of the training images, in pixels; any size runs
    force_upcast: bool = (
        True  # whether it needs float32; the caller chooses, by the dtype of its input
    )
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @property
    def of_decoder(self) -> "KLConfig":
        """The same with the decoder's widths for `block_out_channels`."""
        return self

    def check(self) -> None:
        for name, accepted in ACCEPTED.items():
            self.require_one_of(name, accepted)
        widths = self.block_out_channels
        groups = self.norm_num_groups
        fits = 0 < len(widths) <= MOST_STAGES and all(w % groups == 0 for w in widths)
        self.require(
            fits,
            "block_out_channels",
            f"a list of 1 to {MOST_STAGES} multiples of norm_num_groups={groups}",
        )
        most = MOST_BUILT // len(widths)
        self.require(
            self.layers_per_block <= most,
            "layers_per_block",
            f"up to {most}, with {len(widths)} stages",
        )
        for name in ("down_block_types", "up_block_types"):
            fits = len(getattr(self, name)) == len(widths)
            self.require(fits, name, f"a list of {len(widths)}, one for each of block_out_channels")

    @property
    def required_dtype(self) -> jnp.dtype | None:
        """The only dtype that the network works in; None: any."""
        return jnp.dtype(jnp.float32) if self.force_upcast else None

    @property
    def spatial_compression(self) -> int:
        """Pixels that a latent stands for, each way."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclasses.dataclass(frozen=True)
class AutoencoderKLConfig(KLConfig):
    """The fields of a released `config.json`."""

    network = "AutoencoderKL"

    scaling_factor: float = (
        0.18215  # the diffusion model sees `(latent - shift_factor) * scaling_factor`
    )
    shift_factor: float | None = None  # None: zero
    latents_mean: None = None
    latents_std: None = None

    def unscale(self, latent: Float[Array, "..."]) -> Float[Array, "..."]:
        """From the diffusion model's latents to those that `AutoencoderKL.decode` takes."""
        return latent / self.scaling_factor + (self.shift_factor or 0.0)


class AutoencoderKL(nnx.Module):
    """Latents to images in [-1, 1]. The config's scale and shift are not applied."""

    def __init__(self, config: KLConfig, *, rngs: nnx.Rngs):
        c = config
        latent = config.latent_channels
        self.decoder = Decoder(c.of_decoder, rngs=rngs)
        self.post_quant_conv = (
            Linear(latent, latent, layout="pointwise", rngs=rngs) if c.use_post_quant_conv else None
        )
        self.config = config

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W colours"]:
        """H = h * `config.spatial_compression`. Not clipped to [-1, 1]."""
        return self.decoder(
            latent if self.post_quant_conv is None else self.post_quant_conv(latent)
        )


class Decoder(nnx.Module):
    """Stages from coarse to fine; each but the last ends with the step up."""

    def __init__(self, c: KLConfig, *, rngs: nnx.Rngs):
        widths = c.block_out_channels[::-1]
        self.conv_in = Conv(c.latent_channels, widths[0], 3, rngs=rngs)
        self.mid_block = UNetMidBlock2D(widths[0], c, rngs=rngs)
        self.up_blocks = nnx.List([
            Stage(pair, c.layers_per_block + 1, c, up=i < len(widths) - 1, rngs=rngs)
            for i, pair in enumerate(zip((widths[0], *widths), widths, strict=False))
        ])  # fmt: skip
        self.conv_norm_out = GroupNorm(widths[-1], c.norm_num_groups)
        self.conv_out = Conv(widths[-1], c.out_channels, 3, rngs=rngs)

    def __call__(self, z: Float[Array, "b h w c"]) -> Float[Array, "b H W colours"]:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(norm_silu(self.conv_norm_out, x))


class Stage(nnx.Module):
    """`layers` residual blocks. up: then twice the resolution."""

    def __init__(
        self, widths: tuple[int, int], layers: int, c: KLConfig, *, up: bool, rngs: nnx.Rngs
    ):
        n_in, n_out = widths
        inputs = (n_in, *[n_out] * (layers - 1))
        self.resnets = nnx.List(
            [ResnetBlock2D(n, n_out, c.norm_num_groups, rngs=rngs) for n in inputs]
        )
        self.upsamplers = nnx.List([Upsample2D(n_out, rngs=rngs)] if up else [])

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class UNetMidBlock2D(nnx.Module):
    """The coarsest resolution: a residual block, attention, a residual block."""

    def __init__(self, channels: int, c: KLConfig, *, rngs: nnx.Rngs):
        groups = c.norm_num_groups
        self.attentions = nnx.List(
            [Attention(channels, groups, rngs=rngs)] if c.mid_block_add_attention else []
        )
        self.resnets = nnx.List(
            [ResnetBlock2D(channels, channels, groups, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        first, last = self.resnets
        for layer in (first, *self.attentions, last):
            x = layer(x)
        return x


class ResnetBlock2D(nnx.Module):
    """Norm, SiLU and convolution, twice, added to the input. If the width changes, a 1x1 convolution maps the input."""

    def __init__(self, n_in: int, n_out: int, groups: int, *, rngs: nnx.Rngs):
        self.norm1 = GroupNorm(n_in, groups)
        self.conv1 = Conv(n_in, n_out, 3, rngs=rngs)
        self.norm2 = GroupNorm(n_out, groups)
        self.conv2 = Conv(n_out, n_out, 3, rngs=rngs)
        self.conv_shortcut = (
            None if n_in == n_out else Linear(n_in, n_out, layout="pointwise", rngs=rngs)
        )

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h w n_out"]:
        y = self.conv1(norm_silu(self.norm1, x))
        y = self.conv2(norm_silu(self.norm2, y))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Attention over all pixels with one head, as wide as the network. Pre-norm, and added to its input."""

    def __init__(self, channels: int, groups: int, *, rngs: nnx.Rngs):
        self.group_norm = GroupNorm(channels, groups)
        self.to_q, self.to_k, self.to_v = (Linear(channels, channels, rngs=rngs) for _ in range(3))
        self.to_out = nnx.List([Linear(channels, channels, rngs=rngs)])

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        y = self.group_norm(x)
        q, k, v = (
            to(y).reshape(x.shape[0], -1, 1, x.shape[-1])
            for to in (self.to_q, self.to_k, self.to_v)
        )
        return x + self.to_out[0](attention(q, k, v).reshape(x.shape))


class Upsample2D(nnx.Module):
    """Twice the resolution: each pixel becomes a 2 x 2 square, then a convolution."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.conv = Conv(channels, channels, 3, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 2*h 2*w c"]:
        return self.conv.apply_upsampled(x)


class GroupNorm(nnx.Module):
    """Normalisation over all pixels of each of `groups` runs of neighbouring channels (arXiv 1803.08494); float32 inside."""

    def __init__(self, channels: int, groups: int):
        self.scale = param(jnp.ones(channels), "weight")
        self.bias = param(jnp.zeros(channels), "bias")
        self.groups = groups

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """The same in float32."""
        grouped, first = (
            a.astype(jnp.float32).reshape(*a.shape[:3], self.groups, -1) for a in (x, x[:, :1, :1])
        )
        # both sums in one pass over memory: about a pixel's own mean, which is near, so that few digits cancel
        about = first.mean(-1, keepdims=True)
        mean = (grouped - about).mean((1, 2, 4), keepdims=True)
        variance = jnp.maximum(
            ((grouped - about) ** 2).mean((1, 2, 4), keepdims=True) - mean**2, 0.0
        )
        y = ((grouped - (about + mean)) * jax.lax.rsqrt(variance + NORM_EPS)).reshape(x.shape)
        return y * self.scale.get_value().astype(jnp.float32) + self.bias.get_value().astype(
            jnp.float32
        )


def norm_silu(norm: GroupNorm, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """SiLU of the normalised `x`, rounded once. With a rounding between the two, the error of BF16 is a tenth larger."""
    return jax.nn.silu(norm.wide(x)).astype(x.dtype)
