"""The size of an image as a JPEG file, whatever its prompt: the two toy rewards of DDPO.

See arXiv 2305.13301, section 5.1.
"""

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
    """Returns the size of each image in kB (1000 bytes), which grows with detail.

    It is the size of a JPEG file of quality 95. No file is written.

    Args:
        images: Images [n, H, W, 3] in [0, 1]; other values are clipped. One with a non-finite value
            scores NaN.
        prompts: The n prompts, whose texts have no effect.
        metadata: The metadata of the n prompts, which has no effect.

    Returns:
        The sizes in kB, float32 [n].

    Raises:
        ValueError: If the images are not RGB, or the arguments differ in length.
    """
    check_arguments("jpeg_incompressibility", images, prompts, metadata)
    return np.array([_jpeg_size(image) for image in images], np.float32)


def jpeg_compressibility(
    images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> Float[np.ndarray, " n"]:
    """Returns the negative size of each image in kB. The plainest image scores highest.

    The size is that of a JPEG file of quality 95 in units of 1000 bytes. Flow-GRPO also divides it
    by 500. Here the weight of the reward can do this.

    Args:
        images: Images [n, H, W, 3] in [0, 1]; other values are clipped. One with a non-finite value
            scores NaN.
        prompts: The n prompts, whose texts have no effect.
        metadata: The metadata of the n prompts, which has no effect.

    Returns:
        The negative sizes in kB, float32 [n].

    Raises:
        ValueError: If the images are not RGB, or the arguments differ in length.
    """
    check_arguments("jpeg_compressibility", images, prompts, metadata)
    return -jpeg_incompressibility(images, prompts, metadata)


def _jpeg_size(image: Float[np.ndarray, "H W 3"]) -> float:
    """Returns the size of an image as a JPEG of quality 95 in kB (1000 bytes). No file is written.

    Args:
        image: RGB in [0, 1]; other values are clipped. With a non-finite value, the result is NaN.
    """
    if not np.isfinite(image).all():
        return np.nan
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / KILOBYTE
