"""What a plan is made for: devices with public figures, and as many pretended ones to compile for.

Figures are a device's, per second and dense (without sparsity); links are counted in one direction. Sources, all of the maker:
A100, H100 (SXM), H200 and HGX B200 data sheets of NVIDIA; the pages of TPU v5p and v6e in Google Cloud's documentation. NVIDIA
states no network: one 200 Gb/s (A100) or 400 Gb/s card a GPU is that of its reference systems (DGX).
"""

import dataclasses
import os
import re
import sys
from typing import Any

from solrl_jax.storage.errors import InputError

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COUNT = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind, `devices` on each of `hosts` hosts. Memory in bytes, the rest in bytes or operations a second."""

    name: str
    platform: str  # JAX's: "gpu" is CUDA
    kind: str  # as JAX names the device
    capability: tuple[int, int]  # of CUDA
    memory: float
    bf16: float  # products whose operands are BF16
    fp8: float
    fp4: float
    bandwidth: float  # of memory
    link: float  # between devices of a host, or of a TPU slice
    network: float  # between hosts, a device's share
    devices: int = 1
    hosts: int = 1

    @property
    def count(self) -> int:
        return self.devices * self.hosts

    @property
    def fp32(self) -> float:
        """Of float32 products at JAX's default precision: TF32 on GPUs, one pass of BF16 on TPUs."""
        return self.bf16 / 2 if self.platform == "gpu" else self.bf16


def _row(
    name: str, platform: str, kind: str, capability: int, memory: int, bf16: int, fp8: int, fp4: int, bandwidth: float,
    link: int, network: int,
) -> Machine:  # fmt: skip
    """One device, from GB, teraflops, TB/s and GB/s."""
    rates = (bf16 * 1e12, fp8 * 1e12, fp4 * 1e12, bandwidth * 1e12, link * 1e9, network * 1e9)
    return Machine(name, platform, kind, (capability, 0), memory * 1e9, *rates)


# memory GB; teraflops in BF16, FP8 and FP4 (BF16's where there are no units); TB/s of memory; GB/s of links and of network
DEVICES = {
    m.name: m
    for m in (
        _row("a100", "gpu", "NVIDIA A100", 8, 80, 312, 312, 312, 2.039, 300, 25),
        _row("h100", "gpu", "NVIDIA H100", 9, 80, 989, 1979, 989, 3.35, 450, 50),
        _row("h200", "gpu", "NVIDIA H200", 9, 141, 989, 1979, 989, 4.8, 450, 50),
        _row("b200", "gpu", "NVIDIA B200", 10, 180, 2250, 4500, 9000, 8.0, 900, 50),
        # a chip's links all together
        _row("tpu-v5p", "tpu", "TPU v5", 0, 95, 459, 459, 459, 2.765, 600, 600),
        _row("tpu-v6e", "tpu", "TPU v6 lite", 0, 32, 918, 918, 918, 1.638, 400, 400),
    )
}


def machine(
    device: str, devices: int, hosts: int, memory: str | None, peak_tflops: float | None, memory_bandwidth: float | None,
    link_bandwidth: float | None, network_bandwidth: float | None,
) -> Machine:  # fmt: skip
    """The machine that the command line describes: a row of `DEVICES` with what is given in its place.

    memory: as "80GB"; peak_tflops: in BF16, the faster formats in proportion; bandwidths: GB/s. Raises InputError.
    """
    row = DEVICES[device]
    change: dict[str, Any] = {}
    if memory is not None:
        change["memory"] = parse_memory(memory)
    if peak_tflops is not None:
        change |= {field: getattr(row, field) * peak_tflops * 1e12 / row.bf16 for field in ("bf16", "fp8", "fp4")}
    for field, given in (("bandwidth", memory_bandwidth), ("link", link_bandwidth), ("network", network_bandwidth)):
        if given is not None:
            change[field] = given * 1e9
    if "network" not in change and row.platform == "tpu":  # a slice is one torus, which hosts do not divide
        change["network"] = change.get("link", row.link)
    return dataclasses.replace(row, devices=devices, hosts=hosts, **change)


def parse_memory(text: str) -> float:
    """Bytes of "80GB", "94.5 GiB" and the like. Raises InputError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", text.upper())
    if not found or float(found[1]) == 0:
        raise InputError(f"--memory {text!r}: expected a number above 0 and a unit, GB or GiB, e.g. 80GB")
    return float(found[1]) * UNITS[found[2]]


def pretend(count: int) -> None:
    """Makes JAX see `count` CPU devices. It reads that as it starts: a process in which it has must have as many already."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT)]
    if "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={count}"])
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if len(jax.devices()) < count or jax.default_backend() != "cpu":
        there = f"{len(jax.devices())} of {jax.default_backend()}"
        raise InputError(f"--devices: {count} CPU devices are to be pretended, but JAX has started already, with {there}")
