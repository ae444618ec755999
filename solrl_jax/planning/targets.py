"""The devices that plans support: their public figures, and their description for XLA.

Figures are those of one device, per second and dense (without sparsity); links are counted in one
direction. The sources are the makers': data sheets and white papers of NVIDIA's A100, H100 (SXM),
H200, HGX B200, GB200 NVL72 and RTX PRO 6000 Blackwell; the pages of TPU v5e, v5p, v6e and TPU7x in
Google Cloud's documentation, which state INT8 for all but TPU7x. NVIDIA states no network: one
200 Gb/s (A100) or 400 Gb/s card per GPU is that of its reference systems (DGX); the 18 hosts of a
GB200 NVL72 share their links.

Some figures come from other documents:

* `a100-40gb`: the memory that CUDA reports, its bandwidth, the clock and the cache are those of
  XLA's description of that GPU (`a100_sxm_40.txtpb`). The matmul rates and links are those of the
  A100 with 80 GB, which has the same chip.
* `l4`: no original data sheet was at hand. The rates, the memory bandwidth and PCIe's 64 GB/s in
  both directions are those that vendors and public tables quote from it, with sparsity: 242 (BF16)
  and 485 (FP8, INT8). The 58 multiprocessors, their 2.04 GHz and 1536 threads, and the 22.03 GiB
  that CUDA reports, were logged by users of the device. 58 x 128 units at 2.04 GHz give the 30.3
  teraflops in float32 that are quoted as well. The L2 cache of 48 MiB is quoted by databases of
  GPUs alone. The network is the 100 Gb/s that the eight L4s of Google Cloud's largest G2 machine
  share.
"""

import dataclasses
import re
from typing import Literal

CUDNN = "9.12.0"  # the oldest version that the CUDA 13 plug-in of jax 0.10 accepts


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of a GPU that XLA's compiler needs.

    Attributes:
        cores: The number of streaming multiprocessors of the GPU.
        clock: Their clock in GHz.
        cache: The bytes of the L2 cache.
        shared: The bytes of shared memory per multiprocessor.
        threads: The largest number of threads per multiprocessor.
        units: The number of float32 arithmetic units (CUDA cores) per multiprocessor.
    """

    cores: int
    clock: float
    cache: int
    shared: int
    threads: int = 2048
    units: int = 128


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peak rates of one device.

    Attributes:
        bf16: Operations per second of BF16 matmuls, dense and with 2 for a multiply-add. All rates
            of matmuls below have the same unit.
        int8: INT8 matmuls. Without hardware for them, the rate of `bf16`.
        fp8: FP8 matmuls. Without hardware for them, the rate of `bf16`.
        fp4: FP4 matmuls. Without hardware for them, the rate of `bf16` on GPUs and of `fp8` on
            TPUs.
        fp32: Float32 matmuls at full precision.
        tf32: Float32 matmuls at reduced precision: TF32 on GPUs, three passes of BF16 on TPUs.
        memory: Bytes per second of main memory.
        link: Bytes per second of all links of one device to others of its host or TPU slice, in one
            direction.
        network: Bytes per second of the network between hosts in one direction, as the share of one
            device.
    """

    bf16: float
    int8: float
    fp8: float
    fp4: float
    fp32: float
    tf32: float
    memory: float
    link: float
    network: float


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device that programs can be compiled for.

    Attributes:
        name: Its name on the command line, e.g. "h200".
        platform: "gpu" or "tpu".
        kind: How its name in JAX (`jax.Device.device_kind`) begins, e.g. "NVIDIA H100" of "NVIDIA
            H100 80GB HBM3", or "TPU v5 lite" (`target_of`).
        capability: The CUDA compute capability, e.g. (9, 0); (0, 0) for TPUs.
        memory: The bytes of main memory of one device.
        peaks: The peak rates of one device.
        on_host: The largest number of devices that one host has.
        chip: The figures of a GPU that XLA's compiler needs; None for TPUs.
        axes: 2 or 3 for TPUs whose chips are linked in a two- or three-dimensional torus; 0 for
            GPUs.
        cores: The number of JAX devices of one TPU chip; 1 for GPUs.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    kind: str
    capability: tuple[int, int]
    memory: float
    peaks: Peaks
    on_host: int
    chip: Chip | None = None
    axes: int = 0
    cores: int = 1


