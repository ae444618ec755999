"""FLUX.2-klein as a pipeline: text-to-image generation as in diffusers' `Flux2KleinPipeline`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtyping import Array

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
    """Returns the natural logarithm of FLUX.2's schedule shift, as `compute_empirical_mu` of
    diffusers.

    For 10 and for 200 steps, mu is linear in the number of image tokens. For other numbers of
    steps, it is linear in that number, also beyond 10 and 200. Above 4300 tokens, the line for 200
    steps (which is that of FLUX.1) is used for any number of steps.

    Args:
        steps: number of sampling steps.
        tokens: number of image tokens.

    Returns:
        mu. The shift itself is `exp(mu)`.
    """
    mu_200_steps = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return mu_200_steps
    mu_10_steps = 8.73809524e-05 * tokens + 1.89833333
    slope = (mu_200_steps - mu_10_steps) / 190.0
    return slope * steps + mu_200_steps - 200.0 * slope


class Flux2KleinPipeline(Pipeline):
    """FLUX.2-klein, 4B or 9B, distilled or base. Three hidden states of Qwen3 are the text.

    The distilled models (`is_distilled` in `model_index.json`) have their guidance built in: it
    needs neither a scale nor a second evaluation, and `embedded_guidance` is set. The base models
    need a second evaluation.

    Attributes:
        tokenizer: directory of the tokenizer.
    """

    kind = "Flux2KleinPipeline"
    attends_in_fp8 = True
    linear_sigmas = True

    def __init__(self, folder: Path, remat: str = "none"):
        """Opens a directory in the layout of `black-forest-labs/FLUX.2-klein-4B`. No weight is
        read.

        Args:
            folder: the directory.
            remat: what the gradient of the transformer recomputes: "none" (nothing), "matmuls" (all
                but matmuls and attention kernels) or "blocks" (all but the input of each block). It
                is not checked here.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported; the tokenizer cannot be loaded, has no chat
                template (InputError) or has tokens that the text encoder lacks; a width or number
                of channels of one component is not what another one takes or returns; or
                `is_distilled` is neither true nor false.
        """
        super().__init__(folder, remat)
        config = Flux2Config.read(folder / "transformer")
        vae_config = AutoencoderKLFlux2Config.read(folder / "vae")
        text_config = Qwen3Config.read(folder / "text_encoder")
        text_width = len(HIDDEN_STATES) * text_config.hidden_size
        check_equal(folder, "transformer in_channels", config.in_channels, vae_config.channels)
        check_equal(folder, "transformer out_channels", config.features_out, config.in_channels)
        check_equal(
            folder, "transformer joint_attention_dim", config.joint_attention_dim, text_width
        )
        self.tokenizer = folder / "tokenizer"
        check_chat_template(self.tokenizer)
        check_vocabulary(self.tokenizer, text_config.vocab_size)

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: Flux2Transformer2DModel(config, remat=remat, rngs=rngs),
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

    @property
    def mu(self) -> Callable[[int, int], float]:
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
            params: parameters of the transformer, a nested dictionary by path. Stacks of blocks
                and, over the axis `tensor`, linear layers may be sharded; all else is whole. Leaves
                may be quantized or adapted.
            latent: noisy latents [b, h, w, c] of any height and width.
            conditioning: "text" [b, l, 3 d], three hidden states of Qwen3 side by side, as returned
                by `encode_text`.
            timestep: 1000 times the noise level sigma, from 0 to 1, of each latent.
            guidance: ignored.
            fp8_attention: whether the attention runs in FP8, for programs that take no gradient:
                queries, keys, values and result are rounded to E4M3. On TPUs, on GPUs older than
                Hopper, and on other GPUs for head sizes that are no multiple of 16 or above 128,
                its matmuls run in BF16 all the same.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            KeyError: while tracing, if `remat` is not "none", "matmuls" or "blocks".
        """
        network = self.transformer(params)
        return network(latent, conditioning["text"], timestep, fp8_attention=fp8_attention)

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes each prompt as a user's turn of a chat, with Qwen3's reasoning switched off.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens of each prompt, the tokens of the chat template included:
                up to 4096, and at least the number of special tokens that the tokenizer adds.
                Longer chats are cut, and shorter ones padded, on the sides that the tokenizer's
                settings say: on the right in the released models.
            instruction: not supported, and ignored.

        Returns:
            "ids", int32, and "mask", bool, true on tokens and false on padding: both [prompts,
            max_tokens].

        Raises:
            InputError: the tokenizer has no usable chat template; it fails; `max_tokens` is outside
                of these limits; or the tokenizer has no vocabulary, which only the configurations
                that this package carries for `solrl plan` may lack.
        """
        texts = chat(self.tokenizer, prompts, enable_thinking=False)
        return tokenize(self.tokenizer, texts, max_tokens)

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by Qwen3. For use under jit.

        No mask is returned, because FLUX.2 was trained with attention to padding.

        Args:
            params: a dictionary with the parameters of Qwen3 under "text_encoder". Only stacks of
                blocks may be sharded.
            tokens: "ids" and "mask", one row per prompt, as `tokenize` returns them.

        Returns:
            "text" [b, l, 3 d]: the hidden states after layers 9, 18 and 27 (`HIDDEN_STATES`),
            concatenated in this order, not normalised, in the dtype of the text encoder. d is the
            hidden size of Qwen3.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        return {"text": encoder(tokens["ids"], tokens["mask"])}

    def unscale(self, latent: Array) -> Array:
        """Returns the latent unchanged, because the autoencoder itself undoes the normalisation.

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            `latent` itself.
        """
        return latent  # the autoencoder itself undoes the normalisation
