"""FLUX.2's autoencoder: `AutoencoderKLFlux2` of diffusers in Flax NNX.

The networks of `models.autoencoders.kl`, with other latents outside. Four neighbouring ones become one with four times the
channels, and each channel is normalised by its mean and variance over the training images, which the files hold.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders.kl import AutoencoderKL, KLConfig
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.pixel_shuffle import depth_to_space

PATCH = 2  # latents of the network inside that one outside stands for, each way


@dataclasses.dataclass(frozen=True)
class AutoencoderKLFlux2Config(KLConfig):
    """The fields of a released `config.json`. diffusers no longer reads `force_upcast`; released files have it."""

    network = "AutoencoderKLFlux2"

    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",) * 4
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",) * 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    decoder_block_out_channels: tuple[int, ...] | None = None  # None: as `block_out_channels`
    layers_per_block: int = 2
    latent_channels: int = 32
    sample_size: int | tuple[int, ...] = 1024
    force_upcast: bool = False
    batch_norm_eps: float = 1e-4
    batch_norm_momentum: float = 0.1  # of training
    patch_size: tuple[int, ...] = (PATCH, PATCH)

    @property
    def of_decoder(self) -> "AutoencoderKLFlux2Config":
        widths = self.decoder_block_out_channels
        return (
            self
            if widths is None
            else dataclasses.replace(
                self, block_out_channels=widths, decoder_block_out_channels=None
            )
        )

    def check(self) -> None:
        super().check()
        self.require(self.patch_size == (PATCH, PATCH), "patch_size", f"[{PATCH}, {PATCH}]")
        if (widths := self.decoder_block_out_channels) is not None:
            same = len(widths) == len(self.block_out_channels)
            self.require(
                same, "decoder_block_out_channels", "a list as long as block_out_channels, or None"
            )
            self.of_decoder.check()

    @property
    def channels(self) -> int:
        """Of a latent outside."""
        return self.latent_channels * PATCH**2

    @property
    def compression(self) -> int:
        """Pixels that a latent outside stands for, each way."""
        return self.spatial_compression * PATCH


class AutoencoderKLFlux2(AutoencoderKL):
    """The diffusion model's latents, which are normalised, and two by two in one, to images in [-1, 1]."""

    def __init__(self, config: AutoencoderKLFlux2Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.bn = BatchStatistics(config.channels, config.batch_norm_eps)

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """H = h * `config.compression`. Not clipped to [-1, 1]."""
        return super().decode(depth_to_space(self.bn.restore(latent)))


class BatchStatistics(nnx.Module):
    """Means and variances of channels, which are parameters of files and are not trained."""

    def __init__(self, channels: int, eps: float):
        self.mean = param(jnp.zeros(channels), "running_mean")
        self.variance = param(jnp.ones(channels), "running_var")
        self.eps = eps

    def restore(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Channels with their own means and variances, of normalised ones."""
        deviation = jnp.sqrt(self.variance.get_value() + self.eps).astype(latent.dtype)
        return latent * deviation + self.mean.get_value().astype(latent.dtype)
