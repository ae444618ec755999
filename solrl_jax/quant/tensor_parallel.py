"""Products divided over devices by their outputs: tensor parallelism that splits no sum.

Along the mesh axis `tensor`, each device computes some outputs of a linear, or some of the heads, from all of the inputs, and
is then sent the others. Megatron (arXiv 1909.08053) divides every second product along its contraction instead. That sends
less, but adds partial sums, so that results would depend on the mesh. Where the ambient mesh has no such axis, or one of size
one, nothing is divided.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

TENSOR = "tensor"


def ways() -> int:
    """Over how many devices products are divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(TENSOR, 1)


def split(x: Array, axis: int) -> Array:
    """`x` with `axis` divided over the devices, or replicated if it does not come out even; other axes stay as they are."""
    return (
        _constrain(x, axis, TENSOR) if ways() > 1 and x.shape[axis] % ways() == 0 else join(x, axis)
    )


def join(x: Array, axis: int = -1) -> Array:
    """`x` with all of `axis` on every device; other axes stay as they are."""
    return _constrain(x, axis, None) if ways() > 1 else x


def spec_of(shape: tuple[int, ...], axis: int | None, ways: int) -> PartitionSpec:
    """The placement of a parameter: `axis` divided `ways` ways if it comes out even, all other axes replicated."""
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and ways > 1 and shape[axis] % ways == 0:
        spec[axis] = TENSOR
    return PartitionSpec(*spec)


def shard_weight(w: Array, axis: int) -> Array:
    """A parameter with `axis` divided over the devices, and all other axes replicated."""
    return jax.lax.with_sharding_constraint(w, spec_of(w.shape, axis, ways())) if ways() > 1 else w


def matmul(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]
) -> Float[Array, "rows n_out"]:
    """`x @ w`, outputs divided over the devices."""
    return x @ w if ways() == 1 else _divided(x, w)


@jax.custom_vjp
def _divided(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]
) -> Float[Array, "rows n_out"]:
    """`x @ w`: each device computes some columns. Likewise for the gradient of `x`, for which it is sent whole rows of `w`."""
    return x @ shard_weight(w, -1)


def _divided_forward(x, w):
    return _divided(x, w), (x, w)


def _divided_backward(saved, g):
    x, w = saved
    return join(g @ shard_weight(w, 0).T), x.T @ g


_divided.defvjp(_divided_forward, _divided_backward)


def _constrain(x: Array, axis: int, name: str | None) -> Array:
    spec: list = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = name
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
