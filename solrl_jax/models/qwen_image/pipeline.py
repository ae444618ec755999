"""Qwen-Image as a pipeline: text-to-image generation as in diffusers' `QwenImagePipeline` (arXiv
2508.02324).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.errors import InputError
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import unsupported
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.qwen_image.autoencoder import AutoencoderKLQwenImageConfig, open_autoencoder
from solrl_jax.models.qwen_image.transformer import (
    PATCH,
    QwenImageConfig,
    QwenImageTransformer2DModel,
)
from solrl_jax.models.text_encoders.qwen2_5_vl import Qwen2_5_VLTextConfig, open_qwen2_5_vl
from solrl_jax.models.text_encoders.tokenizers import check_vocabulary, tokenize

MAX_TOKENS = 1024
DEFAULT_MAX_TOKENS = 512  # the default of diffusers
DEFAULT_LATENT_SIDE = 128  # of images, in latent pixels; no released config has it
# The text encoder reads each prompt inside this template. The transformer does not see the tokens
# before the prompt.
TEMPLATE = (
    "<|im_start|>system\n"
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
    "{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PREFIX_TOKENS = 34  # number of tokens of the template before the prompt
# The settings of the scheduler from which the shift of the schedule follows, with the defaults of
# diffusers' pipeline.
SHIFT_SETTINGS = {
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


class QwenImagePipeline(Pipeline):
    """Qwen-Image or Qwen-Image-2512: the language part of Qwen2.5-VL encodes the prompt.

    It uses classifier-free guidance, and scales each token of the result to the norm that the token
    has in the velocity for the prompt (`guide`). `velocity` raises ValueError for `fp8_attention`,
    because the attention is masked.

    `QwenImagePipeline(folder, gradient_checkpointing)` opens a model directory in the layout of
    diffusers without reading a weight. It raises FileNotFoundError if a configuration or the
    tokenizer is missing, and ValueError if one is not supported or two do not fit together.
    `gradient_checkpointing` ("none", the default, "matmuls" or "blocks") says what the backward
    pass of the transformer recomputes; another value raises KeyError while tracing. The attributes
    below are in addition to those of `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        tokenizer: directory of the tokenizer (a path).
    """

    kind = "QwenImagePipeline"
    pipeline_sigmas = True

    @classmethod
    def diffusers_guidance(cls, guidance_scale: float, true_cfg_scale: float) -> dict[str, Any]:
        """Returns the arguments with which the pipeline of diffusers guides as a run does.

        Args:
            guidance_scale: `rollout.guidance_scale` of the run, the `true_cfg_scale` of diffusers.
            true_cfg_scale: ignored, always 1.

        Returns:
            The arguments by name: "true_cfg_scale" and "negative_prompt", the empty text. No
            arguments if `guidance_scale` is at most 1, which is no guidance.
        """
        if guidance_scale <= 1:
            return {}  # diffusers does not guide without a negative prompt
        return {"true_cfg_scale": guidance_scale, "negative_prompt": ""}

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `Qwen/Qwen-Image`. No weight is read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported, the tokenizer cannot be loaded or has tokens
                that the text encoder lacks, or a width or number of channels of one component is
                not what another one takes or returns.
        """
        super().__init__(folder, gradient_checkpointing)
        config = QwenImageConfig.read(folder / "transformer")
        vae_config = AutoencoderKLQwenImageConfig.read(folder / "vae")
        text_config = Qwen2_5_VLTextConfig.read(folder / "text_encoder")
        check_equal(
            folder, "transformer in_channels", config.in_channels, PATCH**2 * vae_config.z_dim
        )
        check_equal(folder, "transformer out_channels", config.num_out_channels, vae_config.z_dim)
        check_equal(
            folder,
            "transformer joint_attention_dim",
            config.joint_attention_dim,
            text_config.hidden_size,
        )
        self.tokenizer = folder / "tokenizer"
        check_vocabulary(self.tokenizer, text_config.vocab_size)
        self.config = config
        self.vae_config = vae_config

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: QwenImageTransformer2DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        self.text_encoders = {"text_encoder": open_qwen2_5_vl(folder / "text_encoder", text_config)}
        self.vae = open_autoencoder(folder / "vae", vae_config)
        self.compression = vae_config.spatial_compression
        self.channels = vae_config.z_dim
        self.patch = PATCH
        side = DEFAULT_LATENT_SIDE * self.compression
        self.default_size = (side, side)
        self.default_max_tokens = DEFAULT_MAX_TOKENS
        self._read_shift()

    def _read_shift(self) -> None:
        """Reads the settings of the schedule shift from the attribute `scheduler`, and sets
        `shift_terminal` (the last noise level before 0) and `_shift`, a dictionary of the four
        others, which `shift_formula` reads.

        Defaults are those of diffusers' pipeline: `base_shift` 0.5, `max_shift` 1.15,
        `base_image_seq_len` 256, `max_image_seq_len` 4096, and no `shift_terminal`.

        Raises:
            ValueError: a setting is not a finite number of at least 0, `max_image_seq_len` does not
                exceed `base_image_seq_len`, or `shift_terminal` is neither None nor a number in [0,
                1). The message names file and setting.
        """
        file = str(self.folder / "scheduler" / "scheduler_config.json")
        settings = SHIFT_SETTINGS | {
            name: value for name, value in self.scheduler.items() if name in SHIFT_SETTINGS
        }
        for name, value in settings.items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise unsupported(file, name, value, "a number of at least 0")
        if settings["max_image_seq_len"] <= settings["base_image_seq_len"]:
            value = settings["max_image_seq_len"]
            raise unsupported(file, "max_image_seq_len", value, "more than base_image_seq_len")
        terminal = self.scheduler.get("shift_terminal")
        if terminal is not None and (type(terminal) not in (int, float) or not 0 <= terminal < 1):
            raise unsupported(file, "shift_terminal", terminal, "None or a number in [0, 1)")
        self._shift = settings
        self.shift_terminal = terminal

    @property
    def shift_formula(self) -> Callable[[int, int], float]:
        """The formula by which the schedule is shifted towards noise for larger images.

        A function (number of steps, number of image tokens of 2 x 2 latent pixels) that returns mu,
        the natural logarithm of the shift. mu is linear in the number of tokens, without bounds: it
        is `base_shift` at `base_image_seq_len` tokens and `max_shift` at `max_image_seq_len`
        tokens, which are fields of `scheduler_config.json`. The number of steps has no effect.
        """

        def line(steps: int, tokens: int) -> float:
            settings = self._shift
            slope = (settings["max_shift"] - settings["base_shift"]) / (
                settings["max_image_seq_len"] - settings["base_image_seq_len"]
            )
            return settings["base_shift"] + slope * (tokens - settings["base_image_seq_len"])

        return line

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
                leaves are whole, as `Component.gather` returns them.
            latent: noisy latents [b, h, w, c], of even height and width.
            conditioning: a dictionary with "text" [b, l, d], hidden states of Qwen2.5-VL, and
                "mask" [b, l], true on tokens and false on the padding after them (that it comes
                after them is not checked), as returned by `encode_text`.
            timestep: `1000 * sigma` of each latent [b], where the noise level sigma lies in [0, 1].
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: must be False, because the attention is masked.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: `fp8_attention` is set; or, while tracing, height or width is odd, `max(h,
                w) // 4 + l` (half of the larger side in tokens, plus the text tokens, padding
                included) exceeds 4096, or the size of the mesh axis `sequence` does not divide the
                number of image tokens.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        if fp8_attention:
            raise ValueError(
                f"fp8_attention: not available for {self.kind}, whose attention is masked"
            )
        network = self.transformer(params)
        return network(latent, conditioning["text"], conditioning["mask"], timestep)

    def guide(
        self,
        conditional: Float[Array, "b h w c"],
        unconditional: Float[Array, "b h w c"],
        scale: Float[Array, ""],
    ) -> Float[Array, "b h w c"]:
        """Combines two velocities by classifier-free guidance (arXiv 2207.12598), and rescales the
        result. For use under jit.

        Each token of the result (2 x 2 latent pixels, all channels) is scaled to the norm that the
        token has in `conditional`.

        Args:
            conditional: the velocity for the prompt, float32, of even height and width.
            unconditional: the velocity for the negative prompt, float32.
            scale: the guidance scale, a scalar. 1: no guidance.

        Returns:
            The guided velocity, float32. A token whose guided velocity is exactly zero becomes NaN,
            as in diffusers.
        """

        def norm(tokens: Array) -> Array:
            return jnp.sqrt((tokens**2).sum(-1, keepdims=True))

        guided = space_to_depth(super().guide(conditional, unconditional, scale))
        return depth_to_space(guided * (norm(space_to_depth(conditional)) / norm(guided)))

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts inside the model's text template, padded on the right.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens per prompt that the transformer sees, from 1 (not checked)
                to 1024. They include the end of the template after the prompt. A longer text is cut
                at its end, so that it loses the end of the template first.
            instruction: ignored: Qwen-Image takes no instruction.

        Returns:
            A dictionary with two arrays [prompts, `max_tokens` + 34]: "ids", token numbers, int32,
            and "mask", bool, true on tokens and false on padding. The first 34 tokens are the
            beginning of the template.

        Raises:
            InputError: `max_tokens` exceeds 1024, or the tokenizer fails or has no vocabulary. (The
                tokenizers that this package carries for `solrl plan` have none either, but return
                zeros of the right shape.)
        """
        if max_tokens > MAX_TOKENS:
            raise InputError(
                f"{max_tokens} tokens per prompt: this model supports up to {MAX_TOKENS}"
            )
        texts = [TEMPLATE.format(prompt) for prompt in prompts]
        return tokenize(self.tokenizer, texts, PREFIX_TOKENS + max_tokens, padding_side="right")

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by the language part of Qwen2.5-VL. For use under jit.

        Args:
            params: a dictionary with the parameters of Qwen2.5-VL under "text_encoder". Only those
                of stacked blocks may still be sharded.
            tokens: "ids" and "mask", one row per prompt, as `tokenize` returns them.

        Returns:
            A dictionary. "text" [b, l, d]: the normalized hidden states after the last layer, in
            the dtype of the text encoder. "mask" [b, l], bool: true on tokens, false on padding.
            The 34 tokens of the template before the prompt are left out, so l is `max_tokens`.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        text = encoder(tokens["ids"], tokens["mask"])
        return {"text": text[:, PREFIX_TOKENS:], "mask": tokens["mask"][:, PREFIX_TOKENS:]}

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent * latents_std +
        latents_mean`, per channel.

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`, computed in this dtype.
        """
        return self.vae_config.unscale(latent)
