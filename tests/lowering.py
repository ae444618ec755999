"""Programs as text for devices that are not here."""

from typing import Any
from unittest import mock

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from solrl_jax.models.layers import attention

H100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
V6E = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")


def traced_for(platform: str) -> Any:
    """A context in which programs are traced for the devices of a platform, which need not exist.

    Args:
        platform: "cpu", "gpu" or "tpu".
    """
    device = AbstractDevice(device_kind="", num_cores=None, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def cuda_text(function: Any, *arguments: Any) -> str:
    """Traces a jitted function and lowers it for an H100.

    Softmax attention is XLA's: JAX traces cuDNN's only where cuDNN is installed, see
    tests/planning/test_lowering.py.

    Returns:
        The program as StableHLO text.
    """
    # Kernels are chosen, and Pallas lowers them, for the device that the mesh describes.
    mesh = AbstractMesh((), (), abstract_device=H100)
    no_cudnn = mock.patch.object(attention, "cudnn_fits", return_value=False)
    with use_abstract_mesh(mesh), no_cudnn:
        return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def tpu_text(function: Any, *arguments: Any) -> str:
    """Traces a jitted function and lowers it for a TPU v6e.

    Returns:
        The program as StableHLO text.
    """
    mesh = AbstractMesh((), (), abstract_device=V6E)
    with use_abstract_mesh(mesh):
        return function.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
