"""SANA as a pipeline: prompt encoding, velocity and decoding as in diffusers' `SanaPipeline` (arXiv 2410.10629)."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from solrl_jax.models.autoencoders.dc import AutoencoderDC, AutoencoderDCConfig
from solrl_jax.models.layers.mhla import BlockMixing, Mhla, tiling
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
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.text_encoders.gemma2 import Gemma2Config, Gemma2Model
from solrl_jax.models.text_encoders.tokenizers import (
    check_vocabulary,
    count_tokens,
    load_tokenizer,
    tokenize,
)

MAX_TOKENS = 300


@dataclasses.dataclass(frozen=True, eq=False)
class SanaText:
    """The text encoder, Gemma 2, and its tokenizer."""

    encoder: Component
    tokenizer: Path

    def tokenize(self, prompts: Sequence[str], max_tokens: int) -> Tokens:
        """Prompts in lower case, stripped, padded on the right to `max_tokens`; without an instruction, as in the recipe."""
        return self._tokens([clean(p) for p in prompts], max_tokens, max_tokens)

    def instruct(self, prompts: Sequence[str], max_tokens: int, instruction: str) -> Tokens:
        """As `tokenize`, with the instruction before each prompt. The encoder reads it; the transformer does not see it.

        The released instruction is the default of `complex_human_instruction` of diffusers' `SanaPipeline` (`chi_prompt` in the
        authors' configs), its lines joined by line breaks.
        """
        # The prompt reuses two of the instruction's own tokens: the one that begins every text, and the last one, which may
        # become one token with the prompt's first letters.
        own = count_tokens(self.tokenizer, instruction) - 2
        return self._tokens([instruction + clean(p) for p in prompts], max_tokens, max_tokens + own)

    def _tokens(self, texts: Sequence[str], kept: int, length: int) -> Tokens:
        """Texts as `length` tokens. "kept": the positions of the first token and of the last `kept` - 1, a row a text."""
        positions = np.concatenate([[0], np.arange(length - kept + 1, length)]).astype("int32")
        kept_tokens = {"kept": np.tile(positions, (len(texts), 1))}
        return tokenize(self.tokenizer, texts, length, padding_side="right") | kept_tokens

    def encode(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """{"text": [b, l, d], "mask": [b, l]}, at the kept tokens."""
        text = self.encoder(params["text_encoder"])(tokens["ids"], tokens["mask"])
        return {
            "text": jnp.take_along_axis(text, tokens["kept"][..., None], axis=1),
            "mask": jnp.take_along_axis(tokens["mask"], tokens["kept"], axis=1),
        }


def clean(prompt: str) -> str:
    return prompt.lower().strip()


def open_sana(
    folder: Path, remat: str, mhla: Mhla | None = None, size: tuple[int, int] = (0, 0)
) -> Pipeline:
    """Opens a directory in the layout of `Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers`.

    mhla: what replaces the attention among image tokens, begun for images of `size`, height and width; None: nothing does.
    """
    config = SanaConfig.read(folder / "transformer")
    vae_config = AutoencoderDCConfig.read(folder / "vae")
    text_config = Gemma2Config.read(folder / "text_encoder")
    check_fit(
        folder,
        ("transformer in_channels", config.in_channels, vae_config.latent_channels),
        # a network with twice the channels would predict a variance beside the velocity
        ("transformer out_channels", config.features_out, config.in_channels),
        ("transformer caption_channels", config.caption_channels, text_config.hidden_size),
        ("transformer cross_attention_dim", config.cross_attention_dim, config.width),
    )
    unit = vae_config.spatial_compression * config.patch_size
    blocks = (1, 1) if mhla is None else tiling(mhla.blocks, (size[0] // unit, size[1] // unit))
    attention = None if mhla is None else partial(BlockMixing, mhla, blocks)

    def network(r):
        return SanaTransformer2DModel(config, remat=remat, attention=attention, rngs=r)

    transformer = Component.of(folder / "transformer", network)
    encoder = Component.of(folder / "text_encoder", lambda r: Gemma2Model(text_config, rngs=r))
    text = SanaText(encoder, folder / "tokenizer")
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
        return transformer(params)(
            latent, conditioning["text"], conditioning["mask"], timestep * config.timestep_scale
        )

    return Pipeline(
        kind="SanaPipeline",
        folder=folder,
        transformer=transformer,
        text_encoders={"text_encoder": encoder},
        vae=Component.of(folder / "vae", lambda r: AutoencoderDC(vae_config, rngs=r), find_decoder),
        scheduler=read_json(folder / "scheduler" / "scheduler_config.json"),
        velocity=velocity,
        tokenize=text.tokenize,
        encode_text=text.encode,
        unscale=lambda latent: latent / vae_config.scaling_factor,
        compression=vae_config.spatial_compression,
        channels=config.in_channels,
        patch=config.patch_size,
        blocks=blocks,
        default_size=(config.sample_size * vae_config.spatial_compression,) * 2,
        default_max_tokens=min(MAX_TOKENS, load_tokenizer(text.tokenizer).model_max_length),
        instruct=text.instruct,
    )
