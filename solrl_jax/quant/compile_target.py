"""The platform that a program is traced for. It decides which kernels a program uses, and nothing
else.

The platform is read from the mesh of `jax.set_mesh`, which JAX itself consults while it traces, and
not from an argument. `jax.lax.platform_dependent` would make the choice explicit in the program,
and is used where a kernel has no gradient (`quant.lazy`, `quant.nvfp4`). Under differentiation it
does not work: it is a `cond`, whose forward pass stores the residuals of every branch. A training
step would then keep the residuals of plain attention (all scores) beside those of the fused kernel.
"""

import jax


def platform() -> str:
    """The platform of the devices that the program is traced for.

    These devices need not exist here: `solrl plan` compiles for devices that are only described.

    Returns:
        "cpu", "gpu" (always CUDA: no other GPU is supported) or "tpu". Without a mesh, the platform
        of JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def triton_converts_fp8() -> bool:
    """Whether Triton kernels can convert to FP8. NVIDIA GPUs older than Ada (compute capability
    8.9) cannot.
    """
    return not _local_gpu_older_than(8.9)


def cudnn_attends_in_fp8() -> bool:
    """Whether cuDNN's FP8 attention is available: the target is a GPU, and the local GPU, if any,
    is Hopper or newer.
    """
    return platform() == "gpu" and not _local_gpu_older_than(9.0)


def _local_gpu_older_than(capability: float) -> bool:
    """Whether the first local device is a GPU with a lower compute capability. Described devices
    are taken to be newer.
    """
    device = jax.devices()[0]
    local = str(getattr(device, "compute_capability", ""))
    is_version = local.replace(".", "").isdigit()
    return device.platform == "gpu" and is_version and float(local) < capability
