"""The type checker of the tests: beartype, which reads jaxtyping's shapes and dtypes."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int passes for a float


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the arguments and the result of a function at every call.

    Constructors are left alone, because JAX rebuilds pytree dataclasses with placements, shapes or
    axis numbers in the place of arrays.
    """
    return function if function.__name__ == "__init__" else _beartype(function)
