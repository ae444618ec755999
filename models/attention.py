"""Softmax attention: the one function through which every network here attends, and the one place that picks a kernel.

Scaled dot products (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1) with heads that may share keys and values
(arXiv 2305.13245), and optionally with the soft cap on the logits of Gemma 2 (arXiv 2408.00118, section 2) or with a bias added
to them (the relative positions of T5, arXiv 1910.10683, section 2.1).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.flash import stand_in
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
    q, k, v = (split.split(split.join(x, 2), 2) for x in (q, k, v))  # by heads; what is before is whole, as norms want it
    if softcap is not None:
        return _softcapped(q, k, v, mask, scale, softcap, bias)
    flash, whole = flash_fits(q, k), (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if flash and mask is not None:  # cuDNN reads it as a bias, whose shape it wants whole and sharded as the queries are
        mask = jnp.broadcast_to(mask, whole)
    kernel: Literal["cudnn", "xla"] = "cudnn" if flash else "xla"
    optional: dict[str, Any] = {}
    if bias is not None:  # cuDNN takes one for the whole batch
        per_head = jnp.broadcast_to(bias, (bias.shape[0], *whole[1:]))
        optional["bias"] = per_head.astype(q.dtype if flash else jnp.float32)
    if flash and target.is_planned():
        out = stand_in(q, k, v, mask, optional.get("bias"))
    else:
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation=kernel, **optional)
    return split.join(split.split(out, 2), 2)


def flash_fits(q: Array, k: Array) -> bool:
    """Whether cuDNN's flash attention takes these operands, with their gradient, on the platform that is traced for.

    Hopper would take heads up to 256 wide; 128 holds on every card. Odd lengths have no gradient (JAX 0.10 refuses them even
    without a mask), and whether one will be asked for cannot be seen from here.
    """
    head, lengths = q.shape[-1], (q.shape[1], k.shape[1])
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    even = all(n % 2 == 0 for n in lengths)
    return target.platform() == "gpu" and half and even and head % 8 == 0 and head <= 128


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
