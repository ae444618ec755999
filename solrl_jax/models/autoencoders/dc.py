"""DC-AE, SANA's autoencoder (arXiv 2410.10733; in SANA: arXiv 2410.10629, section 2.1): diffusers' `AutoencoderDC` in Flax NNX.

A sequence of stages, each at twice the resolution of the one before. Six stages turn one latent vector into 32 x 32 pixels.
Fine stages hold residual convolutions. Coarse stages hold linear attention and a gated convolution (EfficientViT, arXiv
2205.14756). Every change of resolution has a shortcut without parameters: it repeats channels to the wanted width, and moves
them into pixels. So the convolution beside it learns only a difference; this makes it trainable. Training makes latents and
never reads a picture: the encoder is not here (`scripts/pretrain/encoders.py` has it).
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
from solrl_jax.models.loading.config_file import MOST_BUILT, MOST_STAGES, ReleasedConfig
from solrl_jax.quant import compile_target

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "relu": jax.nn.relu}
NORM_EPS = 1e-5
ATTENTION_EPS = 1e-15
Heads = Float[Array, "b n g d"]
ACCEPTED = {  # values of the fields with these names, with or without "encoder_" or "decoder_" before
    "block_types": ("ResBlock", "EfficientViTBlock"),
    "downsample_block_type": ("Conv", "pixel_unshuffle"),
    "upsample_block_type": ("interpolate", "pixel_shuffle"),
    "norm_types": ("rms_norm",),
    "act_fns": tuple(ACTIVATIONS),
    "conv_act_fn": tuple(ACTIVATIONS),
}


@dataclasses.dataclass(frozen=True)
class AutoencoderDCConfig(ReleasedConfig):
    """The fields of a released `config.json`. Tuples have one entry for each stage, finest first."""

    network = "AutoencoderDC"

    in_channels: int = 3
    latent_channels: int = 32
    attention_head_dim: int = 32
    encoder_block_types: str | tuple[str, ...] = "ResBlock"  # a string stands for all stages
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
    scaling_factor: float = 1.0  # the diffusion model sees `encode(x) * scaling_factor`

    def check(self) -> None:
        n = len(self.encoder_block_out_channels)
        self.require(
            1 <= n <= MOST_STAGES,
            "encoder_block_out_channels",
            f"a list of 1 to {MOST_STAGES}, one a stage",
        )
        for field in dataclasses.fields(self):
            name = field.name
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) or name.endswith(("_types", "_fns")):
                value = (value,) * n if isinstance(value, str) else value
                object.__setattr__(self, name, value)
                self.require(
                    isinstance(value, tuple) and len(value) == n,
                    name,
                    f"a list of {n}, as encoder_block_out_channels",
                )
            match name.removeprefix("encoder_").removeprefix("decoder_"):
                case "layers_per_block":
                    fits = min(value) > 0 and sum(value) <= MOST_BUILT
                    self.require(
                        fits, name, f"one layer or more in every stage, up to {MOST_BUILT} together"
                    )
                case "qkv_multiscales":
                    fits = all(
                        len(sizes) <= MOST_STAGES and all(k % 2 for k in sizes) for sizes in value
                    )
                    self.require(fits, name, f"up to {MOST_STAGES} odd kernel sizes in every stage")
                case "block_out_channels":
                    # Shortcuts average or repeat whole channels, and a shuffle makes a 2 x 2 square of four channels.
                    fits = all(
                        4 * fine % coarse == 0 and coarse % 4 == 0
                        for fine, coarse in pairwise(value)
                    )
                    rule = "multiples of 4 that divide 4 times the width before, the last a multiple of latent_channels"
                    self.require(fits and value[-1] % self.latent_channels == 0, name, rule)
                case kind if kind in ACCEPTED:
                    self.require_one_of(name, ACCEPTED[kind])

    @property
    def spatial_compression(self) -> int:
        """Pixels that a latent stands for, each way."""
        return 2 ** (len(self.encoder_block_out_channels) - 1)


class UpBlock(nnx.Module):
    """Twice the resolution: a convolution of repeated pixels, or (shuffle) a convolution and `depth_to_space`."""

    def __init__(self, n_in: int, n_out: int, *, shuffle: bool, rngs: nnx.Rngs):
        self.conv = Conv(n_in, 4 * n_out if shuffle else n_out, 3, rngs=rngs)
        self.repeats = 4 * n_out // n_in
        self.shuffle = shuffle

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b 2*h 2*w n_out"]:
        y = depth_to_space(self.conv(x)) if self.shuffle else self.conv.apply_upsampled(x)
        return y + depth_to_space(x.repeat(self.repeats, axis=-1))


class ResBlock(nnx.Module):
    """Two convolutions and a norm, added to the input."""

    def __init__(self, channels: int, *, activation: str, rngs: nnx.Rngs):
        self.conv1 = Conv(channels, channels, 3, rngs=rngs)
        self.conv2 = Conv(channels, channels, 3, bias=False, rngs=rngs)
        self.norm = RMSNorm(channels, eps=NORM_EPS, bias=True)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        return x + self.norm(self.conv2(self.activation(self.conv1(x))))


class MultiscaleProjection(nnx.Module):
    """Queries, keys and values of `kernel` x `kernel` neighbourhoods. Each group of `size` consecutive channels is mixed."""

    def __init__(self, channels: int, size: int, kernel: int, *, rngs: nnx.Rngs):
        self.proj_in = DepthwiseConv(channels, kernel, bias=False, rngs=rngs)
        weight = jax.random.normal(rngs.params(), (1, 1, size, channels)) * size**-0.5
        self.proj_out = nnx.Dict(
            kernel=param(weight, "weight", "conv")
        )  # a 1x1 convolution with channels / size groups
        self.size = size

    def __call__(self, qkv: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        x = self.proj_in(qkv).reshape(*qkv.shape[:-1], -1, self.size)
        kernel = self.proj_out.kernel.get_value().reshape(self.size, -1, self.size).astype(x.dtype)
        return jnp.einsum("bhwgi,igo->bhwgo", x, kernel).reshape(qkv.shape)


def relu_attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Averages of `v` with weights relu(q) . relu(k): over all pairs of tokens where that is cheaper, else in linear time."""
    q = jax.nn.relu(q)
    k = jax.nn.relu(k)
    if q.shape[1] <= q.shape[-1]:
        scores = jnp.einsum("bngd,bmgd->bgnm", q, k).astype(jnp.float32)
        weights = scores / (scores.sum(-1, keepdims=True) + ATTENTION_EPS)
        return jnp.einsum("bgnm,bmgd->bngd", weights.astype(v.dtype), v)
    # The sums over keys do not depend on q. In float32: they grow with the image, beyond the range of half precision.
    q32 = q.astype(jnp.float32)
    summed = k.sum(1, dtype=jnp.float32)
    if (
        compile_target.platform() == "cpu"
    ):  # which has no such product of BF16; elsewhere it is exact
        k = k.astype(jnp.float32)
        v = v.astype(jnp.float32)
    dot = partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    total = dot("bngd,bgde->bnge", q32, dot("bngd,bnge->bgde", k, v))
    weight = dot("bngd,bgd->bng", q32, summed)[..., None]
    return (total / (weight + ATTENTION_EPS)).astype(q.dtype)


