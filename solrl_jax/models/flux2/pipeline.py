"""FLUX.2-klein as a pipeline: prompt encoding, velocity and decoding as in diffusers' `Flux2KleinPipeline`, from text alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Array

from solrl_jax.models.flux2.autoencoder import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from solrl_jax.models.flux2.transformer import Flux2Config, Flux2Transformer2DModel
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import unsupported
from solrl_jax.models.loading.pipeline import (
    Conditioning,
    Pipeline,
    Tokens,
    TracedTokens,
    check_fit,
)
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params, find_decoder
from solrl_jax.models.text_encoders.qwen3 import Qwen3Config, open_qwen3
from solrl_jax.models.text_encoders.tokenizers import (
    chat,
    check_vocabulary,
    load_tokenizer,
    tokenize,
)

MAX_TOKENS = 512
STATES = (9, 18, 27)  # of the encoder, side by side as the text
DEFAULT_SIDE = 1024  # of images, in pixels; no config says it


@dataclasses.dataclass(frozen=True, eq=False)
class Flux2Text:
    """The text encoder, Qwen3, and its tokenizer."""

    encoder: Component
    tokenizer: Path

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> Tokens:
        """Each prompt as a user's turn, and the beginning of an answer without thoughts; cut at the end to `max_tokens`."""
        return tokenize(
            self.tokenizer, chat(self.tokenizer, prompts, enable_thinking=False), max_tokens
        )

    def encode(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """{"text": [b, l, 3 d]}. The transformer sees padding: FLUX.2 was trained so."""
        return {"text": self.encoder(params["text_encoder"])(tokens["ids"], tokens["mask"])}


def empirical_mu(steps: int, tokens: int) -> float:
    """The logarithm of the shift of `steps` sigmas: diffusers' `compute_empirical_mu`, rounded as there.

    For 10 steps and for 200 it is linear in the number of image tokens, and between these it is linear in the steps. Above 4300
    tokens it is that of 200 steps, which is FLUX.1's, for any number of steps.
    """
    of_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return of_200
    slope = (of_200 - (8.73809524e-05 * tokens + 1.89833333)) / 190.0
    return slope * steps + of_200 - 200.0 * slope


def open_flux2(folder: Path, remat: str) -> Pipeline:
    """Opens a directory in the layout of `black-forest-labs/FLUX.2-klein-4B`, `-9B`, `-base-4B` or `-base-9B`."""
    config = Flux2Config.read(folder / "transformer")
    vae_config = AutoencoderKLFlux2Config.read(folder / "vae")
    text_config = Qwen3Config.read(folder / "text_encoder")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.channels),
        ("transformer out_channels", config.features_out, config.in_channels),
        (
            "transformer joint_attention_dim",
            config.joint_attention_dim,
            len(STATES) * text_config.hidden_size,
        ),
    )
    distilled = read_json(folder / "model_index.json").get("is_distilled", False)
    if type(distilled) is not bool:
        raise unsupported(
            str(folder / "model_index.json"), "is_distilled", distilled, "True, False"
        )
    transformer = Component.of(
        folder / "transformer", lambda r: Flux2Transformer2DModel(config, remat=remat, rngs=r)
    )
    text = Flux2Text(open_qwen3(folder / "text_encoder", text_config, STATES), folder / "tokenizer")
    check_vocabulary(text.tokenizer, text_config.vocab_size)

    def velocity(
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        return transformer(params)(
            latent, conditioning["text"], timestep, fp8_attention=fp8_attention
        )

    return Pipeline(
        kind="Flux2KleinPipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": text.encoder},
        vae=Component.of(
            folder / "vae", lambda r: AutoencoderKLFlux2(vae_config, rngs=r), find_decoder
        ),
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        tokenize=text.tokenize,
        encode_text=text.encode,
        unscale=lambda latent: latent,  # by what the autoencoder's files hold
        compression=vae_config.compression,
        channels=vae_config.channels,
        patch=1,
        default_size=(DEFAULT_SIDE, DEFAULT_SIDE),
        default_max_tokens=min(MAX_TOKENS, load_tokenizer(text.tokenizer).model_max_length),
        vae_dtype=vae_config.own_dtype,
        attends_in_fp8=True,
        embedded_guidance=distilled,  # learned by the distillation: there is no scale to give
        own_sigmas=True,
        mu=empirical_mu,
    )
