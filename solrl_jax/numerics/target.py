"""The platform that a program is traced for. It decides which kernels are used, and nothing else."""

import jax


def platform() -> str:
    """ "cpu", "gpu" (CUDA: this project installs on no other) or "tpu": that of the devices of the mesh in `jax.set_mesh`.

    Those devices need not be here: `solrl plan` compiles for devices that are described only. Without a mesh: JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
