"""Parameters from released files: a bijection between our parameters and the tensors of PyTorch.

Every parameter of a network carries metadata (`models.layers.parameter.param`): the last part of
its name in PyTorch, and the order of its axes there. Its path in our tree gives the rest of the
name. From these, `parameter_table` derives one table per network, with one `ParameterEntry` per
parameter: our path, the PyTorch names, and the shape. The mapping is a bijection:

* Our networks have the module names of PyTorch, so the name of a tensor is the path of its
  parameter, joined by dots.
* A stack of n equal layers is one parameter with a leading axis of n here, and n tensors there.
* `OUR_AXES` lists the permutations of axes: for instance, a linear layer is [in, out] here and
  [out, in] there.

Loading has two steps. `locate_tensors` compares the table with the headers of the files, and
reports all tensors that are missing, unexpected or of another shape at once. `load_tensors` then
reads each tensor and sends it to the devices that hold a part of it. On a mesh, large parameters
pass through host memory in chunks, with the exceptions in the docstring of `load_tensors`.
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
from jax import device_put
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from solrl_jax.models.loading.tensor_files import (
    STORED_DTYPES,
    StoredTensor,
    read_header,
    weight_files,
)
from solrl_jax.parallel import hosts

Params = dict[Any, Any]
# A function (path of a parameter, its shape) -> its sharding.
Placement = Callable[[tuple[Any, ...], tuple[int, ...]], NamedSharding]
# A rectangular part of an array: one range of indices per axis.
Region = tuple[range, ...]

# Bytes of a parameter that are assembled in host memory before they go to the devices.
CHUNK_BYTES = 2**28

# For each axis of the PyTorch tensor, the axis of our parameter.
#   "linear": [in, out] here, [out, in] there.
#   "pointwise": the same for a 1x1 convolution, [out, in, 1, 1] there.
#   "conv": [kh, kw, in / groups, out] here, [out, in / groups, kh, kw] there.
#   "conv3d": [kt, kh, kw, in, out] here, [out, in, kt, kh, kw] there.
# The layout "same" keeps the order.
OUR_AXES = {"linear": (1, 0), "pointwise": (1, 0), "conv": (3, 2, 0, 1), "conv3d": (4, 3, 0, 1, 2)}

# Tensors of older files that may be there but add nothing, if the network has the parameter on the
# right: the positions are 0, 1, 2, ..., and the encoder of T5 shares its token table.
REDUNDANT = {
    "text_model.embeddings.position_ids": "text_model.embeddings.position_embedding.weight",
    "vision_model.embeddings.position_ids": "vision_model.embeddings.position_embedding.weight",
    "encoder.embed_tokens.weight": "shared.weight",
}
# Other names of a tensor, with ours: transformers loads T5's token table under either of its names.
ALIASES = {"encoder.embed_tokens.weight": "shared.weight"}
# Prefixes common to all names of a network that its files may leave out: transformers 5 saves
# `CLIPTextModel` without "text_model.", and a language model may be saved with or without the
# "model." of the class that adds a head.
OPTIONAL_PREFIXES = ("text_model.", "model.")
# Tensors that the files of an autoencoder hold and that its decoder does not use.
ENCODER_PREFIXES = ("encoder.", "quant_conv.", "bn.num_batches_tracked")


@dataclasses.dataclass(frozen=True)
class ParameterEntry:
    """One parameter of a network, and the PyTorch tensors that hold it.

    A stack of equal layers is one parameter with a leading axis of layers here, and one tensor per
    layer in PyTorch.

    Attributes:
        path: path of the parameter in the network's parameter tree: names, and indices of lists,
            for example ("blocks", "attn", "to_out", 0, "kernel"). It has no index for the layers of
            a stack.
        names: PyTorch names of its tensors, such as "blocks.3.attn.to_out.0.weight": one, or one
            per layer.
        layout: "same" if PyTorch has this package's order of axes; otherwise the kind of weight:
            "linear" ([in, out] here, [out, in] in PyTorch), "pointwise" ([in, out] here, [out, in,
            1, 1] there), "conv" ([kh, kw, in, out] here, [out, in, kh, kw] there) or "conv3d" ([kt,
            kh, kw, in, out] here, [out, in, kt, kh, kw] there).
        shape: shape of one tensor in this package's order of axes, without the axis of layers.
        stacked: whether the parameter has a leading axis of layers.
        initializer: for a parameter that files may lack: `(function, *arguments)`. The call
            `function(*arguments)` then gives its value, which is broadcast to `full_shape`. None:
            files must hold the parameter.
        bounds: (smallest, largest) value to which training clips the parameter; None: unbounded.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    stacked: bool
    initializer: tuple[Any, ...] | None = None
    bounds: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """The parameter's path as text, joined by slashes: "blocks/attn/to_out/0/kernel"."""
        return "/".join(map(str, self.path))

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of each PyTorch tensor of the parameter, in PyTorch's order of axes. It has no
        axis of layers, because a stack has one tensor per layer.
        """
        view = np.broadcast_to(np.zeros((), np.bool_), self.shape)  # allocates nothing
        return to_torch_order(view, self.layout).shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter in this package's order of axes. A parameter of a stack
        of layers (`stacked`) has their axis first.
        """
        return (len(self.names), *self.shape) if self.stacked else self.shape


