"""The step `checks`: small matmuls and attention of the device beside plain JAX.

These are the checks of `solrl doctor`. They take a second each, so that a device, a driver or a
library with wrong results is known before anything is timed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.gpu.record import Task
from solrl_jax.planning.device_checks import (
    FP8_MATMUL,
    NVFP4_MATMUL,
    DeviceCheck,
    checks_for,
    find_problem,
)
from solrl_jax.rl.experiment import first_device_info

# Where a device has no kernels to check, the matmuls that it emulates are compared.
EMULATED = (NVFP4_MATMUL, FP8_MATMUL)


def checks(task: Task) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the figures of each check of the kernels that the device has."""
    for check in checks_for(first_device_info()) or EMULATED:
        yield check.name, partial(compare, check)


def compare(check: DeviceCheck) -> dict[str, Any]:
    """Runs a check.

    Returns:
        `tolerance`: the largest accepted difference, as a fraction of the norm of the result.

    Raises:
        RuntimeError: If kernel and twin disagree. The message says by how much.
    """
    problem = find_problem(check)
    if problem is not None:
        raise RuntimeError(problem)
    return {"tolerance": check.tolerance}
