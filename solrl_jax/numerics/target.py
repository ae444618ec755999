"""The platform whose kernels a program is traced for: JAX's own, or the one that a plan names.

A plan traces on a CPU what a GPU would run. The platform decides which kernels are used, and nothing else.
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
    """Whether programs are traced for a plan and will not run here. Stand-ins then replace kernels of other platforms."""
    return _PLANNED.get() is not None


@contextlib.contextmanager
def planned_for(name: str) -> Iterator[None]:
    """In the body, programs are traced for the platform `name`.

    JAX caches what it traced: a plan needs function objects of its own.
    """
    token = _PLANNED.set(name)
    try:
        yield
    finally:
        _PLANNED.reset(token)