def _gpu(
    name: str,
    kind: str,
    capability: tuple[int, int],
    memory: int,
    rates: tuple[int | float, ...],
    chip: Chip,
    on_host: int = 8,
) -> Target:
    """Returns the target of a GPU. Its float32 rate is computed from the chip's units and clock,
    and its TF32 rate is half of that of BF16.

    Args:
        name: Its name on the command line, e.g. "h200".
        kind: How its name in JAX (`jax.Device.device_kind`) begins, e.g. "NVIDIA H200".
        capability: Its CUDA compute capability, e.g. (9, 0).
        memory: MiB of memory, as CUDA reports them.
        rates: Seven peak rates of one device: 10^12 operations per second of matmuls in BF16, INT8,
            FP8 and FP4 (the BF16 rate for a format without hardware), TB/s of memory, GB/s of all
            links, and GB/s of the network, both in one direction.
        chip: The figures that XLA's compiler needs.
        on_host: The largest number of devices that one host has.
    """
    bf16, int8, fp8, fp4, bandwidth, link, network = rates
    fp32 = 2e9 * chip.units * chip.cores * chip.clock
    tf32 = bf16 / 2 * 1e12
    peaks = Peaks(
        bf16=bf16 * 1e12,
        int8=int8 * 1e12,
        fp8=fp8 * 1e12,
        fp4=fp4 * 1e12,
        fp32=fp32,
        tf32=tf32,
        memory=bandwidth * 1e12,
        link=link * 1e9,
        network=network * 1e9,
    )
    return Target(name, "gpu", kind, capability, memory * 2.0**20, peaks, on_host, chip)


def _tpu(
    name: str, kind: str, memory: int, rates: tuple[int | float, ...], axes: int, cores: int = 1
) -> Target:
    """Returns the target of a TPU. Its network has the rate of the links, FP4 that of FP8, and
    float32 matmuls a third (reduced precision) or a sixth (full precision) of that of BF16. A host
    has at most 8 chips if their torus has two dimensions, else 4.

    Args:
        name: Its name on the command line, e.g. "tpu-v5e".
        kind: Its name in JAX (`jax.Device.device_kind`), e.g. "TPU v5 lite".
        memory: GB (10^9 bytes) of memory of a chip.
        rates: Five peak rates of a chip: 10^12 operations per second of matmuls in BF16, INT8 and
            FP8 (the BF16 rate for a format without hardware), TB/s of memory, and GB/s of all links
            in one direction.
        axes: 2 or 3 for chips that are linked in a two- or three-dimensional torus.
        cores: The number of JAX devices of one chip, among which memory and rates are divided.
    """
    bf16, int8, fp8, bandwidth, link = (rate / cores for rate in rates)
    fp32 = bf16 / 6 * 1e12
    tf32 = bf16 / 3 * 1e12
    peaks = Peaks(
        bf16=bf16 * 1e12,
        int8=int8 * 1e12,
        fp8=fp8 * 1e12,
        fp4=fp8 * 1e12,
        fp32=fp32,
        tf32=tf32,
        memory=bandwidth * 1e12,
        link=link * 1e9,
        network=link * 1e9,
    )
    return Target(
        name,
        "tpu",
        kind,
        (0, 0),
        memory * 1e9 / cores,
        peaks,
        (8 if axes == 2 else 4) * cores,
        None,
        axes,
        cores,
    )


