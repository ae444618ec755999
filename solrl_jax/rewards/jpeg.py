"""How well a picture compresses, whatever was asked for: the two toy rewards of DDPO (arXiv 2305.13301, section 5.1)."""

import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from PIL import Image

from solrl_jax.rewards.outside import Metadata, check, finite
from solrl_jax.run.pictures import to_uint8

QUALITY = 95
KILOBYTE = 1000  # bytes


def jpeg_incompressibility(
    images: Float[np.ndarray, "n H W 3"], prompts: Sequence[str], metadata: Sequence[Metadata]
) -> Float[np.ndarray, " n"]:
    """Size in kB of the picture as a JPEG: the more detail the better. NaN for a picture that holds other than numbers."""
    check("jpeg_incompressibility", images, prompts, metadata)
    return _sizes(images)


def jpeg_compressibility(
    images: Float[np.ndarray, "n H W 3"], prompts: Sequence[str], metadata: Sequence[Metadata]
) -> Float[np.ndarray, " n"]:
    """The size in kB, negative: the plainer the better. Flow-GRPO divides it by 500; in a mixture its weight can."""
    check("jpeg_compressibility", images, prompts, metadata)
    return -_sizes(images)


def _sizes(images: Float[np.ndarray, "n H W 3"]) -> Float[np.ndarray, " n"]:
    sound = finite(images)
    return np.array([_size(image) if sound[i] else np.nan for i, image in enumerate(images)], np.float32)


def _size(image: Float[np.ndarray, "H W 3"]) -> float:
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / KILOBYTE
