"""Parameters from released files and back: a bijection between our parameters and PyTorch's tensors.

The metadata of each parameter says how PyTorch names it and orders its axes (`models.layers.parameter.param`). So one function derives
the table of every network: our paths, the names of the tensors, their shapes in the file. Loading checks the whole table before
it reads a value. It lists all tensors that are missing, unexpected or of another shape at once. Then each tensor goes from its
file to the devices that hold a part of it. Only small parameters are ever whole on the host.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from solrl_jax.models.loading.tensor_files import STORED_DTYPES, Stored, read_header, weight_files
from solrl_jax.parallel import hosts

Params = dict[Any, Any]
Placement = Callable[
    [tuple[Any, ...], tuple[int, ...]], NamedSharding
]  # from a parameter's path and shape

Index = tuple[range, ...]  # a part of a tensor: a range for each axis

PART = 2**28  # bytes of a parameter that are assembled on the host before they go to the devices

# Tensors of older files that hold nothing new, if the network has the parameter on the right: positions are 0, 1, 2, ..., and
# the encoder of T5 shares the token table.
REDUNDANT = {
    "text_model.embeddings.position_ids": "text_model.embeddings.position_embedding.weight",
    "vision_model.embeddings.position_ids": "vision_model.embeddings.position_embedding.weight",
    "encoder.embed_tokens.weight": "shared.weight",
}
# What files may leave out, where all names begin with it: transformers 5 does so with `CLIPTextModel`, which has no other part,
# and a decoder may be saved with or without the model around it that has a head.
LEFT_OUT = ("text_model.", "model.")

# For each axis of PyTorch's tensor, the axis of our parameter. "linear": ours is [in, out]; "pointwise": the same, of a 1x1
# convolution [out, in, 1, 1]; "conv": ours is [kh, kw, in / groups, out].
OUR_AXES = {"linear": (1, 0), "pointwise": (1, 0), "conv": (3, 2, 0, 1)}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter, and the tensors that hold it: one tensor, or one for each layer if the parameter is stacked."""

    path: tuple[Any, ...]  # in our tree
    names: tuple[str, ...]  # of its tensors
    layout: str  # "same", or a key of OUR_AXES
    shape: tuple[int, ...]  # of one tensor, in our order of axes
    stacked: bool
    start: tuple[Any, ...] | None = (
        None  # what it begins with, and its bounds: see `models.layers.parameter.param`
    )
    bounds: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        return "/".join(map(str, self.path))

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the file."""
        view = np.broadcast_to(np.zeros((), np.bool_), self.shape)  # nothing is allocated
        return to_torch_order(view, self.layout).shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the parameter; layers come first."""
        return (len(self.names), *self.shape) if self.stacked else self.shape


def entries(state: nnx.State) -> list[Entry]:
    """The table of a network's parameters, from its (abstract) state."""
    table = []
    for path, variable in nnx.to_flat_state(state):
        meta = variable.get_metadata()
        shape = tuple(variable.get_value().shape)
        depth = meta["below_stack"]
        if depth:
            # the layer's index follows the name of the list: text.layers.attn.weight -> text.layers.3.attn.weight
            above = path[:-depth]
            below = path[-depth:-1]
            first = meta["first_layer"]
            if (
                first is not None
            ):  # one of several stacks in a container, which has the name of the list
                above = above[:-1]
            layers = range(first or 0, (first or 0) + shape[0])
            names = tuple(_join(*above, i, *below, meta["torch_name"]) for i in layers)
            shape = shape[1:]
        else:
            names = (_join(*path[:-1], meta["torch_name"]),)
        table.append(
            Entry((*path,), names, meta["layout"], shape, depth > 0, meta["start"], meta["bounds"])
        )
    return table


def load_tensors(
    table: Sequence[Entry],
    stored: Mapping[str, Stored],
    dtype: DTypeLike,
    place: Placement | None = None,
) -> Params:
    """The parameters of a table, cast to `dtype`. Each tensor is read and goes at once to the devices that hold it.

    stored: where each tensor of the table lies, by name; a parameter that begins with something need not be there. place: from
    a parameter's path and shape to its sharding; None: arrays on JAX's default device.
    The host holds no more than `PART` bytes at a time, or one tensor if that is more. A process reads only those rows of a
    file that its own devices hold.
    """
    return unflatten_dict({e.path: _place(e, stored, jnp.dtype(dtype), place) for e in table})


