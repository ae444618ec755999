"""Compiles programs for devices that are not present, with XLA's own compilers.

The GPU compiler is in JAX's CUDA plug-in, the TPU compiler in libtpu. Neither needs a device or a
driver. The functions of training are lowered unchanged, with shardings over the devices of a
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
# JAX runs on the CPU, and caches no compiled programs, because they could not be loaded here.
# libtpu looks for no TPU and writes no log.
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
    """Prepares this process for compiling for absent devices. Call it before JAX is imported, which
    is not checked.

    It sets environment variables, which stay for the rest of the process: JAX then runs on the CPU,
    keeps no compiled programs, and does not look for TPUs.

    Args:
        target: The kind of device that will be compiled for.

    Raises:
        InputError: If its compiler is not installed (JAX's CUDA plug-in with `ptxas` and cuDNN, or
            libtpu). Then no variable is set.
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
    """Returns whether CUDA's assembler `ptxas`, which XLA needs to compile, is installed.

    It may be in NVIDIA's Python packages, on the PATH or in `/usr/local/cuda/bin`.
    """
    nvidia = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in nvidia.submodule_search_locations or ()] if nvidia else []
    return bool(
        shutil.which("ptxas", path=os.pathsep.join([os.environ.get("PATH", ""), str(TOOLKIT)]))
    ) or any(binary for folder in wheels for binary in folder.glob("*/bin/ptxas"))


def _has_cudnn() -> bool:
    """Returns whether cuDNN is installed, as a Python package of NVIDIA or in the system."""
    nvidia = importlib.util.find_spec("nvidia")
    in_wheel = nvidia is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    return in_wheel or ctypes.util.find_library("cudnn") is not None


def devices(target: Target, count: int, hosts: int) -> list[Any]:
    """Returns devices that are not present. JAX can compile programs for them, but not run any.

    `prepare` must have been called before. Also starts JAX's CPU backend.

    Args:
        target: The kind of device.
        count: The number of devices on each host: from 1 to `target.on_host` GPUs, or all devices
            (`target.cores` per chip) of 1, 4 or 8 TPU chips (8 only with a two-dimensional torus).
        hosts: The number of hosts, at least 1; a power of two for TPUs.

    Returns:
        `count` times `hosts` devices (`jax.Device`), sorted by host.

    Raises:
        InputError: If `count` or `hosts` is below 1, if there are no hosts with so many devices, or
            no TPU slice of so many hosts.
    """
    import jax
    from jax.experimental.topologies import get_topology_desc

    jax.devices()  # finds the plug-ins
    if min(count, hosts) < 1:
        raise InputError(f"devices={count}, hosts={hosts}: expected at least 1 of each")
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
    """Returns the TPU slice that consists of some hosts.

    Args:
        target: The kind of TPU.
        count: The number of devices on each host: 1, 4 or 8 chips (8 only with a two-dimensional
            torus) of `target.cores` devices each.
        hosts: The number of hosts, a power of two.

    Returns:
        A pair. First, the name of the slice for libtpu, e.g. "v6e:4x4" for 2 hosts of 8 chips. It
        has the numbers of chips along the axes of the torus, which are as equal as possible.
        Second, the numbers of chips of one host along three axes, e.g. (2, 4, 1).

    Raises:
        InputError: If there are no hosts with so many devices, or no slice of so many hosts. A
            slice has at most 256 chips, or 8192 with a three-dimensional torus, and slices of
            several hosts need at least 4 chips per host.
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
    """Lowers a jitted function for the devices that its arguments are placed on. It is the plain
    call `function.lower(*arguments)`.

    Args:
        function: The jitted function. If it reads the current mesh, the caller must set the mesh
            (`jax.set_mesh`). Kernels that depend on `quant.compile_target` are chosen for the
            platform of the mesh's devices; without a mesh, for JAX's default backend here.
        arguments: Its arguments, with ShapeDtypeStructs in place of arrays. Their shardings name
            the devices.

    Returns:
        The lowered program (`jax.stages.Lowered`).
    """
    return function.lower(*arguments)


def compiled(program: Any, target: Target) -> Any:
    """Compiles a lowered program for a kind of device.

    On GPUs, XLA is told not to compile matmuls with Triton, because their tile sizes could not be
    tuned without the device.

    Args:
        program: The lowered program (`jax.stages.Lowered`), from `lowered`.
        target: The kind of device that the program was lowered for.

    Returns:
        The compiled program (`jax.stages.Compiled`), which cannot be run here.

    Raises:
        jax.errors.JaxRuntimeError: If XLA cannot compile the program.
    """
    return program.compile(compiler_options=OPTIONS[target.platform])
