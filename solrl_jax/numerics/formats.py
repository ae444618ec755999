"""The formats that exploration may run in, by name: how a weight is quantised, its size, and the devices that have it.

Peers and specifications: NVFP4 (arXiv 2509.25149), MXFP4 and MXFP8 (OCP Microscaling Formats 1.0), FP8 (arXiv 2209.05433).
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.numerics import fp8, mx, nvfp4
from solrl_jax.numerics.leaf import Quantized


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts that say which products are native: JAX's platform and device kind, and on CUDA the compute capability."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str = ""
    capability: tuple[int, int] = (0, 0)  # (9, 0) is Hopper; (0, 0): none, as on GPUs that are not NVIDIA's

    @classmethod
    def of(cls, device: Any) -> "Device":
        """The facts of a `jax.Device`."""
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(device.platform, device.device_kind, (int(found[1]), int(found[2])) if found else (0, 0))


_everywhere = lambda device: True


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to hold the quantised linears. The rest of a network stays in the training precision."""

    name: str
    description: str
    bits: float  # per weight, with its share of the block scales, without the float32 scales of a matrix or a channel
    quantize: Callable[[Array], Quantized] | None  # weights [..., in, out] to a leaf; None: nothing is quantised
    native: Callable[[Device], bool]  # whether the device multiplies in the format; elsewhere XLA expands the products, exactly
    compiles: Callable[[Device], bool] = _everywhere  # whether XLA compiles the products, native or expanded

    def describe(self, device: Device) -> str:
        """The format on `device` in one line, for the terminal and for a run's record."""
        how = "native" if self.native(device) else f"emulated: {device.kind or device.platform} has no units for it"
        return f"{self.name} ({self.description}; {how})"


def _cuda(*capability: int) -> Callable[[Device], bool]:
    return lambda device: device.platform == "gpu" and device.capability >= capability


def _fp8_units(device: Device) -> bool:
    """Ada, Hopper and later GPUs, and TPU v7. Earlier TPUs multiply BF16 and integers."""
    return _cuda(8, 9)(device) or device.kind.startswith("TPU7")


_mxfp4, _mxfp8 = (functools.partial(mx.quantize, element) for element in (jnp.float4_e2m1fn, jnp.float8_e4m3fn))
_nowhere = lambda device: False
_no_gpu = lambda device: device.platform != "gpu"  # tried with jax 0.10.2 from the A100 to the B200 (`docs/compiled.md`)
_block_scaled_units = _cuda(10, 0)  # Blackwell

FORMATS = {
    f.name: f
    for f in (
        Format("fp32", "no linear is quantised", 32.0, None, _everywhere),
        Format("bf16", "no linear is quantised", 16.0, None, _everywhere),
        Format("fp8", "weights a channel and activations a token in E4M3", 8.0, fp8.quantize, _fp8_units),
        Format("mxfp8", "weights and activations in E4M3, blocks of 32", 8.25, _mxfp8, _block_scaled_units),
        Format("mxfp4", "weights and activations in E2M1, blocks of 32", 4.25, _mxfp4, _nowhere, _no_gpu),
        Format("nvfp4", "weights and activations in E2M1, blocks of 16", 4.5, nvfp4.quantize, _block_scaled_units),
    )
}
AUTO = "auto"
_FASTEST_FIRST = ("nvfp4", "fp8")


def resolve(name: str, device: Device) -> Format:
    """The format of that name. "auto" is the fastest one that `device` runs natively, or BF16 if none is faster.

    Raises ValueError for a format whose products XLA does not compile for `device`, KeyError for an unknown name.
    """
    if name == AUTO:
        name = next((fast for fast in _FASTEST_FIRST if FORMATS[fast].native(device)), "bf16")
    if not FORMATS[name].compiles(device):
        others = ", ".join(form.name for form in FORMATS.values() if form.compiles(device))
        raise ValueError(f"{name}: XLA compiles no such product for {device.kind or device.platform}; accepted are {others}")
    return FORMATS[name]
