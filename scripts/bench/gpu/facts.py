"""The step `facts`: the device and the versions of all software."""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
from jax._src.lib import cuda_versions  # JAX has no public name for these

from bench.gpu.record import Task
from bench.timing import PACKAGES
from solrl_jax.planning.targets import target_of
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.experiment import first_device_info


def facts(task: Task) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the figures `device`, `plan` and `versions`."""
    yield "device", device
    yield "plan", planned
    yield "versions", versions


def device() -> dict[str, Any]:
    """Describes the first device of JAX and counts them."""
    first = jax.devices()[0]
    info = first_device_info()
    memory = first.memory_stats() or {}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "capability": list(info.capability),
        "memory": memory.get("bytes_limit"),
        "native": [form.name for form in FORMATS.values() if form.is_native(info)],
    }


def planned() -> dict[str, Any]:
    """Returns the public peaks of the device, if `solrl plan` knows it."""
    target = target_of(jax.devices()[0].device_kind)
    return (
        {"target": None}
        if target is None
        else {"target": target.name, "memory": target.memory, **vars(target.peaks)}
    )


def versions() -> dict[str, Any]:
    """Returns the versions of packages, and of CUDA's libraries and driver as JAX reads them."""
    numbers: dict[str, Any] = {name: version(name) for name in PACKAGES}
    for name in dir(cuda_versions) if cuda_versions is not None else ():
        if name.endswith("_get_version"):
            with contextlib.suppress(Exception):  # the library is missing
                numbers[name.removesuffix("_get_version")] = getattr(cuda_versions, name)()
    return numbers | {"backend": jax.devices()[0].client.platform_version}
