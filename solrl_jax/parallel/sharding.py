"""The mesh and the shardings of arrays on it. A single device is a mesh of size one.

The mesh has three axes. Samples are split over `data` and `fsdp`. The frozen base and the adapters
are split over `fsdp` and replicated over `data`. The matmuls of the transformer are split over
`tensor` by their outputs (`quant.tensor_parallel`). Other computations on samples cannot use the
axis `tensor`, so its devices take samples as well (`rows_only`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from solrl_jax.quant.leaf import Leaf
from solrl_jax.quant.matmul import output_partition_specs
from solrl_jax.quant.tensor_parallel import TENSOR

T = TypeVar("T")
AXES = ("data", "fsdp", TENSOR)
AUTO = (jax.sharding.AxisType.Auto,) * len(AXES)
ROWS = PartitionSpec(AXES[:2])  # for arrays with one row per sample
# Every stage is compiled with these options, because results would otherwise depend on the mesh. By
# default XLA keeps float32 instead of BF16 wherever it fuses operations, which differs between
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


def jit(stage: Callable[..., Any], **options: Any) -> Any:
    """Jits a function with `OPTIONS` and with float32 matmuls in full precision.

    `OPTIONS` forbid XLA to keep more precision than the dtypes have and a CPU to choose kernels by
    shape, because results would otherwise depend on the mesh.

    Args:
        stage: The function. It is compiled at the first call for each set of shapes, dtypes,
            shardings and static arguments.
        **options: Further arguments of `jax.jit`, such as `static_argnums` or `donate_argnums`, but
            not `compiler_options`, which would be a TypeError.

    Returns:
        The jitted function, with the name of `stage`.
    """
    return jax.jit(in_float32(stage), compiler_options=OPTIONS, **options)


def make_mesh(
    data: int, fsdp: int, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh of `data` x `fsdp` x `tensor` devices, with axes of these names in this order.

    Args:
        data: The size of the axis `data`, at least 1; or -1, which uses all devices: their number
            divided by `fsdp` and `tensor`.
        fsdp: The size of the axis `fsdp`, at least 1.
        tensor: The size of the axis `tensor`, at least 1.
        devices: The devices to choose from, the first ones first. None means all of `jax.devices`.
            Devices that are not needed stay unused unless `data` is -1.

    Raises:
        ValueError: If there are too few devices, or if -1 would leave some of them unused.
    """
    devices = list(jax.devices() if devices is None else devices)
    groups = max(len(devices) // (fsdp * tensor), 1) if data == -1 else data
    needed = groups * fsdp * tensor
    if needed > len(devices) or (data == -1 and needed < len(devices)):
        raise ValueError(
            f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}: "
            f"need {needed} of the {len(devices)} device(s), all of them if data=-1"
        )
    return jax.make_mesh((groups, fsdp, tensor), AXES, AUTO, devices=devices[:needed])


def rows_only(mesh: Mesh) -> Mesh:
    """Returns the mesh with the axis `tensor` folded into `fsdp`, its devices in the same order.

    Args:
        mesh: A mesh with the axes `data`, `fsdp` and `tensor`.

    Returns:
        A mesh with these three axes, in which `fsdp` is `tensor` times as large and `tensor` is 1,
        so that samples are split over all devices.
    """
    data, fsdp, tensor = (mesh.shape[axis] for axis in AXES)
    return Mesh(mesh.devices.reshape(data, fsdp * tensor, 1), AXES, axis_types=AUTO)


