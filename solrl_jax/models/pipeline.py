"""`Pipeline`: a text-to-image model as pure functions, opened from a directory in the layout of
diffusers.

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
    """What the rest of `solrl_jax` knows about a model.

    Pipelines are compared by identity, because they are static arguments of jitted functions. Their
    attributes must not change after the constructor.

    Attributes:
        kind: name of the pipeline class in `model_index.json`.
        attends_in_fp8: whether `velocity` accepts `fp8_attention`, that is, whether the
            transformer's softmax attention has no mask and can run in FP8
            (`models/layers/attention_fp8.py`).
        accepts_instruction: whether `tokenize` accepts an instruction, a text for the language
            model before each prompt.
        linear_sigmas: whether diffusers' pipeline passes the sigmas `linspace(1, 1/n, n)` to its
            scheduler, instead of using the scheduler's own.
        folder: the directory that the pipeline was opened from.
        remat: what the backward pass of the transformer recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError when the transformer is traced.
        scheduler: contents of `scheduler/scheduler_config.json`.
        transformer: the denoising network, a `Component`: its graph and the place of its files.
        text_encoders: the text encoders, `Component`s by the names of their folders.
        vae: the autoencoder, a `Component` of which only the decoder is built.
        compression: side, in image pixels, of the square that one latent pixel stands for.
        channels: channels of the latent.
        patch: side, in latent pixels, of the square that one transformer token stands for.
        default_size: height and width, in pixels, of the images that the model was made for.
        default_max_tokens: maximum number of prompt tokens when the user gives none.
        embedded_guidance: whether guidance is built into the transformer, which takes the guidance
            scale as an input or was distilled with a fixed one. Otherwise guidance needs a second
            evaluation with a negative prompt.
        largest_side: largest height or width of an image in pixels; None: unlimited.
        vae_dtype: the only dtype that the autoencoder works in; None: any.
        shift_terminal: the lowest sigma before the final 0 of the released schedule. After the
            shift that depends on the resolution, the distances of all sigmas from 1 are multiplied
            by one factor, so that the last one before 0 has this value. None: they are not
            stretched.
    """

    kind: ClassVar[str]
    attends_in_fp8: ClassVar[bool] = False
    accepts_instruction: ClassVar[bool] = False
    linear_sigmas: ClassVar[bool] = False

    folder: Path
    remat: str
    scheduler: dict[str, Any]
    transformer: Component
    text_encoders: dict[str, Component]
    vae: Component
    compression: int
    channels: int
    patch: int
    default_size: tuple[int, int]
    default_max_tokens: int
    embedded_guidance: bool = False
    largest_side: int | None = None
    vae_dtype: jnp.dtype | None = None
    shift_terminal: float | None = None

    def __init__(self, folder: Path, remat: str):
        """Opens a model directory. No weight is read.

        This constructor sets `folder`, `remat` and `scheduler`; the one of the subclass calls it
        and sets the other attributes.

        Args:
            folder: directory of a diffusers pipeline of this kind.
            remat: what the backward pass of the transformer recomputes instead of storing: "none"
                (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
                (everything inside a block; only the inputs of blocks are stored). Another value
                raises KeyError when the transformer is traced.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a configuration is unsupported, a tokenizer cannot be loaded, or a width or
                number of channels of one component is not what another one takes or returns.
        """
        self.folder = folder
        self.remat = remat
        self.scheduler = read_json(folder / "scheduler" / "scheduler_config.json")

    @abc.abstractmethod
    def velocity(
        self,
        params: Params,
        latent: Float[Array, "b h w c"],
        conditioning: Conditioning,
        timestep: Float[Array, " b"],
        guidance: Float[Array, ""],
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w c"]:
        """Predicts the velocity `v = noise - x0`, in the dtype of `latent`. For use under jit.

        Args:
            params: parameters of the transformer: nested dictionaries keyed by module name. A leaf
                may be an array, a quantized weight, or a weight with its LoRA adapter. Stacked
                blocks and, under tensor parallelism, linear layers may still be sharded; all other
                leaves are whole.
            latent: noisy latents, in the dtype to compute in.
            conditioning: encoded prompts by name, one row per latent, as returned by `encode_text`:
                for example "text" [b, tokens, features].
            timestep: `1000 * sigma` of each latent, where the noise level sigma lies in [0, 1].
            guidance: guidance scale, a scalar. Networks that do not take it as an input ignore it.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. It has no gradient. Hardware without FP8 attention computes in BF16
                from the rounded inputs. Only where `attends_in_fp8` is set.

        Returns:
            The velocity, of the shape of `latent`, from one evaluation of the network.

        Raises:
            ValueError: while tracing, if the network does not support the size of the latents, or
                if `fp8_attention` is set for a model without FP8 attention.
            KeyError: while tracing, if `remat` is not "none", "matmuls" or "blocks".
        """

    @abc.abstractmethod
    def tokenize(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> Tokens:
        """Tokenizes prompts for `encode_text`.

        Args:
            prompts: one or more texts; a negative prompt may be empty.
            max_tokens: number of tokens to which each prompt is padded or cut: at least the number
                of special tokens that the tokenizer adds to every text, and at most 4096 together
                with the tokens of an instruction. Some models accept fewer.
            instruction: text for the language model before each prompt, only where
                `accepts_instruction`; other models ignore it. None: no instruction.

        Returns:
            Arrays in host memory by name, with one row per prompt in the order of `prompts`. The
            names depend on the model, for example "ids", int32, and "mask", bool, true on tokens:
            both [prompts, tokens].

        Raises:
            InputError: `max_tokens` is not possible for the model or its tokenizer; the tokenizer
                fails; or it has no vocabulary, which only the configurations that this package
                carries for `solrl plan` may lack.
        """

    @abc.abstractmethod
    def encode_text(self, params: dict[str, Params], tokens: TracedTokens) -> Conditioning:
        """Encodes tokenized prompts for the transformer. For use under jit.

        Args:
            params: parameters of each text encoder by the name of its folder, such as
                "text_encoder". Only stacks of blocks may be sharded.
            tokens: result of `tokenize`: arrays by name, one row per prompt.

        Returns:
            Arrays by name, with one row per prompt: the argument `conditioning` of `velocity`. The
            names depend on the model, for example "text" [prompts, tokens, features] and "mask".
            Floating-point arrays have the dtype of the text encoders' parameters.
        """

    @abc.abstractmethod
    def unscale(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Converts the transformer's latents to the scale that the autoencoder decodes.

        Args:
            latent: the transformer's latents [b, h, w, c], of any floating-point dtype.

        Returns:
            An array of the shape and dtype of `latent`.
        """

    def decode(self, params: Params, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Decodes latents to images in [0, 1], float32. For use under jit.

        The network computes in the dtype of `latent`. Values outside of [0, 1] are clipped; NaN
        stays NaN.

        Args:
            params: parameters of the autoencoder, a nested dictionary by path, gathered.
            latent: the transformer's latents, before `unscale`, which is applied here.

        Returns:
            The images, `compression` times as high and wide as the latents.
        """
        image = self.vae(params).decode(self.unscale(latent))  # in [-1, 1], overshoots included
        return jnp.clip(image.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)

    def guide(
        self,
        conditional: Float[Array, "b h w c"],
        unconditional: Float[Array, "b h w c"],
        scale: Float[Array, ""],
    ) -> Float[Array, "b h w c"]:
        """Combines two velocities by classifier-free guidance (arXiv 2207.12598): `unconditional +
        scale (conditional - unconditional)`. For use under jit.

        A family may override it: Qwen-Image also rescales the result.

        Args:
            conditional: the velocity for the prompt, float32.
            unconditional: the velocity for the negative prompt, float32.
            scale: the guidance scale, above 1.

        Returns:
            The guided velocity, float32.
        """
        return unconditional + scale * (conditional - unconditional)

    @property
    def mu(self) -> Callable[[int, int], float] | None:
        """The formula of the resolution-dependent schedule shift, or None for that of FLUX.1.

        The schedule of a flow may be shifted towards noise for large images. This is a function
        (number of steps, number of image tokens) that gives the natural logarithm of the shift. It
        is None here; a family with another formula overrides the property.
        """
        return None

    def size_multiples(self) -> tuple[int, int]:
        """Returns the numbers of pixels that image heights and image widths must be multiples of.

        Returns:
            The number for heights, then that for widths. Here both are the side of one transformer
            token, `compression * patch`; SANA with MHLA has larger ones.
        """
        token = self.compression * self.patch
        return token, token

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns height, width and channels of the latent of an image.

        Args:
            height: image height in pixels.
            width: image width in pixels.

        Returns:
            (height / `compression`, width / `compression`, `channels`).

        Raises:
            ValueError: a side is not a positive multiple of the pixels in `size_multiples`, or
                larger than `largest_side`.
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
        return height // self.compression, width // self.compression, self.channels

    def image_tokens(self, height: int, width: int) -> int:
        """Returns how many tokens the transformer makes of an image.

        The size is not checked; for a size that `latent_shape` refuses, the area of the image
        divided by that of a token is rounded down.

        Args:
            height: image height in pixels.
            width: image width in pixels.

        Returns:
            The number of image tokens. Text tokens and padding are not counted.
        """
        return height * width // (self.compression * self.patch) ** 2


def check_equal(folder: Path, name: str, value: int, expected: int) -> None:
    """Checks one size of a component against the size that the other components need.

    Args:
        folder: the model directory. It only begins the error message.
        name: component and field of the checked size, such as "transformer in_channels", for the
            message alone.
        value: the size in the component's configuration.
        expected: the size that the other components need.

    Raises:
        ValueError: `value` is not `expected`.
    """
    if value != expected:
        raise ValueError(
            f"{folder}: {name}={value} does not fit the other components, which need {expected}"
        )
