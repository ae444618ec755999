"""Conversion of images to bytes."""

import numpy as np
from jax import Array
from jaxtyping import Float, UInt8


def to_uint8(image: Float[Array | np.ndarray, "*size"]) -> UInt8[np.ndarray, "*size"]:
    """Converts an image, or an array of images, from values in 0..1 to bytes in 0..255.

    Args:
        image: Real values of any shape, on the host or a device. Values outside 0..1 are clipped,
            infinite ones too, and NaN becomes 0.

    Returns:
        A new uint8 array on the host, of the shape of `image`: 255 times the values, rounded to the
        nearest integer (halves to the even one).
    """
    unit = np.clip(np.nan_to_num(np.asarray(image, np.float32)), 0, 1)
    return np.round(255 * unit).astype(np.uint8)
