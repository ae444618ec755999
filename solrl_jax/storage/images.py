"""Images as bytes."""

import numpy as np
from jax import Array
from jaxtyping import Float, UInt8


def to_uint8(image: Float[Array | np.ndarray, "*size"]) -> UInt8[np.ndarray, "*size"]:
    """The bytes of an image [..., 3]: 255 times its values, rounded and clipped to 0..255; NaN gives 0."""
    unit = np.clip(np.nan_to_num(np.asarray(image, np.float32)), 0, 1)
    return np.round(255 * unit).astype(np.uint8)
