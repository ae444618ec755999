"""The number formats that exploration can run in.

Sources: NVFP4 (arXiv 2509.25149), FP8 (arXiv 2209.05433), INT8 by channels and tokens (arXiv
2208.07339). `docs/choices.md` explains why the MX formats are not among them.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.quant import fp8, int8, nvfp4
from solrl_jax.quant.leaf import Quantized

AUTO = "auto"  # accepted by `resolve_format` and `scoring_dtypes` in place of a name


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """The properties of a device that decide which matmuls it runs natively.

    Attributes:
        platform: JAX's name of the platform: "cpu", "gpu" or "tpu".
        kind: JAX's `device_kind`, for example "NVIDIA H200" or "TPU v6 lite".
        capability: The CUDA compute capability, for example (9, 0) for Hopper. (0, 0) for all other
            devices.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def from_jax(cls, device: Any) -> "DeviceInfo":
        """Reads the properties of a device.

        Args:
            device: A `jax.Device`, or an object with its attributes `platform`, `device_kind` and,
                for CUDA, `compute_capability` (text such as "9.0").

        Returns:
            The properties. The capability is (0, 0) if the device has none of the form
            "MAJOR.MINOR".
        """
        version = str(getattr(device, "compute_capability", ""))
        match = re.fullmatch(r"(\d+)\.(\d+)", version)
        capability = (int(match[1]), int(match[2])) if match else (0, 0)
        return cls(device.platform, device.device_kind, capability)

    def is_cuda_from(self, capability: tuple[int, int]) -> bool:
        """Returns whether the device is an NVIDIA GPU with at least a given compute capability.

        Args:
            capability: The lowest (major, minor) that is accepted.

        Returns:
            False for CPUs and TPUs. A GPU whose capability is not known counts as (0, 0).
        """
        return self.platform == "gpu" and self.capability >= capability


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format for the quantized linear layers. The rest of a network keeps the training
    precision.

    Attributes:
        name: The name in configurations, for example "nvfp4".
        description: Half a sentence about the format for progress output and run records.
        bits_per_weight: The storage of one weight, including its share of the block scales but not
            the float32 scales per matrix or channel.
        quantize: Converts weights [..., in, out] of a floating-point dtype to a leaf of the
            parameter tree. None for formats that quantize nothing.
        cuda_capability: The lowest CUDA compute capability with matmul units for the format. None
            if every device runs the format natively.
        tpu_kinds: The prefixes of the `device_kind` of TPUs that multiply in the format faster than
            in BF16.
    """

    name: str
    description: str
    bits_per_weight: float
    quantize: Callable[[Array], Quantized] | None = None
    cuda_capability: tuple[int, int] | None = None
    tpu_kinds: tuple[str, ...] = ()

    def is_native(self, device: DeviceInfo) -> bool:
        """Returns whether a device has matmul units for the format.

        Other devices emulate it: XLA converts the operands to a wider dtype first, which is exact.

        Args:
            device: The device that runs the matmuls.

        Returns:
            True on every device, also on CPUs, if `cuda_capability` is None. Otherwise whether
            `device` is of a kind that begins with one of `tpu_kinds`, or an NVIDIA GPU of at least
            `cuda_capability`; False for CPUs.
        """
        if self.cuda_capability is None:
            return True
        if device.kind.startswith(self.tpu_kinds):
            return True
        return device.is_cuda_from(self.cuda_capability)

    def describe(self, device: DeviceInfo) -> str:
        """Returns one line about the format on a device, for the terminal and for a run's record.

        Args:
            device: The device that runs the matmuls.

        Returns:
            "NAME (DESCRIPTION; native)", or "NAME (DESCRIPTION; emulated: KIND has no units for
            it)" with the kind of the device, or its platform if the kind is empty.
        """
        if self.is_native(device):
            support = "native"
        else:
            support = f"emulated: {device.kind or device.platform} has no units for it"
        return f"{self.name} ({self.description}; {support})"


_FORMATS = (
    Format("fp32", "no linear layer is quantized", bits_per_weight=32.0),
    Format("bf16", "no linear layer is quantized", bits_per_weight=16.0),
    Format(
        "fp8",
        "weights and activations in E4M3, one scale per channel and per token",
        bits_per_weight=8.0,
        quantize=fp8.quantize,
        cuda_capability=(8, 9),  # Ada, Hopper and later
        tpu_kinds=("TPU7",),  # earlier TPUs multiply BF16 and integers only
    ),
    Format(
        "int8",
        "weights and activations in INT8, one scale per channel and per token",
        bits_per_weight=8.0,
        quantize=int8.quantize,
        cuda_capability=(8, 0),  # Ampere and later
        tpu_kinds=("TPU v5", "TPU v6"),  # v5e, v5p and v6e; a v4 has the same rate as in BF16
    ),
    Format(
        "nvfp4",
        "weights and activations in E2M1, blocks of 16",
        bits_per_weight=4.5,
        quantize=nvfp4.quantize,
        cuda_capability=(10, 0),  # Blackwell
    ),
)
FORMATS = {format.name: format for format in _FORMATS}
_FASTEST_FIRST = ("nvfp4", "fp8", "int8")


def resolve_format(name: str, device: DeviceInfo) -> Format:
    """Looks up a format.

    Args:
        name: A key of `FORMATS` ("fp32", "bf16", "int8", "fp8" or "nvfp4"), or "auto" for the
            fastest format that `device` runs natively: NVFP4, else FP8, else INT8, else BF16.
        device: The device that the program will run on. It matters only for "auto": a named format
            is returned even if `device` emulates it.

    Returns:
        The entry of `FORMATS`, with its name and its function that quantizes (None for "fp32" and
        "bf16").

    Raises:
        KeyError: If there is no format of this name.
    """
    if name == AUTO:
        native = (fast for fast in _FASTEST_FIRST if FORMATS[fast].is_native(device))
        name = next(native, "bf16")
    return FORMATS[name]


def scoring_dtypes(
    name: str, precision: str, device: DeviceInfo
) -> tuple[jnp.dtype | None, jnp.dtype]:
    """Returns the dtypes that images are decoded and scored in.

    Args:
        name: "fp32" decodes and scores in float32. "half" decodes in BF16 and scores in FP16 (BF16
            on TPUs, which have no FP16). "auto" is "half" if `precision` is "bf16" and the device
            computes in BF16 (TPUs, and NVIDIA GPUs from compute capability 8.0); otherwise it
            decodes in the dtype that the autoencoder was released for and scores in float32. So
            does any other name; names are not checked.
        precision: The training precision, "bf16" or "fp32". It matters only for "auto".
        device: The device that decodes and scores.

    Returns:
        A pair: the dtype of the decoder (None: the dtype that the autoencoder was released for),
        and the dtype of the matmuls in reward networks.
    """
    # Ampere and later GPUs, and TPUs. CPUs are slower in BF16 than in float32.
    has_bf16_units = device.is_cuda_from((8, 0)) or device.platform == "tpu"
    if name == "half" or (name == AUTO and precision == "bf16" and has_bf16_units):
        bf16 = jnp.dtype(jnp.bfloat16)
        # The autoencoder needs the range of BF16. FP16 has three more bits of precision.
        return bf16, bf16 if device.platform == "tpu" else jnp.dtype(jnp.float16)
    float32 = jnp.dtype(jnp.float32)
    return float32 if name == "fp32" else None, float32
