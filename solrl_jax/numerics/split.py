"""Products divided over devices by their outputs: tensor parallelism that splits no sum.

Along the mesh's axis `tensor`, each device computes some of a linear's outputs, or some of the heads, from whole inputs, and is
then sent the others. (Megatron's scheme, arXiv 1909.08053, splits every second product along its contraction instead: it sends
less, and adds partial sums, so that results would depend on the mesh.) Where the ambient mesh has no such axis, or one of
size one, every function here returns what it is given.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

TENSOR = "tensor"


def ways() -> int:
    """Over how many devices products are divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def split(x: Array, axis: int) -> Array:
    """`x` with `axis` divided over the devices, whole if it does not come out even; other axes stay as they are."""
    return _constrain(x, axis, TENSOR) if ways() > 1 and x.shape[axis] % ways() == 0 else join(x, axis)


def join(x: Array, axis: int = -1) -> Array:
    """`x` with `axis` whole on every device; other axes stay as they are."""
    return _constrain(x, axis, None) if ways() > 1 else x


def spec_of(shape: tuple[int, ...], axis: int | None, ways: int) -> PartitionSpec:
    """The placement of a parameter that is whole but for `axis`, which is divided if there is one and it comes out even."""
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and ways > 1 and shape[axis] % ways == 0:
        spec[axis] = TENSOR
    return PartitionSpec(*spec)


def _constrain(x: Array, axis: int, name: str | None) -> Array:
    spec: list = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = name
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