class MultiscaleAttention(nnx.Module):
    """Attention over the pixels, and, with as many more heads, over neighbourhoods of each of the sizes in `scales`."""

    def __init__(self, channels: int, *, head_dim: int, scales: tuple[int, ...], rngs: nnx.Rngs):
        inner = channels // head_dim * head_dim
        self.to_q, self.to_k, self.to_v = (
            Linear(channels, inner, bias=False, rngs=rngs) for _ in range(3)
        )
        self.to_qkv_multiscale = nnx.List(
            [MultiscaleProjection(3 * inner, head_dim, k, rngs=rngs) for k in scales]
        )
        self.to_out = Linear(inner * (1 + len(scales)), channels, bias=False, rngs=rngs)
        self.norm_out = RMSNorm(channels, eps=NORM_EPS, bias=True)
        self.head_dim = head_dim

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        b, h, w, _ = x.shape
        qkv = jnp.concatenate([self.to_q(x), self.to_k(x), self.to_v(x)], axis=-1)
        qkv = jnp.concatenate([qkv, *(project(qkv) for project in self.to_qkv_multiscale)], axis=-1)
        # The channels are ordered (head, q or k or v, feature). The released layers to_q, to_k and to_v are thirds of them in
        # this order: with several heads, one layer may make all three parts of a head.
        q, k, v = jnp.moveaxis(qkv.reshape(b, h * w, -1, 3, self.head_dim), 3, 0)
        return x + self.norm_out(self.to_out(relu_attention(q, k, v).reshape(b, h, w, -1)))


