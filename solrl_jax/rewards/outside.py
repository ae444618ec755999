"""What the package's rewards outside JAX share: checks of their arguments, and pictures that cannot be scored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

Metadata = Mapping[str, Any]  # what a prompt set says about a prompt beside its text
Images = Float[np.ndarray, "..."]  # float32 [n, H, W, 3] in [0, 1], which `check_arguments` checks


def check_arguments(reward: str, images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Raises ValueError in one line unless there are n pictures, n prompts and n mappings of metadata."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"reward '{reward}': images of shape {images.shape}; expected [n, height, width, 3]")
    if not len(images) == len(prompts) == len(metadata):
        count = f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} mappings of metadata"
        raise ValueError(f"reward '{reward}': {count}; expected as many of each")


def finite(images: Float[np.ndarray, "n H W 3"]) -> Bool[np.ndarray, " n"]:
    """Which pictures have only finite values. The others score NaN, as in JAX, and are not trained on."""
    return np.isfinite(images).all((1, 2, 3))
