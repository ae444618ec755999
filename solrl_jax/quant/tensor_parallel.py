"""Tensor parallelism that shards the outputs of every matmul and splits no sum.

Along the mesh axis `tensor`, each device computes some of the outputs of a linear layer, or some
attention heads, from all of the inputs. The outputs are then all-gathered. Megatron (arXiv
1909.08053) shards every second matmul along its contraction instead. That communicates less, but it
adds partial sums, so results would depend on the mesh.

All functions read the mesh of `jax.set_mesh`. If it has no axis `tensor`, or one of size 1, they
leave arrays as they are.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from solrl_jax.quant.mesh_axes import TENSOR, axis_size


def shard_axis(x: Array, axis: int) -> Array:
    """Shards one axis of an activation over the mesh axis `tensor`.

    Args:
        x: Any array. The sharding of its other axes is left to the partitioner.
        axis: The axis to shard, possibly negative. If its size is not a multiple of the size of the
            mesh axis, it is replicated instead.

    Returns:
        `x` with a sharding constraint; `x` itself if the mesh axis has size 1 or there is no mesh.
    """
    if axis_size(TENSOR) > 1 and x.shape[axis] % axis_size(TENSOR) == 0:
        return _constrain(x, axis, TENSOR)
    return gather_axis(x, axis)


def gather_axis(x: Array, axis: int = -1) -> Array:
    """Gathers one axis of an activation: every device receives all of it.

    Args:
        x: Any array. The sharding of its other axes is left to the partitioner.
        axis: The axis, possibly negative, which may be sharded over the mesh axis `tensor`.

    Returns:
        `x` with a sharding constraint; `x` itself if the mesh axis has size 1 or there is no mesh.
    """
    return _constrain(x, axis, None) if axis_size(TENSOR) > 1 else x


def partition_spec(shape: tuple[int, ...], axis: int | None, shards: int) -> PartitionSpec:
    """Returns the sharding of a parameter over the mesh axis `tensor`. Does not read the current
    mesh.

    Args:
        shape: The shape of the parameter, with leading axes.
        axis: The axis to shard, possibly negative. None replicates the parameter.
        shards: The number of shards. If it is 1, or if the size of the axis is not a multiple of
            it, the parameter is replicated.

    Returns:
        A spec with one entry per axis: "tensor" for `axis`, None for all other axes.
    """
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and shards > 1 and shape[axis] % shards == 0:
        spec[axis] = TENSOR
    return PartitionSpec(*spec)


def shard_weight(w: Array, axis: int) -> Array:
    """Shards one axis of a weight over the mesh axis `tensor`, and replicates all other axes.

    Args:
        w: The weight, of any shape.
        axis: The axis to shard, possibly negative. If its size is not a multiple of the size of the
            mesh axis, the whole weight is replicated.

    Returns:
        `w` with a sharding constraint; `w` itself if the mesh axis has size 1 or there is no mesh.
    """
    if axis_size(TENSOR) == 1:
        return w
    return jax.lax.with_sharding_constraint(w, partition_spec(w.shape, axis, axis_size(TENSOR)))


def column_parallel_matmul(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]
) -> Float[Array, "rows n_out"]:
    """Computes `x @ w` with the outputs sharded over the mesh axis `tensor`. No sum over inputs is
    split.

    Args:
        x: Inputs [rows, n_in].
        w: The weight [n_in, n_out], of the dtype of `x`.

    Returns:
        The result [rows, n_out], sharded by its columns. If n_out is not a multiple of the size of
        the mesh axis, every device computes all columns; without a mesh it is plain `x @ w`.
    """
    return x @ w if axis_size(TENSOR) == 1 else _sharded_matmul(x, w)


@jax.custom_vjp
def _sharded_matmul(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]
) -> Float[Array, "rows n_out"]:
    """Computes `x @ w`. Each device along the mesh axis `tensor` computes some of the columns.

    The gradient of `x` is computed in shards of its columns, for which each device receives whole
    rows of `w`; the shards are then gathered. If n_out (for the gradient: n_in) is not a multiple
    of the size of the mesh axis, every device computes all columns.

    Args:
        x: Inputs [rows, n_in].
        w: The weight [n_in, n_out], of the dtype of `x`.

    Returns:
        The result [rows, n_out], sharded by its columns.
    """
    return x @ shard_weight(w, -1)


def _sharded_matmul_forward(x, w):
    """Computes the forward pass of `_sharded_matmul`.

    Args:
        x: Inputs [rows, n_in].
        w: The weight [n_in, n_out].

    Returns:
        The result [rows, n_out], and the residuals for the backward pass: (x, w).
    """
    return _sharded_matmul(x, w), (x, w)


def _sharded_matmul_backward(residuals, g):
    """Computes the backward pass of `_sharded_matmul`.

    Args:
        residuals: The operands x [rows, n_in] and w [n_in, n_out].
        g: The gradient of the result [rows, n_out].

    Returns:
        The gradients of x [rows, n_in], complete on every device of the mesh axis `tensor`, and of
        w [n_in, n_out], whose sharding is left to the partitioner.
    """
    x, w = residuals
    return gather_axis(g @ shard_weight(w, 0).T), x.T @ g


_sharded_matmul.defvjp(_sharded_matmul_forward, _sharded_matmul_backward)


def _constrain(x: Array, axis: int, name: str | None) -> Array:
    """Constrains the sharding of one axis, and leaves the other axes to the partitioner.

    Args:
        x: Any array.
        axis: The axis that is constrained, possibly negative.
        name: The mesh axis over which it is sharded. None: it is replicated.

    Returns:
        `x` with the sharding constraint.
    """
    spec: list = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = name
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