_KIB = 2**10
_MIB = 2**20
_L4 = Chip(58, 2.04, 48 * _MIB, 100 * _KIB, threads=1536)
_A100 = Chip(108, 1.41, 40 * _MIB, 164 * _KIB, units=64)
_HOPPER = Chip(132, 1.98, 50 * _MIB, 228 * _KIB)
_B200 = Chip(148, 1.965, 132644864, 228 * _KIB)
_GB200 = Chip(152, 2.062, 135528448, 228 * _KIB)
_PRO = Chip(188, 2.6, 128 * _MIB, 100 * _KIB, threads=1536)
TARGETS = {
    target.name: target
    for target in (
        _gpu("l4", "NVIDIA L4", (8, 9), 22560, (121, 242, 242, 121, 0.3, 32, 1.56), _L4),
        _gpu(
            "a100-40gb",
            "NVIDIA A100-SXM4-40GB",
            (8, 0),
            40370,
            (312, 624, 312, 312, 1.555, 300, 25),
            _A100,
        ),
        _gpu("a100", "NVIDIA A100", (8, 0), 81157, (312, 624, 312, 312, 2.039, 300, 25), _A100),
        _gpu("h100", "NVIDIA H100", (9, 0), 81007, (989, 1979, 1979, 989, 3.35, 450, 50), _HOPPER),
        _gpu("h200", "NVIDIA H200", (9, 0), 144384, (989, 1979, 1979, 989, 4.8, 450, 50), _HOPPER),
        _gpu("b200", "NVIDIA B200", (10, 0), 182642, (2250, 4500, 4500, 9000, 8.0, 900, 50), _B200),
        _gpu(
            "gb200",
            "NVIDIA GB200",
            (10, 0),
            188730,
            (2500, 5000, 5000, 10000, 8.0, 900, 900),
            _GB200,
            on_host=4,
        ),
        _gpu(
            "rtx6000pro",
            "NVIDIA RTX PRO 6000 Blackwell",
            (12, 0),
            98304,
            (504, 1008, 1008, 2015, 1.792, 64, 50),
            _PRO,
        ),
        _tpu("tpu-v5e", "TPU v5 lite", 16, (197, 394, 197, 0.819, 200), axes=2),
        _tpu("tpu-v5p", "TPU v5", 95, (459, 918, 459, 2.765, 600), axes=3),
        _tpu("tpu-v6e", "TPU v6 lite", 32, (918, 1836, 918, 1.638, 400), axes=2),
        _tpu("tpu7x", "TPU7x", 192, (2307, 2307, 4614, 7.38, 600), axes=3, cores=2),
    )
}

# Variants with fewer units or slower memory than the devices above.
_VARIANTS = re.compile("PCIe|NVL|Max-Q|MIG", re.IGNORECASE)


def target_of(kind: str) -> Target | None:
    """Returns the entry of `TARGETS` for a device that is present.

    Args:
        kind: The kind of device as JAX names it (`jax.Device.device_kind`), e.g. "NVIDIA H100 80GB
            HBM3".

    Returns:
        The entry whose `kind` is the longest of those that begin the name; None for an unknown
        device, and for a slower variant of a known one (PCIe, NVL, Max-Q, a part of a MIG device).
    """
    if _VARIANTS.search(kind):
        return None
    targets = [t for t in TARGETS.values() if re.match(rf"{re.escape(t.kind)}\b", kind)]
    return max(targets, key=lambda target: len(target.kind), default=None)


def description(target: Target) -> str:
    """Returns the text that describes a GPU to XLA's compiler (a `GpuTargetConfigProto`).

    Args:
        target: A GPU. TPUs are not accepted (AssertionError).
    """
    chip = target.chip
    (major, minor) = target.capability
    assert chip is not None
    # Features of one architecture alone, such as those of sm_90a.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    dnn = "major: {} minor: {} patch: {}".format(*CUDNN.split("."))
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {chip.cores} fpus_per_core: {chip.units} clock_rate_ghz: {chip.clock}
  l2_cache_size: {chip.cache}
  memory_bandwidth: {target.peaks.memory:.0f} device_memory_size: {target.memory:.0f}
  shared_memory_per_core: {chip.shared} shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {chip.shared - _KIB}
  threads_per_warp: 32 threads_per_core_limit: {chip.threads} threads_per_block_limit: 1024
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_vendor: "NVIDIA Corporation" name: "{target.kind}" dnn_version: "{CUDNN}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ {dnn} }} device_description_str: "{target.kind}"
"""
