"""The autoencoders of image pipelines, by the class that their config names, and a pipeline that decodes with another."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from solrl_jax.models.autoencoder_dc import AutoencoderDC, AutoencoderDCConfig
from solrl_jax.models.autoencoder_kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.pipeline import Component, Pipeline, check_fit, read_json


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """A network between images in [-1, 1] and latents, and what has to be known of it beside its parameters."""

    component: Component
    config: AutoencoderDCConfig | AutoencoderKLConfig
    dtype: jnp.dtype | None  # the one dtype that it works in, where there is one


def open_autoencoder(folder: Path) -> Autoencoder:
    """Reads a folder in the layout of diffusers; no weight is loaded.

    Raises FileNotFoundError or ValueError, in one line, for what is missing or of a kind that is not ported.
    """
    fields = read_json(folder / "config.json")
    match fields.get("_class_name"):
        case "AutoencoderDC":
            dc = AutoencoderDCConfig.from_dict(fields)
            return Autoencoder(Component.of(folder, lambda _: lambda r: AutoencoderDC(dc, rngs=r)), dc, None)
        case "AutoencoderKL":
            kl = AutoencoderKLConfig.from_dict(fields)
            return Autoencoder(Component.of(folder, lambda _: lambda r: AutoencoderKL(kl, rngs=r)), kl, kl.own_dtype)
        case kind:
            raise ValueError(f"{folder / 'config.json'}: _class_name={kind!r}; accepted: AutoencoderDC, AutoencoderKL")


def with_autoencoder(pipeline: Pipeline, folder: Path) -> Pipeline:
    """The pipeline decoding with the autoencoder in `folder`, which was made for the same latents.

    How latents are scaled is the pipeline's own affair, and stays as it is. Raises what `open_autoencoder` does, and ValueError
    for another number of latent channels or of pixels that a latent stands for.
    """
    other = open_autoencoder(folder)
    channels = pipeline.latent_shape(*pipeline.default_size)[-1]
    check_fit(
        folder,
        ("latent_channels", other.config.latent_channels, channels),
        ("pixels a latent", other.config.spatial_compression, pipeline.compression),
    )
    return dataclasses.replace(pipeline, vae=other.component, vae_dtype=other.dtype)
