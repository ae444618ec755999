"""SANA as a pipeline: prompt encoding, velocity and decoding as in diffusers' `SanaPipeline` (arXiv 2410.10629)."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from solrl_jax.models.autoencoder_dc import AutoencoderDC, AutoencoderDCConfig
from solrl_jax.models.gemma2 import Gemma2Config, Gemma2Model
from solrl_jax.models.pipeline import (
    Component,
    Conditioning,
    Pipeline,
    Tokens,
    check_fit,
    fitting_latent,
    load_tokenizer,
    read_json,
)
from solrl_jax.models.sana import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.weights import Params

MAX_TOKENS = 300


def open_sana(folder: Path, remat: str) -> Pipeline:
    """Reads a directory in the layout of `Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers`."""
    config = SanaConfig.from_dict(read_json(folder / "transformer" / "config.json"))
    vae_config = AutoencoderDCConfig.from_dict(read_json(folder / "vae" / "config.json"))
    _check_fit(folder, config, vae_config)

    transformer = Component.of(
        folder / "transformer", lambda d: lambda r: SanaTransformer2DModel(SanaConfig.from_dict(d), remat=remat, rngs=r)
    )
    text_encoder = Component.of(folder / "text_encoder", lambda d: lambda r: Gemma2Model(Gemma2Config.from_dict(d), rngs=r))
    vae = Component.of(folder / "vae", lambda d: lambda r: AutoencoderDC(AutoencoderDCConfig.from_dict(d), rngs=r))
    tokenizer = folder / "tokenizer"

    def tokenize(prompts: Sequence[str], max_tokens: int) -> Tokens:
        """Lower-cased, stripped, padded on the right to `max_tokens`; without an instruction, as the recipe trains."""
        return with_instruction(prompts, max_tokens, "", 0)

    def instruct(prompts: Sequence[str], max_tokens: int, instruction: str) -> Tokens:
        """The instruction, as it is, before each prompt; of all tokens the first and the last `max_tokens` - 1 are kept.

        The released text is the default of `complex_human_instruction` of diffusers' `SanaPipeline`, `chi_prompt` in the
        authors' configs: its lines joined by line breaks.
        """
        # 2: of the instruction's own tokens the one that begins the text, and the one that runs into the prompt
        return with_instruction(prompts, max_tokens, instruction, len(load_tokenizer(tokenizer).encode(instruction)) - 2)

    def with_instruction(prompts: Sequence[str], max_tokens: int, instruction: str, more: int) -> Tokens:
        """`more`: tokens that the encoder sees beside those that are kept. kept: the places of those, a row a prompt."""
        length = max_tokens + more
        encoded = load_tokenizer(tokenizer)(
            [instruction + p.lower().strip() for p in prompts], padding="max_length", max_length=length, truncation=True,
            padding_side="right", return_tensors="np")  # fmt: skip
        kept = np.concatenate([[0], np.arange(length - max_tokens + 1, length)]).astype("int32")
        return {
            "ids": encoded["input_ids"].astype("int32"),
            "mask": encoded["attention_mask"].astype(bool),
            "kept": np.tile(kept, (len(prompts), 1)),
        }

    def encode_text(params: dict[str, Params], tokens: Tokens) -> Conditioning:
        text = text_encoder(params["text_encoder"])(tokens["ids"], tokens["mask"])
        return {
            "text": jnp.take_along_axis(text, tokens["kept"][..., None], axis=1),
            "mask": jnp.take_along_axis(tokens["mask"], tokens["kept"], axis=1),
        }

    def velocity(params: Params, latent: Array, conditioning: Conditioning, timestep: Array, guidance: Array) -> Array:
        embedded = None
        if config.guidance_embeds:
            embedded = jnp.broadcast_to(guidance * config.guidance_embeds_scale, timestep.shape)
        timestep = timestep * config.timestep_scale
        return transformer(params)(latent, conditioning["text"], conditioning["mask"], timestep, embedded)

    compression = vae_config.spatial_compression

    def latent_shape(height: int, width: int) -> tuple[int, int, int]:
        return *fitting_latent(height, width, compression, config.patch_size), config.in_channels

    return Pipeline(
        kind="SanaPipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": text_encoder},
        vae=vae,
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        encode_text=encode_text,
        unscale=lambda latent: latent / vae_config.scaling_factor,
        tokenize=tokenize,
        instruct=instruct,
        latent_shape=latent_shape,
        image_tokens=lambda height, width: height * width // (compression * config.patch_size) ** 2,
        default_max_tokens=min(MAX_TOKENS, load_tokenizer(tokenizer).model_max_length),
        default_size=(config.sample_size * compression,) * 2,
    )


def _check_fit(folder: Path, config: SanaConfig, vae: AutoencoderDCConfig) -> None:
    """The components were made for each other, and the network predicts a velocity and nothing beside it."""
    text = Gemma2Config.from_dict(read_json(folder / "text_encoder" / "config.json"))
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae.latent_channels),
        ("transformer out_channels", config.out_channels or config.in_channels, config.in_channels),
        ("transformer caption_channels", config.caption_channels, text.hidden_size),
        ("transformer cross_attention_dim", config.cross_attention_dim, config.width),
    )
