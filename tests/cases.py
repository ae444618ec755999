"""Parametrizations of which `make test` runs the first case and `make test-all` runs all."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_quick(cases: Iterable[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; all but the first are marked `exhaustive`.

    A tuple holds the values of several arguments.
    """
    first, *others = cases
    return [
        first,
        *(
            pytest.param(
                *(case if isinstance(case, tuple) else [case]), marks=pytest.mark.exhaustive
            )
            for case in others
        ),
    ]
