"""Softmax attention for all networks. The kernel is chosen here and nowhere else.

Scaled dot products (arXiv 1706.03762, section 3.2.1). Several query heads may share the keys and values of one head (arXiv
2305.13245). Two options act on the logits: the soft cap of Gemma 2 (arXiv 2408.00118, section 2), and an added bias, which T5
uses for relative positions (arXiv 1910.10683, section 2.1).
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers import attention_tpu
from solrl_jax.quant import compile_target, tensor_parallel

# Where a query may look: true there; or of how many keys, from the first, in each row, which no kernel has to read as a matrix.
Mask: TypeAlias = Bool[Array, "#b #n #t s"] | Int[Array, " b"]


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Float[Array, "#b #n t s"] | None = None,
) -> Float[Array, "b t n h"]:
    """`softmax(scale * q k^T + bias) v` for each head, in the dtype of `q`, with the softmax in float32.

    Args:
      q, k, v: t queries and s keys and values; query head `i` reads key head `i // (n / kv)`.
      mask: None: anywhere. A query that may look nowhere gets the mean of the values, so that padding is finite; of a number of
        keys, at least one.
      scale: `h ** -0.5` unless given.
      softcap: with a cap c, the logits become `c tanh(logits / c)`, before the mask.
      bias: cuDNN reads it in the dtype of `q`. Not with a soft cap: no network has both.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        assert bias is None
        q, k, v = (tensor_parallel.split(tensor_parallel.join(x, 2), 2) for x in (q, k, v))
        return _softcapped(q, k, v, _as_matrix(mask, k), scale, softcap)
    return _attend(q, k, v, mask, scale, bias, gradient=True)


def attention_forward(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Mask | None = None,
) -> Float[Array, "b t n h"]:
    """`attention` of which no gradient is asked for: cuDNN then takes odd lengths and one mask for all heads."""
    return _attend(q, k, v, mask, q.shape[-1] ** -0.5, None, gradient=False)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    scale: float,
    bias: Array | None,
    gradient: bool,
) -> Float[Array, "b t n h"]:
    q, k, v = (
        tensor_parallel.join(x, 2) for x in (q, k, v)
    )  # whole, so that a norm before the attention sees all features
    rows = q[:, 0, 0, 0] if gradient else None
    q, k, v = (
        tensor_parallel.split(x, 2) for x in (q, k, v)
    )  # divided by heads over the mesh axis `tensor`
    matrix = _as_matrix(mask, k)
    if attention_tpu.fits(q, k, matrix, bias):
        out = attention_tpu.flash(q, k, v, matrix, scale)
    elif cudnn_fits(q, k, biased=bias is not None or (mask is not None and mask is matrix)):
        out = _cudnn(q, k, v, mask, scale, bias, rows)
    else:
        if bias is not None:
            bias = jnp.broadcast_to(
                bias, (bias.shape[0], q.shape[2], q.shape[1], k.shape[1])
            ).astype(jnp.float32)
        dtype = q.dtype
        if dtype == jnp.float16:  # a CPU has no such product
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, bias, matrix, scale=scale, implementation="xla"
        ).astype(dtype)
    return tensor_parallel.join(tensor_parallel.split(out, 2), 2)


def _as_matrix(mask: Mask | None, k: Float[Array, "b s kv h"]) -> Bool[Array, "#b #n #t s"] | None:
    if mask is None or mask.ndim > 1:
        return mask
    return (jnp.arange(k.shape[1]) < mask[:, None])[:, None, None]


def cudnn_fits(
    q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, *, biased: bool
) -> bool:
    """Whether cuDNN's flash attention takes these operands, on the platform that is traced for, and computes their gradient.

    biased: with a bias or a mask; cuDNN reads a mask as a bias.
    Heads are at most 128 wide, the limit of all cards (Hopper takes 256). Odd lengths have no gradient. `_cudnn` makes them
    even, but cannot do so with a bias. Whether a gradient is needed is not known here, so it is always required.
    """
    head = q.shape[-1]
    lengths = (q.shape[1], k.shape[1])
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    even = not biased or all(n % 2 == 0 for n in lengths)
    return compile_target.platform() == "gpu" and half and even and head % 8 == 0 and head <= 128


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | None,
    scale: float,
    bias: Array | None,
    rows: Float[Array, " b"] | None,
) -> Array:
    """cuDNN's flash attention (arXiv 2205.14135), with operands as it requires them.

    It requires a bias in the dtype of `q` and, for the gradient, a mask of the full shape and even lengths. An odd one gets one
    more position, and the kernel is told the true length of each row, so that it ignores that position.
    rows: one number for each row, of any value; None: no gradient is needed.
    """
    (batch, t, heads, _), s = q.shape, k.shape[1]
    queries = keys = None
    if mask is not None and mask.ndim == 1:
        # t for every row, but computed from its number of keys, for the reason that is given below
        queries = jnp.maximum(jnp.minimum(mask, 1), t)
        keys = mask
        mask = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, 1 if rows is None else heads, t, s))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (bias.shape[0], heads, t, s)).astype(q.dtype)
    if rows is not None and (t % 2 or s % 2):
        # The lengths must be split over devices and mapped by `jax.vmap` as the rows are. A constant is not, so each length is
        # computed from the row's number: 0 or 1, and the larger of this and the length is the length.
        if keys is None:
            queries, keys = (jnp.maximum(jnp.isnan(rows).astype(jnp.int32), n) for n in (t, s))
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) if x.shape[1] % 2 else x for x in (q, k, v)
        )
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        query_seq_lengths=queries,
        key_value_seq_lengths=keys,
        implementation="cudnn",
    )
    return out[:, :t]


def _softcapped(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, softcap: float
) -> Array:
    """The same, written out: no fused kernel has a soft cap."""
    (batch, t, heads, head), (s, kv) = q.shape, k.shape[1:3]
    q = q.reshape(batch, t, kv, heads // kv, head)
    logits = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = softcap * jnp.tanh(logits / softcap)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, heads, t, s)).reshape(logits.shape)
        logits = jnp.where(
            mask, logits, jnp.finfo(jnp.float32).min
        )  # finite: a row of -inf would be NaN
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, t, heads, head)
