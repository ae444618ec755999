"""The platform whose kernels a program is traced for: JAX's own, or the one that a plan names.

A plan traces, on a CPU, what a GPU would run. Only a choice of kernels depends on it; no result of a run does.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_PLANNED: ContextVar[str | None] = ContextVar("planned", default=None)


def platform() -> str:
    """ "cpu", "gpu" (CUDA: this project installs on no other) or "tpu"."""
    return _PLANNED.get() or jax.default_backend()


def is_planned() -> bool:
    """Whether what is traced now will not run here: kernels of other platforms are then traced as stand-ins."""
    return _PLANNED.get() is not None


@contextlib.contextmanager
def planned_for(name: str) -> Iterator[None]:
    """Within it, programs are traced for the platform `name`. JAX remembers what it traced: plan with objects of their own."""
    token = _PLANNED.set(name)
    try:
        yield
    finally:
        _PLANNED.reset(token)
