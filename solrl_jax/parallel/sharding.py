"""The mesh and the shardings of arrays on it. A single device is a mesh of size one.

The mesh has four axes. Samples are split over `data` and `fsdp`. The frozen base and the adapters
are split over `fsdp` and replicated over `data`. The tokens of the transformer are split over
`sequence` (`quant.sequence_parallel`), and its matmuls over `tensor` by their outputs
(`quant.tensor_parallel`). Other computations on samples cannot use these two axes, so their devices
take samples as well (`row_mesh`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from solrl_jax.quant.leaf import Leaf
from solrl_jax.quant.matmul import output_partition_specs
from solrl_jax.quant.mesh_axes import SEQUENCE, TENSOR

T = TypeVar("T")
AXES = ("data", "fsdp", SEQUENCE, TENSOR)
AUTO = (jax.sharding.AxisType.Auto,) * len(AXES)
ROWS = PartitionSpec(AXES[:2])  # for arrays with one row per sample
# Every program is compiled with these options, because results would otherwise depend on the mesh.
# By default XLA keeps float32 instead of BF16 wherever it fuses operations, which differs between
# programs (gradients by 4 %, measured). On a CPU it also chooses kernels by the shape of a matmul:
# with AMX, the matmul of half of the columns then differs from half of the matmul. On a GPU, JAX
# 0.11 would compute a matmul a second time to write it into a stack of layers (SANA's update:
# 9.8e16 operations instead of 8.2e16).
OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # For speed alone: a stack of layers that is written completely is not filled with zeros first.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}
# Matmuls of float32 use full precision. The default would be TF32 on a GPU and BF16 on a TPU.
in_float32 = jax.default_matmul_precision("highest")
# In elements. Splitting a smaller array costs more in collectives than it saves in memory.
SMALLEST_SHARDED = 2**12


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Jits a function so that its result does not depend on the mesh.

    It sets the compiler options `OPTIONS` (among others, intermediate results have no more
    precision than their dtypes), and computes float32 matmuls in full precision.

    Args:
        function: The function.
        **options: Further arguments of `jax.jit`, such as `static_argnums` or `donate_argnums`, but
            not `compiler_options`.

    Returns:
        The jitted function.
    """
    return jax.jit(in_float32(function), compiler_options=OPTIONS, **options)


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int = 1,
    sequence: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a mesh with the axes `data`, `fsdp`, `sequence` and `tensor`.

    Args:
        data: The size of the axis `data`, at least 1. -1: as large as the number of devices allows.
        fsdp: The size of the axis `fsdp`, at least 1.
        tensor: The size of the axis `tensor`, at least 1.
        sequence: The size of the axis `sequence`, at least 1.
        devices: The devices to use, from the first one on; those that are not needed stay unused.
            None: `jax.devices()`.

    Returns:
        The mesh.

    Raises:
        ValueError: If there are too few devices, or if -1 would leave some of them unused.
    """
    devices = list(jax.devices() if devices is None else devices)
    group = fsdp * sequence * tensor
    groups = max(len(devices) // group, 1) if data == -1 else data
    needed = groups * group
    if needed > len(devices) or (data == -1 and needed < len(devices)):
        raise ValueError(
            f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}, mesh.sequence={sequence}: "
            f"require {needed} device(s), but {len(devices)} are available; with mesh.data=-1 the "
            "product of the other axes must divide that number"
        )
    shape = (groups, fsdp, sequence, tensor)
    return jax.make_mesh(shape, AXES, AUTO, devices=devices[:needed])


def row_mesh(mesh: Mesh) -> Mesh:
    """Turns a mesh into one without sequence and tensor parallelism, so that samples can be split
    over all its devices.

    Args:
        mesh: A mesh with the axes `data`, `fsdp`, `sequence` and `tensor`.

    Returns:
        A mesh of the same devices in the same order, and of the same axes, in which `sequence` and
        `tensor` have size 1, and `fsdp` is larger by the factor of their former sizes.
    """
    return Mesh(mesh.devices.reshape(mesh.shape["data"], -1, 1, 1), AXES, axis_types=AUTO)


def row_groups(mesh: Mesh) -> int:
    """Returns the number of parts that a batch is split into over a mesh: `data` times `fsdp`.

    The devices along the axes `sequence` and `tensor` work on the same samples.

    Args:
        mesh: The mesh, with the axes `data` and `fsdp`.
    """
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_sharding(mesh: Mesh, tree: Any) -> Any:
    """Chooses a sharding for each array in a tree of parameters.

    Arrays of fewer than 4096 elements (`SMALLEST_SHARDED`) are replicated. Two rules apply to all
    others:

    1. The weight of a linear layer ("kernel") and the factor "b" of a LoRA adapter are split over
       `tensor` along their output axis, if `tensor` divides it. They are [in, out], a stack
       [layers, in, out], or quantized. The rule does not apply to arrays with more axes, such as
       the kernels of convolutions.
    2. The largest axis that `fsdp` divides is split over `fsdp`; if several are equally large, the
       last of them. It may be the axis of layers, or the axis that is split over `tensor`, whose
       size is counted after that split. An array without such an axis is replicated over `fsdp`.

    Args:
        mesh: The mesh, with the axes `data`, `fsdp`, `sequence` and `tensor`.
        tree: The parameters by name: arrays, `jax.ShapeDtypeStruct`s or quantized weights.

    Returns:
        The tree with a `NamedSharding` in place of each array, also of each one within a quantized
        weight.
    """
    size = mesh.shape["fsdp"]
    tensor = mesh.shape[TENSOR]

    def split(leaf: Any, spec: PartitionSpec) -> NamedSharding:
        if np.prod(leaf.shape) < SMALLEST_SHARDED:
            return NamedSharding(mesh, PartitionSpec())
        names = [*spec, *[None] * (leaf.ndim - len(spec))]
        left = [n // tensor if name else n for n, name in zip(leaf.shape, names, strict=True)]
        divisible = [i for i, n in enumerate(left) if n % size == 0]
        if size > 1 and divisible:
            axis = max(divisible, key=lambda i: (left[i], i))
            names[axis] = (TENSOR, "fsdp") if names[axis] else "fsdp"
        # jit distinguishes P() from P(None) and would compile twice.
        while names and names[-1] is None:
            names.pop()
        return NamedSharding(mesh, PartitionSpec(*names))

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        name = next((str(key.key) for key in reversed(path) if hasattr(key, "key")), "")
        linear = name.rpartition("/")[2] == "kernel" or name == "b"
        divided = linear and (isinstance(leaf, Leaf) or leaf.ndim in (2, 3))
        specs = (
            output_partition_specs(leaf, tensor)
            if divided
            else jax.tree.map(lambda _: PartitionSpec(), leaf)
        )
        return jax.tree.map(split, leaf, specs)

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda x: isinstance(x, Leaf))


def parameter_placement(mesh: Mesh) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
    """Returns a function that chooses the sharding of one parameter on a mesh, by the rules of
    `parameter_sharding`. The parameter must be a plain array.

    Args:
        mesh: The mesh, with the axes `data`, `fsdp`, `sequence` and `tensor`.

    Returns:
        A function `(path, shape)` that returns a `NamedSharding`. The path is a tuple whose last
        entry is the name of the parameter, e.g. ("blocks", "attn", "to_q", "kernel").
    """

    def place(path: tuple, shape: tuple[int, ...]) -> NamedSharding:
        return parameter_sharding(mesh, {path[-1]: jax.ShapeDtypeStruct(shape, np.float32)})[
            path[-1]
        ]

    return place


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device of a mesh holds as a whole.

    Args:
        mesh: The mesh, of any axes.
    """
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with one row per sample: its leading axis is split over
    `data` and `fsdp`.

    Args:
        mesh: The mesh, with the axes `data`, `fsdp`, `sequence` and `tensor`.
    """
    return NamedSharding(mesh, ROWS)


def split_rows(x: T) -> T:
    """Constrains arrays with one row per sample to be split by rows over the mesh axes `data` and
    `fsdp`.

    Args:
        x: A pytree of arrays. Their number of rows is a multiple of `row_groups` of the mesh, which
            must be set (`jax.set_mesh`); without one, JAX raises an error.

    Returns:
        The same pytree with the constraint.
    """
    return jax.lax.with_sharding_constraint(x, ROWS)


def replicate(x: jax.Array) -> jax.Array:
    """Constrains an array to be whole on every device of the mesh that is set.

    Args:
        x: Any array.

    Returns:
        The same values with the constraint; `x` itself if no mesh is set (`jax.set_mesh`).
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def map_rows(f: Callable[[Any], Any], tree: Any, count: int) -> Any:
    """Applies a function to a batch in pieces, of `count` rows per device at a time.

    This saves memory. Results do not depend on the size of the batch, because every piece has the
    same number of rows. Each device has a share of consecutive rows of the batch, and each piece
    has the next `count` rows of every share. The last piece is filled up with copies of the first
    row of each share, whose results are dropped. The mesh that is set must have no sequence or
    tensor parallelism (`row_mesh`); without a mesh, there is one device. A gradient evaluates `f`
    once more for each piece.

    Args:
        f: The function. It maps a pytree of arrays to a pytree of arrays. In both, the leading axis
            is the rows of one piece: `count` times the number of devices. It must not mix rows.
        tree: The batch: a pytree of arrays whose leading axis is the rows, a multiple of the number
            of devices.
        count: The number of rows per device and piece, at least 1.

    Returns:
        The results of `f` for all rows, in their order.
    """
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    each = len(jax.tree.leaves(tree)[0]) // devices
    parts = -(-each // count)

    def split(x: jax.Array) -> jax.Array:
        # [rows] to [parts, devices * count]; each device keeps its rows.
        x = x.reshape(devices, each, *x.shape[1:])
        x = jnp.concatenate([x, jnp.repeat(x[:, :1], parts * count - each, axis=1)], axis=1)
        return (
            x.reshape(devices, parts, count, *x.shape[2:])
            .swapaxes(0, 1)
            .reshape(parts, devices * count, *x.shape[2:])
        )

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(parts, devices, count, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(devices, parts * count, *x.shape[3:])[:, :each].reshape(
            devices * each, *x.shape[3:]
        )

    place = split_rows if devices > 1 else lambda x: x
    # Without checkpoints, the gradient would keep the residuals of all calls. Preventing common
    # subexpression elimination is unnecessary inside a loop.
    apply = jax.checkpoint(f, prevent_cse=False)
    return jax.tree.map(
        join, jax.lax.map(lambda part: apply(jax.tree.map(place, part)), jax.tree.map(split, tree))
    )


def pad_rows(x: np.ndarray, count: int) -> np.ndarray:
    """Pads an array to `count` rows with copies of its first row.

    Args:
        x: An array with 1 to `count` rows (leading axis).
        count: The number of rows of the result, at least that of `x`.

    Returns:
        An array [`count`, ...] of the dtype of `x`; `x` itself if it has as many rows.
    """
    if len(x) == count:
        return x
    return np.concatenate([x, np.repeat(x[:1], count - len(x), axis=0)])
