"""FLUX.2's autoencoder: `AutoencoderKLFlux2` of diffusers in Flax NNX.

It has the networks of `models.autoencoders.kl`, but the diffusion model's latents differ. One of
their pixels holds 2 x 2 latent pixels of the network, so they have four times the channels. Every
channel is normalized by its mean and variance over the training images, which the files hold.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders.kl import AutoencoderKL, KLConfig
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.pixel_shuffle import depth_to_space

PATCH = 2  # side, in the network's latent pixels, of one latent pixel of the diffusion model


@dataclasses.dataclass(frozen=True)
class AutoencoderKLFlux2Config(KLConfig):
    """The configuration of FLUX.2's autoencoder: the fields of a released `config.json`.

    A stage is a group of blocks at one resolution. Tuples have one entry per stage, finest first.
    Only the decoder is built; the fields of the encoder are read and checked. In the diffusion
    model's latents, each square of 2 x 2 pixels of the autoencoder's latents is stacked into the
    channels of one pixel, and every channel is normalized. The constructor raises ValueError for a
    value that is not supported; so does `read` for an unknown field.

    Attributes:
        in_channels: channels of an image at the input of the encoder, 3 by default.
        out_channels: channels of a decoded image, 3 by default.
        down_block_types: "DownEncoderBlock2D" for every stage, the only supported value.
        up_block_types: "UpDecoderBlock2D" for every stage, the only supported value.
        block_out_channels: channels of each stage of the encoder, multiples of `norm_num_groups`.
        decoder_block_out_channels: number of channels of each stage of the decoder, multiples of
            `norm_num_groups`; None: the same as in the encoder.
        layers_per_block: number of residual blocks in each stage of the encoder. Each stage of the
            decoder has one more.
        act_fn: "silu", the only supported value.
        latent_channels: number of channels of the autoencoder's latents. The diffusion model's have
            four times as many.
        norm_num_groups: number of groups of channels in every group normalization, 32 by default.
        sample_size: side, or height and width, of the training images in pixels. It has no effect.
        force_upcast: whether the network needs float32. Pipelines then decode in float32, even if
            the rest of the model has another dtype (`Pipeline.vae_dtype`).
        use_quant_conv: whether the released network has a 1x1 convolution after its encoder. It has
            no effect here.
        use_post_quant_conv: whether there is a 1x1 convolution before the decoder, True by default.
        mid_block_add_attention: whether the coarsest resolution has attention, True by default.
        batch_norm_eps: added to the variance by which each channel of the diffusion model's latents
            is normalized.
        batch_norm_momentum: has no effect; it served the training of the autoencoder.
        patch_size: (2, 2), the only supported value: rows and columns of the autoencoder's latent
            that become one pixel of the diffusion model's latent.
    """

    network = "AutoencoderKLFlux2"

    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",) * 4
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",) * 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    decoder_block_out_channels: tuple[int, ...] | None = None
    layers_per_block: int = 2
    latent_channels: int = 32
    sample_size: int | tuple[int, ...] = 1024
    force_upcast: bool = False
    batch_norm_eps: float = 1e-4
    batch_norm_momentum: float = 0.1
    patch_size: tuple[int, ...] = (PATCH, PATCH)

    @property
    def decoder_config(self) -> "AutoencoderKLFlux2Config":
        """The configuration in which `block_out_channels` are the channels of the decoder's stages.

        It is `self` if `decoder_block_out_channels` is None, otherwise a copy in which
        `block_out_channels` has the value of that field, and that field is None.
        """
        widths = self.decoder_block_out_channels
        if widths is None:
            return self
        return dataclasses.replace(self, block_out_channels=widths, decoder_block_out_channels=None)

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `act_fn`, a block type or `patch_size` is not the supported value; the
                number of channels of a stage is not a positive multiple of `norm_num_groups`; there
                are no stages; or the lists with one entry per stage differ in length. The message
                names the field.
        """
        super().check()
        self.require(self.patch_size == (PATCH, PATCH), "patch_size", f"[{PATCH}, {PATCH}]")
        widths = self.decoder_block_out_channels
        if widths is not None:
            self.require(
                len(widths) == len(self.block_out_channels),
                "decoder_block_out_channels",
                "a list as long as block_out_channels, or None",
            )
            groups = self.norm_num_groups
            self.require(
                all(width > 0 and width % groups == 0 for width in widths),
                "decoder_block_out_channels",
                f"positive multiples of norm_num_groups={groups}",
            )

    @property
    def channels(self) -> int:
        """Number of channels of the diffusion model's latents: four times `latent_channels`."""
        return self.latent_channels * PATCH**2

    @property
    def compression(self) -> int:
        """Side, in image pixels, of the square that one pixel of the diffusion model's latent
        stands for: 2 to the power of the number of stages, 16 by default. This is twice the
        compression of the autoencoder itself.
        """
        return self.spatial_compression * PATCH


class AutoencoderKLFlux2(AutoencoderKL):
    """FLUX.2's autoencoder, of which only the decoder is built.

    Unlike other autoencoders, it decodes the diffusion model's latents directly: it undoes their
    normalization, and turns the channels of each latent pixel into 2 x 2 pixels.

    Args:
        config: configuration of the autoencoder (`AutoencoderKLFlux2Config`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderKLFlux2Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.bn = BatchStatistics(config.channels, config.batch_norm_eps)

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Undoes the normalization of the diffusion model's latents, and decodes them to images in
        [-1, 1] but for overshoots, which are not clipped.

        Args:
            latent: the latents as the transformer returns them: c is `config.channels`, ordered
                (channel, row, column in the 2 x 2 pixels).

        Returns:
            The images, in the dtype of `latent`, with `config.out_channels` colors: H is `h *
            config.compression` and W is `w * config.compression`.
        """
        return super().decode(depth_to_space(self.bn.denormalize(latent)))


class BatchStatistics(nnx.Module):
    """The fixed mean and variance of every channel. They are 0 and 1 until they are read from the
    released files.

    Args:
        channels: number of channels.
        eps: added to the variance.
    """

    def __init__(self, channels: int, eps: float):
        self.mean = param(jnp.zeros(channels), "running_mean")
        self.variance = param(jnp.ones(channels), "running_var")
        self.eps = eps

    def denormalize(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Gives normalized channels their original mean and variance back: `latent * sqrt(variance
        + eps) + mean`.

        Args:
            latent: normalized latents.

        Returns:
            An array of the shape and dtype of `latent`.
        """
        std = jnp.sqrt(self.variance.get_value() + self.eps).astype(latent.dtype)
        return latent * std + self.mean.get_value().astype(latent.dtype)
