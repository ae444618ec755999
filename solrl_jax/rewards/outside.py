"""What rewards outside JAX have in common: what they are given is checked, and a picture that is none has no score."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

Metadata = Mapping[str, Any]  # what a prompt set says of a prompt beside its text


def check(reward: str, images: Float[np.ndarray, "n H W 3"], prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Raises ValueError in one line unless there are n pictures, n prompts and what is said of each."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"reward '{reward}': images of shape {images.shape}; expected [n, height, width, 3]")
    if not len(images) == len(prompts) == len(metadata):
        count = f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} mappings of metadata"
        raise ValueError(f"reward '{reward}': {count}; expected as many of each")


def finite(images: Float[np.ndarray, "n H W 3"]) -> Bool[np.ndarray, " n"]:
    """Which pictures hold numbers alone. The others score NaN, as they do with the rewards in JAX, and are not learnt from."""
    return np.isfinite(images).all((1, 2, 3))