def find_component(
    source: Path, state: nnx.State, unused: tuple[str, ...] = ()
) -> tuple[list[Entry], dict[str, Stored]]:
    """The network's table, and where each of its tensors lies, from the headers of the files alone: for `load_tensors`.

    source: a directory of a pipeline's component, or one safetensors file. unused: how the names of tensors begin that the
    files hold and the network does without.
    A parameter that begins with something may be missing, with all of its layers.
    Raises ValueError listing every tensor that is missing, unexpected, of another shape, stored twice or not floating-point.
    """
    files = [source] if source.is_file() else weight_files(source)
    table = _as_spelt(entries(state), files)
    there = {tensor.name for file in files for tensor in read_header(file)}

    def begun(e):
        return e.start is not None and there.isdisjoint(e.names)

    wanted = {name: e.torch_shape for e in table if not begun(e) for name in e.names}

    def ignored(name):
        return REDUNDANT.get(name) in wanted or name.startswith(unused)

    return table, find_tensors(files, wanted, str(source), ignored)


def find_decoder(source: Path, state: nnx.State) -> tuple[list[Entry], dict[str, Stored]]:
    """As `find_component`, of an autoencoder that only decodes: the encoder in its files, and a counter, are passed over."""
    return find_component(source, state, ("encoder.", "quant_conv.", "bn.num_batches_tracked"))


def _as_spelt(table: list[Entry], files: Sequence[Path]) -> list[Entry]:
    """The table with the names in the files: without what they leave out (`LEFT_OUT`)."""
    for prefix in LEFT_OUT:
        if all(name.startswith(prefix) for e in table for name in e.names):
            if any(
                tensor.name.startswith(prefix) for file in files for tensor in read_header(file)
            ):
                return table
            return [
                dataclasses.replace(e, names=tuple(name.removeprefix(prefix) for name in e.names))
                for e in table
            ]
    return table


def find_tensors(
    files: Sequence[Path],
    wanted: Mapping[str, tuple[int, ...]],
    source: str,
    ignored: Callable[[str], bool],
) -> dict[str, Stored]:
    """Where in `files` each of the wanted tensors (name and shape) lies, from the headers alone.

    source: how messages call the files. ignored: whether a tensor that is not wanted may be there.
    Raises ValueError listing every tensor that is missing, unexpected, of another shape, stored twice or not floating-point.
    """
    stored: dict[str, Stored] = {}
    problems = []
    for file in files:
        for tensor in read_header(file):
            if (other := stored.setdefault(tensor.name, tensor)) is not tensor:
                problems.append(f"{tensor.name} is both in {other.file.name} and in {file.name}")
    problems += [
        f"{name} is {tensor.dtype}, expected one of {', '.join(STORED_DTYPES)}"
        for name, tensor in stored.items()
        if name in wanted and tensor.dtype not in STORED_DTYPES
    ]
    found = {name: t.shape for name, t in stored.items() if name in wanted or not ignored(name)}
    problems += [f"missing {n} {s}" for n, s in wanted.items() if n not in found]
    problems += [f"unexpected {n} {s}" for n, s in found.items() if n not in wanted]
    problems += [
        f"{n} has shape {found[n]}, expected {s}"
        for n, s in wanted.items()
        if n in found and found[n] != s
    ]
    if problems:
        raise ValueError(
            f"{source}: {len(problems)} tensor(s) do not fit the network: " + "; ".join(problems)
        )
    return stored