def parameter_table(state: nnx.State) -> list[ParameterEntry]:
    """Lists the parameters of a network with their PyTorch names.

    Args:
        state: state of the network, whose parameters were made by `models.layers.parameter.param`.
            Arrays may be abstract.

    Returns:
        One entry per parameter, in the order of `nnx.to_flat_state`. In a stack of n layers, the
        same parameter of all layers has one entry, with n PyTorch names.
    """
    table = []
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        shape = tuple(variable.get_value().shape)
        depth = metadata["below_stack"]
        if depth:
            # The index of the layer follows the name of the list: text.layers.attn.weight is
            # text.layers.3.attn.weight.
            list_path = path[:-depth]
            inner_path = path[-depth:-1]
            first = metadata["first_layer"]
            if first is not None:
                # One of several stacks in a container, and the container has the name of the list.
                list_path = list_path[:-1]
            layers = range(first or 0, (first or 0) + shape[0])
            names = tuple(
                _tensor_name(*list_path, layer, *inner_path, metadata["torch_name"])
                for layer in layers
            )
            shape = shape[1:]
        else:
            names = (_tensor_name(*path[:-1], metadata["torch_name"]),)
        entry = ParameterEntry(
            path=tuple(path),
            names=names,
            layout=metadata["layout"],
            shape=shape,
            stacked=depth > 0,
            initializer=metadata["initializer"],
            bounds=metadata["bounds"],
        )
        table.append(entry)
    return table


