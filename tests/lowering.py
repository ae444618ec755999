"""Programs as text for a GPU that is not here."""

from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from solrl_jax.planning import topology

H100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")


def cuda_text(function: Any, *arguments: Any) -> str:
    """Traces a jitted function and lowers it for an H100.

    Returns:
        The program as StableHLO text.
    """
    # Kernels are chosen, and Pallas lowers them, for the device that the mesh describes.
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)), topology.tracing():
        return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
