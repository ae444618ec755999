"""`Pipeline`: a text-to-image model as pure functions, read from a diffusers directory.

Such a directory has a `model_index.json` and a folder for each component. A `Pipeline` holds graphs, shapes and functions. It
holds no parameters: the caller loads these separately, and says where they lie and in which dtype.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import Params

Tokens = dict[
    str, np.ndarray
]  # prompts for the text encoders; every array has a leading axis of prompts
TracedTokens = Mapping[str, Array | np.ndarray]  # the same inside jit
Conditioning = dict[
    str, Array
]  # encoded prompts for the transformer; every array has a leading axis of prompts


class VelocityFn(Protocol):
    """A velocity network as a pure function of its parameters and inputs."""

    def __call__(
        self,
        params: Params,
        latent: Array,
        conditioning: Conditioning,
        timestep: Array,
        guidance: Array,
        fp8_attention: bool = False,
    ) -> Array:
        """Predicts the velocity `noise - x0`.

        Args:
          params: The transformer's parameters.
          latent: The noisy latents [b, h, w, c], in the dtype that the network computes in.
          conditioning: The prompt embeddings, one row per latent.
          timestep: `1000 * sigma` [b], float32.
          guidance: The guidance scale (a scalar array). Only networks that embed the guidance scale read it.
          fp8_attention: Whether softmax attention runs in FP8. Accepted only if the pipeline sets `attends_in_fp8`.

        Returns:
          The velocity [b, h, w, c] in the dtype of `latent`.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: a static argument of jit
class Pipeline:
    """What the rest of `solrl_jax` knows of a model. Heights and widths of images are in pixels."""

    kind: str  # the class name in model_index.json
    folder: Path
    transformer: Component
    text_encoders: dict[str, Component]  # by folder
    vae: Component
    scheduler: dict[str, Any]  # scheduler_config.json
    velocity: VelocityFn
    tokenize: Callable[[Sequence[str], int], Tokens]  # prompts, the most tokens a prompt
    encode_text: Callable[[dict[str, Params], TracedTokens], Conditioning]  # parameters by folder
    unscale: Callable[
        [Float[Array, "b h w c"]], Float[Array, "b h w c"]
    ]  # latents to what the autoencoder decodes
    compression: int  # pixels that a latent stands for, each way
    channels: int  # of a latent
    patch: int  # latents that a token of the transformer stands for, each way
    default_size: tuple[int, int]  # height and width that the model was made for
    default_max_tokens: int
    blocks: tuple[int, int] = (
        1,
        1,
    )  # equal parts that the tokens of an image divide into, down and across (`models/layers/mhla.py`)
    largest_side: int | None = None  # of an image; None: any
    vae_dtype: jnp.dtype | None = None  # the only dtype that the autoencoder decodes in; None: any
    attends_in_fp8: bool = (
        False  # its softmax attention may be that of `models/layers/attention_fp8.py`
    )
    embedded_guidance: bool = False  # the network is told the guidance scale, instead of a second evaluation without the prompt
    instruct: Callable[[Sequence[str], int, str], Tokens] | None = (
        None  # as `tokenize`, for prompts after an instruction
    )
    remat: str = "none"  # what gradients through the transformer compute again, a key of `models.layers.stack.REMAT`
    own_sigmas: bool = False  # the pipeline gives its scheduler `linspace(1, 1/n, n)` instead of taking the default grid
    mu: Callable[[int, int], float] | None = (
        None  # of a shift by resolution, from steps and image tokens; None: FLUX.1's
    )

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Height, width and channels of an image's latent. Raises ValueError for a size that the model does not take."""
        down, across = (self.compression * self.patch * parts for parts in self.blocks)
        if height % down or width % across or height <= 0 or width <= 0:
            raise ValueError(
                f"size {height}x{width}: this model takes multiples of {down} pixels down and {across} across"
            )
        if self.largest_side is not None and max(height, width) > self.largest_side:
            raise ValueError(
                f"size {height}x{width}: this model takes up to {self.largest_side} pixels in either direction"
            )
        return height // self.compression, width // self.compression, self.channels

    def image_tokens(self, height: int, width: int) -> int:
        """The number of tokens that the transformer makes of an image's latent."""
        return height * width // (self.compression * self.patch) ** 2

    def decode(self, params: Params, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Images in [0, 1], float32. params: the autoencoder's."""
        image = self.vae(params).decode(self.unscale(latent))  # in [-1, 1], overshoots included
        return jnp.clip(image.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)


def check_fit(folder: Path, *facts: tuple[str, int, int]) -> None:
    """Raises ValueError for the first fact (name, value, what the other components want) whose two numbers differ."""
    for name, value, wanted in facts:
        if value != wanted:
            raise ValueError(
                f"{folder}: {name}={value} does not fit the other components, which want {wanted}"
            )
