"""The mesh, and where arrays lie on it. One device is a mesh of size one: there is no other path.

Three axes. SeedBatch (candidates, samples) are split over `data` and `fsdp`. The frozen base and the adapters are split over `fsdp`
and replicated over `data`. The products of the transformer are divided over `tensor` by their outputs (`quant.tensor_parallel`).
Other computations on rows have no use for the axis `tensor`: its devices take rows as well (`rows_only`).
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
ROWS = PartitionSpec(AXES[:2])  # the leading axis of anything that has a row a sample
# Every stage is compiled with these options, or results would depend on the mesh. By default XLA keeps float32 instead of BF16
# wherever it fuses so, which differs between programs (gradients by 4 %, measured). On a CPU it also chooses kernels by the
# shape of a product: with AMX, a product of half of the columns then differs from half of the product. On a GPU, JAX 0.11 would
# compute a product a second time to write it into a stack of layers (SANA's update: 9.8e16 operations in place of 8.2e16).
OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,  # of stacks that are written whole: for speed alone
}
# float32 is multiplied as float32: by default it would be TF32 on a GPU, and BF16 on a TPU.
in_float32 = jax.default_matmul_precision("highest")
SMALLEST_SHARDED = (
    2**12
)  # elements; to split a smaller array costs more in messages than it saves in memory


def jit(stage: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a stage: its result is the same on every device and mesh, up to rounding in the dtypes that it names."""
    return jax.jit(in_float32(stage), compiler_options=OPTIONS, **options)


def make_mesh(
    data: int, fsdp: int, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A `data` x `fsdp` x `tensor` mesh; `data = -1` takes all devices.

    Raises ValueError if the sizes do not fit the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    groups = max(len(devices) // (fsdp * tensor), 1) if data == -1 else data
    needed = groups * fsdp * tensor
    if needed > len(devices) or (data == -1 and needed < len(devices)):
        raise ValueError(
            f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}: need {needed} of the {len(devices)} device(s), "
            "all of them if data=-1"
        )
    return jax.make_mesh((groups, fsdp, tensor), AXES, AUTO, devices=devices[:needed])


def rows_only(mesh: Mesh) -> Mesh:
    """The same devices in the same order, with the axis `tensor` folded into `fsdp`."""
    data, fsdp, tensor = (mesh.shape[axis] for axis in AXES)
    return Mesh(mesh.devices.reshape(data, fsdp * tensor, 1), AXES, axis_types=AUTO)


def row_groups(mesh: Mesh) -> int:
    """How many parts rows are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_sharding(mesh: Mesh, tree: Any) -> Any:
    """A sharding for each array: its largest axis that `fsdp` divides is split over `fsdp`; small arrays are replicated.

    The outputs of linears (leaves named kernel, and the factor b of adapters) are split over `tensor` first.
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
        while (
            names and names[-1] is None
        ):  # one spelling: jit distinguishes P() and P(None), and would compile again
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
    """The sharding of one parameter, from its path and shape (`models.loading.weights.Placement`)."""

    def place(path: tuple, shape: tuple[int, ...]) -> NamedSharding:
        return parameter_sharding(mesh, {path[-1]: jax.ShapeDtypeStruct(shape, np.float32)})[
            path[-1]
        ]

    return place


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, ROWS)


def split_rows(x: T) -> T:
    """Constrains the leading axis of each array in `x` to be split over the rows' axes of the ambient mesh."""
    return jax.lax.with_sharding_constraint(x, ROWS)


def replicate(x: jax.Array) -> jax.Array:
    """Constrains `x` to be replicated over the ambient mesh, if any; under `jax.vmap`, over the devices of each row."""
    return (
        x
        if jax.sharding.get_abstract_mesh().empty
        else jax.lax.with_sharding_constraint(x, PartitionSpec())
    )


def map_rows(f: Callable[[Any], Any], tree: Any, count: int) -> Any:
    """`f` of `count` rows at a time on every device of the ambient mesh; the last `count` are filled up with copies of a row.

    tree: arrays with rows first; `f` returns the same. So every product in `f` has the same number of rows, and rounds the same
    way, whatever the total number.
    """
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    each = len(jax.tree.leaves(tree)[0]) // devices
    parts = -(-each // count)

    def split(
        x: jax.Array,
    ) -> jax.Array:  # [rows] to [parts, devices * count], each device's rows staying on it
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
    """`x` filled up to `count` rows with copies of its first row, so that every chunk runs the same compiled program."""
    return x if len(x) == count else np.concatenate([x, np.repeat(x[:1], count - len(x), axis=0)])
