"""`Pipeline`: a model that makes images or clips from text, as pure functions, opened from a
directory in the layout of diffusers.

Such a directory has a `model_index.json` and one folder per component. A `Pipeline` holds network
graphs, parameter shapes and functions, but no parameters: the caller loads these separately and
chooses their dtype and sharding. Each model family has one subclass, in
`models/<family>/pipeline.py`.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.errors import InputError
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import Params

# Tokenized prompts, the input of the text encoders, by name. Every array has a leading axis of
# prompts.
Tokens = dict[str, np.ndarray]
# The same arrays inside a jitted function.
TracedTokens = Mapping[str, Array | np.ndarray]
# Encoded prompts, the input of the transformer, by name. Every array has a leading axis of prompts.
Conditioning = dict[str, Array]


class Pipeline(abc.ABC):
    """Base class of all models: a model that makes images or clips from text, as pure functions,
    without its parameters.

    Pipelines are compared by identity, because they are static arguments of jitted functions. Their
    attributes must not change after the constructor.

    Attributes:
        kind: name of the pipeline class in `model_index.json`.
        attends_in_fp8: whether `velocity` accepts `fp8_attention`. It requires softmax attention
            without a mask.
        accepts_instruction: whether `tokenize` accepts an instruction: a text for the language
            model before each prompt.
        pipeline_sigmas: whether diffusers' pipeline of this model passes the noise levels
            `linspace(1, 1/n, n)` for n steps to its Euler scheduler, which then shifts them. False:
            the scheduler computes its own noise levels (`diffusion.sigmas.sd3`). Only generation
            from a model directory uses that scheduler; runs use `rollout.schedule` instead.
        folder: the directory that the pipeline was opened from.
        gradient_checkpointing: what the backward pass of the transformer recomputes instead of
            storing: "none" (nothing), "matmuls" (everything except matmuls and attention kernels)
            or "blocks" (everything inside a block; only the inputs of blocks are stored). Another
            value raises KeyError when the transformer is traced.
        scheduler: contents of `scheduler/scheduler_config.json`, a dictionary.
        transformer: the denoising network, a `Component` (a network without parameters, and its
            files).
        text_encoders: the text encoders, `Component`s by the names of their folders.
        vae: the autoencoder, a `Component` of which only the decoder is built.
        compression: side, in image pixels, of the square that one latent pixel stands for.
        channels: number of channels of a latent pixel, before patches become tokens.
        patch: side, in latent pixels, of the square that becomes one transformer token.
        default_size: (height, width) in pixels of the images that the model was made for; for
            video models (height, width, frames).
        default_max_tokens: number of prompt tokens when the user sets none.
        temporal_compression: for video models, the number of frames that each latent frame but
            the first stands for. Latents and images then have an axis of frames after that of
            samples, also where there is one frame. None: the model makes images.
        frames_per_second: for video models, the playback rate of clips.
        embedded_guidance: whether guidance is built into the transformer, which takes the guidance
            scale as an input or was distilled with a fixed one. Otherwise guidance needs a second
            evaluation with a negative prompt.
        largest_side: greatest height or width of an image in pixels; None: unlimited.
        vae_dtype: the dtype that the autoencoder must run in; None: any.
        shift_terminal: the last noise level before 0. In the schedule "flux" (`rollout.schedule`),
            noise levels are first shifted depending on the image size. Then `1 - sigma` of each
            noise level sigma but the final 0 is multiplied by one factor, so that the last of them
            has this value. The schedule of a single step is not changed. None or 0: no stretching.
    """

    kind: ClassVar[str]
    attends_in_fp8: ClassVar[bool] = False
    accepts_instruction: ClassVar[bool] = False
    pipeline_sigmas: ClassVar[bool] = False

    folder: Path
    gradient_checkpointing: str
    scheduler: dict[str, Any]
    transformer: Component
    text_encoders: dict[str, Component]
    vae: Component
    compression: int
    channels: int
    patch: int
    default_size: tuple[int, ...]
    default_max_tokens: int
    temporal_compression: int | None = None
    frames_per_second: int = 16
    embedded_guidance: bool = False
    largest_side: int | None = None
    vae_dtype: jnp.dtype | None = None
    shift_terminal: float | None = None

    def __init__(self, folder: Path, gradient_checkpointing: str):
        """Opens a model directory. No weight is read.

        This constructor sets `folder`, `gradient_checkpointing` and `scheduler`. The constructor of
        the subclass calls it, reads the other configurations, loads the tokenizers (which stay in
        memory, see `load_tokenizer`), and sets the other attributes.

        Args:
            folder: directory of a diffusers pipeline of this kind.
            gradient_checkpointing: what the backward pass of the transformer recomputes instead of
                storing: "none" (nothing), "matmuls" (everything except matmuls and attention
                kernels) or "blocks" (everything inside a block; only the inputs of blocks are
                stored). Another value raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: the scheduler's configuration is missing or, in a subclass, another
                configuration or a tokenizer. Weights are not looked for.
            ValueError: the scheduler's configuration cannot be read; or, in a subclass, a
                configuration is unsupported, a tokenizer cannot be loaded, or a width or number of
                channels of one component is not what another one takes or returns.
        """
        self.folder = folder
        self.gradient_checkpointing = gradient_checkpointing
        self.scheduler = read_json(folder / "scheduler" / "scheduler_config.json")

    @abc.abstractmethod
    def velocity(
        self,
        params: Params,
        latent: Float[Array, "b ... c"],
        conditioning: Conditioning,
        timestep: Float[Array, " b"],
        guidance: Float[Array, ""],
        fp8_attention: bool = False,
    ) -> Float[Array, "b ... c"]:
        """Predicts the velocity `noise - x0`, in the dtype of `latent`. For use under jit.

        Args:
            params: parameters of the transformer: nested dictionaries keyed by module name. A leaf
                may be an array, a quantized weight, or a weight with its LoRA adapter. Stacked
                blocks and, under tensor parallelism, linear layers may still be sharded; all other
                leaves are whole.
            latent: noisy latents [b, h, w, c], or [b, t, h, w, c] of video models, in the dtype
                to compute in.
            conditioning: encoded prompts: arrays by name with one row per latent, as returned by
                `encode_text`, for example "text" [b, tokens, features].
            timestep: `1000 * sigma` of each latent, where the noise level sigma lies in [0, 1].
            guidance: guidance scale, a scalar. Ignored by networks that do not take it as an input.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken. Accelerators without FP8 attention compute in
                BF16 from the rounded inputs. Only where `attends_in_fp8` is set.

        Returns:
            The velocity, of the shape of `latent`. It is one evaluation of the network, without
            classifier-free guidance.

        Raises:
            ValueError: while tracing, if the network does not support `fp8_attention` or the size
                of the latents, or if the mesh axis `sequence` does not divide their tokens.
            KeyError: while tracing, if `gradient_checkpointing` is not "none", "matmuls" or
                "blocks".
        """

    @abc.abstractmethod
    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts as `encode_text` needs them.

        Args:
            prompts: one or more texts. An empty text is allowed.
            max_tokens: number of tokens to which each prompt is padded or cut, up to 4096, or fewer
                for some models. The minimum is the number of special tokens that the tokenizer
                adds.
            instruction: text for the language model before each prompt; ignored unless
                `accepts_instruction`. None: no instruction.

        Returns:
            Arrays in host memory by name, with one row per prompt. The names depend on the model:
            for example "ids", int32, and "mask", bool, true on tokens, both [prompts, tokens].

        Raises:
            InputError: `max_tokens` is out of range, or the tokenizer fails or has no vocabulary.
                (The tokenizers that this package carries for `solrl plan` have none either, but
                return zeros of the right shape.)
        """

    @abc.abstractmethod
    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts for the transformer. For use under jit.

        Args:
            params: the parameters of each text encoder by the name of its folder, such as
                "text_encoder". Only those of stacked blocks (with a leading axis of blocks) may
                still be sharded.
            tokens: the result of `tokenize`.

        Returns:
            Arrays by name, with one row per prompt, for the argument `conditioning` of `velocity`.
            The names depend on the model: for example "text" [prompts, tokens, features], in the
            dtype of a text encoder, and "mask" [prompts, tokens], bool, true on tokens.
        """

    @classmethod
    def diffusers_guidance(cls, guidance_scale: float, true_cfg_scale: float) -> dict[str, Any]:
        """Returns the arguments with which the pipeline of diffusers guides as a run does.

        Models whose pipeline in diffusers takes other arguments override this method.

        Args:
            guidance_scale: `rollout.guidance_scale` of the run.
            true_cfg_scale: `rollout.true_cfg_scale` of the run, which is 1 for models without
                embedded guidance.

        Returns:
            The arguments by name: "guidance_scale"; if `true_cfg_scale` is not 1, also
            "true_cfg_scale" and "negative_prompt", the empty text.
        """
        arguments: dict[str, Any] = {"guidance_scale": guidance_scale}
        if true_cfg_scale != 1:
            # diffusers guides only if a negative prompt is given. An empty one suffices.
            arguments |= {"true_cfg_scale": true_cfg_scale, "negative_prompt": ""}
        return arguments

    def check_guidance(
        self, guidance_scale: float, true_cfg_scale: float, section: str = ""
    ) -> None:
        """Checks that both scales have an effect on this model, unless they ask for no guidance.

        Models that take no scale extend this method.

        Args:
            guidance_scale: the guidance scale.
            true_cfg_scale: the scale of classifier-free guidance for models with
                `embedded_guidance`.
            section: what precedes the names of both in messages, e.g. "rollout.".

        Raises:
            InputError: `true_cfg_scale` is not 1 for a model without embedded guidance; or, in a
                subclass, a scale above 1 would have no effect.
        """
        if true_cfg_scale != 1 and not self.embedded_guidance:
            raise InputError(
                f"{section}true_cfg_scale={true_cfg_scale}: must be 1 for a {self.kind}, whose "
                f"{section}guidance_scale is classifier-free"
            )

    @abc.abstractmethod
    def unscale(self, latent: Float[Array, "b ... c"]) -> Float[Array, "b ... c"]:
        """Converts the transformer's latents to the scale that the autoencoder decodes.

        Args:
            latent: the transformer's latents [b, h, w, c], or [b, t, h, w, c] of video models,
                of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `latent`.
        """

    def decode(
        self, params: Params, latent: Float[Array, "b ... c"], chunk: int | None = None
    ) -> Float[Array, "b ... 3"]:
        """Decodes latents to images in [0, 1], float32, clipped to this range. For use under jit.

        The autoencoder computes in the dtype of `latent`. NaN stays NaN.

        Args:
            params: parameters of the autoencoder: nested dictionaries keyed by module name. They
                are not sharded.
            latent: the transformer's latents [b, h, w, c], or [b, t, h, w, c] of video models.
                The caller casts them to `vae_dtype`, if that is set. `unscale` is applied here.
            chunk: for video models: the largest number of latent frames that are decoded at once,
                at least 1. Smaller chunks save memory, and the result is the same up to rounding.
                None: all frames at once. Must be None for models of images.

        Returns:
            The images [b, H, W, 3] or clips [b, T, H, W, 3], `compression` times as high and wide
            as the latents. T is `1 + (t - 1) * temporal_compression`.
        """
        vae = self.vae(params)
        latent = self.unscale(latent)
        # in [-1, 1] except for overshoots, which are clipped below
        image = vae.decode(latent) if chunk is None else vae.decode_in_chunks(latent, chunk)
        return jnp.clip(image.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)

    def guide(
        self,
        conditional: Float[Array, "b ... c"],
        unconditional: Float[Array, "b ... c"],
        scale: Float[Array, ""],
    ) -> Float[Array, "b ... c"]:
        """Combines two velocities by classifier-free guidance (arXiv 2207.12598): `unconditional +
        scale * (conditional - unconditional)`. For use under jit.

        A model may override it: Qwen-Image also rescales the result.

        Args:
            conditional: the velocity for the prompt, float32.
            unconditional: the velocity for the negative prompt, float32.
            scale: the guidance scale, a scalar. 1: no guidance.

        Returns:
            The guided velocity, float32.
        """
        return unconditional + scale * (conditional - unconditional)

    @property
    def shift_formula(self) -> Callable[[int, int], float] | None:
        """The formula by which the schedule is shifted towards noise for larger images; None:
        FLUX.1's formula is used.

        A function (number of steps, number of image tokens) that returns mu, the natural logarithm
        of the shift. Only the schedule "flux" (`rollout.schedule`) and released schedulers with
        `use_dynamic_shifting` use it. It is None here; models with another formula override the
        property.
        """
        return None

    def size_multiples(self) -> tuple[int, int]:
        """Returns the numbers of pixels that image heights and widths must be multiples of.

        Returns:
            (number for heights, number for widths). Here both are `compression * patch`, the side
            of one transformer token.
        """
        token = self.compression * self.patch
        return token, token

    def latent_shape(self, height: int, width: int, frames: int | None = None) -> tuple[int, ...]:
        """Returns the shape of the latent of an image or a clip, and checks that the model supports
        its size.

        Args:
            height: height in pixels.
            width: width in pixels.
            frames: number of frames of a clip, required for video models. None: an image.

        Returns:
            (height / `compression`, width / `compression`, `channels`) for an image. For a clip,
            the number of latent frames comes first: 1, plus one for every `temporal_compression`
            frames after the first.

        Raises:
            ValueError: height or width is not a positive multiple of its number in
                `size_multiples()`, or exceeds `largest_side`; frames are given to a model of
                images, or not given to a video model; or their number is not 1 plus a multiple of
                `temporal_compression`.
        """
        rows, columns = self.size_multiples()
        if height % rows or width % columns or height <= 0 or width <= 0:
            raise ValueError(
                f"size {height}x{width}: this model supports heights in multiples of {rows} pixels "
                f"and widths in multiples of {columns}"
            )
        if self.largest_side is not None and max(height, width) > self.largest_side:
            raise ValueError(
                f"size {height}x{width}: this model supports up to {self.largest_side} pixels "
                "per side"
            )
        shape = (height // self.compression, width // self.compression, self.channels)
        if self.temporal_compression is None:
            if frames is not None:
                raise ValueError(
                    f"size {height}x{width}x{frames}: this model makes images; accepted: a height "
                    "and a width, without a number of frames"
                )
            return shape
        if frames is None:
            raise ValueError(
                f"size {height}x{width}: this model makes clips; accepted: a height, a width and a "
                "number of frames"
            )
        if frames < 1 or (frames - 1) % self.temporal_compression:
            raise ValueError(
                f"size {height}x{width}x{frames}: this model supports 1 frame plus a multiple of "
                f"{self.temporal_compression}"
            )
        return self.latent_frames(frames), *shape

    def latent_frames(self, frames: int | None) -> int:
        """Returns the number of latent frames of a clip.

        The number of frames is not checked; one that `latent_shape` refuses is rounded down.

        Args:
            frames: number of frames of the clip. None: an image.

        Returns:
            1, plus one for every `temporal_compression` frames after the first. For an image, and
            for every input of a model of images, 1.
        """
        if frames is None or self.temporal_compression is None:
            return 1
        return 1 + (frames - 1) // self.temporal_compression

    def image_tokens(self, height: int, width: int, frames: int | None = None) -> int:
        """Returns how many tokens an image or a clip becomes in the transformer.

        Text tokens and padding are not counted. The size is not checked.

        Args:
            height: height in pixels.
            width: width in pixels.
            frames: number of frames of a clip. None: an image.

        Returns:
            The area of the image divided by that of a token, rounded down, times the number of
            latent frames.
        """
        in_frame = height * width // (self.compression * self.patch) ** 2
        return self.latent_frames(frames) * in_frame


def check_equal(folder: Path, name: str, value: int, expected: int) -> None:
    """Checks that a size in one network's configuration is what the other networks of the model
    need.

    Args:
        folder: the model directory, for the error message.
        name: network and field of the size, such as "transformer in_channels", for the error
            message.
        value: the size.
        expected: the size that the other networks need.

    Raises:
        ValueError: `value` is not `expected`.
    """
    if value != expected:
        raise ValueError(
            f"{folder}: {name}={value} does not fit the other components, which need {expected}"
        )
