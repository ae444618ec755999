"""Means that leave out what is not finite, such as rewards that could not be computed."""

import numpy as np
from numpy.typing import ArrayLike


def finite_mean(values: ArrayLike) -> float:
    """The mean of the finite elements of an array.

    Args:
        values: Numbers, in any shape.

    Returns:
        The mean in float64; NaN if no element is finite, also for an empty array.
    """
    x = np.asarray(values)
    finite = np.isfinite(x)
    return float(np.mean(x[finite], dtype=float)) if finite.any() else float("nan")
