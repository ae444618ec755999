"""The type checker of the tests: beartype, which reads jaxtyping's shapes and dtypes."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int passes for a float


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the arguments and the result of a function at every call.

    Constructors are left alone, because JAX rebuilds pytree dataclasses with placements, shapes or
    axis numbers in the place of arrays. The annotations of a function are read at its first call.
    """
    if function.__name__ == "__init__":
        return function

    # One process of the tests calls few of the functions that it imports, and the generated code of
    # a check takes a millisecond or two to compile.
    @functools.cache
    def checked():
        return _beartype(function)

    @functools.wraps(function)
    def check_when_called(*args, **kwargs):
        return checked()(*args, **kwargs)

    return check_when_called
