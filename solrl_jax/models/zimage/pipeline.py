"""Z-Image as a pipeline: prompt encoding, velocity and decoding as in diffusers' `ZImagePipeline` (arXiv 2511.22699).

Its guidance is `v + s (v - v_negative)`: a `guidance_scale` of s there is a guidance of 1 + s here, and 0 there is 1.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Array

from solrl_jax.errors import InputError
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
from solrl_jax.models.text_encoders.qwen3 import Qwen3Config, open_qwen3
from solrl_jax.models.text_encoders.tokenizers import (
    chat,
    chat_template,
    check_vocabulary,
    tokenize,
)
from solrl_jax.models.zimage.transformer import PATCH, ZImageConfig, ZImageTransformer2DModel

MAX_TOKENS = 512
SIZE = 1024  # side of the images that the model was made for; its config does not say


@dataclasses.dataclass(frozen=True, eq=False)
class ZImageText:
    """The text encoder, Qwen3, and its tokenizer."""

    encoder: Component
    tokenizer: Path
    most_tokens: int

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> Tokens:
        """Prompts as turns of a chat, the words of its template among the `max_tokens`.

        Raises InputError for more tokens than the transformer has positions for.
        """
        if max_tokens > self.most_tokens:
            raise InputError(
                f"{max_tokens} tokens a prompt: this model takes up to {self.most_tokens}"
            )
        turns = chat(self.tokenizer, prompts, enable_thinking=True)
        return tokenize(self.tokenizer, turns, max_tokens, padding_side="right")

    def encode(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """{"text": [b, l, d], "mask": [b, l]}: the hidden states before the last layer."""
        return {
            "text": self.encoder(params["text_encoder"])(tokens["ids"], tokens["mask"]),
            "mask": tokens["mask"],
        }


def open_zimage(folder: Path, remat: str) -> Pipeline:
    """Opens a directory in the layout of `Tongyi-MAI/Z-Image` (or `-Turbo`)."""
    config = ZImageConfig.read(folder / "transformer")
    vae_config = AutoencoderKLConfig.read(folder / "vae")
    text_config = Qwen3Config.read(folder / "text_encoder")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.latent_channels),
        ("transformer cap_feat_dim", config.cap_feat_dim, text_config.hidden_size),
    )
    transformer = Component.of(
        folder / "transformer", lambda r: ZImageTransformer2DModel(config, remat=remat, rngs=r)
    )
    encoder = open_qwen3(folder / "text_encoder", text_config, (text_config.num_hidden_layers - 1,))
    text = ZImageText(encoder, folder / "tokenizer", config.most_tokens)
    chat_template(text.tokenizer)  # raises now if there is none
    check_vocabulary(text.tokenizer, text_config.vocab_size)

    def velocity(
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        if fp8_attention:
            raise ValueError(
                "fp8_attention: this network attends with a mask; FP8 attention has none"
            )
        return transformer(params)(latent, conditioning["text"], conditioning["mask"], timestep)

    largest = min(config.axes_lens[1:]) * PATCH * vae_config.spatial_compression
    return Pipeline(
        kind="ZImagePipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": encoder},
        vae=Component.of(folder / "vae", lambda r: AutoencoderKL(vae_config, rngs=r), find_decoder),
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        tokenize=text.tokenize,
        encode_text=text.encode,
        unscale=vae_config.unscale,
        compression=vae_config.spatial_compression,
        channels=vae_config.latent_channels,
        patch=PATCH,
        default_size=(min(SIZE, largest),) * 2,
        default_max_tokens=min(MAX_TOKENS, config.most_tokens),
        largest_side=largest,
        vae_dtype=vae_config.own_dtype,
        own_sigmas=True,
    )
