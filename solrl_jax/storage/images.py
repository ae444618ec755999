"""Conversion of images to bytes."""

import numpy as np
from jax import Array
from jaxtyping import Float, UInt8


def to_uint8(image: Float[Array | np.ndarray, "*size"]) -> UInt8[np.ndarray, "*size"]:
    """Converts images with values from 0 to 1 to bytes from 0 to 255.

    Args:
        image: Real values of any shape, on the host or a device. Values (also infinite ones) below
            0 or above 1 are clipped, and NaN becomes 0.

    Returns:
        A uint8 array of the same shape on the host: 255 times the values, rounded to the nearest
        integer.
    """
    unit = np.clip(np.nan_to_num(np.asarray(image, np.float32)), 0, 1)
    return np.round(255 * unit).astype(np.uint8)
