"""Stable Diffusion 3 and 3.5 as a pipeline, as in diffusers' `StableDiffusion3Pipeline`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from solrl_jax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params, locate_decoder_tensors
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.models.text_encoders.t5 import T5Config, T5EncoderModel
from solrl_jax.models.text_encoders.tokenizers import check_vocabulary, clip_length, tokenize
from solrl_jax.models.vision.clip import CLIPTextConfig, CLIPTextModelWithProjection

MAX_TOKENS = 256  # of T5
CLIPS = ("text_encoder", "text_encoder_2")
T5 = "text_encoder_3"
TOKENIZERS = {
    "text_encoder": "tokenizer",
    "text_encoder_2": "tokenizer_2",
    "text_encoder_3": "tokenizer_3",
}


class StableDiffusion3Pipeline(Pipeline):
    """Stable Diffusion 3 or 3.5: two CLIPs and T5 encode the prompt. A release may leave out T5.

    `StableDiffusion3Pipeline(folder, gradient_checkpointing)` opens a model directory (a `Path`) in
    the layout of diffusers without reading a weight. It raises FileNotFoundError if a configuration
    (that of the scheduler included) or a tokenizer is missing, and ValueError if one is not
    supported or two do not fit together. `gradient_checkpointing` ("none", the default, "matmuls"
    or "blocks") says what the backward pass of the transformer recomputes; another value raises
    KeyError while tracing. The attributes below are in addition to those of `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        clip_tokens: number of tokens to which prompts are padded or cut for both CLIPs: the
            `model_max_length` of the first one's tokenizer.
    """

    kind = "StableDiffusion3Pipeline"
    attends_in_fp8 = True

    def __init__(self, folder: Path, gradient_checkpointing: str = "none"):
        """Opens a directory in the layout of `stabilityai/stable-diffusion-3.5-large`. No weight is
        read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a configuration or a tokenizer is missing.
            ValueError: a configuration is unsupported; a tokenizer cannot be loaded, has tokens
                that its text encoder lacks, or pads CLIP's texts to more tokens than a CLIP has
                positions; or a width or number of channels of one component is not what another one
                takes or returns.
        """
        super().__init__(folder, gradient_checkpointing)
        config = SD3Config.read(folder / "transformer")
        vae_config = AutoencoderKLConfig.read(folder / "vae")
        check_equal(
            folder, "transformer in_channels", config.in_channels, vae_config.latent_channels
        )
        check_equal(folder, "transformer out_channels", config.num_out_channels, config.in_channels)
        self.config = config
        self.vae_config = vae_config
        self._open_text_encoders()

        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: SD3Transformer2DModel(
                config, gradient_checkpointing=gradient_checkpointing, rngs=rngs
            ),
        )
        self.vae = Component.from_builder(
            folder / "vae",
            lambda rngs: AutoencoderKL(vae_config, rngs=rngs),
            locate_decoder_tensors,
        )
        self.compression = vae_config.spatial_compression
        self.channels = config.in_channels
        self.patch = config.patch_size
        self.vae_dtype = vae_config.required_dtype
        side = config.sample_size * self.compression
        self.default_size = (side, side)
        self.default_max_tokens = MAX_TOKENS
        # The table of positions has no entries beyond this side.
        self.largest_side = config.pos_embed_max_size * config.patch_size * self.compression

    def _open_text_encoders(self) -> None:
        """Opens the text encoders: sets the attributes `text_encoders` (`Component`s by the names
        of their folders) and `clip_tokens` (the `model_max_length` of the first CLIP's tokenizer),
        and checks that encoders, tokenizers and transformer fit.

        T5 is left out if `model_index.json` does not name "text_encoder_3", or names no class for
        it. The constructor calls this after it has set `folder` and `config`.

        Raises:
            FileNotFoundError: a configuration or a tokenizer is missing.
            ValueError: a configuration is not supported, a tokenizer cannot be loaded or does not
                fit its text encoder, or the widths of text encoders and transformer do not fit.
        """
        folder = self.folder
        text_width = self.config.joint_attention_dim
        clips = {name: CLIPTextConfig.read(folder / name) for name in CLIPS}
        clip_width = sum(clip.hidden_size for clip in clips.values())
        if text_width < clip_width:
            raise ValueError(
                f"{folder}: transformer joint_attention_dim={text_width}; "
                f"accepted: at least {clip_width}, the hidden_size of both CLIPs"
            )
        check_equal(
            folder,
            "transformer pooled_projection_dim",
            self.config.pooled_projection_dim,
            sum(clip.projection_dim for clip in clips.values()),
        )
        self.text_encoders = {}
        for name, clip in clips.items():
            self.text_encoders[name] = Component.from_builder(
                folder / name,
                lambda rngs, clip=clip: CLIPTextModelWithProjection(clip, rngs=rngs),
            )
            check_vocabulary(folder / TOKENIZERS[name], clip.vocab_size)
        positions = min(clip.max_position_embeddings for clip in clips.values())
        # Both CLIPs are padded to the length of the first one's tokenizer, as in diffusers.
        self.clip_tokens = clip_length(folder / TOKENIZERS[CLIPS[0]], positions)
        if read_json(folder / "model_index.json").get(T5) not in (None, [None, None]):
            t5 = T5Config.read(folder / T5)
            check_equal(folder, "transformer joint_attention_dim", text_width, t5.d_model)
            check_vocabulary(folder / TOKENIZERS[T5], t5.vocab_size)
            self.text_encoders[T5] = Component.from_builder(
                folder / T5, lambda rngs: T5EncoderModel(t5, rngs=rngs)
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
                leaves are whole.
            latent: noisy latents [b, h, w, c]. Height and width are multiples of the patch size.
            conditioning: a dictionary with "text" [b, l, d], the CLIP tokens and then the T5
                tokens, and "pooled" [b, e], one embedding of the whole prompt, as returned by
                `encode_text`.
            timestep: [b], `1000 * sigma` of each latent, where the noise level sigma lies in [0,
                1].
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: while tracing, if height or width is not a whole number of patches or
                exceeds the stored positions, or the size of the mesh axis `sequence` does not
                divide the number of image tokens.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        network = self.transformer(params)
        return network(
            latent,
            conditioning["text"],
            conditioning["pooled"],
            timestep,
            fp8_attention=fp8_attention,
        )

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts for each text encoder.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens for T5, its end-of-text token included: from 1 to 4096,
                which is not checked if the model has no T5. The CLIPs always get `clip_tokens`.
            instruction: ignored: the model takes no instruction.

        Returns:
            A dictionary with int32 arrays of token numbers by the folder of the text encoder:
            "text_encoder" and "text_encoder_2" (the CLIPs) [prompts, clip_tokens], and
            "text_encoder_3" (T5) [prompts, max_tokens], which is all zeros without T5.

        Raises:
            InputError: `max_tokens` is out of range, a tokenizer fails, or it is a `NoVocabulary`
                (a stand-in for plans) and its folder is not one that this package carries.
        """
        tokens = {T5: np.zeros((len(prompts), max_tokens), "int32")}
        for name in self.text_encoders:
            length = max_tokens if name == T5 else self.clip_tokens
            tokens[name] = tokenize(self.folder / TOKENIZERS[name], prompts, length)["ids"]
        return tokens

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by both CLIPs and T5. For use under jit.

        Args:
            params: the parameters of each text encoder by its folder: "text_encoder" and
                "text_encoder_2" (the CLIPs), and "text_encoder_3" (T5, if the model has it). Only
                those of stacked blocks may still be sharded.
            tokens: the token numbers under these three names, as `tokenize` returns them.

        Returns:
            A dictionary in the dtype of the CLIPs. "text" [b, `clip_tokens + max_tokens`, d], where
            d is the transformer's `joint_attention_dim`: the CLIP tokens (the hidden states before
            the last layer, not normalized, both CLIPs side by side, padded with zeros to d
            features), followed by the T5 tokens (zeros without T5). "pooled" [b, e]: the projected
            states of the end-of-text tokens, both CLIPs side by side.
        """
        clips = [self.text_encoders[name](params[name])(tokens[name]) for name in CLIPS]
        clip_text = jnp.concatenate([clip.penultimate for clip in clips], axis=-1)
        width = self.config.joint_attention_dim
        clip_text = jnp.pad(clip_text, ((0, 0), (0, 0), (0, width - clip_text.shape[-1])))
        if T5 in self.text_encoders:
            t5_text = self.text_encoders[T5](params[T5])(tokens[T5]).astype(clip_text.dtype)
        else:
            t5_text = jnp.zeros((*tokens[T5].shape, width), clip_text.dtype)
        return {
            "text": jnp.concatenate([clip_text, t5_text], axis=1),
            "pooled": jnp.concatenate([clip.pooled for clip in clips], axis=-1),
        }

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent / scaling_factor +
        shift_factor`, both from `vae_config` (a shift of None is 0).

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return self.vae_config.unscale(latent)