class ResidualGLUMBConv(GLUMBConv):
    """The gated convolution with eight times the width inside; its result is normalised and added to the input."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        super().__init__(channels, 4 * channels, rngs=rngs)
        self.norm = RMSNorm(channels, eps=NORM_EPS, bias=True)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        return x + self.norm(super().__call__(x))


class EfficientViTBlock(nnx.Module):
    """Attention over the whole image, then a gated convolution over neighbourhoods."""

    def __init__(self, channels: int, *, head_dim: int, scales: tuple[int, ...], rngs: nnx.Rngs):
        self.attn = MultiscaleAttention(channels, head_dim=head_dim, scales=scales, rngs=rngs)
        self.conv_out = ResidualGLUMBConv(channels, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        return self.conv_out(self.attn(x))


def make_stages(
    config: AutoencoderDCConfig, side: str, activations: Sequence[str], rngs: nnx.Rngs
) -> list[list]:
    """The blocks of each stage, without the steps between stages. side: "encoder" or "decoder"."""

    def make(kind: str, width: int, scales: tuple[int, ...], activation: str) -> nnx.Module:
        if kind == "ResBlock":
            return ResBlock(width, activation=activation, rngs=rngs)
        return EfficientViTBlock(
            width, head_dim=config.attention_head_dim, scales=scales, rngs=rngs
        )

    names = ("layers_per_block", "block_types", "block_out_channels", "qkv_multiscales")
    stages = zip(*(getattr(config, f"{side}_{name}") for name in names), activations, strict=True)
    return [[make(*block) for _ in range(depth)] for depth, *block in stages]


class Decoder(nnx.Module):
    """Stages from coarse to fine, but listed finest first. Each begins with the step up from the coarser one."""

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        widths = config.decoder_block_out_channels
        shuffle = config.upsample_block_type == "pixel_shuffle"
        stages = make_stages(config, "decoder", config.decoder_act_fns, rngs)
        for stage, fine, coarse in zip(stages, widths, widths[1:], strict=False):
            stage.insert(0, UpBlock(coarse, fine, shuffle=shuffle, rngs=rngs))
        self.conv_in = Conv(config.latent_channels, widths[-1], 3, rngs=rngs)
        self.up_blocks = nnx.List([nnx.List(stage) for stage in stages])
        self.norm_out = RMSNorm(widths[0], eps=NORM_EPS, bias=True)
        self.conv_out = Conv(widths[0], config.in_channels, 3, rngs=rngs)
        self.activation = ACTIVATIONS[config.decoder_conv_act_fn]
        self.repeats = widths[-1] // config.latent_channels
        self.shortcut = config.decoder_in_shortcut

    def __call__(self, z: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        x = self.conv_in(z) + z.repeat(self.repeats, axis=-1) if self.shortcut else self.conv_in(z)
        for block in chain.from_iterable(reversed(self.up_blocks)):
            x = block(x)
        return self.conv_out(self.activation(self.norm_out(x)))


class AutoencoderDC(nnx.Module):
    """Latents to images in [-1, 1]. `config.scaling_factor` is not applied."""

    def __init__(self, config: AutoencoderDCConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs=rngs)
        self.config = config

    def decode(self, z: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """H = h * `config.spatial_compression`. Not clipped to [-1, 1]."""
        return self.decoder(z)
