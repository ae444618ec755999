"""FLUX.1 as a pipeline: prompt encoding, velocity and decoding as in diffusers' `FluxPipeline`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.flux.transformer import PATCH, FluxConfig, FluxTransformer2DModel
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.pipeline import (
    Conditioning,
    Pipeline,
    Tokens,
    TracedTokens,
    check_fit,
)
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params, find_decoder
from solrl_jax.models.text_encoders.t5 import T5Config, T5EncoderModel
from solrl_jax.models.text_encoders.tokenizers import (
    check_vocabulary,
    clip_length,
    load_tokenizer,
    tokenize,
)
from solrl_jax.models.vision.clip import CLIPTextConfig, CLIPTextModel

MAX_TOKENS = 512  # of T5
SAMPLE_SIZE = 128  # side of the latents that the model was made for; its config does not say


@dataclasses.dataclass(frozen=True, eq=False)
class FluxText:
    """The text encoders: T5 gives a vector for every token, CLIP one for the whole prompt."""

    folder: Path
    clip: Component
    t5: Component
    clip_tokens: int

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> Tokens:
        """max_tokens: of T5. CLIP has the length of its tokenizer."""
        return {
            "clip": tokenize(self.folder / "tokenizer", prompts, self.clip_tokens)["ids"],
            "t5": tokenize(self.folder / "tokenizer_2", prompts, max_tokens)["ids"],
        }

    def encode(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """{"text": [b, l, d], "pooled": [b, e]}. Padding is not masked: FLUX was trained with padding in view."""
        text = self.t5(params["text_encoder_2"])(tokens["t5"])
        return {"text": text, "pooled": self.clip(params["text_encoder"])(tokens["clip"]).pooled}


def open_flux(folder: Path, remat: str) -> Pipeline:
    """Opens a directory in the layout of `black-forest-labs/FLUX.1-dev` (or `-schnell`)."""
    config = FluxConfig.read(folder / "transformer")
    vae_config = AutoencoderKLConfig.read(folder / "vae")
    clip_config = CLIPTextConfig.read(folder / "text_encoder")
    t5_config = T5Config.read(folder / "text_encoder_2")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.latent_channels * PATCH**2),
        ("transformer out_channels", config.features_out, config.in_channels),
        ("transformer joint_attention_dim", config.joint_attention_dim, t5_config.d_model),
        (
            "transformer pooled_projection_dim",
            config.pooled_projection_dim,
            clip_config.hidden_size,
        ),
    )
    check_vocabulary(folder / "tokenizer", clip_config.vocab_size)
    check_vocabulary(folder / "tokenizer_2", t5_config.vocab_size)
    transformer = Component.of(
        folder / "transformer", lambda r: FluxTransformer2DModel(config, remat=remat, rngs=r)
    )
    text = FluxText(
        folder,
        clip=Component.of(folder / "text_encoder", lambda r: CLIPTextModel(clip_config, rngs=r)),
        t5=Component.of(folder / "text_encoder_2", lambda r: T5EncoderModel(t5_config, rngs=r)),
        clip_tokens=clip_length(folder / "tokenizer", clip_config.max_position_embeddings),
    )

    def velocity(
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        embedded = jnp.broadcast_to(guidance, timestep.shape) if config.guidance_embeds else None
        return transformer(params)(
            latent,
            conditioning["text"],
            conditioning["pooled"],
            timestep,
            embedded,
            fp8_attention=fp8_attention,
        )

    return Pipeline(
        kind="FluxPipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": text.clip, "text_encoder_2": text.t5},
        vae=Component.of(folder / "vae", lambda r: AutoencoderKL(vae_config, rngs=r), find_decoder),
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        tokenize=text.tokenize,
        encode_text=text.encode,
        unscale=vae_config.unscale,
        compression=vae_config.spatial_compression,
        channels=vae_config.latent_channels,
        patch=PATCH,
        default_size=(SAMPLE_SIZE * vae_config.spatial_compression,) * 2,
        default_max_tokens=min(MAX_TOKENS, load_tokenizer(folder / "tokenizer_2").model_max_length),
        vae_dtype=vae_config.own_dtype,
        attends_in_fp8=True,
        embedded_guidance=True,
        own_sigmas=True,
    )
