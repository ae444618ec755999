"""The matmul of every linear layer. A weight is an array or a `Leaf`, which defines its own."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.leaf import MATMUL, Leaf, Quantized
from solrl_jax.quant.low_rank import LowRank

__all__ = [
    "LowRank",
    "Quantized",
    "Weight",
    "dequantize",
    "lazy_matmul",
    "matmul",
    "matmul_sharded",
    "output_partition_specs",
]

Weight: TypeAlias = Float[Array, "... n_in n_out"] | Leaf


def matmul(x: Float[Array, "... n_in"], w: Weight) -> Float[Array, "... n_out"]:
    """Multiplies activations by a weight matrix.

    The result is named "matmul" for gradient checkpointing.

    Args:
        x: Activations [..., in] of a floating-point dtype.
        w: A single weight matrix [in, out]: an array, which is cast to the dtype of `x`, or a
            `Leaf`. A quantized leaf is not differentiable, not even with respect to `x`.

    Returns:
        `x @ w` [..., out], complete on every device of the mesh axis `tensor`. It has the dtype of
        `x` (a `HalfPrecisionWeight` gives its own dtype).

    Raises:
        ValueError: If `x` is not of a floating-point dtype, or does not have the `in` columns of an
            NVFP4 weight. Other wrong shapes are JAX's TypeError.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has dtype {x.dtype}; matmul takes floating-point activations")
    # With flattened rows, XLA sees a plain matmul forwards and backwards, which is three times
    # faster on CPU.
    rows = x.reshape(-1, x.shape[-1])
    y = checkpoint_name(tensor_parallel.gather_axis(matmul_sharded(rows, w)), MATMUL)
    return y.reshape(*x.shape[:-1], -1)


def lazy_matmul(x: LazyActivation, w: Weight) -> LazyActivation:
    """Computes `x @ w` for a lazy activation.

    Args:
        x: The lazy activation [b, s, n_in], of a floating-point dtype; for a leaf in FP8, in BF16
            or float32, because unscaled sums could exceed the range of float16.
        w: A single matrix [n_in, n_out]: an array, or a leaf of the parameter tree. A leaf in FP8,
            INT8 or NVFP4 reads only codes and scales of `x`. For all other weights (also a
            `Corrected` leaf, a low-rank branch beside a matrix in such a format), `x` is written to
            memory, and the lazy result holds an array that is in memory already.

    Returns:
        The lazy result [b, s, n_out] in the dtype of `x` (a `HalfPrecisionWeight` gives its own
        dtype), complete on every device of the mesh axis `tensor`. Unless the weight is in FP8,
        INT8 or NVFP4, it is marked as exact (`LazyPart.exact`): plain JAX operations then compute
        functions of it in the dtypes of their arrays, and not in float32.

    Raises:
        ValueError: If `w` is an array and `x` is not of a floating-point dtype.
    """
    if isinstance(w, Leaf):
        return w.lazy_matmul(x)
    return LazyActivation.from_array(matmul(x.value, w))


def matmul_sharded(x: Float[Array, "rows n_in"], w: Weight) -> Float[Array, "rows n_out"]:
    """Computes `x @ w`. Unlike `matmul`, it may leave the outputs sharded over the mesh axis
    `tensor`, and does not name them for gradient checkpointing.

    Args:
        x: Inputs [rows, n_in] of a floating-point dtype, which is not checked.
        w: A single matrix [n_in, n_out]: an array, which is cast to the dtype of `x`, or a leaf of
            the parameter tree. A quantized leaf is not differentiable, not even with respect to
            `x`.

    Returns:
        The result [rows, n_out] in the dtype of `x`; for a `HalfPrecisionWeight` in the dtype of
        the weight, FP16 or BF16.

    Raises:
        ValueError: If `w` is an NVFP4 weight and `x` does not have `n_in` columns. Other wrong
            shapes are JAX's TypeError.
    """
    if isinstance(w, Leaf):
        return w.matmul(x)
    return tensor_parallel.column_parallel_matmul(x, w.astype(x.dtype))


def dequantize(w: Weight) -> Float[Array, "... n_in n_out"]:
    """Returns the matrix that a weight represents, [..., n_in, n_out] in float32. Leading axes are
    kept.

    Args:
        w: An array of any floating-point dtype, or a leaf: LoRA adapters are merged, and codes are
            multiplied by their scales.

    Returns:
        The matrix. For a quantized leaf, it is an approximation of the matrix before quantization.
    """
    return w.dequantize() if isinstance(w, Leaf) else w.astype(jnp.float32)


def output_partition_specs(w: Weight | np.ndarray | jax.ShapeDtypeStruct, shards: int) -> Any:
    """Returns the sharding of a weight [..., in, out] over the mesh axis `tensor`.

    Args:
        w: An array, an abstract array or a leaf. The outputs of an array are its last axis.
        shards: The number of shards along the axis. 1 replicates everything.

    Returns:
        A `PartitionSpec` for an array; for a leaf, the leaf with a `PartitionSpec` in place of each
        array. The outputs are sharded where their number is a multiple of `shards`, and everything
        else is replicated.
    """
    if isinstance(w, Leaf):
        return w.partition_specs(shards)
    return tensor_parallel.partition_spec(w.shape, w.ndim - 1, shards)