def _place(
    e: Entry, stored: Mapping[str, Stored], dtype: np.dtype, place: Placement | None
) -> jax.Array:
    """Reads and places one parameter. A large one goes to the devices in parts, along its leading axis."""
    if e.start is not None and e.names[0] not in stored:
        make, *arguments = e.start
        value = jnp.asarray(np.broadcast_to(make(*arguments), e.full_shape), dtype)
        return value if place is None else hosts.put(value, place(e.path, e.full_shape))
    if place is None:
        whole = tuple(map(range, e.full_shape))
        return jnp.asarray(_read_parts(e, stored, dtype, [whole])[0])
    sharding = place(e.path, e.full_shape)
    if not e.full_shape:
        return _put(e, stored, dtype, sharding, slice(None))
    rows = sharding.shard_shape(e.full_shape)[
        0
    ]  # leading rows of each device's shard; `step` of them go at a time
    step = rows
    if (
        e.stacked or e.layout == "same"
    ):  # otherwise the file has another leading axis, and each part would read it all
        # the bytes of the shards on the devices of this process, where replicas count once
        size = (
            len(_shards(e, sharding))
            * math.prod(sharding.shard_shape(e.full_shape))
            * dtype.itemsize
        )
        step = max(1, PART * rows // max(1, size))
    if step >= rows:
        return _put(e, stored, dtype, sharding, slice(None))
    array = jnp.zeros(e.full_shape, dtype, device=sharding)
    for start in range(0, rows, step):
        part = _put(e, stored, dtype, sharding, slice(start, start + step))
        array = _fill(sharding)(array, part, np.int32(start))
    return array.block_until_ready()


def _put(
    e: Entry, stored: Mapping[str, Stored], dtype: np.dtype, sharding: NamedSharding, rows: slice
) -> jax.Array:
    """An array that holds, on each device, these leading rows of the device's shard of the parameter."""
    shards = _shards(e, sharding)
    parts = [(index[0][rows], *index[1:]) if index else index for index in shards]
    pieces = []
    for host, devices in zip(_read_parts(e, stored, dtype, parts), shards.values(), strict=True):
        pieces += [jax.device_put(host, device) for device in devices]
    jax.block_until_ready(pieces)  # so that the host's copies are freed at the end of this call
    shape = e.full_shape
    if shape:
        whole = sharding.shard_shape(shape)[0]
        shape = (shape[0] // whole * len(range(whole)[rows]), *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


@functools.cache
def _fill(sharding: NamedSharding) -> Callable[[jax.Array, jax.Array, np.int32], jax.Array]:
    """A program `(array, part, start) -> array`: each device writes its shard of `part` into its shard of `array`, in place.

    start: the first row, in the device's shard.
    """
    spec = sharding.spec

    def write(array, part, start):
        return jax.lax.dynamic_update_slice_in_dim(array, part, start, axis=0)

    shards = jax.shard_map(
        write,
        mesh=sharding.mesh,
        in_specs=(spec, spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(shards, donate_argnums=0)


def _shards(e: Entry, sharding: NamedSharding) -> dict[Index, list[jax.Device]]:
    """The parts of a parameter that the devices of this process hold, each with its devices."""
    shards: dict[Index, list[jax.Device]] = {}
    for device, slices in sharding.addressable_devices_indices_map(e.full_shape).items():
        index = tuple(range(n)[s] for s, n in zip(slices or (), e.full_shape, strict=True))
        shards.setdefault(index, []).append(device)
    return shards


def _read_parts(
    e: Entry, stored: Mapping[str, Stored], dtype: np.dtype, parts: Sequence[Index]
) -> list[np.ndarray]:
    """Parts of a parameter, given by ranges over its axes. Each tensor is read once for all parts."""
    hosts = [np.empty([len(r) for r in index], dtype) for index in parts]
    wanted: dict[str, list[tuple[Index, np.ndarray]]] = {}
    for index, host in zip(parts, hosts, strict=True):
        if e.stacked:
            for slot, layer in enumerate(index[0]):
                wanted.setdefault(e.names[layer], []).append((index[1:], host[slot, ...]))
        else:
            wanted.setdefault(e.names[0], []).append((index, host))
    for name, targets in wanted.items():
        _read(stored[name], e.layout, targets)
    return hosts


def _read(tensor: Stored, layout: str, targets: list[tuple[Index, np.ndarray]]) -> None:
    """Fills each target, an array in our order of axes, with its part of the tensor. Reads a few rows of the file at a time."""
    views = [  # in the file's order of axes
        (index_in_torch(index, layout), to_torch_order(out, layout))
        if tensor.shape
        else ((range(1),), out[None])
        for index, out in targets
    ]
    first = min(index[0].start for index, _ in views)
    last = max(index[0].stop for index, _ in views)
    for start, rows_read in tensor.rows(first, last):
        stop = start + len(rows_read)
        # cast first, then reorder: several times faster than one assignment that does both
        with np.errstate(
            over="ignore"
        ):  # infinite weights make pictures that are not finite, which is said
            block = rows_read.astype(targets[0][1].dtype, copy=False)
        for (rows, *columns), view in views:
            low = max(start, rows.start)
            high = min(stop, rows.stop)
            if low < high:
                cut = tuple(
                    slice(r.start, r.stop) for r in (range(low - start, high - start), *columns)
                )
                view[low - rows.start : high - rows.start] = block[cut]


def _join(*parts: Any) -> str:
    return ".".join(str(p) for p in parts)


def to_torch_order(t: np.ndarray, layout: str) -> np.ndarray:
    """A view of our parameter in PyTorch's order."""
    if layout == "same":
        return t
    turned = t.transpose(OUR_AXES[layout])
    return turned[:, :, None, None] if layout == "pointwise" else turned


def index_in_torch(index: Index, layout: str) -> Index:
    """The part of PyTorch's tensor that holds the part `index` of our parameter."""
    if layout == "same":
        return index
    turned = tuple(index[axis] for axis in OUR_AXES[layout])
    return (*turned, range(1), range(1)) if layout == "pointwise" else turned
