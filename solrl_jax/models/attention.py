"""Softmax attention: the one function through which every network here attends, and the one place that picks a kernel.

Scaled dot products (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1) with heads that may share keys and values
(arXiv 2305.13245), and optionally with the soft cap on the logits of Gemma 2 (arXiv 2408.00118, section 2) or with a bias added
to them (the relative positions of T5, arXiv 1910.10683, section 2.1).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from solrl_jax.numerics import split, target


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Bool[Array, "#b #n #t s"] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Float[Array, "#b #n t s"] | None = None,
) -> Float[Array, "b t n h"]:
    """`softmax(scale * q k^T + bias) v` for each head, in the dtype of `q`; the softmax is taken in float32.

    Query head `i` reads key head `i // (n / kv)`. `mask` is true where a query may look; a query that may look nowhere gets
    the mean of the values, so that padding stays finite. `scale` is `h ** -0.5` unless given. With `softcap` c, logits
    become `c tanh(logits / c)` before bias and mask. cuDNN reads the bias in the dtype of `q`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (split.join(x, 2) for x in (q, k, v))  # whole, as norms before it want it
    rows = q[:, 0, 0, 0]
    q, k, v = (split.split(x, 2) for x in (q, k, v))  # by heads
    if softcap is not None:
        return _softcapped(q, k, v, mask, scale, softcap, bias)
    if flash_fits(q, k, biased=mask is not None or bias is not None):
        out = _flash(q, k, v, mask, scale, bias, rows)
    else:
        if bias is not None:
            bias = jnp.broadcast_to(bias, (bias.shape[0], q.shape[2], q.shape[1], k.shape[1])).astype(jnp.float32)
        out = jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale, implementation="xla")
    return split.join(split.split(out, 2), 2)


def flash_fits(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, *, biased: bool) -> bool:
    """Whether cuDNN's flash attention takes these operands, with their gradient, on the platform that is traced for.

    Hopper would take heads up to 256 wide; 128 holds on every card. Odd lengths have no gradient: without a bias (a mask is
    one to cuDNN) `_flash` makes them even. Whether one will be asked for cannot be seen from here.
    """
    head, lengths = q.shape[-1], (q.shape[1], k.shape[1])
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    even = not biased or all(n % 2 == 0 for n in lengths)
    return target.platform() == "gpu" and half and even and head % 8 == 0 and head <= 128


def _flash(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, bias: Array | None, rows: Float[Array, " b"]
) -> Array:
    """cuDNN's kernel, given what it wants: a mask of the whole shape, sharded as the queries are, for it is read as a bias; a
    bias for the whole batch, in the dtype of `q`; and, without either, even lengths, what is added to them left out.

    The kernel is told each row's length, which must lie on the row's device and be mapped (`jax.vmap`) as the row is. A
    constant would not, so it is made of `rows`, any number of each: the larger of a length and of 0 or 1 is the length.
    """
    (batch, t, heads, _), s = q.shape, k.shape[1]
    queries = keys = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, heads, t, s))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (bias.shape[0], heads, t, s)).astype(q.dtype)
    if t % 2 or s % 2:
        queries, keys = (jnp.maximum(jnp.isnan(rows).astype(jnp.int32), n) for n in (t, s))
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) if x.shape[1] % 2 else x for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, bias, mask, scale=scale, query_seq_lengths=queries, key_value_seq_lengths=keys, implementation="cudnn"
    )
    return out[:, :t]


def _softcapped(q: Array, k: Array, v: Array, mask: Array | None, scale: float, softcap: float, bias: Array | None) -> Array:
    """`attention` spelled out, because no fused kernel caps its logits."""
    (batch, t, heads, head), (s, kv) = q.shape, k.shape[1:3]
    q = q.reshape(batch, t, kv, heads // kv, head)
    logits = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits += jnp.broadcast_to(bias, (batch, heads, t, s)).reshape(logits.shape).astype(jnp.float32)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, heads, t, s)).reshape(logits.shape)
        logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)  # finite: a row of -inf would be NaN
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, t, heads, head)
