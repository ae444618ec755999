"""The mesh and where things lie on it. One device is the mesh of size one: there is no other path.

Two axes: rows (candidates, samples) are split over both; the frozen base and the adapters are split over `fsdp` and whole
on every group of `data`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp")
ROWS = PartitionSpec(AXES)  # the leading axis of anything that has a row a sample
# Every stage is compiled with it. XLA may otherwise keep float32 where BF16 is asked for, as it happens to fuse: each program
# differently, so that results would depend on the mesh (gradients by 4 %, measured).
jit = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
SMALLEST_SHARDED = 2**12  # elements; splitting less costs more in messages than it saves in memory


def make_mesh(data: int, fsdp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A `data` x `fsdp` mesh; `data = -1` takes all the devices that are left.

    Raises ValueError when the devices do not come out even.
    """
    devices = list(jax.devices() if devices is None else devices)
    asked = data
    if data == -1:
        data = max(len(devices) // fsdp, 1)
        wanted = len(devices)
    else:
        wanted = data * fsdp
    if data * fsdp != wanted or wanted > len(devices):
        raise ValueError(
            f"mesh.data={asked}, mesh.fsdp={fsdp}: need {data * fsdp} of the {len(devices)} device(s), all of them if data=-1"
        )
    return jax.make_mesh((data, fsdp), AXES, (jax.sharding.AxisType.Auto,) * 2, devices=devices[: data * fsdp])


def parameter_sharding(mesh: Mesh, tree: Any) -> Any:
    """A sharding a leaf: its largest axis that `fsdp` divides is split over `fsdp`; small leaves are whole everywhere."""
    size = mesh.shape["fsdp"]

    def place(leaf) -> NamedSharding:
        spec: list[str | None] = [None] * leaf.ndim
        divisible = [i for i, n in enumerate(leaf.shape) if n % size == 0]
        if size > 1 and divisible and np.prod(leaf.shape) >= SMALLEST_SHARDED:
            spec[max(divisible, key=lambda i: (leaf.shape[i], i))] = "fsdp"
        while spec and spec[-1] is None:  # one spelling a placement: jit tells P() from P(None) and would compile again
            spec.pop()
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(place, tree)


def placement(mesh: Mesh) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
    """Where a parameter of some path and shape belongs, one at a time (`models.weights.Placement`)."""
    return lambda path, shape: parameter_sharding(mesh, jax.ShapeDtypeStruct(shape, np.float32))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, ROWS)


def split_rows(x: jax.Array) -> jax.Array:
    """Constrains the leading axis to be split over the ambient mesh's devices."""
    return jax.lax.with_sharding_constraint(x, ROWS)


def map_rows(f: Callable[[Any], Any], tree: Any, count: int) -> Any:
    """`f` of `count` rows at a time on every device of the ambient mesh, one after another; what is missing is filled up.

    tree: arrays with rows first; so is what `f` returns. Every product in `f` then has the same number of rows, and rounds the
    same way, however many there are in all.
    """
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    each = len(jax.tree.leaves(tree)[0]) // devices
    parts = -(-each // count)

    def split(x: jax.Array) -> jax.Array:  # [rows] to [parts, devices * count], each device's rows staying on it
        x = x.reshape(devices, each, *x.shape[1:])
        x = jnp.concatenate([x, jnp.repeat(x[:, :1], parts * count - each, axis=1)], axis=1)
        return x.reshape(devices, parts, count, *x.shape[2:]).swapaxes(0, 1).reshape(parts, devices * count, *x.shape[2:])

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(parts, devices, count, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(devices, parts * count, *x.shape[3:])[:, :each].reshape(devices * each, *x.shape[3:])

    place = split_rows if devices > 1 else lambda x: x
    return jax.tree.map(join, jax.lax.map(lambda part: f(jax.tree.map(place, part)), jax.tree.map(split, tree)))


def pad_rows(x: np.ndarray, count: int) -> np.ndarray:
    """`x` with its first row repeated up to `count` rows: every chunk runs the one compiled program."""
    return x if len(x) == count else np.concatenate([x, np.repeat(x[:1], count - len(x), axis=0)])
