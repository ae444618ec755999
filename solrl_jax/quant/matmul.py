"""`matmul(x, w)`: the product of every linear layer. `w` is an array, or a `Leaf` that knows how it multiplies."""

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
    """`x @ w` in the dtype of `x`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):  # the product would be rounded to whole numbers
        raise ValueError(f"x: is {x.dtype}; accepted: floating-point numbers")
    # rows flattened: XLA then sees a plain matrix product forwards and backwards, three times faster on CPU
    rows = x.reshape(-1, x.shape[-1])
    return checkpoint_name(tensor_parallel.join(matmul_sharded(rows, w)), MATMUL).reshape(
        *x.shape[:-1], -1
    )


def lazy_matmul(x: LazyActivation, w: Weight) -> LazyActivation:
    """`x @ w` of an activation that need not be in memory, to one that need not be. A plain weight needs and gives memory."""
    return w.lazy_matmul(x) if isinstance(w, Leaf) else LazyActivation.of(matmul(x.value, w))


def matmul_sharded(x: Float[Array, "rows n_in"], w: Weight) -> Float[Array, "rows n_out"]:
    """`x @ w` in the dtype of `x`, outputs divided over the devices of the mesh axis `tensor`."""
    return w.matmul(x) if isinstance(w, Leaf) else tensor_parallel.matmul(x, w.astype(x.dtype))


def dequantize(w: Weight) -> Float[Array, "... n_in n_out"]:
    """The float32 matrix that a weight stands for."""
    return w.dequantize() if isinstance(w, Leaf) else w.astype(jnp.float32)


def output_partition_specs(w: Weight | np.ndarray | jax.ShapeDtypeStruct, ways: int) -> Any:
    """A `PartitionSpec` for each array of a weight [..., in, out]: outputs divided `ways` ways over the mesh axis `tensor`."""
    return (
        w.output_specs(ways)
        if isinstance(w, Leaf)
        else tensor_parallel.spec_of(w.shape, w.ndim - 1, ways)
    )
