"""Z-Image as a pipeline: prompt encoding, velocity and decoding as in diffusers' `ZImagePipeline`
(arXiv 2511.22699).

Diffusers' guidance for Z-Image is `v + s (v - v_negative)`. A `guidance_scale` of s there is 1 + s
here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Array

from solrl_jax.errors import InputError
from solrl_jax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import Params, locate_decoder_tensors
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.text_encoders.qwen3 import Qwen3Config, open_qwen3
from solrl_jax.models.text_encoders.tokenizers import (
    chat,
    check_chat_template,
    check_vocabulary,
    tokenize,
)
from solrl_jax.models.zimage.transformer import PATCH, ZImageConfig, ZImageTransformer2DModel

MAX_TOKENS = 512
DEFAULT_SIDE = 1024  # of images, in pixels; no released config has it


class ZImagePipeline(Pipeline):
    """Z-Image or Z-Image-Turbo: Qwen3 encodes the prompt. Guidance needs a second evaluation of
    `velocity`, with the negative prompt.

    `ZImagePipeline(folder, gradient_checkpointing)` opens a model directory (a `Path`) in the
    layout of diffusers without reading a weight. It raises FileNotFoundError if a configuration or
    the tokenizer is missing, and ValueError if one is not supported or two do not fit together.
    `gradient_checkpointing` ("none", the default, "matmuls" or "blocks") says what the backward
    pass of the transformer recomputes; another value raises KeyError while tracing. The attributes
    below are in addition to those of `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        tokenizer: directory of the tokenizer (a path).
    """

    kind = "ZImagePipeline"
    pipeline_sigmas = True

    @classmethod
    def diffusers_guidance(cls, guidance_scale: float, true_cfg_scale: float) -> dict[str, Any]:
        """Returns the arguments with which the pipeline of diffusers guides as a run does.

        Args:
            guidance_scale: `rollout.guidance_scale` of the run, 1 + s for the scale s of diffusers.
            true_cfg_scale: ignored: a run of a model without embedded guidance has 1.

        Returns:
            {"guidance_scale": s}; s is 0 (no guidance) for a `guidance_scale` up to 1.
        """
        return {"guidance_scale": max(guidance_scale - 1, 0.0)}

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `Tongyi-MAI/Z-Image`. No weight is read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported; the tokenizer cannot be loaded or has no
                chat template (an InputError, which is a ValueError), or has tokens that the text
                encoder lacks; or a width or number of channels of one component is not what another
                one takes or returns.
        """
        super().__init__(folder, gradient_checkpointing)
        config = ZImageConfig.read(folder / "transformer")
        vae_config = AutoencoderKLConfig.read(folder / "vae")
        text_config = Qwen3Config.read(folder / "text_encoder")
        check_equal(
            folder, "transformer in_channels", config.in_channels, vae_config.latent_channels
        )
        check_equal(
            folder, "transformer cap_feat_dim", config.cap_feat_dim, text_config.hidden_size
        )
        self.tokenizer = folder / "tokenizer"
        check_chat_template(self.tokenizer)
        check_vocabulary(self.tokenizer, text_config.vocab_size)
        self.config = config
        self.vae_config = vae_config

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: ZImageTransformer2DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        # The text is the hidden state before the last layer.
        state = text_config.num_hidden_layers - 1
        self.text_encoders = {
            "text_encoder": open_qwen3(folder / "text_encoder", text_config, (state,))
        }
        self.vae = Component.from_builder(
            folder / "vae",
            lambda rngs: AutoencoderKL(vae_config, rngs=rngs),
            locate_decoder_tensors,
        )
        self.compression = vae_config.spatial_compression
        self.channels = vae_config.latent_channels
        self.patch = PATCH
        self.vae_dtype = vae_config.required_dtype
        self.largest_side = min(config.axes_lens[1:]) * PATCH * self.compression
        side = min(DEFAULT_SIDE, self.largest_side)
        self.default_size = (side, side)
        self.default_max_tokens = min(MAX_TOKENS, config.max_text_tokens)

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
            latent: noisy latents [b, h, w, c], of even height and width.
            conditioning: a dictionary with "text" [b, l, d], hidden states of Qwen3, and "mask" [b,
                l], true on tokens and false on the padding after them, as returned by
                `encode_text`.
            timestep: `1000 * sigma` of each latent [b], where the noise level sigma lies in [0, 1].
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: must be False, because the attention is masked.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: `fp8_attention` is set; or, while tracing, height or width is odd, image or
                text is too large for the transformer (`config.axes_lens`,
                `config.max_text_tokens`), or the size of the mesh axis `sequence` does not divide
                the number of image tokens, or that of image and text tokens together (image and
                text each padded to a multiple of 32).
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        if fp8_attention:
            raise ValueError(
                f"fp8_attention: not available for {self.kind}, whose attention is masked"
            )
        network = self.transformer(params)
        return network(latent, conditioning["text"], conditioning["mask"], timestep)

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes each prompt as a user's turn of a chat, up to where the answer begins, with
        Qwen3's reasoning switched on (`enable_thinking`), padded on the right.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens per prompt, those of the chat template included, from 1
                (not checked) up to `config.max_text_tokens` and 4096. Longer chats are cut, on the
                right in the released models.
            instruction: ignored: Z-Image takes no instruction.

        Returns:
            A dictionary with two NumPy arrays [prompts, max_tokens]: "ids", token numbers, int32,
            and "mask", bool, true on tokens and false on padding.

        Raises:
            InputError: `max_tokens` is too large, or the tokenizer fails or has no usable chat
                template or no vocabulary. (The tokenizers that this package carries for `solrl
                plan` have none either, but return zeros.)
        """
        if max_tokens > self.config.max_text_tokens:
            raise InputError(
                f"{max_tokens} tokens per prompt: this model supports up to "
                f"{self.config.max_text_tokens}"
            )
        texts = chat(self.tokenizer, prompts, enable_thinking=True)
        return tokenize(self.tokenizer, texts, max_tokens, padding_side="right")

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by Qwen3. For use under jit.

        Args:
            params: a dictionary with the parameters of Qwen3 under "text_encoder". Only those of
                stacked blocks may still be sharded.
            tokens: "ids" and "mask", one row per prompt, as `tokenize` returns them.

        Returns:
            A dictionary. "text" [b, l, d]: the hidden states before Qwen3's last layer, without a
            final norm, in the dtype of the text encoder. States of padding are not zero. "mask" [b,
            l], bool: the "mask" of `tokens`.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        return {"text": encoder(tokens["ids"], tokens["mask"]), "mask": tokens["mask"]}

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent / scaling_factor +
        shift_factor`, two fields of `vae_config` (a `shift_factor` of None is 0).

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return self.vae_config.unscale(latent)
