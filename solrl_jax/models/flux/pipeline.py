"""FLUX.1 as a pipeline: prompt encoding, velocity and decoding as in diffusers' `FluxPipeline`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.errors import InputError
from solrl_jax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.flux.transformer import PATCH, FluxConfig, FluxTransformer2DModel
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import Params, locate_decoder_tensors
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.text_encoders.t5 import T5Config, T5EncoderModel
from solrl_jax.models.text_encoders.tokenizers import (
    check_vocabulary,
    clip_length,
    load_tokenizer,
    tokenize,
)
from solrl_jax.models.vision.clip import CLIPTextConfig, CLIPTextModel

MAX_TOKENS = 512  # of T5
SAMPLE_SIZE = 128  # side of the latents that the model was made for; no released config has it


class FluxPipeline(Pipeline):
    """FLUX.1-dev or FLUX.1-schnell.

    The transformer gets T5's encoding of every prompt token, and one vector from CLIP for the whole
    prompt.

    `FluxPipeline(folder, gradient_checkpointing)` opens a model directory (a `Path`) in the layout
    of diffusers without reading a weight. It raises FileNotFoundError if a configuration (that of
    the scheduler included) or a tokenizer is missing, and ValueError if one is not supported or two
    do not fit together. `gradient_checkpointing` ("none", the default, "matmuls" or "blocks") says
    what the backward pass of the transformer recomputes; another value raises KeyError while
    tracing. The attributes below are in addition to those of `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        clip_tokens: number of tokens to which prompts are padded or cut for CLIP.
    """

    kind = "FluxPipeline"
    attends_in_fp8 = True
    pipeline_sigmas = True
    embedded_guidance = True

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `black-forest-labs/FLUX.1-dev`. No weight is read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or a tokenizer is missing.
            ValueError: a configuration is unsupported; a tokenizer cannot be loaded, has tokens
                that its text encoder lacks, or pads CLIP's texts to more tokens than CLIP has
                positions; or a width or number of channels of one component is not what another one
                takes or returns.
        """
        super().__init__(folder, gradient_checkpointing)
        config = FluxConfig.read(folder / "transformer")
        vae_config = AutoencoderKLConfig.read(folder / "vae")
        clip_config = CLIPTextConfig.read(folder / "text_encoder")
        t5_config = T5Config.read(folder / "text_encoder_2")
        self.config = config
        self.vae_config = vae_config
        self._check_widths(clip_config, t5_config)
        check_vocabulary(folder / "tokenizer", clip_config.vocab_size)
        check_vocabulary(folder / "tokenizer_2", t5_config.vocab_size)

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: FluxTransformer2DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        self.text_encoders = {
            "text_encoder": Component.from_builder(
                folder / "text_encoder", lambda rngs: CLIPTextModel(clip_config, rngs=rngs)
            ),
            "text_encoder_2": Component.from_builder(
                folder / "text_encoder_2", lambda rngs: T5EncoderModel(t5_config, rngs=rngs)
            ),
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
        side = SAMPLE_SIZE * self.compression
        self.default_size = (side, side)
        limit = load_tokenizer(folder / "tokenizer_2").model_max_length
        self.default_max_tokens = min(MAX_TOKENS, limit)
        self.clip_tokens = clip_length(folder / "tokenizer", clip_config.max_position_embeddings)

    def check_guidance(
        self, guidance_scale: float, true_cfg_scale: float, section: str = ""
    ) -> None:
        """Checks both scales as `Pipeline.check_guidance`. FLUX.1-schnell takes no guidance scale.

        Args:
            guidance_scale: the guidance scale.
            true_cfg_scale: the scale of classifier-free guidance in addition.
            section: what precedes the names of both in messages, e.g. "rollout.".

        Raises:
            InputError: `guidance_scale` is above 1 and the transformer does not embed it.
        """
        super().check_guidance(guidance_scale, true_cfg_scale, section)
        if guidance_scale > 1 and not self.config.guidance_embeds:
            raise InputError(
                f"{section}guidance_scale={guidance_scale}: must be at most 1 for FLUX.1-schnell, "
                "which takes no guidance scale"
            )

    def _check_widths(self, clip_config: CLIPTextConfig, t5_config: T5Config) -> None:
        """Checks that the widths of transformer, text encoders and autoencoder agree.

        Args:
            clip_config: configuration of CLIP, whose `hidden_size` is the width of the pooled text.
            t5_config: configuration of T5, whose `d_model` is the width of the text tokens.

        Raises:
            ValueError: `in_channels` or `out_channels` of the transformer is not four times the
                channels of a latent, or `joint_attention_dim` or `pooled_projection_dim` is not the
                width of its text encoder.
        """
        config = self.config
        latent = self.vae_config.latent_channels * PATCH**2
        check_equal(self.folder, "transformer in_channels", config.in_channels, latent)
        check_equal(
            self.folder, "transformer out_channels", config.num_out_channels, config.in_channels
        )
        check_equal(
            self.folder,
            "transformer joint_attention_dim",
            config.joint_attention_dim,
            t5_config.d_model,
        )
        check_equal(
            self.folder,
            "transformer pooled_projection_dim",
            config.pooled_projection_dim,
            clip_config.hidden_size,
        )

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
            conditioning: a dictionary with "text" [b, l, d], hidden states of T5, and "pooled" [b,
                e], CLIP's embedding of the whole prompt, as returned by `encode_text`.
            timestep: `1000 * sigma` of each latent [b], where the noise level sigma lies in [0, 1].
            guidance: guidance scale, a scalar, for example 3.5. FLUX.1-schnell, whose transformer
                does not embed it, ignores it.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: while tracing, if height or width is odd, or the size of the mesh axis
                `sequence` does not divide the number of image tokens, or that of text and image
                tokens together.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        scale = jnp.broadcast_to(guidance, timestep.shape) if self.config.guidance_embeds else None
        network = self.transformer(params)
        return network(
            latent,
            conditioning["text"],
            conditioning["pooled"],
            timestep,
            scale,
            fp8_attention=fp8_attention,
        )

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts for CLIP and T5.

        Padding and cutting follow the settings of each tokenizer.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens for T5, its end-of-text token included: from 1 to 4096.
                (CLIP always gets `clip_tokens`.)
            instruction: ignored: FLUX.1 takes no instruction.

        Returns:
            A dictionary with two NumPy arrays of token numbers, int32: "clip" [prompts,
            clip_tokens] and "t5" [prompts, max_tokens]. There is no mask, because FLUX.1 attends to
            padding.

        Raises:
            InputError: `max_tokens` is out of range, or a tokenizer fails or has no vocabulary. The
                tokenizers without a vocabulary that this package carries for `solrl plan` are an
                exception: they return zeros, because a plan needs only shapes.
        """
        return {
            "clip": tokenize(self.folder / "tokenizer", prompts, self.clip_tokens)["ids"],
            "t5": tokenize(self.folder / "tokenizer_2", prompts, max_tokens)["ids"],
        }

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by T5 and CLIP. For use under jit.

        Padding is not masked, because FLUX was trained with attention to it.

        Args:
            params: a dictionary with the parameters of CLIP under "text_encoder" and those of T5
                under "text_encoder_2". Only the parameters of stacked blocks may still be sharded.
            tokens: the token numbers "clip" and "t5", one row per prompt, as `tokenize` returns
                them.

        Returns:
            A dictionary with "text" [b, l, d], the last hidden states of T5 for all l tokens, and
            "pooled" [b, e], CLIP's hidden state at the end-of-text token, without CLIP's final
            projection. Both are taken after the final norm of their encoder, in the dtype of its
            token embedding.
        """
        clip = self.text_encoders["text_encoder"](params["text_encoder"])
        t5 = self.text_encoders["text_encoder_2"](params["text_encoder_2"])
        return {"text": t5(tokens["t5"]), "pooled": clip(tokens["clip"]).pooled}

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent / scaling_factor +
        shift_factor`, two fields of `vae_config` (a `shift_factor` of None is 0).

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return self.vae_config.unscale(latent)
