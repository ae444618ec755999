"""Compiles for devices that are not present, by XLA's own compilers.

The GPU compiler is in JAX's CUDA plug-in, the TPU compiler in libtpu. Neither needs a device or a
driver. The functions that train are lowered unchanged, with shardings over the devices of a
topology.
"""

import ctypes.util
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from solrl_jax.errors import InputError
from solrl_jax.planning.targets import Target, description

# The modules that contain the compiler of a platform. One of them suffices.
WHEELS = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
TOOLKIT = Path("/usr/local/cuda/bin")  # where CUDA installs its own tools
EXTRAS = {"gpu": "plan-cuda", "tpu": "plan-tpu"}
# JAX uses no device, and caches no compiled program, since it could not be loaded here. libtpu
# looks for no TPU and writes no log.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
# Nothing can be tuned without a device: matmuls in Triton would get tile sizes that were not
# measured, or that do not fit.
OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}, "tpu": {}}
# The arrangement of the chips of a host, by their number.
_TPU_HOSTS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
# The largest number of chips of a slice, by the number of its axes.
_MOST_CHIPS = {2: 256, 3: 8192}


def prepare(target: Target) -> None:
    """Sets the environment variables for compiling for a device. JAX reads them when it is
    imported.

    They make JAX run on the CPU, without a compilation cache, and keep libtpu from looking for a
    TPU. The variables of this process that have these names are replaced, for the rest of its life.

    Args:
        target: The kind of device that programs will be compiled for. It decides which compiler is
            looked for.

    Raises:
        InputError: If its compiler is not installed: JAX's CUDA plug-in with `ptxas` and cuDNN, or
            libtpu. They are looked for, not loaded. No variable is set then.
    """
    installed = any(map(importlib.util.find_spec, WHEELS[target.platform]))
    if target.platform == "gpu":
        installed = installed and _has_assembler() and _has_cudnn()
    if not installed:
        extra = f"solrl_jax[{EXTRAS[target.platform]}]"
        raise InputError(
            f"device={target.name}: its compiler is not installed: pip install '{extra}'"
        )
    os.environ.update(ENVIRONMENT)


def _has_assembler() -> bool:
    """Returns whether XLA finds CUDA's assembler `ptxas`: in a wheel of NVIDIA, on the PATH, or in
    `/usr/local/cuda/bin`.

    Some compilers crash without it.
    """
    nvidia = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in nvidia.submodule_search_locations or ()] if nvidia else []
    return bool(
        shutil.which("ptxas", path=os.pathsep.join([os.environ.get("PATH", ""), str(TOOLKIT)]))
    ) or any(binary for folder in wheels for binary in folder.glob("*/bin/ptxas"))


def _has_cudnn() -> bool:
    """Returns whether cuDNN is installed, in a wheel or in the system. It is not loaded.

    JAX asks the library for its version when it traces attention. No device is needed for that.
    """
    nvidia = importlib.util.find_spec("nvidia")
    in_wheel = nvidia is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    return in_wheel or ctypes.util.find_library("cudnn") is not None


def devices(target: Target, count: int, hosts: int) -> list[Any]:
    """Returns devices that are not present. Programs can be compiled for them, but not run.

    Starts JAX's backends, so `prepare` must have been called before.

    Args:
        target: The kind of device, which decides the platform and the largest number on a host.
        count: The number of devices on each host. For GPUs: from 1 to `target.on_host`. For TPUs:
            that of 1, 4 or 8 chips (chips times `target.cores`), at most `target.on_host`.
        hosts: The number of hosts: at least 1 for GPUs, and a power of two for TPUs.

    Returns:
        `count` times `hosts` `jax.Device`s, host by host and then by their numbers.

    Raises:
        InputError: If `count` is more GPUs than a host has, or is no number of devices that a TPU
            host has, or if there is no TPU slice of so many hosts.
    """
    import jax
    from jax.experimental.topologies import get_topology_desc

    jax.devices()  # finds the plug-ins
    if target.platform == "gpu":
        if count > target.on_host:
            raise InputError(
                f"devices={count}: a host has at most {target.on_host} {target.name}; "
                "name more hosts"
            )
        layout = f"1x{hosts}x{count}"  # slices, hosts, devices
        topology_desc = get_topology_desc(
            platform="cuda", topology_name="", topology=layout, target_config=description(target)
        )
    else:
        name, host = tpu_topology(target, count, hosts)
        topology_desc = get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=host
        )
    return sorted(topology_desc.devices, key=lambda device: (device.process_index, device.id))


def tpu_topology(target: Target, count: int, hosts: int) -> tuple[str, tuple[int, int, int]]:
    """Returns the name of a TPU slice and the arrangement of a host's chips.

    Args:
        target: The kind of TPU. Its axes, its cores per chip and the size of its hosts decide.
        count: The number of devices on each host: 1, 4 or 8 chips times `target.cores`, at most
            `target.on_host`.
        hosts: The number of hosts: 1, or a power of two.

    Returns:
        libtpu's name of the slice, e.g. "v6e:4x4" for 2 hosts of 8 tpu-v6e, and the numbers of a
        host's chips along the three axes. The slice is as near to a square or cube as powers of two
        allow, with the longest axes last, but axes of length 1 behind all others.

    Raises:
        InputError: If there are no hosts with so many devices, or no slices with so many hosts: the
            number is no power of two, the slice has more than 256 chips (8192 with three axes), or
            hosts of one chip are combined.
    """
    sizes = {
        chips * target.cores: bounds
        for chips, bounds in _TPU_HOSTS.items()
        if chips * target.cores <= target.on_host
    }
    if count not in sizes:
        raise InputError(
            f"devices={count}: a host has {' or '.join(map(str, sizes))} {target.name}; name more "
            "hosts"
        )
    chips = count * hosts // target.cores
    most = _MOST_CHIPS[target.axes]
    if hosts > 1 and (hosts & (hosts - 1) or chips > most or count == target.cores):
        raise InputError(
            f"hosts={hosts}: expected a power of two, at most {most} chips in all, "
            "and at least 4 chips "
            "per host"
        )
    doublings = chips.bit_length() - 1
    edges = [
        2 ** ((doublings + i) // target.axes) for i in range(target.axes)
    ]  # the last ones are longest
    edges.sort(key=lambda edge: edge == 1)
    return f"{target.name.removeprefix('tpu-')}:{'x'.join(map(str, edges))}", sizes[count]


def lowered(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Lowers a jitted function for shapes that are placed on a topology's devices. Raises what JAX
    raises.

    Args:
        function: The jitted function, whose mesh must be set (`jax.set_mesh`) if it reads one.
        arguments: Its arguments, with placed ShapeDtypeStructs in place of arrays.

    Returns:
        The lowered program (`jax.stages.Lowered`).
    """
    return function.lower(*arguments)


def compiled(program: Any, target: Target) -> Any:
    """Compiles a lowered program for a device, with the options of its platform: on GPUs, without
    matmuls in Triton, which could not be tuned. Raises what XLA raises.

    Args:
        program: The result of `lowered`.
        target: The kind of device that the program was lowered for. Only its platform, "gpu" or
            "tpu", is used.

    Returns:
        The compiled program (`jax.stages.Compiled`), which cannot be run here.
    """
    return program.compile(compiler_options=OPTIONS[target.platform])
