"""The size of a picture as a JPEG, whatever its prompt: the two toy rewards of DDPO (arXiv 2305.13301, section 5.1)."""

import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from PIL import Image

from solrl_jax.rewards.protocol import Images, Metadata, check_arguments
from solrl_jax.storage.images import to_uint8

QUALITY = 95
KILOBYTE = 1000  # bytes


def jpeg_incompressibility(
    images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> Float[np.ndarray, " n"]:
    """The size in kB: the more detail, the higher. NaN for a picture with values that are not finite."""
    check_arguments("jpeg_incompressibility", images, prompts, metadata)
    return np.array([_size(image) for image in images], np.float32)


def jpeg_compressibility(
    images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> Float[np.ndarray, " n"]:
    """Minus the size in kB: the plainer, the higher. Flow-GRPO also divides by 500; here the weight can do this."""
    check_arguments("jpeg_compressibility", images, prompts, metadata)
    return -jpeg_incompressibility(images, prompts, metadata)


def _size(image: Float[np.ndarray, "H W 3"]) -> float:
    if not np.isfinite(image).all():
        return np.nan
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / KILOBYTE