def row_groups(mesh: Mesh) -> int:
    """Returns the number of parts that the samples of a batch are split into.

    Args:
        mesh: The mesh. The result is the product of its axes `data` and `fsdp`; the devices along
            `tensor` share the samples of one part.
    """
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_sharding(mesh: Mesh, tree: Any) -> Any:
    """Chooses a sharding for each array of a tree of parameters.

    The output axis of linear layers (leaves named "kernel" or "PATH/kernel", and the factor "b" of
    adapters, with 2 or 3 axes) is split over `tensor`, if `tensor` divides it. Then the largest
    axis that `fsdp` divides is split over `fsdp`; of equal axes the last one. The size of an axis
    that is split over `tensor` counts per part, and it may be split over both. Without such an axis
    an array is not split over `fsdp`. Arrays of fewer than `SMALLEST_SHARDED` (4096) elements, and
    all other axes, are replicated.

    Args:
        mesh: The mesh of the shardings, with the axes `data`, `fsdp` and `tensor`.
        tree: Arrays, `jax.ShapeDtypeStruct`s or quantized leaves, by name. The arrays of a
            quantized leaf are split over `tensor` as its `partition_specs` says.

    Returns:
        The tree with a NamedSharding in place of each array.
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


def placement(mesh: Mesh) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
    """Returns a function from a parameter's path and shape to its sharding.

    The function takes a path, a tuple whose last entry is the name of the parameter, e.g.
    ("blocks", "attn", "to_q", "kernel"), and a shape. The output axis of a "kernel" or "b" with 2
    or 3 axes (the last one) is split over `tensor`, and then the largest axis that `fsdp` divides
    over `fsdp`, as `parameter_sharding` does. Arrays of fewer than 4096 elements are replicated.

    Args:
        mesh: The mesh of the shardings, with the axes `data`, `fsdp` and `tensor`.

    Returns:
        The function, a `models.loading.weights.Placement`.
    """

    def place(path: tuple, shape: tuple[int, ...]) -> NamedSharding:
        return parameter_sharding(mesh, {path[-1]: jax.ShapeDtypeStruct(shape, np.float32)})[
            path[-1]
        ]

    return place


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device of a mesh holds completely.

    Args:
        mesh: The mesh, of any axes.
    """
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose leading axis has one entry per sample.

    Args:
        mesh: The mesh. The leading axis is split over its axes `data` and `fsdp`, and replicated
            over `tensor`.
    """
    return NamedSharding(mesh, ROWS)


def split_rows(x: T) -> T:
    """Constrains the leading axis of each array to be split over `data` and `fsdp`.

    Args:
        x: A tree of arrays with one row per sample, a number that `row_groups` of the mesh divides.
            A mesh must be set (`jax.set_mesh`). Otherwise JAX raises an error.

    Returns:
        The tree with equal values, each array split along its leading axis.
    """
    return jax.lax.with_sharding_constraint(x, ROWS)


def replicate(x: jax.Array) -> jax.Array:
    """Returns an array with the constraint that every device of the mesh that is set holds all of
    it.

    Under `jax.vmap` it is replicated over the devices of each row.

    Args:
        x: Any array. Without a mesh (`jax.set_mesh`) it is returned as it is.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def map_rows(f: Callable[[Any], Any], tree: Any, count: int) -> Any:
    """Applies a function to `count` rows at a time on every device of the mesh that is set.

    Every matmul in `f` has the same number of rows whatever the total number, and so rounds the
    same way. A device's rows are processed one call after another (`jax.lax.map`), and the last
    call is filled up with copies of its first row. Without a mesh, one device has all rows. The
    mesh must be one of `rows_only`: devices along an axis `tensor` would share their rows.

    Args:
        f: The function. It maps a tree of arrays with leading axis n to a tree of arrays with
            leading axis n, where n is `count` times the number of devices.
        tree: Arrays with the rows as leading axis, a number that the mesh's size divides; another
            number is an error of JAX.
        count: The number of rows of a call on one device, at least 1.

    Returns:
        A tree as `f` returns it, with one row of output per row of `tree`, in their order. The
        outputs of the copies are left out.
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
    return jax.tree.map(
        join, jax.lax.map(lambda part: f(jax.tree.map(place, part)), jax.tree.map(split, tree))
    )


def pad_rows(x: np.ndarray, count: int) -> np.ndarray:
    """Fills an array up to `count` rows, so that every chunk runs the same compiled program.

    Args:
        x: An array of 1 to `count` rows along its leading axis. More rows are a ValueError.
        count: The number of rows of the result. Missing ones are copies of the first row.

    Returns:
        An array [`count`, ...] of the dtype of `x`: the rows of `x`, then copies of its first row.
        It is `x` itself if that has `count` rows, and otherwise new.
    """
    if len(x) == count:
        return x
    return np.concatenate([x, np.repeat(x[:1], count - len(x), axis=0)])
