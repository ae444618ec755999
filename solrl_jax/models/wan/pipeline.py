"""Wan 2.1 and Wan 2.2 TI2V 5B as a pipeline: text-to-video generation as in diffusers'
`WanPipeline` (arXiv 2503.20314).
"""

import html
import re
from collections.abc import Sequence
from pathlib import Path

import ftfy
import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.errors import InputError
from solrl_jax.models.autoencoders.wan import AutoencoderKLWanConfig, open_autoencoder
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import unsupported
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.text_encoders.t5 import T5EncoderModel, UMT5Config
from solrl_jax.models.text_encoders.tokenizers import check_vocabulary, tokenize
from solrl_jax.models.wan.transformer import WanConfig, WanTransformer3DModel

MAX_TOKENS = 512
# Default sizes and playback rates: those of Wan 2.1 are in diffusers' pipeline, those of Wan 2.2
# TI2V 5B on the page of its release. No released config has them.
DEFAULT_SIZE = (480, 832, 81)
WAN22_SIZE = (704, 1280, 121)
FRAMES_PER_SECOND = 16
WAN22_FRAMES_PER_SECOND = 24


class WanPipeline(Pipeline):
    """Wan 2.1 T2V, and Wan 2.2 TI2V 5B without an initial image: clips of 4 k + 1 frames. UMT5
    encodes the prompt.

    Guidance needs a second evaluation of `velocity`, with the negative prompt. The attention among
    the tokens of a clip can run in FP8.

    Wan 2.2 TI2V (`expand_timesteps` in `model_index.json`) gives the transformer one timestep per
    token, which is 0 for the tokens of an initial image. Without an image all tokens have the same
    timestep, as in Wan 2.1, so `expand_timesteps` only selects the default size and the playback
    rate here.

    `WanPipeline(folder, gradient_checkpointing)` opens a model directory (a `Path`) in the layout
    of diffusers without reading a weight. It raises FileNotFoundError if a configuration or the
    tokenizer is missing, and ValueError if one is not supported (such as that of Wan 2.2 A14B,
    which has two transformers) or two do not fit together. `gradient_checkpointing` ("none", the
    default, "matmuls" or "blocks") says what the backward pass of the transformer recomputes;
    another value raises KeyError while tracing. The attributes below are in addition to those of
    `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        tokenizer: directory of the tokenizer (a path).
    """

    kind = "WanPipeline"
    attends_in_fp8 = True

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `Wan-AI/Wan2.1-T2V-1.3B-Diffusers` or of
        `Wan-AI/Wan2.2-TI2V-5B-Diffusers`. No weight is read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported, such as that of Wan 2.2 A14B, which has two
                transformers; the tokenizer cannot be loaded or has tokens that the text encoder
                lacks; or a width or number of channels of one component is not what another one
                takes or returns.
        """
        super().__init__(folder, gradient_checkpointing)
        timestep_per_token = _check_index(folder / "model_index.json")
        config = WanConfig.read(folder / "transformer")
        vae_config = AutoencoderKLWanConfig.read(folder / "vae")
        text_config = UMT5Config.read(folder / "text_encoder")
        check_equal(folder, "transformer in_channels", config.in_channels, vae_config.z_dim)
        check_equal(folder, "transformer out_channels", config.num_out_channels, vae_config.z_dim)
        check_equal(folder, "transformer text_dim", config.text_dim, text_config.d_model)
        self.tokenizer = folder / "tokenizer"
        check_vocabulary(self.tokenizer, text_config.vocab_size)
        self.config = config
        self.vae_config = vae_config

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: WanTransformer3DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        self.text_encoders = {
            "text_encoder": Component.from_builder(
                folder / "text_encoder", lambda rngs: T5EncoderModel(text_config, rngs=rngs)
            )
        }
        self.vae = open_autoencoder(folder / "vae", vae_config)
        self.compression = vae_config.spatial_compression
        self.temporal_compression = vae_config.temporal_compression
        self.channels = vae_config.z_dim
        self.patch = config.patch_side
        self.default_size = WAN22_SIZE if timestep_per_token else DEFAULT_SIZE
        self.frames_per_second = (
            WAN22_FRAMES_PER_SECOND if timestep_per_token else FRAMES_PER_SECOND
        )
        self.default_max_tokens = MAX_TOKENS

    def velocity(
        self,
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        """Predicts the velocity `noise - x0`, in the dtype of `latent`. For use under jit.

        Args:
            params: parameters of the transformer: nested dictionaries keyed by module name. A leaf
                may be an array, a quantized weight, or a weight with its LoRA adapter. Stacked
                blocks and, under tensor parallelism, linear layers may still be sharded; all other
                leaves are whole.
            latent: noisy latents [b, t, h, w, c]: t = k + 1 latent frames for a clip of 4 k + 1
                frames. Height and width are multiples of the side of a patch.
            conditioning: a dictionary with "text" [b, l, d], hidden states of UMT5 with zeros on
                padding, as returned by `encode_text`.
            timestep: `1000 * sigma` of each latent [b], where the noise level sigma lies in [0, 1].
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: whether the attention among the tokens of the clip is computed in FP8:
                queries, keys, values and result are in E4M3. No gradient may be taken. Accelerators
                without FP8 attention compute in BF16 from the rounded inputs. The attention to the
                text is not in FP8.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: while tracing, if height or width is not a multiple of the side of a patch,
                a clip has more frames, rows or columns of patches than the network has positions,
                or the size of the mesh axis `sequence` does not divide the number of tokens of a
                clip.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        network = self.transformer(params)
        return network(latent, conditioning["text"], timestep, fp8_attention=fp8_attention)

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts, cleaned as in diffusers (`clean`): wrongly decoded characters are
        repaired, HTML entities resolved, and runs of white space become one space.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens to which each prompt is padded or cut, its end-of-text
                token included: up to 512 (`MAX_TOKENS`), and at least the number of special tokens
                that the tokenizer adds (1 for UMT5). It affects the clips, because the transformer
                attends to the zeros that `encode_text` returns for padding.
            instruction: ignored: Wan takes no instruction.

        Returns:
            A dictionary with two NumPy arrays [prompts, max_tokens]: "ids", token numbers, int32,
            and "mask", bool, true on tokens and false on padding (on the right in released models).

        Raises:
            InputError: `max_tokens` is outside of these limits, or the tokenizer fails or has no
                vocabulary. (The tokenizers that this package carries for `solrl plan` have none
                either, but return zeros.)
        """
        if max_tokens > MAX_TOKENS:
            raise InputError(
                f"{max_tokens} tokens per prompt: this model supports up to {MAX_TOKENS}"
            )
        return tokenize(self.tokenizer, [clean(prompt) for prompt in prompts], max_tokens)

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by UMT5. For use under jit.

        Args:
            params: a dictionary with the parameters of UMT5 under "text_encoder". Only those of
                stacked blocks may still be sharded.
            tokens: "ids" and "mask", one row per prompt, as `tokenize` returns them.

        Returns:
            A dictionary with "text" [b, l, d]: the normalized hidden states after the last layer,
            and zeros on padding, in the dtype of the text encoder.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        mask = jnp.asarray(tokens["mask"])
        return {"text": jnp.where(mask[..., None], encoder(tokens["ids"], mask), 0)}

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent * latents_std +
        latents_mean`, per channel.

        Args:
            latent: the transformer's latents [b, t, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return self.vae_config.unscale(latent)


def _check_index(index: Path) -> bool:
    """Reads `expand_timesteps` from a `model_index.json`, and checks that the model has a single
    transformer.

    Args:
        index: the file.

    Returns:
        The field `expand_timesteps`, false by default: whether the model is Wan 2.2 TI2V, whose
        transformer takes one timestep per token.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read; `transformer_2` is neither missing, null nor [null,
            null], or `boundary_ratio` is neither missing nor null, which means a second transformer
            for low noise (Wan 2.2 A14B); or `expand_timesteps` is present but not a bool. The
            message names the field.
    """
    fields = read_json(index)
    one_transformer = "None: models with a second transformer for low noise are not supported"
    second = fields.get("transformer_2")
    if second not in (None, [None, None]):
        raise unsupported(str(index), "transformer_2", second, one_transformer)
    boundary = fields.get("boundary_ratio")
    if boundary is not None:
        raise unsupported(str(index), "boundary_ratio", boundary, one_transformer)
    expand_timesteps = fields.get("expand_timesteps", False)
    if not isinstance(expand_timesteps, bool):
        raise unsupported(str(index), "expand_timesteps", expand_timesteps, "true or false")
    return expand_timesteps


def clean(prompt: str) -> str:
    """Returns a prompt as diffusers' pipeline passes it to the tokenizer.

    In this order: wrongly decoded characters are repaired by ftfy, HTML entities are resolved
    twice, white space is stripped from both ends, and each other run of it becomes one space.

    Args:
        prompt: any text.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", text.strip()).strip()
