"""Qwen-Image's autoencoder: `AutoencoderKLQwenImage` of diffusers in Flax NNX.

It is the video autoencoder of Wan 2.1 for clips of one frame, with a decoder that was trained
further (`models/autoencoders/wan.py`). The weights of the temporal upsampling, which skips the
first frame, are not read.
"""

import dataclasses
from functools import partial
from pathlib import Path

from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.autoencoders.wan import AutoencoderKLWan, VideoAutoencoderConfig
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import ENCODER_PREFIXES, locate_tensors


@dataclasses.dataclass(frozen=True)
class AutoencoderKLQwenImageConfig(VideoAutoencoderConfig):
    """The configuration of Qwen-Image's autoencoder: the fields of a released `vae/config.json`,
    with the defaults of diffusers.

    The attribute below is in addition to those of `VideoAutoencoderConfig`. The values in
    `temperal_downsample` have no effect, because an image has one frame, but their number must be
    one less than that of `dim_mult`. The constructor raises ValueError for a value that is not
    supported; so does `read` for an unknown field.

    Attributes:
        input_channels: number of color channels of an image; only 3 is supported.
    """

    network = "AutoencoderKLQwenImage"

    input_channels: int = 3

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: a field of `VideoAutoencoderConfig` has an unsupported value (see its method
                `check`), or `input_channels` is not 3. The message names the field.
        """
        super().check()
        self.require(self.input_channels == 3, "input_channels", "3")


def open_autoencoder(folder: Path, config: AutoencoderKLQwenImageConfig) -> Component:
    """Opens the decoder of Qwen-Image's autoencoder. No file is read.

    The files also hold the encoder and the temporal upsampling, which are ignored.

    Args:
        folder: the folder of the autoencoder in a model directory, usually `vae`.
        config: configuration of the autoencoder, as read from this folder.

    Returns:
        The network `AutoencoderKLQwenImage` without its parameters; the component loads them from
        `folder`.
    """
    temporal = (
        f"decoder.up_blocks.{i}.upsamplers.0.time_conv." for i in range(len(config.dim_mult))
    )
    return Component.from_builder(
        folder,
        lambda rngs: AutoencoderKLQwenImage(config, rngs=rngs),
        partial(locate_tensors, unused=(*ENCODER_PREFIXES, *temporal)),
    )


class AutoencoderKLQwenImage(AutoencoderKLWan):
    """Decodes latents to images in [-1, 1]. Only the decoder of the autoencoder is built.

    Args:
        config: configuration of the autoencoder (`AutoencoderKLQwenImageConfig`). Its means and
            standard deviations are not applied here (`VideoAutoencoderConfig.unscale`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: AutoencoderKLQwenImageConfig, *, rngs: nnx.Rngs):
        super().__init__(config, temporal=False, rngs=rngs)

    def decode(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [-1, 1]. Values beyond this range are not clipped.

        Args:
            latent: latents on the scale of the autoencoder, the result of `config.unscale`.

        Returns:
            The images, in the dtype of `latent`: H is `h * config.spatial_compression`, and W is
            `w * config.spatial_compression`.
        """
        return super().decode(latent[:, None])[:, 0]
