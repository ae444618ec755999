"""Measures the loading of weights: its time, and its host memory beyond the loaded arrays.

    python scripts/bench_load.py --gigabytes 8 --out benchmarks/load-cpu.json

The script writes a checkpoint of random numbers in the released layout: the transformer of Stable
Diffusion 3.5 Large in BF16, in shards with an index, with as many layers as the size requires. It
drops the files from the page cache, loads them as training does, compares every tensor with its
file, and deletes the checkpoint.

`host_bytes_peak` is the largest resident memory of the process, including interpreter and
libraries, minus the arrays on the mesh if those are in host memory (on a CPU). It should stay below
the largest shard plus 1 GB.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from bench.timing import finish
from flax import nnx
from jax.sharding import NamedSharding
from safetensors import safe_open

from solrl_jax.models.loading.weights import (
    ParameterEntry,
    load_tensors,
    locate_tensors,
    parameter_table,
)
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.parallel.sharding import make_mesh, parameter_sharding

# The released configuration without the number of layers.
LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_attention_heads": 38,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
GB = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, default=8.0, help="smallest size of the checkpoint (default: 8)"
    )
    parser.add_argument(
        "--shard-gigabytes", type=float, default=2.0, help="largest size of a shard (default: 2)"
    )
    parser.add_argument(
        "--fsdp", type=int, default=1, help="devices that share the parameters (default: 1)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="folder of the checkpoint (default: a temporary one)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="JSON file for the result, which is also printed",
    )
    args = parser.parse_args()
    state, layers = network(args.gigabytes * GB)
    folder = Path(tempfile.mkdtemp(prefix="bench-load-", dir=args.folder))
    try:
        sizes = write(folder, parameter_table(state), int(args.shard_gigabytes * GB))
        result = measure(folder, state, args.fsdp)
    finally:
        shutil.rmtree(folder)
    checkpoint = {
        "architecture": "SD3Transformer2DModel",
        "layers": layers,
        "parameters": count(state),
        "dtype": "BF16",
        "bytes": sum(sizes),
        "shards": len(sizes),
        "largest_shard_bytes": max(sizes),
    }
    bar = max(sizes) + GB
    peak = result["host_bytes_peak"]
    verdict = {"bar_bytes": bar, "peak_over_bar": round(peak / bar, 3), "within_bar": peak < bar}
    result |= {"bytes_per_second": round(sum(sizes) / result["seconds"])} | verdict
    finish(
        {"checkpoint": checkpoint, "load": result},
        args.out,
        ("jax", "jaxlib", "numpy", "safetensors"),
    )


def network(size: float) -> tuple[nnx.State, int]:
    """Returns the smallest abstract network of at least `size` bytes in BF16, and its layers."""

    def state(layers: int) -> nnx.State:
        config = SD3Config.from_dict(LARGE | {"num_layers": layers})
        return nnx.split(nnx.eval_shape(lambda: SD3Transformer2DModel(config, rngs=nnx.Rngs(0))))[1]

    two = 2 * count(state(2))
    three = 2 * count(state(3))
    layers = max(2, 2 - int((two - size) // (three - two)))
    return state(layers), layers


def count(state: nnx.State) -> int:
    """The number of parameters of a network."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def write(folder: Path, table: list[ParameterEntry], shard: int) -> list[int]:
    """Writes a sharded checkpoint of random numbers.

    Args:
        folder: The directory of the checkpoint.
        table: The tensors to write.
        shard: The largest size of a shard, in bytes.

    Returns:
        The size of each file, in bytes.
    """
    shapes = {name: e.torch_shape for e in table for name in e.names}
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(shapes):
        bytes_ = 2 * int(np.prod(shapes[name]))
        if shards[-1] and size + bytes_ > shard:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    place: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        place |= dict.fromkeys(names, file)
        write_shard(folder / file, {name: shapes[name] for name in names})
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": place})
    )
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file of random BF16 tensors, and drops it from the page cache."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for block in noise(name, int(np.prod(shape))):
                file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        # The file is then read from the disk, not from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def noise(name: str, count: int, block: int = 2**20) -> Iterator[np.ndarray]:
    """Yields `count` BF16 numbers that depend on `name`, as bytes, `block` numbers at a time."""
    draw = np.random.default_rng(list(name.encode())).standard_normal(block, np.float32)
    numbers = draw.astype(ml_dtypes.bfloat16).view(np.uint8)
    for start in range(0, count, block):
        yield np.roll(numbers, 2 * (start // block))[: 2 * min(block, count - start)]


def measure(folder: Path, state: nnx.State, fsdp: int) -> dict:
    """Loads a checkpoint while sampling the memory, then compares every tensor with its file.

    Args:
        folder: The directory of the checkpoint.
        state: The abstract network.
        fsdp: The number of devices that share the parameters.

    Returns:
        Seconds and bytes by name.
    """
    mesh = make_mesh(1, fsdp)
    jnp.zeros(1).block_until_ready()  # starts the backend before the measurement
    with HostMemory() as memory:

        def place(_: tuple, shape: tuple[int, ...]) -> NamedSharding:
            memory.begun += 2 * math.prod(shape)
            return parameter_sharding(mesh, jax.ShapeDtypeStruct(shape, jnp.bfloat16))

        began = time.perf_counter()
        computed = time.process_time()
        params = jax.block_until_ready(
            load_tensors(*locate_tensors(folder, state), jnp.dtype(jnp.bfloat16), place)
        )
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - computed
    check(folder, state, params)
    return {
        "fsdp": fsdp,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "arrays_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "host_bytes_before": memory.before,
        "host_bytes_peak": memory.peak,
        "host_bytes_peak_with_unfinished_arrays": memory.peak_unfinished,
        "resident_bytes_peak": memory.peak_resident,
        "samples": memory.samples,
    }


class HostMemory:
    """Samples the resident memory of this process while it is entered.

    If the arrays on the mesh are in host memory, they are subtracted. `peak` subtracts the arrays
    of all parameters whose placement has `begun`, because an array is allocated before its host
    buffer is freed. `peak_unfinished` subtracts only arrays that JAX lists at the time, which do
    not include those that a program is writing, so it is an upper bound.
    """

    def __init__(self, seconds: float = 0.005):
        self.seconds = seconds
        self.samples = 0
        self.begun = 0
        self.peak = self.peak_unfinished = self.peak_resident = 0
        self.on_host = jax.default_backend() == "cpu"

    def __enter__(self):
        self.before = self._resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(self.seconds):
            begun = self.begun
            listed = self._listed()
            resident = self._resident()
            listed = min(listed, self._listed())
            self.samples += 1
            self.peak_resident = max(self.peak_resident, resident)
            self.peak = max(self.peak, resident - begun * self.on_host)
            self.peak_unfinished = max(self.peak_unfinished, resident - listed * self.on_host)

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    @staticmethod
    def _listed() -> int:
        """The bytes of the arrays on the mesh.

        Shards on single devices are not counted: on a GPU they may still be in transfer.
        """
        return sum(a.nbytes for a in jax.live_arrays() if isinstance(a.sharding, NamedSharding))


def check(folder: Path, state: nnx.State, params: dict) -> None:
    """Raises ValueError naming the first tensor that differs from its file."""
    files = {
        name: file
        for file in folder.glob("*.safetensors")
        for name in safe_open(file, "numpy").keys()
    }
    for e in parameter_table(state):
        leaf = params
        for key in e.path:
            leaf = leaf[key]
        for i, name in enumerate(e.names):
            with safe_open(files[name], "numpy") as file:
                stored = file.get_tensor(name)
            value = np.asarray(leaf[i] if e.stacked else leaf)
            ours = {
                "linear": lambda v: v.T,
                "conv": lambda v: v.transpose(3, 2, 0, 1),
                "same": lambda v: v,
            }[e.layout](value)
            if not np.array_equal(ours.view(np.uint16), stored.view(np.uint16)):
                raise ValueError(f"{name}: loaded otherwise than stored")


if __name__ == "__main__":
    main()
