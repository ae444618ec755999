"""FLUX.2-klein as a pipeline: text-to-image generation as in diffusers' `Flux2KleinPipeline`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Array

from solrl_jax.errors import InputError
from solrl_jax.models.flux2.autoencoder import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from solrl_jax.models.flux2.transformer import Flux2Config, Flux2Transformer2DModel
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import unsupported
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params, locate_decoder_tensors
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.text_encoders.qwen3 import Qwen3Config, open_qwen3
from solrl_jax.models.text_encoders.tokenizers import (
    chat,
    check_chat_template,
    check_vocabulary,
    load_tokenizer,
    tokenize,
)

MAX_TOKENS = 512
HIDDEN_STATES = (9, 18, 27)  # the hidden states of Qwen3 that are concatenated as the text
DEFAULT_SIDE = 1024  # of images, in pixels; no released config has it


def empirical_mu(steps: int, tokens: int) -> float:
    """Returns the natural logarithm mu of the factor by which FLUX.2 shifts its schedule towards
    noise.

    Equal to `compute_empirical_mu` of diffusers. Up to 4300 tokens, mu is linear in the number of
    steps and in the number of tokens, each with the other fixed. Beyond 4300 tokens, it is the
    value for 200 steps and does not depend on `steps`.

    Args:
        steps: number of sampling steps.
        tokens: number of image tokens.

    Returns:
        mu. The shift k is `exp(mu)`: a noise level sigma becomes `k sigma / (1 + (k - 1) sigma)`.
    """
    mu_200_steps = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return mu_200_steps
    mu_10_steps = 8.73809524e-05 * tokens + 1.89833333
    slope = (mu_200_steps - mu_10_steps) / 190.0
    return slope * steps + mu_200_steps - 200.0 * slope


class Flux2KleinPipeline(Pipeline):
    """FLUX.2-klein, 4B or 9B, distilled or base.

    The text encoder is Qwen3: three of its hidden states, concatenated, are the features of each
    text token. The distilled models (`is_distilled` in `model_index.json`, by default false) were
    trained to give guided results from one evaluation without a guidance scale; for them the
    attribute `embedded_guidance` (guidance is built into the transformer) is True. The base models
    use classifier-free guidance, with two evaluations.

    `Flux2KleinPipeline(folder, gradient_checkpointing)` opens a model directory (a `Path`) in the
    layout of diffusers without reading a weight. It raises FileNotFoundError if a configuration
    (that of the scheduler included) or the tokenizer is missing, and ValueError if one is not
    supported or two do not fit together. `gradient_checkpointing` ("none", the default, "matmuls"
    or "blocks") says what the backward pass of the transformer recomputes; another value raises
    KeyError while tracing. The attribute below is in addition to those of `Pipeline`.

    Attributes:
        tokenizer: directory of the tokenizer (a path).
    """

    kind = "Flux2KleinPipeline"
    attends_in_fp8 = True
    pipeline_sigmas = True

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `black-forest-labs/FLUX.2-klein-4B`. No weight is
        read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported; the text encoder does not have more than 27
                layers; the tokenizer cannot be loaded or has no chat template (both raise
                InputError, a ValueError); the tokenizer has tokens that the text encoder lacks; a
                width or number of channels of one component is not what another one takes or
                returns; or `is_distilled` is neither true nor false.
        """
        super().__init__(folder, gradient_checkpointing)
        config = Flux2Config.read(folder / "transformer")
        vae_config = AutoencoderKLFlux2Config.read(folder / "vae")
        text_config = Qwen3Config.read(folder / "text_encoder")
        text_width = len(HIDDEN_STATES) * text_config.hidden_size
        check_equal(folder, "transformer in_channels", config.in_channels, vae_config.channels)
        check_equal(folder, "transformer out_channels", config.num_out_channels, config.in_channels)
        check_equal(
            folder, "transformer joint_attention_dim", config.joint_attention_dim, text_width
        )
        self.tokenizer = folder / "tokenizer"
        check_chat_template(self.tokenizer)
        check_vocabulary(self.tokenizer, text_config.vocab_size)

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: Flux2Transformer2DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        self.text_encoders = {
            "text_encoder": open_qwen3(folder / "text_encoder", text_config, HIDDEN_STATES)
        }
        self.vae = Component.from_builder(
            folder / "vae",
            lambda rngs: AutoencoderKLFlux2(vae_config, rngs=rngs),
            locate_decoder_tensors,
        )
        self.compression = vae_config.compression
        self.channels = vae_config.channels
        self.patch = 1
        self.vae_dtype = vae_config.required_dtype
        self.default_size = (DEFAULT_SIDE, DEFAULT_SIDE)
        limit = load_tokenizer(self.tokenizer).model_max_length
        self.default_max_tokens = min(MAX_TOKENS, limit)
        index = folder / "model_index.json"
        distilled = read_json(index).get("is_distilled", False)
        if not isinstance(distilled, bool):
            raise unsupported(str(index), "is_distilled", distilled, "True, False")
        self.embedded_guidance = distilled

    @classmethod
    def diffusers_guidance(cls, guidance_scale: float, true_cfg_scale: float) -> dict[str, Any]:
        """Returns the arguments with which the pipeline of diffusers guides as a run does.

        Args:
            guidance_scale: `rollout.guidance_scale` of the run.
            true_cfg_scale: ignored: the pipeline of diffusers cannot guide a distilled model.

        Returns:
            The arguments by name: "guidance_scale".
        """
        return {"guidance_scale": guidance_scale}

    def check_guidance(
        self, guidance_scale: float, true_cfg_scale: float, section: str = ""
    ) -> None:
        """Checks both scales as `Pipeline.check_guidance`. The distilled models take no guidance
        scale; they can be guided by `true_cfg_scale`.

        Args:
            guidance_scale: the guidance scale.
            true_cfg_scale: the scale of classifier-free guidance of a distilled model.
            section: what precedes the names of both in messages, e.g. "rollout.".

        Raises:
            InputError: `true_cfg_scale` is not 1 for a base model, or `guidance_scale` is above 1
                for a distilled one.
        """
        super().check_guidance(guidance_scale, true_cfg_scale, section)
        if self.embedded_guidance and guidance_scale > 1:
            raise InputError(
                f"{section}guidance_scale={guidance_scale}: must be at most 1 for a distilled "
                "FLUX.2-klein, which takes no guidance scale"
            )

    @property
    def shift_formula(self) -> Callable[[int, int], float]:
        """The formula of the schedule shift, `empirical_mu`: a function (number of steps, number of
        image tokens) that returns the natural logarithm of the shift.
        """
        return empirical_mu

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
            latent: noisy latents [b, h, w, c] of any height and width.
            conditioning: a dictionary with "text" [b, l, 3 d], three hidden states of Qwen3 (d
                features each) side by side, as returned by `encode_text`.
            timestep: `1000 * sigma` of each latent [b], where the noise level sigma lies in [0, 1].
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: while tracing, if the size of the mesh axis `sequence` does not divide the
                number of image tokens, or that of text and image tokens together.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        network = self.transformer(params)
        return network(latent, conditioning["text"], timestep, fp8_attention=fp8_attention)

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes each prompt as a user's turn of a chat, with Qwen3's reasoning switched off.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens per prompt, those of the chat template included, from 1
                (not checked) to 4096. Longer chats are cut and shorter ones padded on the sides
                that the tokenizer sets: in the released models both on the right.
            instruction: ignored: FLUX.2 takes no instruction.

        Returns:
            A dictionary with two arrays [prompts, max_tokens]: "ids", token numbers, int32, and
            "mask", bool, true on tokens and false on padding.

        Raises:
            InputError: `max_tokens` is above 4096, or the tokenizer fails or has no usable chat
                template or no vocabulary. The tokenizers without a vocabulary that this package
                carries for `solrl plan` are an exception: they return zeros and a mask that is all
                true.
        """
        texts = chat(self.tokenizer, prompts, enable_thinking=False)
        return tokenize(self.tokenizer, texts, max_tokens)

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by Qwen3. For use under jit.

        Qwen3 does not attend to padding, but FLUX.2 does, so the result has no mask.

        Args:
            params: a dictionary with the parameters of Qwen3 under "text_encoder". Only those of
                stacked blocks may still be sharded.
            tokens: "ids" and "mask", one row per prompt, as `tokenize` returns them.

        Returns:
            A dictionary with "text" [b, l, 3 d]: the hidden states after layers 9, 18 and 27 of
            Qwen3 (counted from 1), concatenated in this order, without a final norm, in the dtype
            of the text encoder. d is the hidden size of Qwen3.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        return {"text": encoder(tokens["ids"], tokens["mask"])}

    def unscale(self, latent: Array) -> Array:
        """Returns the latent unchanged, because FLUX.2's autoencoder itself undoes the
        normalization.

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            `latent` itself.
        """
        return latent
