"""Stable Diffusion 3 and 3.5 as a pipeline: prompt encoding, velocity, decoding as in diffusers' `StableDiffusion3Pipeline`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from solrl_jax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
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
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.models.text_encoders.t5 import T5Config, T5EncoderModel
from solrl_jax.models.text_encoders.tokenizers import check_vocabulary, clip_length, tokenize
from solrl_jax.models.vision.clip import CLIPTextConfig, CLIPTextModelWithProjection

MAX_TOKENS = 256  # of T5
TOKENIZERS = {
    "text_encoder": "tokenizer",
    "text_encoder_2": "tokenizer_2",
    "text_encoder_3": "tokenizer_3",
}
CLIPS = ("text_encoder", "text_encoder_2")
T5 = "text_encoder_3"


@dataclasses.dataclass(frozen=True, eq=False)
class SD3Text:
    """The text encoders: two CLIPs, and T5, which a release may leave out."""

    folder: Path
    encoders: dict[str, Component]  # by folder
    clip_tokens: int
    width: int  # of the text that the transformer takes

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> Tokens:
        """max_tokens: of T5. Both CLIPs have the length of the first one's tokenizer."""
        length = {T5: max_tokens} | dict.fromkeys(CLIPS, self.clip_tokens)
        tokens = {
            part: tokenize(self.folder / TOKENIZERS[part], prompts, length[part])["ids"]
            for part in self.encoders
        }
        return {T5: np.zeros((len(prompts), max_tokens), "int32")} | tokens

    def encode(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """{"text": [b, l, width], "pooled": [b, e]}. Text is the CLIPs' tokens, side by side and padded to `width`, then T5's.

        Where there is no T5, zeros take the place of its tokens, as in diffusers.
        """
        clips = [self.encoders[part](params[part])(tokens[part]) for part in CLIPS]
        text = jnp.concatenate([clip.penultimate for clip in clips], axis=-1)
        text = jnp.pad(text, ((0, 0), (0, 0), (0, self.width - text.shape[-1])))
        more = jnp.zeros((*tokens[T5].shape, self.width), text.dtype)
        if T5 in self.encoders:
            more = self.encoders[T5](params[T5])(tokens[T5]).astype(text.dtype)
        return {
            "text": jnp.concatenate([text, more], axis=1),
            "pooled": jnp.concatenate([clip.pooled for clip in clips], axis=-1),
        }


def open_text(folder: Path, width: int, pooled: int) -> SD3Text:
    """Opens the text encoders and tokenizers for a transformer that takes text of `width` and a vector of `pooled` features.

    Raises FileNotFoundError or ValueError for what is missing, not supported or of another width.
    """
    configs = {part: CLIPTextConfig.read(folder / part) for part in CLIPS}
    if width < (least := sum(config.hidden_size for config in configs.values())):
        wanted = f"at least {least}, the hidden_size of both CLIPs"
        raise ValueError(f"{folder}: transformer joint_attention_dim={width}; accepted: {wanted}")
    check_fit(
        folder,
        (
            "transformer pooled_projection_dim",
            pooled,
            sum(c.projection_dim for c in configs.values()),
        ),
    )

    def open_clip(part: str) -> Component:
        return Component.of(
            folder / part, lambda r: CLIPTextModelWithProjection(configs[part], rngs=r)
        )

    encoders = {part: open_clip(part) for part in CLIPS}
    if read_json(folder / "model_index.json").get(T5) not in (None, [None, None]):
        config = T5Config.read(folder / T5)
        check_fit(folder, ("transformer joint_attention_dim", width, config.d_model))
        encoders[T5] = Component.of(folder / T5, lambda r: T5EncoderModel(config, rngs=r))
        check_vocabulary(folder / TOKENIZERS[T5], config.vocab_size)
    for part in CLIPS:
        check_vocabulary(
            folder / TOKENIZERS[part], configs[part].vocab_size
        )  # raises now if there is no tokenizer
    positions = [config.max_position_embeddings for config in configs.values()]
    return SD3Text(folder, encoders, clip_length(folder / TOKENIZERS[CLIPS[0]], *positions), width)


def open_sd3(folder: Path, remat: str) -> Pipeline:
    """Opens a directory in the layout of `stabilityai/stable-diffusion-3.5-large`."""
    config = SD3Config.read(folder / "transformer")
    vae_config = AutoencoderKLConfig.read(folder / "vae")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.latent_channels),
        ("transformer out_channels", config.features_out, config.in_channels),
    )
    text = open_text(folder, config.joint_attention_dim, config.pooled_projection_dim)
    transformer = Component.of(
        folder / "transformer", lambda r: SD3Transformer2DModel(config, remat=remat, rngs=r)
    )
    compression = vae_config.spatial_compression

    def velocity(
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        return transformer(params)(
            latent,
            conditioning["text"],
            conditioning["pooled"],
            timestep,
            fp8_attention=fp8_attention,
        )

    return Pipeline(
        kind="StableDiffusion3Pipeline",
        folder=folder,
        transformer=transformer,
        text_encoders=text.encoders,
        vae=Component.of(folder / "vae", lambda r: AutoencoderKL(vae_config, rngs=r), find_decoder),
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        tokenize=text.tokenize,
        encode_text=text.encode,
        unscale=vae_config.unscale,
        compression=compression,
        channels=config.in_channels,
        patch=config.patch_size,
        default_size=(config.sample_size * compression,) * 2,
        default_max_tokens=MAX_TOKENS,
        largest_side=config.pos_embed_max_size
        * config.patch_size
        * compression,  # there are no positions beyond
        vae_dtype=vae_config.own_dtype,
        attends_in_fp8=True,
    )
