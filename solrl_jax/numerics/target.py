"""The platform that a program is traced for. It decides which kernels are used, and nothing else."""

import jax


def platform() -> str:
    """ "cpu", "gpu" (CUDA: this project installs on no other) or "tpu": that of the devices of the mesh in `jax.set_mesh`.

    Those devices need not be here: `solrl plan` compiles for devices that are described only. Without a mesh: JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def converts_fp8() -> bool:
    """Whether kernels in Triton write FP8: not on NVIDIA GPUs before Ada. A GPU that is not here is taken to be newer."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform != "gpu" or not capability.replace(".", "").isdigit() or float(capability) >= 8.9
