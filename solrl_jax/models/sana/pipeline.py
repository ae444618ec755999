"""SANA as a pipeline: prompt encoding, velocity and decoding as in diffusers' `SanaPipeline` (arXiv
2410.10629).
"""

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
from solrl_jax.models.loading.weights import Params, locate_decoder_tensors
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens, check_equal
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.text_encoders.gemma2 import Gemma2Config, Gemma2Model
from solrl_jax.models.text_encoders.tokenizers import (
    check_vocabulary,
    count_tokens,
    load_tokenizer,
    tokenize,
)

MAX_TOKENS = 300


@dataclasses.dataclass(frozen=True)
class MhlaOverride:
    """A request to replace the linear attention among SANA's image tokens by MHLA (token-level
    multi-head linear attention).

    Attributes:
        mhla: the settings of MHLA (`Mhla`): the number of blocks (`blocks`), whether the released
            code is followed instead of the paper (`released_variant`), and whether norms of queries
            and keys are added to models without them (`add_norms`).
        size: (height, width) of images in pixels. It decides how many of the blocks lie from top to
            bottom and how many from left to right, so that they are as square as possible. The two
            numbers are the same for images of all sizes.
    """

    mhla: Mhla
    size: tuple[int, int]


class SanaPipeline(Pipeline):
    """SANA: Gemma 2 encodes the prompt, DC-AE decodes the latents.

    `SanaPipeline(folder, gradient_checkpointing, mhla)` opens a model directory (a `Path`) in the
    layout of diffusers without reading a weight. It raises FileNotFoundError if a configuration
    (that of the scheduler included) or the tokenizer is missing, and ValueError if one is not
    supported or two do not fit together. `gradient_checkpointing` ("none", the default, "matmuls"
    or "blocks") says what the backward pass of the transformer recomputes; another value raises
    KeyError while tracing. `mhla` is an `MhlaOverride`, which replaces the linear attention by MHLA
    (token-level multi-head linear attention), or None, the default, to keep the linear attention;
    ValueError is also raised if the image tokens of `mhla.size` cannot be divided into the
    requested number of blocks. The attributes below are in addition to those of `Pipeline`.

    Attributes:
        config: configuration of the transformer (`transformer/config.json`).
        vae_config: configuration of the autoencoder (`vae/config.json`).
        tokenizer: directory of the tokenizer (a path).
        mhla_layout: (blocks from top to bottom, blocks from left to right) into which MHLA divides
            the image tokens; (1, 1) without MHLA.
    """

    kind = "SanaPipeline"
    accepts_instruction = True

    def __init__(
        self, folder: Path, gradient_checkpointing: str = "none", mhla: MhlaOverride | None = None
    ):
        """Opens a directory in the layout of
        `Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers`. No weight is read.

        Args:
            folder: the directory.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.
            mhla: replaces the linear attention among image tokens by MHLA, token-level multi-head
                linear attention (arXiv 2601.07832): its settings (`mhla.mhla`), and the (height,
                width) in pixels of the images for which its blocks are arranged (`mhla.size`). None
                keeps the linear attention.

        Raises:
            FileNotFoundError: a configuration or the tokenizer is missing.
            ValueError: a configuration is unsupported, the tokenizer cannot be loaded or has tokens
                that the text encoder lacks, a width or number of channels of one component is not
                what another one takes or returns, or the image tokens of `mhla.size` do not divide
                into `mhla.mhla.blocks` equal blocks.
        """
        super().__init__(folder, gradient_checkpointing)
        config = SanaConfig.read(folder / "transformer")
        vae_config = AutoencoderDCConfig.read(folder / "vae")
        text_config = Gemma2Config.read(folder / "text_encoder")
        check_equal(
            folder, "transformer in_channels", config.in_channels, vae_config.latent_channels
        )
        # A network with twice the output channels would predict a variance beside the velocity.
        check_equal(folder, "transformer out_channels", config.num_out_channels, config.in_channels)
        check_equal(
            folder,
            "transformer caption_channels",
            config.caption_channels,
            text_config.hidden_size,
        )
        check_equal(
            folder, "transformer cross_attention_dim", config.cross_attention_dim, config.width
        )
        self.config = config
        self.vae_config = vae_config
        self.tokenizer = folder / "tokenizer"
        check_vocabulary(self.tokenizer, text_config.vocab_size)
        self.compression = vae_config.spatial_compression
        self.channels = config.in_channels
        self.patch = config.patch_size

        # MHLA divides the image tokens into this many equal blocks, down and across.
        self.mhla_layout = (1, 1)
        attention = None
        if mhla is not None:
            token = self.compression * self.patch
            self.mhla_layout = tiling(
                mhla.mhla.blocks, (mhla.size[0] // token, mhla.size[1] // token)
            )
            attention = partial(BlockMixing, mhla.mhla, self.mhla_layout)
        self.transformer = Component.from_builder(
            folder / "transformer",
            lambda rngs: SanaTransformer2DModel(
                config,
                gradient_checkpointing=gradient_checkpointing,
                attention=attention,
                rngs=rngs,
            ),
        )
        self.text_encoders = {
            "text_encoder": Component.from_builder(
                folder / "text_encoder", lambda rngs: Gemma2Model(text_config, rngs=rngs)
            )
        }
        self.vae = Component.from_builder(
            folder / "vae",
            lambda rngs: AutoencoderDC(vae_config, rngs=rngs),
            locate_decoder_tensors,
        )
        side = config.sample_size * self.compression
        self.default_size = (side, side)
        limit = load_tokenizer(self.tokenizer).model_max_length
        self.default_max_tokens = min(MAX_TOKENS, limit)

    def size_multiples(self) -> tuple[int, int]:
        """Returns the numbers of pixels that image heights and widths must be multiples of.

        Returns:
            (number for heights, number for widths): the side of a token, `compression * patch`,
            times the number of MHLA's blocks along the axis (1 without MHLA).
        """
        rows, columns = super().size_multiples()
        return rows * self.mhla_layout[0], columns * self.mhla_layout[1]

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
            latent: noisy latents [b, h, w, c], of a size that `size_multiples` allows.
            conditioning: a dictionary with "text" [b, l, d], hidden states of Gemma, and "mask" [b,
                l], true on tokens and false on padding, as returned by `encode_text`.
            timestep: [b], `1000 * sigma` of each latent, where the noise level sigma lies in [0,
                1]. The configuration's `timestep_scale` is applied here.
            guidance: ignored: the transformer takes no guidance scale.
            fp8_attention: must be False, because the attention is masked or linear.

        Returns:
            The velocity, of the shape of `latent`.

        Raises:
            ValueError: `fp8_attention` is set; or, while tracing, the size of the mesh axis
                `sequence` does not divide the number of rows of tokens, or exceeds 1 although MHLA
                replaces the linear attention.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """
        timestep = timestep * self.config.timestep_scale
        if fp8_attention:
            raise ValueError(
                f"fp8_attention: not available for {self.kind}, whose attention is masked"
            )
        network = self.transformer(params)
        return network(latent, conditioning["text"], conditioning["mask"], timestep)

    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts in lower case, stripped of surrounding white space, and pads (on the
        right) or cuts them.

        With an instruction, Gemma reads it before each prompt, but the transformer sees only
        `max_tokens` of the encoded tokens: the first one and the last ones, which are those of the
        prompt and its padding.

        Args:
            prompts: one or more texts.
            max_tokens: number of tokens per prompt that the transformer sees. With those of the
                instruction, at most 4096.
            instruction: text before each prompt, neither stripped nor in lower case, for example
                the `complex_human_instruction` of diffusers' `SanaPipeline` with its lines joined
                by line breaks. None or "": no instruction.

        Returns:
            A dictionary with three arrays. "ids" [prompts, tokens], int32: the token numbers.
            "mask" [prompts, tokens], bool: true on tokens, false on padding. "kept" [prompts,
            max_tokens], int32: the positions, from 0, of the tokens that the transformer sees (all,
            without an instruction). The number of tokens is `max_tokens`; an instruction of n
            tokens (the special one at its start included) adds `max(n - 2, 0)`.

        Raises:
            InputError: `max_tokens` is out of range, the tokenizer fails, or it is a `NoVocabulary`
                (a stand-in for plans) and its folder is not one that this package carries.
        """
        texts = [prompt.lower().strip() for prompt in prompts]
        length = max_tokens
        if instruction is not None:
            texts = [instruction + text for text in texts]
            # The prompt reuses two of the instruction's tokens: the one that begins every text, and
            # the last one, which may become one token with the first letters of the prompt.
            # An empty instruction has only the first of them.
            length += max(count_tokens(self.tokenizer, instruction) - 2, 0)
        tokens = tokenize(self.tokenizer, texts, length, padding_side="right")
        last = np.arange(length - max_tokens + 1, length)
        kept = np.concatenate([[0], last]).astype("int32")
        return tokens | {"kept": np.tile(kept, (len(texts), 1))}

    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts by Gemma. For use under jit.

        Args:
            params: a dictionary with the parameters of Gemma under "text_encoder". Only those of
                stacked blocks may still be sharded.
            tokens: "ids", "mask" and "kept" (the positions of the l tokens per prompt that the
                transformer sees), one row per prompt, as `tokenize` returns them.

        Returns:
            A dictionary for the l tokens in "kept": "text" [b, l, d], Gemma's last hidden states
            (after its final norm) in the dtype of the text encoder, and "mask" [b, l], bool, true
            on tokens and false on padding.
        """
        encoder = self.text_encoders["text_encoder"](params["text_encoder"])
        text = encoder(tokens["ids"], tokens["mask"])
        return {
            "text": jnp.take_along_axis(text, tokens["kept"][..., None], axis=1),
            "mask": jnp.take_along_axis(tokens["mask"], tokens["kept"], axis=1),
        }

    def unscale(self, latent: Array) -> Array:
        """Converts latents to the scale that the autoencoder decodes: `latent / scaling_factor`,
        with the factor from `vae_config`.

        Args:
            latent: the transformer's latents [b, h, w, c].

        Returns:
            An array of the shape and dtype of `latent`.
        """
        return latent / self.vae_config.scaling_factor
