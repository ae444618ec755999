"""The files of a component: its JSON configuration, its safetensors files, and rows of the tensors
in them.

Tensors are read into small buffers. With a memory map, as safetensors offers, every page that was
read would count as memory of the process, which would end up holding the whole file.
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

BLOCK_BYTES = 2**22  # read at a time; a block fits the CPU cache while it is cast and reordered
MAX_HEADER_BYTES = 2**24  # of a safetensors file; that of FLUX.1 has 2**17
# The accepted dtypes of stored tensors, by their names in safetensors.
STORED_DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
# The names under which diffusers and transformers save the weights of a component. The first one
# that exists is read, as both libraries do: diffusers prefers an index of shards to a single file,
# transformers a single file to an index. Other files beside them, such as a LoRA, are not read.
STANDARD_NAMES = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is in a safetensors file.

    Attributes:
        name: name of the tensor.
        file: the safetensors file.
        dtype: name of the dtype in safetensors, such as "BF16".
        shape: shape of the tensor, in PyTorch's order of axes.
        byte_offset: offset of the tensor's first byte from the beginning of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    byte_offset: int

    def rows(self, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """Reads rows (along the leading axis) of the tensor in blocks of about 4 MiB. A generator.

        Each block overwrites the memory of the one before, so use or copy it first. A tensor
        without axes counts as one row.

        Args:
            first: index of the first row to read, counted from 0.
            last: index after that of the last row to read, from `first` to the size of the leading
                axis (not checked).

        Yields:
            Pairs (index in the tensor of the block's first row, block). A block is an array of one
            or more rows in the stored dtype; that of a tensor without axes has the shape [1].

        Raises:
            KeyError: the dtype is not BF16, F16, F32 or F64.
            OSError: the file cannot be opened or read.
            ValueError: the file ends too early.
        """
        dtype = np.dtype(STORED_DTYPES[self.dtype])
        row_shape = self.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        buffer = np.empty(min(step, last - first) * row_bytes, np.uint8)
        with open(self.file, "rb") as file:
            file.seek(self.byte_offset + first * row_bytes)
            for start in range(first, last, step):
                stop = min(start + step, last)
                data = buffer[: (stop - start) * row_bytes]
                if file.readinto(data.data) != len(data):
                    raise ValueError(f"{self.file}: the file ends within {self.name}")
                yield start, data.view(dtype).reshape(-1, *row_shape)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    NaN, Infinity and -Infinity are accepted as numbers.

    Args:
        path: the file, in UTF-8.

    Returns:
        The object as a dictionary.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: a folder above the file may not be searched.
        ValueError: the file cannot be read, is larger than 64 MiB, is not JSON, is nested too
            deeply, repeats a key, or does not hold an object. The message names the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = parse_json(read_text(path), number=float)  # schedulers of diffusers hold -Infinity
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_header(file: Path) -> list[StoredTensor]:
    """Lists the tensors of a safetensors file with their positions. Only the header is read.

    Args:
        file: the safetensors file.

    Returns:
        One entry per tensor, of any dtype, in the order of the header.

    Raises:
        ValueError: the file is missing, damaged or of another format, or its header is longer than
            16 MiB.
    """
    try:
        if not file.is_file():
            raise OSError("no such regular file")
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"the header claims to have {size} bytes")
            header = parse_json(opened.read(size))
        # The library checks dtypes, shapes and offsets, and that the file is as long as they say.
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from error
    tensors = []
    for name, field in header.items():
        if name != "__metadata__":
            start = 8 + size + field["data_offsets"][0]
            tensor = StoredTensor(name, file, field["dtype"], tuple(field["shape"]), start)
            tensors.append(tensor)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Finds the safetensors files with the weights of a component: one file, or the shards that an
    index lists.

    If files have standard names of diffusers or transformers, only the one whose name is first in
    `STANDARD_NAMES` is used: diffusers' index, diffusers' single file, transformers' single file,
    transformers' index. Otherwise the folder must have a single index, or no index and a single
    file. Variants such as `model.fp16.safetensors` are used only if there is nothing else.

    Args:
        folder: directory of the component (for example of the transformer).

    Returns:
        The paths of the files, sorted by name.

    Raises:
        FileNotFoundError: the folder, its weights or a shard is missing, the weights are PyTorch
            pickles, or there are several candidates without a standard name.
        ValueError: the index cannot be read, or lists a file in another folder.
    """
    present = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    names = without_variants(present)
    for name in STANDARD_NAMES:
        if name in names:
            return _indexed_files(folder / name) if name.endswith(".json") else [folder / name]
    indices = [name for name in names if name.endswith(".json")]
    files = [name for name in names if not name.endswith(".json")]
    if len(indices) == 1:
        return _indexed_files(folder / indices[0])
    if not indices and len(files) == 1:
        return [folder / files[0]]
    message = f"{folder}: expected one .safetensors file or an index of shards, found "
    pickles = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if not names and pickles:
        raise FileNotFoundError(
            f"{message}PyTorch pickles only ({pickles[0]}); `solrl convert` turns a pickle into a "
            "safetensors file"
        )
    raise FileNotFoundError(message + (", ".join(indices or files) or "none"))


def _indexed_files(index: Path) -> list[Path]:
    """Returns the files that an index of shards lists, in the folder of the index and sorted by
    name.

    Args:
        index: the JSON file. Its `weight_map` maps the name of each tensor to the name of its file.

    Returns:
        The path of each file, once. All exist.

    Raises:
        FileNotFoundError: the index, or a file that it lists, is missing.
        ValueError: the file is not an index of shards, or lists a file in another folder.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is outside of its folder")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{index}: not an index of shards ({type(error).__name__}: {error})"
        ) from error
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{index.parent}: {index.name} names missing files: {', '.join(missing)}"
        )
    return [index.parent / name for name in names]


def without_variants(names: Iterable[str]) -> list[str]:
    """Selects the safetensors files and indices of shards among the files of a folder, without
    variants.

    A variant such as `model.fp16.safetensors` holds the same weights in another precision, or
    averaged ones. The name of a variant has an additional part between dots; the name of a shard,
    such as `model-00001-of-00002.safetensors`, has none. If all are variants, all are selected.

    Args:
        names: names of all files in the folder, without directories.

    Returns:
        The selected names, sorted: those that end in ".safetensors", and JSON files with
        ".safetensors.index." in their names.
    """
    weights = sorted(
        name
        for name in names
        if name.endswith(".safetensors")
        or (".safetensors.index." in name and name.endswith(".json"))
    )
    return [name for name in weights if not _variant(name)] or weights


def _variant(name: str) -> str:
    """Returns the variant that a file name contains, such as "fp16" for
    `model.fp16-00001-of-00002.safetensors` and `model.safetensors.index.fp16.json`.

    The parts of the name between dots, except the first one and "safetensors", "index" and "json",
    are each cut at their first hyphen and joined by dots.

    Args:
        name: name of a safetensors file or of an index, without directories.

    Returns:
        The variant; "" if there is none.
    """
    _, *parts = name.split(".")
    variants = [part for part in parts if part not in ("safetensors", "index", "json")]
    return ".".join(part.split("-")[0] for part in variants)
