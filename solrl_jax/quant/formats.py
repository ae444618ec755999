"""The formats that exploration may run in, by name: how a weight is quantised, its size, and the devices that have it.

Sources: NVFP4 (arXiv 2509.25149), FP8 (arXiv 2209.05433). `docs/choices.md` says why the MX formats are not among them.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.quant import fp8, nvfp4
from solrl_jax.quant.leaf import Quantized


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """The facts that say which products are native: JAX's platform and device kind, and on CUDA the compute capability."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str = ""
    capability: tuple[int, int] = (
        0,
        0,
    )  # (9, 0) is Hopper; (0, 0): none, as on GPUs that are not NVIDIA's

    @classmethod
    def from_jax(cls, device: Any) -> "DeviceInfo":
        """The facts of a `jax.Device`."""
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(
            device.platform, device.device_kind, (int(found[1]), int(found[2])) if found else (0, 0)
        )


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to hold the quantised linears. The rest of a network stays in the training precision."""

    name: str
    description: str
    bits_per_weight: float  # per weight, with its share of the block scales, without the float32 scales of a matrix or a channel
    quantize: (
        Callable[[Array], Quantized] | None
    )  # weights [..., in, out] to a leaf; None: nothing is quantised
    is_native: Callable[
        [DeviceInfo], bool
    ]  # whether the device multiplies in the format; elsewhere XLA expands the products, exactly

    def describe(self, device: DeviceInfo) -> str:
        """The format on `device` in one line, for the terminal and for a run's record."""
        how = (
            "native"
            if self.is_native(device)
            else f"emulated: {device.kind or device.platform} has no units for it"
        )
        return f"{self.name} ({self.description}; {how})"


def _cuda(*capability: int) -> Callable[[DeviceInfo], bool]:
    return lambda device: device.platform == "gpu" and device.capability >= capability


def _fp8_units(device: DeviceInfo) -> bool:
    """Ada, Hopper and later GPUs, and TPU v7. Earlier TPUs multiply BF16 and integers."""
    return _cuda(8, 9)(device) or device.kind.startswith("TPU7")


def _bf16_units(device: DeviceInfo) -> bool:
    """Ampere and later GPUs, and TPUs. A CPU takes longer for BF16 than for float32."""
    return _cuda(8)(device) or device.platform == "tpu"


def _everywhere(device):
    return True


_block_scaled_units = _cuda(10, 0)  # Blackwell

FORMATS = {
    f.name: f
    for f in (
        Format("fp32", "no linear is quantised", 32.0, None, _everywhere),
        Format("bf16", "no linear is quantised", 16.0, None, _everywhere),
        Format(
            "fp8",
            "weights a channel and activations a token in E4M3",
            8.0,
            fp8.quantize,
            _fp8_units,
        ),
        Format(
            "nvfp4",
            "weights and activations in E2M1, blocks of 16",
            4.5,
            nvfp4.quantize,
            _block_scaled_units,
        ),
    )
}
AUTO = "auto"
_FASTEST_FIRST = ("nvfp4", "fp8")


def resolve_format(name: str, device: DeviceInfo) -> Format:
    """The format of that name. "auto" is the fastest one that `device` runs natively, or BF16 if none is faster."""
    if name == AUTO:
        name = next((fast for fast in _FASTEST_FIRST if FORMATS[fast].is_native(device)), "bf16")
    return FORMATS[name]


def scoring_dtypes(
    name: str, precision: str, device: DeviceInfo
) -> tuple[jnp.dtype | None, jnp.dtype]:
    """What pictures are decoded in, and what the networks that score them multiply in.

    name: "half", "fp32", or "auto": half if `device` has units for BF16 and the training precision is BF16. Otherwise auto is
    None, what the autoencoder was released for, and float32. Half is BF16 for decoding, whose range it needs, and FP16 for
    networks that score, which has three bits more; TPUs have no FP16.
    """
    half = jnp.dtype(jnp.bfloat16)
    whole = jnp.dtype(jnp.float32)
    if name == "half" or (name == AUTO and precision == "bf16" and _bf16_units(device)):
        return half, half if device.platform == "tpu" else jnp.dtype(jnp.float16)
    return whole if name == "fp32" else None, whole
