"""The platform that a program is traced for. It decides which kernels are used, and nothing else."""

import jax


def platform() -> str:
    """ "cpu", "gpu" (CUDA: this project installs on no other) or "tpu": that of the devices of the mesh in `jax.set_mesh`.

    Those devices need not be here: `solrl plan` compiles for devices that are described only. Without a mesh: JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def converts_fp8() -> bool:
    """Whether kernels in Triton write FP8: not on NVIDIA GPUs before Ada."""
    return not _older_than(8.9)


def attends_in_fp8() -> bool:
    """Whether cuDNN attends in FP8: on Hopper and later."""
    return platform() == "gpu" and not _older_than(9.0)


def _older_than(capability: float) -> bool:
    """Of the GPU that is here. One that is not is taken to be newer."""
    device = jax.devices()[0]
    own = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and own.replace(".", "").isdigit() and float(own) < capability
