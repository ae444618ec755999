"""`matmul(x, w)`: the product of every linear layer, chosen by what kind of leaf the weight is.

Precision is a leaf type. The BF16 policy, its LoRA-adapted form and its quantised copies are one network with other leaves:
an array, a `LowRank`, one of `Quantized` (`formats.py` has a name for each, `principal.py` what may go past it).
"""

import dataclasses
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics import fp8, mx, nvfp4, principal, split
from solrl_jax.numerics.fp8 import FP8Tensor
from solrl_jax.numerics.mx import MXTensor
from solrl_jax.numerics.nvfp4 import QTensor, WeightOnly
from solrl_jax.numerics.principal import Corrected, Probe


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


Quantized: TypeAlias = QTensor | WeightOnly | MXTensor | FP8Tensor | Corrected
Weight: TypeAlias = Array | LowRank | Quantized | Probe


def matmul(x: Float[Array, "... n_in"], w: Weight) -> Float[Array, "... n_out"]:
    """`x @ w` in the dtype of `x`, for any kind of weight leaf."""
    # rows flattened: XLA then sees a plain matrix product forwards and backwards, three times faster on CPU
    rows = x.reshape(-1, x.shape[-1])
    return split.join(_product(rows, w)).reshape(*x.shape[:-1], -1)


def outputs_divided(w: Array | LowRank | Quantized, ways: int) -> Any:
    """Of a leaf [..., in, out], a `PartitionSpec` an array: outputs divided `ways` ways over the mesh axis `tensor`."""
    if isinstance(w, LowRank):  # adapters are small, and their gradients are sums over outputs
        whole: Any = split.spec_of((), None, ways)
        return LowRank(outputs_divided(w.base, ways), whole, whole, w.scale)
    if isinstance(w, Corrected):
        basis: Any = split.spec_of((), None, ways)
        carried: Any = split.spec_of(w.carried.shape, w.carried.ndim - 1, ways)
        return Corrected(outputs_divided(w.remainder, ways), basis, carried)
    if isinstance(w, Quantized):
        inner = w.weight if isinstance(w, WeightOnly) else w
        axis = inner.codes.ndim - 2  # the outputs are before the contraction, in the scales too
    else:
        axis = w.ndim - 1
    return jax.tree.map(lambda x: split.spec_of(x.shape, axis if axis < x.ndim else None, ways), w)


def _product(x: Float[Array, "rows n_in"], w: Weight) -> Float[Array, "rows n_out"]:
    match w:
        case LowRank():
            return _dense(x, w.base.astype(x.dtype)) + _low_rank(w.scale, x, w.a, w.b)
        case QTensor():
            return nvfp4.scaled_matmul(x, w)
        case WeightOnly():
            return nvfp4.weight_only_matmul(x, w)
        case MXTensor():
            return mx.scaled_matmul(x, w)
        case FP8Tensor():
            return fp8.scaled_matmul(x, w)
        case Corrected():
            inner, rest = principal.divide(x, w)
            return _product(rest, w.remainder) + inner @ _at(w.carried, -1).astype(x.dtype)
        case Probe():
            return principal.probe(x, w.weight.astype(x.dtype), w.basis)
    return _dense(x, w.astype(x.dtype))


def _dense(x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]) -> Float[Array, "rows n_out"]:
    return x @ w if split.ways() == 1 else _divided(x, w)


@jax.custom_vjp
def _divided(x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"]) -> Float[Array, "rows n_out"]:
    """`x @ w`, each device some of its columns; likewise its gradient, for which a device is sent whole rows of `w`."""
    return x @ _at(w, -1)


def _divided_forward(x, w):
    return _divided(x, w), (x, w)


def _divided_backward(saved, g):
    x, w = saved
    return split.join(g @ _at(w, 0).T), x.T @ g


_divided.defvjp(_divided_forward, _divided_backward)


def _at(w: Float[Array, "n_in n_out"], axis: int) -> Float[Array, "n_in n_out"]:
    return jax.lax.with_sharding_constraint(w, split.spec_of(w.shape, axis, split.ways())) if split.ways() > 1 else w


def dequantize(w: Quantized) -> Float[Array, "... n_in n_out"]:
    """The float32 matrix that a quantised leaf stands for."""
    match w:
        case QTensor():
            return nvfp4.dequantize(w)
        case WeightOnly():
            return nvfp4.dequantize(w.weight)
        case MXTensor():
            return mx.dequantize(w)
        case Corrected():
            return dequantize(w.remainder) + w.basis.astype(jnp.float32) @ w.carried.astype(jnp.float32)
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
    return inner @ _at(b, -1).astype(x.dtype) * jnp.asarray(scale, x.dtype), (x, inner, a, b)


def _low_rank_backward(scale, saved, g):
    x, inner, a, b = saved
    g = g * jnp.asarray(scale, g.dtype)
    g_inner = g @ b.astype(g.dtype).T
    over_rows = lambda left, right: jnp.dot(left.T, right, preferred_element_type=jnp.float32)
    return g_inner @ a.astype(g.dtype).T, over_rows(x, g_inner).astype(a.dtype), over_rows(inner, g).astype(b.dtype)


_low_rank.defvjp(_low_rank_forward, _low_rank_backward)
