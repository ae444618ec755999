"""Flash attention as a plan traces it where there is no cuDNN: operands, results and what is kept for the gradient (the output
and a logarithm a query; arXiv 2205.14135) have the kernel's shapes and dtypes, and values mean nothing.

Two primitives, by whose names a plan knows them, compiled to sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float


def stand_in(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Bool[Array, "b n t s"] | None,
    bias: Float[Array, "#b n t s"] | None,
) -> Float[Array, "b t n h"]:
    """Takes the place of the kernel in `models.attention.attention`."""
    if mask is not None:  # JAX hands it to cuDNN as a bias
        hidden = jnp.asarray(jnp.finfo(q.dtype).min, q.dtype)
        bias = jnp.where(mask, jnp.zeros((), q.dtype) if bias is None else bias, hidden)
    return _attend(q, k, v, *([] if bias is None else [bias]))


def _forward(q: Array, k: Array, v: Array, *bias: Array) -> list[Array]:
    """The output [b, t, n, h], and the logarithm of each query's sum of exponentials [b, n, t] float32."""
    out = q + sum(map(_all, (k, v, *bias)))
    return [out, out[..., 0].swapaxes(1, 2).astype(jnp.float32)]


def _backward(q: Array, k: Array, v: Array, out: Array, lse: Array, g: Array, *bias: Array) -> list[Array]:
    """Gradients of q, k and v."""
    whole = g + out + lse.swapaxes(1, 2)[..., None].astype(g.dtype)
    one = _all(whole) + sum(map(_all, bias))
    return [q + whole + _all(k) + _all(v), k + one + _all(q), v + one]


def _all(x: Float[Array, "b _ _ _"]) -> Float[Array, "b 1 1 1"]:
    """A sum: nothing of an operand is left out, or what makes it would be."""
    return x.sum((1, 2, 3), keepdims=True)


def _primitive(name: str, f: Callable[..., list[Array]]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(f)
    primitive.def_abstract_eval(lambda *operands: jax.tree.map(_aval, jax.eval_shape(f, *operands)))
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=True))

    def batched(operands: Sequence[Array], axes: Sequence[int | None]) -> tuple[list[Array], list[int]]:
        """As the kernel does it: one batch of all batches."""
        count = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        rows = max(x.shape[int(axis == 0)] for x, axis in zip(operands, axes, strict=True))
        outs = primitive.bind(*(_all_batches(x, axis, count, rows) for x, axis in zip(operands, axes, strict=True)))
        return [x.reshape(count, -1, *x.shape[1:]) for x in outs], [0] * len(outs)

    batching.primitive_batchers[primitive] = batched
    return primitive


def _all_batches(x: Array, axis: int | None, count: int, rows: int) -> Array:
    x = x[None] if axis is None else jnp.moveaxis(x, axis, 0)
    return jnp.broadcast_to(x, (count, rows, *x.shape[2:])).reshape(count * rows, *x.shape[2:])


def _aval(x: jax.ShapeDtypeStruct) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(x.shape, x.dtype)


forward_p = _primitive("flash_attention", _forward)
backward_p = _primitive("flash_attention_gradient", _backward)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, *bias: Array) -> Array:
    return forward_p.bind(q, k, v, *bias)[0]


def _save(q: Array, k: Array, v: Array, *bias: Array) -> tuple[Array, Any]:
    out, lse = forward_p.bind(q, k, v, *bias)
    return out, (q, k, v, out, lse, bias)


def _gradient(saved: Any, g: Array) -> tuple[Array, ...]:
    *operands, bias = saved
    return *backward_p.bind(*operands, g, *bias), *map(jnp.zeros_like, bias)


_attend.defvjp(_save, _gradient)