def locate_tensors(
    source: Path, state: nnx.State, unused: tuple[str, ...] = ()
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """Finds the tensors of a network in released files, and checks that they fit. Only the headers
    of the files are read.

    Differences between versions of transformers are accepted: the prefix "text_model." or "model."
    may be missing in all names, T5's token table has two possible names, and some redundant tensors
    may be present (`REDUNDANT`: position numbers, T5's second token table). A parameter with an
    initial value may be missing. In a stack, it must then be missing in all layers.

    Args:
        source: the directory of a network, or one safetensors file.
        state: abstract state of the network, whose parameters were made by
            `models.layers.parameter.param`.
        unused: prefixes of tensor names that the files may hold although the network does not use
            them, such as "encoder.".

    Returns:
        The first two arguments of `load_tensors`: a list with one entry per parameter, with the
        tensor names that the files use; and a dictionary with the position of every tensor in the
        files, unused ones included, by name.

    Raises:
        FileNotFoundError: the weights are missing, are PyTorch pickles, or are several files
            without a standard name.
        ValueError: a file or an index cannot be read; or tensors are missing, unexpected, of
            another shape, stored twice or of a dtype other than BF16, F16, F32 and F64. The message
            lists all such tensors.
    """
    files = [source] if source.is_file() else weight_files(source)
    stored_names = {tensor.name for file in files for tensor in read_header(file)}
    table = _without_optional_prefix(parameter_table(state), stored_names)
    table = _with_aliases(table, stored_names)
    expected: dict[str, tuple[int, ...]] = {}
    for entry in table:
        initialized = entry.initializer is not None and stored_names.isdisjoint(entry.names)
        if not initialized:
            expected |= dict.fromkeys(entry.names, entry.torch_shape)

    def ignored(name: str) -> bool:
        return REDUNDANT.get(name) in expected or name.startswith(unused)

    return table, check_tensors(files, expected, str(source), ignored)


# `locate_tensors` for an autoencoder of which only the decoder is used.
locate_decoder_tensors = functools.partial(locate_tensors, unused=ENCODER_PREFIXES)


def _without_optional_prefix(
    table: list[ParameterEntry], stored_names: set[str]
) -> list[ParameterEntry]:
    """Removes the prefix "text_model." or "model." from the PyTorch names of a table if the files
    leave it out.

    A prefix is removed if all names in the table have it and no name in the files does.

    Args:
        table: the parameters of a network. The list is not changed.
        stored_names: the names of all tensors in the files.

    Returns:
        A new table with the shorter names, or `table` itself if no prefix is removed.
    """
    for prefix in OPTIONAL_PREFIXES:
        in_table = all(name.startswith(prefix) for entry in table for name in entry.names)
        in_files = any(name.startswith(prefix) for name in stored_names)
        if in_table and not in_files:
            return [
                dataclasses.replace(
                    entry, names=tuple(name.removeprefix(prefix) for name in entry.names)
                )
                for entry in table
            ]
    return table


def _with_aliases(table: list[ParameterEntry], stored_names: set[str]) -> list[ParameterEntry]:
    """Renames T5's token table in a table of parameters if the files have it under its other name.

    The network calls it "shared.weight". It is renamed to "encoder.embed_tokens.weight" if the
    files hold only that name (`ALIASES`).

    Args:
        table: the parameters of a network. The list is not changed.
        stored_names: the names of all tensors in the files.

    Returns:
        A new table in the same order.
    """
    renamed = {
        ours: other
        for other, ours in ALIASES.items()
        if other in stored_names and ours not in stored_names
    }
    return [
        dataclasses.replace(entry, names=tuple(renamed.get(name, name) for name in entry.names))
        for entry in table
    ]


def check_tensors(
    files: Sequence[Path],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    ignored: Callable[[str], bool],
) -> dict[str, StoredTensor]:
    """Checks that safetensors files hold exactly the tensors that a network needs. Only the headers
    of the files are read.

    Args:
        files: the safetensors files.
        expected: shape of each tensor that the network needs, in PyTorch's order of axes, by the
            tensor's name.
        source: the directory or file, for the beginning of the error message.
        ignored: a function that takes the name of a tensor that is not expected, and returns
            whether the files may hold it.

    Returns:
        The position of every tensor in the files, ignored ones included, by name.

    Raises:
        ValueError: a file is missing or cannot be read; expected tensors are missing, of another
            shape or of a dtype other than BF16, F16, F32 and F64; there are unexpected tensors that
            are not ignored; or a tensor is stored twice. The message lists all such tensors.
    """
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        for tensor in read_header(file):
            if tensor.name in stored:
                first = stored[tensor.name].file.name
                problems.append(f"{tensor.name} is both in {first} and in {file.name}")
            else:
                stored[tensor.name] = tensor
    for name, tensor in stored.items():
        if name in expected and tensor.dtype not in STORED_DTYPES:
            accepted = ", ".join(STORED_DTYPES)
            problems.append(f"{name} is {tensor.dtype}, expected one of {accepted}")
    for name, shape in expected.items():
        if name not in stored:
            problems.append(f"missing {name} {shape}")
    for name, tensor in stored.items():
        if name not in expected and not ignored(name):
            problems.append(f"unexpected {name} {tensor.shape}")
    for name, shape in expected.items():
        if name in stored and stored[name].shape != shape:
            problems.append(f"{name} has shape {stored[name].shape}, expected {shape}")
    if problems:
        raise ValueError(
            f"{source}: {len(problems)} tensor(s) do not fit the network: " + "; ".join(problems)
        )
    return stored


def load_tensors(
    table: Sequence[ParameterEntry],
    stored: Mapping[str, StoredTensor],
    dtype: DTypeLike,
    place: Placement | None = None,
) -> Params:
    """Reads parameters from released files onto the devices.

    With `place`, all processes of a run must call it with the same arguments. Each reads only the
    rows of the stored tensors that its own devices need, and sends them to the devices in chunks of
    about 256 MiB (`CHUNK_BYTES`). A parameter is not divided into chunks if it is small, or if it
    is neither stacked nor stored in this package's order of axes. Without `place`, one whole
    parameter at a time is in host memory.

    Args:
        table: the parameters to read, with the tensor names in the files.
        stored: position of each tensor in the files, by its name. The tensors must fit the table,
            which `locate_tensors` checks. A parameter with an `initializer` is initialized if its
            first tensor is missing here.
        dtype: dtype to which the parameters are cast. Values beyond its range become infinite.
        place: gives each parameter's sharding: a function `(path, shape)` that returns a
            `NamedSharding`. The shape of a stacked parameter begins with the number of layers.
            None: all parameters are on JAX's default device.

    Returns:
        The parameters as nested dictionaries keyed by the parts of their paths.

    Raises:
        KeyError: one of the tensors to read is not in `stored`.
        OSError: a file cannot be opened or read.
        ValueError: a file ends within a tensor.
    """
    dtype = jnp.dtype(dtype)
    return unflatten_dict(
        {entry.path: load_parameter(entry, stored, dtype, place) for entry in table}
    )


def load_parameter(
    entry: ParameterEntry,
    stored: Mapping[str, StoredTensor],
    dtype: np.dtype,
    place: Placement | None,
) -> jax.Array:
    """Reads one parameter onto the devices, or initializes it if the files lack it.

    With `place`, all processes of a run must call it with the same arguments. A large parameter
    then goes to the devices in chunks of about 256 MiB (`CHUNK_BYTES`) if it is stacked or its
    layout is "same", otherwise in one piece.

    Args:
        entry: the parameter.
        stored: position of each tensor in the files, by its name. A parameter with an `initializer`
            is initialized if its first tensor is missing here.
        dtype: dtype to which the values are cast. Values beyond its range become infinite.
        place: gives the parameter's sharding: a function `(entry.path, entry.full_shape)` that
            returns a `NamedSharding`. None: the parameter is on JAX's default device.

    Returns:
        The parameter, of shape `entry.full_shape`.

    Raises:
        KeyError: one of the tensors to read is not in `stored`.
        OSError: a file cannot be opened or read.
        ValueError: a file ends within a tensor.
    """
    if entry.initializer is not None and entry.names[0] not in stored:
        initialize, *arguments = entry.initializer
        value = np.broadcast_to(initialize(*arguments), entry.full_shape)
        array = jnp.asarray(value, dtype)
        return array if place is None else hosts.put(array, place(entry.path, entry.full_shape))
    if place is None:
        whole = tuple(range(size) for size in entry.full_shape)
        return jnp.asarray(read_regions(entry, stored, dtype, [whole])[0])
    sharding = place(entry.path, entry.full_shape)
    if not entry.full_shape:
        return _load_rows(entry, stored, dtype, sharding, slice(None))

    # A large parameter goes to the devices in chunks of `step` rows of each device's shard.
    shard_shape = sharding.shard_shape(entry.full_shape)
    rows = shard_shape[0]
    step = rows
    # With another layout, the leading axis is not the leading one in the file, and each chunk would
    # read the whole file.
    if entry.stacked or entry.layout == "same":
        local_shards = len(_local_shards(entry, sharding))
        local_bytes = local_shards * math.prod(shard_shape) * dtype.itemsize
        step = max(1, CHUNK_BYTES * rows // max(1, local_bytes))
    if step >= rows:
        return _load_rows(entry, stored, dtype, sharding, slice(None))
    array = jnp.zeros(entry.full_shape, dtype, device=sharding)
    for start in range(0, rows, step):
        chunk = _load_rows(entry, stored, dtype, sharding, slice(start, start + step))
        array = _write_rows(array, chunk, np.int32(start), sharding)
    return array.block_until_ready()


def _load_rows(
    entry: ParameterEntry,
    stored: Mapping[str, StoredTensor],
    dtype: np.dtype,
    sharding: NamedSharding,
    rows: slice,
) -> jax.Array:
    """Reads some rows of the shard of every device, and waits until the devices have them. Every
    process must call it, and reads for its own devices.

    A shard is the part of the parameter that a device holds, and a row is one entry along the
    shard's leading axis.

    Args:
        entry: the parameter.
        stored: position of each tensor in the files, by its name.
        dtype: dtype to which the values are cast.
        sharding: sharding of the whole parameter.
        rows: which rows of each shard to read, counted from the beginning of the shard.
            `slice(None)`: all.

    Returns:
        An array with `sharding`, in which the shard of each device consists of these rows only: its
        leading axis is their number times the number of shards along it.

    Raises:
        KeyError: a tensor of these rows is not in `stored`.
        OSError: a file cannot be opened or read.
        ValueError: a file ends within a tensor.
    """
    shards = _local_shards(entry, sharding)
    regions = [(region[0][rows], *region[1:]) if region else region for region in shards]
    pieces = []
    for piece, devices in zip(
        read_regions(entry, stored, dtype, regions), shards.values(), strict=True
    ):
        pieces += [device_put(piece, device) for device in devices]
    jax.block_until_ready(pieces)  # frees the host's copies at the end of this call
    shape = entry.full_shape
    if shape:
        shard_rows = sharding.shard_shape(shape)[0]
        shape = (shape[0] // shard_rows * len(range(shard_rows)[rows]), *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


@functools.partial(jax.jit, static_argnames="sharding", donate_argnames="array")
def _write_rows(
    array: jax.Array, chunk: jax.Array, start: jax.Array | np.int32, sharding: NamedSharding
) -> jax.Array:
    """Writes a chunk of rows into the shard of every device, in place. Compiled by jit. Every
    process must call it.

    Args:
        array: the whole parameter. Its buffer is donated, so it cannot be used afterwards.
        chunk: the rows to write, as returned by `_load_rows`: the same number for each device's
            shard.
        start: index of the first row to overwrite in each device's shard.
        sharding: sharding of `array` and of `chunk`. Static under jit.

    Returns:
        The parameter with the new rows.
    """
    spec = sharding.spec
    write = jax.shard_map(
        functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0),
        mesh=sharding.mesh,
        in_specs=(spec, spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    return write(array, chunk, start)


def _local_shards(entry: ParameterEntry, sharding: NamedSharding) -> dict[Region, list[jax.Device]]:
    """Returns the parts of a parameter that the devices of this process hold.

    Args:
        entry: the parameter.
        sharding: sharding of the whole parameter, over devices of this and possibly of other
            processes.

    Returns:
        For each part, the devices of this process that hold it (several if it is replicated). A
        part is a tuple with one `range` of indices per axis, the axis of layers included.
    """
    shape = entry.full_shape
    shards: dict[Region, list[jax.Device]] = {}
    for device, slices in sharding.addressable_devices_indices_map(shape).items():
        region = tuple(range(size)[cut] for cut, size in zip(slices or (), shape, strict=True))
        shards.setdefault(region, []).append(device)
    return shards


def read_regions(
    entry: ParameterEntry,
    stored: Mapping[str, StoredTensor],
    dtype: np.dtype,
    regions: Sequence[Region],
) -> list[np.ndarray]:
    """Reads rectangular parts of one parameter into host memory. Each tensor in the files is read
    once for all parts.

    Args:
        entry: the parameter.
        stored: position of each tensor in the files, by its name.
        dtype: dtype to which the values are cast. Values beyond its range become infinite.
        regions: the parts to read: tuples with one `range` of indices (step 1) per axis of the
            parameter, in this package's order of axes. The first axis of a stacked parameter is
            that of the layers.

    Returns:
        One array per part, in the order of `regions`.

    Raises:
        KeyError: a tensor of a region is not in `stored`.
        OSError: a file cannot be opened or read.
        ValueError: a file ends within a tensor.
    """
    arrays = [np.empty([len(axis) for axis in region], dtype) for region in regions]
    # for each tensor, the regions of it that are needed and the arrays that they go to
    targets: dict[str, list[tuple[Region, np.ndarray]]] = {}
    for region, array in zip(regions, arrays, strict=True):
        if entry.stacked:
            for slot, layer in enumerate(region[0]):
                targets.setdefault(entry.names[layer], []).append((region[1:], array[slot, ...]))
        else:
            targets.setdefault(entry.names[0], []).append((region, array))
    for name, parts in targets.items():
        _read_tensor(stored[name], entry.layout, parts)
    return arrays


def _read_tensor(
    tensor: StoredTensor, layout: str, targets: list[tuple[Region, np.ndarray]]
) -> None:
    """Reads rectangular parts of one tensor into given arrays. A few rows of the file are read at a
    time.

    Args:
        tensor: where the tensor is in its file.
        layout: "same" if the file has this package's order of axes; otherwise the kind of weight:
            "linear", "pointwise", "conv" or "conv3d" (`ParameterEntry.layout`).
        targets: one or more pairs (part, array to fill). A part is a tuple with one `range` of
            indices per axis, in this package's order of axes without the axis of layers. The arrays
            have one dtype, to which the values are cast; values beyond its range become infinite.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the file ends within the tensor.
    """
    # Everything below is in the file's order of axes. A tensor without axes counts as one row.
    views = [
        (region_in_torch(region, layout), to_torch_order(array, layout))
        if tensor.shape
        else ((range(1),), array[None])
        for region, array in targets
    ]
    dtype = targets[0][1].dtype
    first = min(region[0].start for region, _ in views)
    last = max(region[0].stop for region, _ in views)
    for start, rows in tensor.rows(first, last):
        stop = start + len(rows)
        # Casting first and then reordering is several times faster than one assignment that does
        # both. Values beyond the range of `dtype` become infinite without a warning: non-finite
        # images are reported later.
        with np.errstate(over="ignore"):
            block = rows.astype(dtype, copy=False)
        for (wanted, *columns), view in views:
            low = max(start, wanted.start)
            high = min(stop, wanted.stop)
            if low < high:
                cuts = [slice(axis.start, axis.stop) for axis in columns]
                view[low - wanted.start : high - wanted.start] = block[
                    (slice(low - start, high - start), *cuts)
                ]


def to_torch_order(parameter: np.ndarray, layout: str) -> np.ndarray:
    """Returns a view of an array in PyTorch's order of axes. It shares the memory of the array.

    Args:
        parameter: the values of one layer, in this package's order of axes.
        layout: "same" if PyTorch has that order too; otherwise the kind of weight: "linear",
            "pointwise" (two axes of size 1 are added at the end), "conv" or "conv3d".

    Returns:
        The view; `parameter` itself for "same".
    """
    if layout == "same":
        return parameter
    view = parameter.transpose(OUR_AXES[layout])
    return view[:, :, None, None] if layout == "pointwise" else view


def region_in_torch(region: Region, layout: str) -> Region:
    """Converts the indices of a rectangular part of a parameter to PyTorch's order of axes.

    Args:
        region: the part: a tuple with one `range` of indices per axis, in this package's order of
            axes without the axis of layers.
        layout: "same" if PyTorch has that order too; otherwise the kind of weight: "linear",
            "pointwise" (two axes of size 1 are added at the end), "conv" or "conv3d".

    Returns:
        A tuple with one `range` per axis of the PyTorch tensor.
    """
    if layout == "same":
        return region
    permuted = tuple(region[axis] for axis in OUR_AXES[layout])
    return (*permuted, range(1), range(1)) if layout == "pointwise" else permuted


def _tensor_name(*parts: Any) -> str:
    """Joins parts (texts or numbers) by dots to the name of a PyTorch tensor, such as
    "blocks.3.attn.weight".
    """
    return ".".join(map(str, parts))
