"""FLUX.1 as a pipeline: prompt encoding, velocity and decoding as in diffusers' `FluxPipeline`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array

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

    T5 encodes every token of the prompt, CLIP the prompt as a whole.

    Attributes:
        config: contents of `transformer/config.json`, checked.
        vae_config: contents of `vae/config.json`, checked.
        clip_tokens: number of tokens to which prompts are padded or cut for CLIP.
    """

    kind = "FluxPipeline"
    attends_in_fp8 = True
    linear_sigmas = True
    embedded_guidance = True

    def __init__(self, folder: Path, remat: str = "none"):
        """Opens a directory in the layout of `black-forest-labs/FLUX.1-dev`. No weight is read.

        Args:
            folder: the directory.
            remat: what the gradient of the transformer recomputes: "none" (nothing), "matmuls" (all
                but matmuls and attention kernels) or "blocks" (all but the input of each block). It
                is not checked here.

        Raises:
            FileNotFoundError: a configuration or a tokenizer is missing.
            ValueError: a configuration is unsupported; a tokenizer cannot be loaded, has tokens
                that its text encoder lacks, or pads CLIP's texts to more tokens than CLIP has
                positions; or a width or number of channels of one component is not what another one
                takes or returns.
        """
        super().__init__(folder, remat)
        config = FluxConfig.read(folder / "transformer")
        vae_config = AutoencoderKLConfig.read(folder / "vae")
        clip_config = CLIPTextConfig.read(folder / "text_encoder")
        t5_config = T5Config.read(folder / "text_encoder_2")
        self.config = config
        self.vae_config = vae_config
        self._check_sizes(clip_config, t5_config)
        check_vocabulary(folder / "tokenizer", clip_config.vocab_size)
        check_vocabulary(folder / "tokenizer_2", t5_config.vocab_size)

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: FluxTransformer2DModel(config, remat=remat, rngs=rngs),
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

    def _check_sizes(self, clip_config: CLIPTextConfig, t5_config: T5Config) -> None:
        """Checks that the transformer takes what text encoders and autoencoder return.

        Args:
            clip_config: configuration of CLIP, whose `hidden_size` is the width of the pooled text.
            t5_config: configuration of T5, whose `d_model` is the width of the text tokens.

        Raises:
            ValueError: the transformer's `in_channels` is not four times the autoencoder's
                `latent_channels`, its output channels are not `in_channels`, its
                `joint_attention_dim` is not T5's width, or its `pooled_projection_dim` is not
                CLIP's width.
        """
        config = self.config
        latent = self.vae_config.latent_channels * PATCH**2
        check_equal(self.folder, "transformer in_channels", config.in_channels, latent)
        check_equal(
            self.folder, "transformer out_channels", config.features_out, config.in_channels
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
            params: parameters of the transformer, a nested dictionary by path. Stacks of blocks
                and, over the axis `tensor`, linear layers may be sharded; all else is whole. Leaves
                may be quantized or adapted.
            latent: noisy latents [b, h, w, c], not packed, of even height and width.
            conditioning: "text" [b, l, d], hidden states of T5, and "pooled" [b, e], CLIP's
                embedding of the whole prompt, as returned by `encode_text`.
            timestep: 1000 times the noise level sigma, from 0 to 1, of each latent.
            guidance: guidance scale, a scalar, for example 3.5. FLUX.1-schnell, whose transformer
                does not embed it, ignores it.
            fp8_attention: whether the attention runs in FP8, for programs that take no gradient:
                queries, keys, values and result are rounded to E4M3. On TPUs, on GPUs older than
                Hopper, and on other GPUs for head sizes that are no multiple of 16 or above 128,
                its matmuls run in BF16 all the same.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: while tracing, if height or width is odd.
            KeyError: while tracing, if `remat` is not "none", "matmuls" or "blocks".
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

        The tokenizers are those that the constructor has loaded. Their own settings say on which
        side prompts are padded and cut.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens for T5, its end-of-text token included: up to 4096, and at
                least the number of special tokens that the tokenizer adds (1 for T5). The number
                for CLIP is `clip_tokens`.
            instruction: not supported, and ignored.

        Returns:
            "clip" [prompts, clip_tokens] and "t5" [prompts, max_tokens]: tokens, int32, padded or
            cut. No mask is returned, because FLUX attends to padding.

        Raises:
            InputError: `max_tokens` is outside of these limits; a tokenizer fails; or it has no
                vocabulary, which only the configurations that this package carries for
                `solrl plan` may lack.
        """
        return {
            "clip": tokenize(self.folder / "tokenizer", prompts, self.clip_tokens)["ids"],
            "t5": tokenize(self.folder / "tokenizer_2", prompts, max_tokens)["ids"],
        }

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by T5 and CLIP. For use under jit.

        Padding is not masked, because FLUX was trained with attention to it.

        Args:
            params: a dictionary with the parameters of CLIP under "text_encoder" and of T5 under
                "text_encoder_2". Only stacks of blocks may be sharded.
            tokens: the token numbers "clip" and "t5", one row per prompt, as `tokenize` returns
                them.

        Returns:
            "text" [b, l, d], the last hidden states of T5 for all l tokens, and "pooled" [b, e],
            the state of CLIP's end-of-text token without its projection. Each has the dtype of its
            encoder.
        """
        clip = self.text_encoders["text_encoder"](params["text_encoder"])
        t5 = self.text_encoders["text_encoder_2"](params["text_encoder_2"])
        return {"text": t5(tokens["t5"]), "pooled": clip(tokens["clip"]).pooled}

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent / scaling_factor +
        shift_factor`.

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return self.vae_config.unscale(latent)
