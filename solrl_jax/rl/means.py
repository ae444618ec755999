"""Means that leave out what is not finite, such as rewards that could not be computed."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def finite_mean(values: Sequence[float] | Float[np.ndarray, "..."]) -> float:
    """The mean of the finite numbers among some.

    Args:
        values: The numbers: a sequence, or an array of any shape. There may be none.

    Returns:
        The mean in float64; NaN if no number is finite, also if there are none.
    """
    x = np.asarray(values)
    finite = np.isfinite(x)
    return float(np.mean(x[finite], dtype=float)) if finite.any() else float("nan")
