"""`LowRank`: a frozen weight with a trainable low-rank update beside it (LoRA, arXiv
2106.09685).
"""

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
    """The weight `base + scale * a @ b` (arXiv 2106.09685, equation 3; our `a` and `b` are the
    paper's A and B, transposed).

    Attributes:
        base: The frozen matrix [..., in, out], of any floating-point dtype.
        a: The trainable factor [..., in, rank], float32.
        b: The trainable factor [..., rank, out], float32.
        scale: alpha / rank.
    """

    # The adapters are replicated: they are small, and their gradients are sums over the outputs.
    output_axes: ClassVar[Mapping[str, int]] = {"base": -1}

    base: Float[Array, "... n_in n_out"]
    a: Float[Array, "... n_in rank"]
    b: Float[Array, "... rank n_out"]
    scale: float = dataclasses.field(metadata={"static": True})

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Returns `x @ base + scale * x @ a @ b` in the dtype of `x`."""
        y = tensor_parallel.matmul(x, self.base.astype(x.dtype))
        return y + _low_rank_matmul(self.scale, x, self.a, self.b)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the merged weight `base + scale * a @ b` in float32."""
        return self.base.astype(jnp.float32) + self.scale * self.a @ self.b


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_rank_matmul(
    scale: float,
    x: Float[Array, "rows n_in"],
    a: Float[Array, "n_in rank"],
    b: Float[Array, "rank n_out"],
) -> Float[Array, "rows n_out"]:
    """`scale * x @ a @ b` in the dtype of `x`, with gradients of `a` and `b` that are summed over
    the rows in float32.

    JAX's own gradient of a BF16 matmul would round the gradient of the weight to BF16 once per
    micro-batch. The result would depend on how the rows are grouped into micro-batches, and small
    contributions would be lost.

    Args:
        scale: alpha / rank.
        x: inputs.
        a: the first LoRA factor.
        b: the second LoRA factor.
    """
    return _low_rank_forward(scale, x, a, b)[0]


def _low_rank_forward(scale, x, a, b):
    """The forward pass of `_low_rank_matmul`: its result, and what the backward pass needs."""
    inner = checkpoint_name(x @ a.astype(x.dtype), MATMUL)
    # The scale is applied to the small factor `b`: applied to the result, it would read and write
    # all outputs once more.
    scaled_b = (scale * tensor_parallel.shard_weight(b, -1)).astype(x.dtype)
    return inner @ scaled_b, (x, inner, a, b)


def _low_rank_backward(scale, residuals, g):
    """The backward pass of `_low_rank_matmul`: the gradients of `x`, `a` and `b` from that of the
    result, `g`.
    """
    x, inner, a, b = residuals
    g_inner = g @ (scale * b).astype(g.dtype).T
    g_x = g_inner @ a.astype(g.dtype).T
    g_a = _sum_over_rows(x, g_inner).astype(a.dtype)
    g_b = (scale * _sum_over_rows(inner, g)).astype(b.dtype)
    return g_x, g_a, g_b


def _sum_over_rows(left, right):
    """`left.T @ right`, accumulated in float32."""
    return jnp.dot(left.T, right, preferred_element_type=jnp.float32)


_low_rank_matmul.defvjp(_low_rank_forward, _low_rank_backward)
