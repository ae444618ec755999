"""The platform that a program is traced for.

It decides which kernels a program uses, and nothing else.

The platform is read from the mesh of `jax.set_mesh`, which JAX itself consults while it traces, and
not from an argument. `jax.lax.platform_dependent` would make the choice explicit in the program,
and is used where a kernel has no gradient (`quant.lazy`, `quant.nvfp4`). Under differentiation it
does not work: it is a `cond`, whose forward pass stores the residuals of every branch. A training
step would then keep the residuals of plain attention (all scores) beside those of the fused kernel.
"""

import jax


def platform() -> str:
    """Returns the platform of the devices that the program is traced for.

    These devices need not be attached: `solrl plan` compiles for devices that are only described.

    Returns:
        "cpu", "gpu" (always CUDA: no other GPU is supported) or "tpu", of the mesh that
        `jax.set_mesh` has set. Without a mesh, or with an `AbstractMesh` that was made without a
        device, the platform of JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def local_triton_converts_fp8() -> bool:
    """Returns whether Triton kernels can convert to FP8, judged by the first device of JAX.

    Returns:
        False if that is an NVIDIA GPU older than Ada (compute capability below 8.9). True
        otherwise, also without a GPU: a GPU that programs are only compiled for counts as newer.
    """
    return not _local_gpu_older_than(8.9)


def cudnn_attends_in_fp8() -> bool:
    """Returns whether the program that is traced can use cuDNN's FP8 attention.

    Returns:
        True if it is traced for a GPU (`platform`), unless the first device of JAX is an NVIDIA GPU
        older than Hopper (compute capability below 9.0). A GPU that programs are only compiled for
        counts as newer.
    """
    return platform() == "gpu" and not _local_gpu_older_than(9.0)


def first_device() -> jax.Device:
    """Returns the first device that JAX runs on, which may not be the one that a program is traced
    for. With several hosts it may belong to another process.
    """
    return jax.devices()[0]


def _local_gpu_older_than(capability: float) -> bool:
    """Returns whether the first device of JAX is a GPU with a lower compute capability.

    Args:
        capability: A CUDA compute capability as a decimal number, e.g. 8.9 for Ada.

    Returns:
        False also if the first device is no GPU, or has no numeric compute capability. Devices that
        a program is planned for are not considered.
    """
    device = first_device()
    local = str(getattr(device, "compute_capability", ""))
    is_version = local.replace(".", "").isdigit()
    return device.platform == "gpu" and is_version and float(local) < capability
