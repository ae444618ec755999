"""Stable Diffusion 3 and 3.5 as a pipeline: prompt encoding, velocity, decoding as in diffusers' `StableDiffusion3Pipeline`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from solrl_jax.models.autoencoder_kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.clip_text import CLIPTextEncoderConfig, CLIPTextModelWithProjection
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
from solrl_jax.models.sd3 import SD3Config, SD3Transformer2DModel
from solrl_jax.models.t5 import T5Config, T5EncoderModel
from solrl_jax.models.weights import Params

MAX_TOKENS = 256  # of T5
CLIPS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
T5 = "text_encoder_3"


def open_sd3(folder: Path, remat: str) -> Pipeline:
    """Reads a directory in the layout of `stabilityai/stable-diffusion-3.5-large`; T5 may be left out, as it may there."""
    read = lambda part: read_json(folder / part / "config.json")
    config, vae_config = SD3Config.from_dict(read("transformer")), AutoencoderKLConfig.from_dict(read("vae"))
    clip_configs = {part: CLIPTextEncoderConfig.from_dict(read(part)) for part in CLIPS}
    with_t5 = (read_json(folder / "model_index.json").get(T5) or [None])[0] is not None
    t5_config = T5Config.from_dict(read(T5)) if with_t5 else None
    _check_fit(folder, config, vae_config, clip_configs, t5_config)

    def open_clip(part: str) -> Component:
        return Component.of(folder / part, lambda _: lambda r: CLIPTextModelWithProjection(clip_configs[part], rngs=r))

    transformer = Component.of(folder / "transformer", lambda _: lambda r: SD3Transformer2DModel(config, remat=remat, rngs=r))
    clips = {part: open_clip(part) for part in CLIPS}
    t5 = None if t5_config is None else Component.of(folder / T5, lambda _: lambda r: T5EncoderModel(t5_config, rngs=r))
    vae = Component.of(folder / "vae", lambda _: lambda r: AutoencoderKL(vae_config, rngs=r))

    length = clip_length(folder / "tokenizer", *(c.max_position_embeddings for c in clip_configs.values()))
    for part in ("tokenizer_2", "tokenizer_3")[: 1 + with_t5]:
        load_tokenizer(folder / part)  # raises now if it is not there

    def tokenize(prompts: Sequence[str], max_tokens: int) -> Tokens:
        """max_tokens: of T5; both CLIPs have the length of the first one's tokenizer."""
        tokens = {part: tokenize_padded(folder / tokenizer, prompts, length) for part, tokenizer in CLIPS.items()}
        if t5 is None:  # as many zeros in its place as it would have had tokens
            return tokens | {T5: np.zeros((len(prompts), max_tokens), "int32")}
        return tokens | {T5: tokenize_padded(folder / "tokenizer_3", prompts, max_tokens)}

    def encode_text(params: dict[str, Params], tokens: Tokens) -> Conditioning:
        encoded = [clip(params[part])(tokens[part]) for part, clip in clips.items()]
        text = jnp.concatenate([e.penultimate for e in encoded], axis=-1)
        text = jnp.pad(text, ((0, 0), (0, 0), (0, config.joint_attention_dim - text.shape[-1])))
        if t5 is None:
            more = jnp.zeros((*tokens[T5].shape, config.joint_attention_dim), text.dtype)
        else:
            more = t5(params[T5])(tokens[T5]).astype(text.dtype)
        return {"text": jnp.concatenate([text, more], axis=1), "pooled": jnp.concatenate([e.pooled for e in encoded], axis=-1)}

    def velocity(params: Params, latent: Array, conditioning: Conditioning, timestep: Array, guidance: Array) -> Array:
        return transformer(params)(latent, conditioning["text"], conditioning["pooled"], timestep)

    compression = vae_config.spatial_compression

    def latent_shape(height: int, width: int) -> tuple[int, int, int]:
        latent = fitting_latent(height, width, compression, config.patch_size)
        most = config.pos_embed_max_size * config.patch_size
        if max(latent) > most:  # it has no positions beyond
            raise ValueError(f"size {height}x{width}: this model takes up to {most * compression} pixels in either direction")
        return *latent, config.in_channels

    return Pipeline(
        kind="StableDiffusion3Pipeline",
        folder=folder,
        transformer=transformer,
        text_encoders=clips if t5 is None else clips | {T5: t5},
        vae=vae,
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        encode_text=encode_text,
        unscale=vae_config.unscale,
        tokenize=tokenize,
        latent_shape=latent_shape,
        image_tokens=lambda height, width: height * width // (compression * config.patch_size) ** 2,
        default_max_tokens=MAX_TOKENS,
        default_size=(config.sample_size * compression,) * 2,
        vae_dtype=vae_config.own_dtype,
    )


def _check_fit(
    folder: Path, config: SD3Config, vae: AutoencoderKLConfig, clips: dict[str, CLIPTextEncoderConfig], t5: T5Config | None
) -> None:
    widest = sum(clip.hidden_size for clip in clips.values())
    if config.joint_attention_dim < widest:
        wanted = f"at least {widest}, both CLIPs side by side"
        raise ValueError(f"{folder}: transformer joint_attention_dim={config.joint_attention_dim}; accepted: {wanted}")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae.latent_channels),
        ("transformer out_channels", config.out_channels or config.in_channels, config.in_channels),
        ("transformer pooled_projection_dim", config.pooled_projection_dim, sum(c.projection_dim for c in clips.values())),
        (
            "transformer joint_attention_dim",
            config.joint_attention_dim,
            config.joint_attention_dim if t5 is None else t5.d_model,
        ),
    )
