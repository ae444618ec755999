"""Programs as text for a GPU that is not here."""

import contextlib
from unittest import mock

import jax

try:
    from jax._src.pallas.triton import (
        gpu_info,
    )  # from JAX 0.11 on, kernels in Pallas ask which GPU they are lowered for
except ImportError:
    gpu_info = None


def cuda_text(traced: jax.stages.Traced) -> str:
    """StableHLO of a traced function, for an H100."""
    with (
        mock.patch.object(gpu_info, "get_device_kind", return_value="NVIDIA H100")
        if gpu_info
        else contextlib.nullcontext()
    ):
        return traced.lower(lowering_platforms=("cuda",)).as_text()
