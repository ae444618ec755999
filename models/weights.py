"""Released files in, released files out: the bijection between PyTorch's tensors and our parameters.

Every parameter says in its metadata how PyTorch names and orders it (`models.layers.param`), so one function derives the
table for every network: our path, the tensor's name, the shape it has there. Loading checks the whole table before it reads
a value: tensors that are missing, unexpected or of another shape are listed by name, all at once.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Params = dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter: `path` in our tree, `names` of its tensors (one, or one a layer when stacked), layout, our shape."""

    path: tuple[Any, ...]
    names: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]  # of one tensor, in our axis order
    stacked: bool

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return _to_torch_shape(self.shape, self.layout)


def entries(state: nnx.State) -> list[Entry]:
    """The table of a network's parameters, from its (abstract) state."""
    table = []
    for path, variable in nnx.to_flat_state(state):
        meta, shape = variable.get_metadata(), tuple(variable.get_value().shape)
        depth = meta["below_stack"]
        if depth:
            # the layer index goes just below the list's own name: text.layers.attn.weight -> text.layers.3.attn.weight
            above, below = path[:-depth], path[-depth:-1]
            names = tuple(_join(*above, i, *below, meta["torch_name"]) for i in range(shape[0]))
            shape = shape[1:]
        else:
            names = (_join(*path[:-1], meta["torch_name"]),)
        table.append(Entry((*path,), names, meta["layout"], shape, stacked=depth > 0))
    return table


def from_torch(state: nnx.State, tensors: Mapping[str, np.ndarray], source: str = "the given tensors") -> Params:
    """A nested dict of parameters for `nnx.merge(graphdef, params)` from tensors as PyTorch names and orders them.

    state: the network's abstract or real `nnx.State`.
    Raises ValueError listing every tensor of `source` that is missing, unexpected or mis-shaped.
    """
    table = entries(state)
    _check(table, {name: tuple(t.shape) for name, t in tensors.items()}, source)
    return _nest({e.path: _gather(e, tensors.__getitem__) for e in table})


def to_torch(state: nnx.State, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `from_torch`: tensors under PyTorch's names, in its axis order."""
    flat = dict(_flatten(params))
    out = {}
    for e in entries(state):
        value = np.asarray(flat[e.path])
        for name, tensor in zip(e.names, value if e.stacked else value[None], strict=True):
            out[name] = np.asarray(_to_torch(tensor, e.layout), order="C")  # (ascontiguousarray would make 0-d 1-d)
    return out


def load_component(folder: Path, state: nnx.State, dtype: jnp.dtype) -> Params:
    """Parameters of one component (`folder` holds one safetensors file or shards with an index), cast to `dtype`."""
    files = weight_files(folder)
    handles, shapes = {}, {}
    for file in files:
        try:
            handle = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a readable safetensors file ({error})") from error
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            handles[name], shapes[name] = handle, tuple(handle.get_slice(name).get_shape())
    table = entries(state)
    _check(table, shapes, str(folder))
    read = lambda name: handles[name].get_tensor(name)
    return _nest({e.path: jnp.asarray(_gather(e, read), dtype) for e in table})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component. Raises FileNotFoundError that says what was looked for."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of shards ({type(error).__name__}: {error})") from error
        missing = [n for n in names if not (folder / n).exists()]
        if missing:
            raise FileNotFoundError(f"{folder}: {index.name} names files that are not there: {', '.join(missing)}")
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise FileNotFoundError(f"{folder}: expected one .safetensors file or an index of shards, found {found}")
    return files


def save_component(folder: Path, filename: str, config: dict, tensors: Mapping[str, np.ndarray], dtype: jnp.dtype) -> None:
    """Writes `config.json` and the weights in `dtype`; each file appears by rename."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {k: np.asarray(v).astype(dtype) for k, v in tensors.items()}
    _appear(folder / filename, lambda partial: save_file(stored, partial, metadata={"format": "pt"}))
    _appear(folder / "config.json", lambda partial: partial.write_text(json.dumps(config, indent=2) + "\n"))


def _appear(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a hidden sibling of `path`, then renames it; nothing is left of a failure."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _check(table: list[Entry], found: Mapping[str, tuple[int, ...]], source: str) -> None:
    wanted = {name: e.torch_shape for e in table for name in e.names}
    problems = [f"missing {n} {s}" for n, s in wanted.items() if n not in found]
    problems += [f"unexpected {n} {s}" for n, s in found.items() if n not in wanted]
    problems += [f"{n} has shape {found[n]}, expected {s}" for n, s in wanted.items() if n in found and found[n] != s]
    if problems:
        raise ValueError(f"{source}: {len(problems)} tensor(s) do not fit the network: " + "; ".join(problems))


def _gather(e: Entry, read) -> np.ndarray:
    tensors = [_from_torch(read(name), e.layout) for name in e.names]
    return np.stack(tensors) if e.stacked else tensors[0]


def _from_torch(t: np.ndarray, layout: str) -> np.ndarray:
    match layout:
        case "linear":
            return t.T
        case "pointwise":
            return t[:, :, 0, 0].T
        case "conv":
            return t.transpose(2, 3, 1, 0)
    return t


def _to_torch(t: np.ndarray, layout: str) -> np.ndarray:
    match layout:
        case "linear":
            return t.T
        case "pointwise":
            return t.T[:, :, None, None]
        case "conv":
            return t.transpose(3, 2, 0, 1)
    return t


def _to_torch_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return _to_torch(np.broadcast_to(np.zeros((), np.bool_), shape), layout).shape  # a view: nothing is allocated


def _join(*parts: Any) -> str:
    return ".".join(str(p) for p in parts)


def _nest(flat: Mapping[tuple, Any]) -> Params:
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _flatten(tree: Params, prefix: tuple = ()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def parameter_count(state: nnx.State) -> int:
    """How many numbers a network holds, from shapes alone."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
