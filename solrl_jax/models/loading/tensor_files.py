"""The files of a component: its JSON, which safetensors files it has, what they hold, and single rows of a tensor.

Tensors are read into small buffers. The usual way, a memory map, would count every page that was read as the process's memory:
at the end, the whole file.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from solrl_jax.storage.readers import parse_json, read_text

BLOCK = 2**22  # bytes read at a time: they fit the cache while they are cast and reordered
MOST_HEADER = 2**24  # bytes of a safetensors header: FLUX.1's has 2**17
STORED_DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    dtype: str  # the format's own name
    shape: tuple[int, ...]
    start: int  # its first byte in the file

    def rows(self, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the rows `first` to `last` of the leading axis, some at a time, as (first row of the array, array).

        The next array overwrites the one before. A tensor without axes counts as one row.
        """
        dtype = np.dtype(STORED_DTYPES[self.dtype])
        shape = self.shape[1:]
        row = math.prod(shape) * dtype.itemsize
        step = max(1, BLOCK // max(1, row))
        buffer = np.empty(min(step, last - first) * row, np.uint8)
        with open(self.file, "rb") as file:
            file.seek(self.start + first * row)
            for start in range(first, last, step):
                data = buffer[: (min(start + step, last) - start) * row]
                if file.readinto(data.data) != len(data):
                    raise ValueError(f"{self.file}: ended within {self.name}")
                yield start, data.view(dtype).reshape(-1, *shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError or ValueError naming the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = parse_json(read_text(path), number=float)  # schedulers of diffusers hold -Infinity
    except (OSError, ValueError) as error:  # of JSON or of UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_header(file: Path) -> list[Stored]:
    """The tensors of a file, from its header. Raises ValueError for a file that is damaged or of another kind."""
    try:
        if not file.is_file():
            raise OSError("no such regular file")
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > MOST_HEADER:
                raise ValueError(f"its header is said to have {size} bytes")
            header = parse_json(opened.read(size))
        with safe_open(file, framework="numpy"):
            pass  # the library checks dtypes, shapes and offsets, and that the file is as long as they say
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from error
    return [
        Stored(
            name, file, field["dtype"], tuple(field["shape"]), 8 + size + field["data_offsets"][0]
        )
        for name, field in header.items()
        if name != "__metadata__"
    ]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component: one file, or those that an index of shards names. Variants are the last choice.

    Raises FileNotFoundError that says what was expected and what was found.
    """
    names = without_variants(p.name for p in folder.iterdir()) if folder.is_dir() else []
    indices = [n for n in names if n.endswith(".json")]
    files = [n for n in names if not n.endswith(".json")]
    if len(indices) == 1:
        index = folder / indices[0]
        try:
            files = sorted(set(read_json(index)["weight_map"].values()))
            if outside := [name for name in files if Path(name).name != name]:
                raise ValueError(f"{outside[0]!r} is no file of its folder")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{index}: not an index of shards ({type(error).__name__}: {error})"
            ) from error
        missing = [n for n in files if not (folder / n).exists()]
        if missing:
            raise FileNotFoundError(
                f"{folder}: {index.name} names files that are not there: {', '.join(missing)}"
            )
    elif indices or len(files) != 1:
        found = ", ".join(indices or files) or "none"
        raise FileNotFoundError(
            f"{folder}: expected one .safetensors file or an index of shards, found {found}"
        )
    return [folder / n for n in files]


def without_variants(names: Iterable[str]) -> list[str]:
    """Those names in a folder that are of safetensors files and their indices, without variants if there are others.

    A variant, such as `model.fp16.safetensors`, holds the same weights in another precision, or their average.
    """
    kept = sorted(
        n
        for n in names
        if n.endswith(".safetensors") or (".safetensors.index." in n and n.endswith(".json"))
    )
    return [n for n in kept if not _variant(n)] or kept


def _variant(name: str) -> str:
    """`fp16` of `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`, `model.safetensors.index.fp16.json`, ..."""
    _, *parts = name.split(".")
    return ".".join(p.split("-")[0] for p in parts if p not in ("safetensors", "index", "json"))
