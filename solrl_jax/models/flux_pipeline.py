"""FLUX.1 as a pipeline: prompt encoding, velocity and decoding as in diffusers' `FluxPipeline`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.models.autoencoder_kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.clip_text import CLIPTextEncoderConfig, CLIPTextModel
from solrl_jax.models.flux import PATCH, FluxConfig, FluxTransformer2DModel
from solrl_jax.models.pipeline import (
    Component,
    Conditioning,
    Pipeline,
    Tokens,
    check_fit,
    clip_length,
    fitting_latent,
    load_tokenizer,
    read_json,
    tokenize_padded,
)  # fmt: skip
from solrl_jax.models.t5 import T5Config, T5EncoderModel
from solrl_jax.models.weights import Params

MAX_TOKENS = 512  # of T5
SAMPLE_SIZE = 128  # latents a side that the model was made for; its config does not say


def open_flux(folder: Path, remat: str) -> Pipeline:
    """Reads a directory in the layout of `black-forest-labs/FLUX.1-dev` (or `-schnell`)."""
    read = lambda part: read_json(folder / part / "config.json")
    config, vae_config = FluxConfig.from_dict(read("transformer")), AutoencoderKLConfig.from_dict(read("vae"))
    clip_config, t5_config = CLIPTextEncoderConfig.from_dict(read("text_encoder")), T5Config.from_dict(read("text_encoder_2"))
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.latent_channels * PATCH**2),
        ("transformer out_channels", config.features_out, config.in_channels),
        ("transformer joint_attention_dim", config.joint_attention_dim, t5_config.d_model),
        ("transformer pooled_projection_dim", config.pooled_projection_dim, clip_config.hidden_size),
    )
    transformer = Component.of(folder / "transformer", lambda _: lambda r: FluxTransformer2DModel(config, remat=remat, rngs=r))
    clip = Component.of(folder / "text_encoder", lambda _: lambda r: CLIPTextModel(clip_config, rngs=r))
    t5 = Component.of(folder / "text_encoder_2", lambda _: lambda r: T5EncoderModel(t5_config, rngs=r))
    vae = Component.of(folder / "vae", lambda _: lambda r: AutoencoderKL(vae_config, rngs=r))

    length = clip_length(folder / "tokenizer", clip_config.max_position_embeddings)

    def tokenize(prompts: Sequence[str], max_tokens: int) -> Tokens:
        """max_tokens: of T5; CLIP has the length of its tokenizer."""
        return {
            "clip": tokenize_padded(folder / "tokenizer", prompts, length),
            "t5": tokenize_padded(folder / "tokenizer_2", prompts, max_tokens),
        }

    def encode_text(params: dict[str, Params], tokens: Tokens) -> Conditioning:
        text = t5(params["text_encoder_2"])(tokens["t5"])  # no mask: FLUX was trained with padding in view
        return {"text": text, "pooled": clip(params["text_encoder"])(tokens["clip"]).pooled}

    def velocity(params: Params, latent: Array, conditioning: Conditioning, timestep: Array, guidance: Array) -> Array:
        embedded = jnp.broadcast_to(guidance, timestep.shape) if config.guidance_embeds else None
        return transformer(params)(latent, conditioning["text"], conditioning["pooled"], timestep, embedded)

    compression = vae_config.spatial_compression

    def latent_shape(height: int, width: int) -> tuple[int, int, int]:
        return *fitting_latent(height, width, compression, PATCH), vae_config.latent_channels

    return Pipeline(
        kind="FluxPipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": clip, "text_encoder_2": t5},
        vae=vae,
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        encode_text=encode_text,
        unscale=vae_config.unscale,
        tokenize=tokenize,
        latent_shape=latent_shape,
        image_tokens=lambda height, width: height * width // (compression * PATCH) ** 2,
        default_max_tokens=min(MAX_TOKENS, load_tokenizer(folder / "tokenizer_2").model_max_length),
        default_size=(SAMPLE_SIZE * compression,) * 2,
        vae_dtype=vae_config.own_dtype,
        embedded_guidance=True,
        own_sigmas=True,
    )
