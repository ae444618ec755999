"""The mean of finite numbers. Rewards that could not be computed are NaN and do not count."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def finite_mean(values: Sequence[float] | Float[np.ndarray, "..."]) -> float:
    """Returns the mean of the finite numbers.

    Args:
        values: The numbers, also non-finite ones: a sequence, or an array of any shape; it may be
            empty.

    Returns:
        The mean in float64; NaN if no number is finite.
    """
    x = np.asarray(values)
    finite = np.isfinite(x)
    return float(np.mean(x[finite], dtype=float)) if finite.any() else float("nan")
