"""`LowRank`: a frozen weight with a trainable low-rank update beside it (LoRA)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.leaf import MATMUL, Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(Leaf):
    """The weight `base + scale * a @ b` (arXiv 2106.09685, equation 3).

    `a` and `b` are the paper's A and B, transposed.

    Attributes:
        output_axes: A class attribute: by field, the axis of the outputs, which may be sharded over
            the mesh axis `tensor`: the last of `base`. The adapters are replicated.
        base: The frozen matrix [..., in, out], of any floating-point dtype.
        a: The trainable factor [..., in, rank], float32.
        b: The trainable factor [..., rank, out], float32.
        scale: alpha / rank. Static: part of the tree's structure.
    """

    # The adapters are replicated: they are small, and their gradients are sums over the outputs.
    output_axes: ClassVar[Mapping[str, int]] = {"base": -1}

    base: Float[Array, "... n_in n_out"]
    a: Float[Array, "... n_in rank"]
    b: Float[Array, "... rank n_out"]
    scale: float = dataclasses.field(metadata={"static": True})

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Returns `x @ base + scale * x @ a @ b` for a single matrix, with all factors cast to the
        dtype of `x`.

        Args:
            x: Activations [rows, n_in] of a floating-point dtype.

        Returns:
            The result [rows, n_out] in the dtype of `x`, with its columns sharded over the mesh
            axis `tensor` if n_out is a multiple of the size of that axis. Gradients of `a` and `b`
            are accumulated in float32. The gradient of `base` is not stopped, but callers do not
            request it.
        """
        y = tensor_parallel.column_parallel_matmul(x, self.base.astype(x.dtype))
        return y + _low_rank_matmul(self.scale, x, self.a, self.b)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the merged weight `base + scale * a @ b` [..., in, out] in float32."""
        return self.base.astype(jnp.float32) + self.scale * self.a @ self.b


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_rank_matmul(
    scale: float,
    x: Float[Array, "rows n_in"],
    a: Float[Array, "n_in rank"],
    b: Float[Array, "rank n_out"],
) -> Float[Array, "rows n_out"]:
    """Computes `scale * x @ a @ b` in the dtype of `x`, with gradients of `a` and `b` summed in
    float32.

    JAX's own gradient of a BF16 matmul would round the gradient of the weight to BF16 once per
    micro-batch. The result would depend on how the rows are grouped into micro-batches, and small
    contributions would be lost. Gradient checkpointing knows `x @ a` by the name "matmul".

    Args:
        scale: alpha / rank, a Python number. It has no gradient.
        x: Inputs [rows, n_in].
        a: The first LoRA factor [n_in, rank], float32; cast to the dtype of `x`.
        b: The second LoRA factor [rank, n_out], float32; multiplied by `scale`, then cast.

    Returns:
        The low-rank update of the outputs, [rows, n_out], in the dtype of `x`, sharded over the
        mesh axis `tensor` if n_out is a multiple of the axis.
    """
    return _low_rank_forward(scale, x, a, b)[0]


def _low_rank_forward(scale, x, a, b):
    """Computes the forward pass of `_low_rank_matmul`.

    Args:
        scale: alpha / rank.
        x: Inputs [rows, n_in].
        a: The first LoRA factor [n_in, rank].
        b: The second LoRA factor [rank, n_out].

    Returns:
        The result `scale * x @ a @ b` [rows, n_out], and the residuals for the backward pass, (x,
        x @ a, a, b), where x @ a [rows, rank] is named "matmul" for gradient checkpointing.
    """
    inner = checkpoint_name(x @ a.astype(x.dtype), MATMUL)
    # The scale is applied to the small factor `b`: applied to the result, it would read and write
    # all outputs once more.
    scaled_b = (scale * tensor_parallel.shard_weight(b, -1)).astype(x.dtype)
    return inner @ scaled_b, (x, inner, a, b)


def _low_rank_backward(scale, residuals, g):
    """Computes the backward pass of `_low_rank_matmul`.

    Args:
        scale: alpha / rank.
        residuals: The residuals of `_low_rank_forward`: (x, x @ a, a, b).
        g: The gradient of the result [rows, n_out].

    Returns:
        The gradients of x (through the low-rank update alone, in the dtype of `g`), of a and of b
        (summed over the rows in float32, and then cast to the dtypes of a and b).
    """
    x, inner, a, b = residuals
    g_inner = g @ (scale * b).astype(g.dtype).T
    g_x = g_inner @ a.astype(g.dtype).T
    g_a = _sum_over_rows(x, g_inner).astype(a.dtype)
    g_b = (scale * _sum_over_rows(inner, g)).astype(b.dtype)
    return g_x, g_a, g_b


def _sum_over_rows(left, right):
    """Computes `left.T @ right`, the sum over rows of their outer products.

    Args:
        left: A matrix [rows, m].
        right: A matrix [rows, n], of the dtype of `left`.

    Returns:
        The sums [m, n], accumulated and returned in float32.
    """
    return jnp.dot(left.T, right, preferred_element_type=jnp.float32)


_low_rank_matmul.defvjp(_low_rank_forward, _low_rank_backward)
