"""`LowRank`: a frozen weight with a trained low-rank correction beside it (LoRA)."""

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
    """`base + scale * a b` (Hu et al. 2021, eq. 3, with our a, b = A^T, B^T).

    base: [..., in, out], frozen, any dtype; a: [..., in, rank] and b: [..., rank, out], float32, trained; scale = alpha / rank.
    """

    # adapters are small, and their gradients are sums over outputs: they are replicated
    output_axes: ClassVar[Mapping[str, int]] = {"base": -1}

    base: Float[Array, "... n_in n_out"]
    a: Float[Array, "... n_in rank"]
    b: Float[Array, "... rank n_out"]
    scale: float = dataclasses.field(metadata={"static": True})

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        return tensor_parallel.matmul(x, self.base.astype(x.dtype)) + _low_rank(
            self.scale, x, self.a, self.b
        )

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return self.base.astype(jnp.float32) + self.scale * self.a @ self.b


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_rank(
    scale: float,
    x: Float[Array, "rows n_in"],
    a: Float[Array, "n_in rank"],
    b: Float[Array, "rank n_out"],
) -> Float[Array, "rows n_out"]:
    """`scale x a b` in the dtype of `x`, with gradients of `a` and `b` summed over rows in float32.

    JAX's own gradient of a product in BF16 rounds the gradient of the weight to BF16, once a micro-batch. The result would
    depend on how rows are grouped, and small contributions would be lost.
    """
    return _low_rank_forward(scale, x, a, b)[0]


def _low_rank_forward(scale, x, a, b):
    inner = checkpoint_name(x @ a.astype(x.dtype), MATMUL)
    # the scale goes to the small factor, and to its gradient: a product of its own would read and write all outputs again
    return inner @ (scale * tensor_parallel.shard_weight(b, -1)).astype(x.dtype), (x, inner, a, b)


def _low_rank_backward(scale, saved, g):
    x, inner, a, b = saved
    g_inner = g @ (scale * b).astype(g.dtype).T

    def over_rows(left, right):
        return jnp.dot(left.T, right, preferred_element_type=jnp.float32)

    return (
        g_inner @ a.astype(g.dtype).T,
        over_rows(x, g_inner).astype(a.dtype),
        (scale * over_rows(inner, g)).astype(b.dtype),
    )


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)
