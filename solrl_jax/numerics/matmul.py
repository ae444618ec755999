"""`matmul(x, w)`: the product of every linear layer, chosen by what kind of leaf the weight is.

Precision is a leaf type. The BF16 policy, its LoRA-adapted form and its quantised copies are one network with other leaves:
an array, a `LowRank`, one of `Quantized` (`formats.py` has a name for each).
"""

import dataclasses
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics import fp8, mx, nvfp4
from solrl_jax.numerics.fp8 import FP8Tensor
from solrl_jax.numerics.mx import MXTensor
from solrl_jax.numerics.nvfp4 import QTensor, WeightOnly


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A weight with a low-rank correction: `base + scale * a b` (LoRA; Hu et al. 2021, eq. 3, with our a, b = A^T, B^T).

    base: [..., in, out], frozen, any dtype; a: [..., in, rank] and b: [..., rank, out], float32, trained; scale = alpha / rank.
    """

    base: Array
    a: Float[Array, "... n_in rank"]
    b: Float[Array, "... rank n_out"]
    scale: float


Quantized: TypeAlias = QTensor | WeightOnly | MXTensor | FP8Tensor
Weight: TypeAlias = Array | LowRank | Quantized


def matmul(x: Float[Array, "... n_in"], w: Weight) -> Float[Array, "... n_out"]:
    """`x @ w` in the dtype of `x`, for any kind of weight leaf."""
    # rows flattened: XLA then sees a plain matrix product forwards and backwards, three times faster on CPU
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, w).reshape(*x.shape[:-1], -1)


def _product(x: Float[Array, "rows n_in"], w: Weight) -> Float[Array, "rows n_out"]:
    match w:
        case LowRank():
            return x @ w.base.astype(x.dtype) + _low_rank(w.scale, x, w.a, w.b)
        case QTensor():
            return nvfp4.scaled_matmul(x, w)
        case WeightOnly():
            return nvfp4.weight_only_matmul(x, w)
        case MXTensor():
            return mx.scaled_matmul(x, w)
        case FP8Tensor():
            return fp8.scaled_matmul(x, w)
    return x @ w.astype(x.dtype)


def dequantize(w: Quantized) -> Float[Array, "... n_in n_out"]:
    """The float32 matrix that a quantised leaf stands for."""
    match w:
        case QTensor():
            return nvfp4.dequantize(w)
        case WeightOnly():
            return nvfp4.dequantize(w.weight)
        case MXTensor():
            return mx.dequantize(w)
    return fp8.dequantize(w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_rank(scale: float, x: Float[Array, "rows n_in"], a: Array, b: Array) -> Float[Array, "rows n_out"]:
    """`scale x a b` in the dtype of `x`, with gradients of `a` and `b` summed over rows in float32.

    Left to itself, a product in BF16 rounds the gradient of its weight to BF16: per micro-batch, so that the result would
    depend on how rows are grouped, and small contributions would be lost.
    """
    return _low_rank_forward(scale, x, a, b)[0]


def _low_rank_forward(scale, x, a, b):
    inner = x @ a.astype(x.dtype)
    return inner @ b.astype(x.dtype) * jnp.asarray(scale, x.dtype), (x, inner, a, b)


def _low_rank_backward(scale, saved, g):
    x, inner, a, b = saved
    g = g * jnp.asarray(scale, g.dtype)
    g_inner = g @ b.astype(g.dtype).T
    over_rows = lambda left, right: jnp.dot(left.T, right, preferred_element_type=jnp.float32)
    return g_inner @ a.astype(g.dtype).T, over_rows(x, g_inner).astype(a.dtype), over_rows(inner, g).astype(b.dtype)


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)
