"""Softmax attention for all networks. Only this module chooses the kernel.

Scaled dot-product attention (arXiv 1706.03762, section 3.2.1). Several query heads may share the
keys and values of one head (arXiv 2305.13245). Two options change the logits: the soft cap of Gemma
2 (arXiv 2408.00118, section 2), and an added bias, which T5 uses for relative positions (arXiv
1910.10683, section 2.1).
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers import attention_tpu
from solrl_jax.quant import compile_target, tensor_parallel

# Either a Boolean matrix, True where a query may attend to a key; or the number of keys, counted
# from the first, that all queries of a sample attend to. No kernel has to read the latter as a
# matrix.
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
    """Computes `softmax(scale * q k^T + bias) v` for each head. The softmax is in float32.

    The kernel depends on the platform and the shapes: Pallas on TPUs, cuDNN on GPUs, otherwise XLA.
    Under tensor parallelism, heads are computed on different devices, and the result is gathered.

    Args:
        q: Queries: batch, query positions, heads, features of a head.
        k: Keys: batch, key positions, key heads, features. Query head `i` reads key head `i // (n /
            kv)`.
        v: Values, with the axes of the keys.
        mask: The keys that queries attend to: a Boolean matrix that broadcasts to [b, n, t, s],
            True where a query may attend to a key, or int [b], the number of keys from the first
            on. None: all keys. A query that attends to no key of a matrix gets the mean of the
            values, so that the outputs of padding are finite (on TPUs, the mean includes zeros that
            pad the keys). A number of keys must be at least 1.
        scale: The factor of the logits. None: `h ** -0.5`.
        softcap: A cap c turns the logits into `c tanh(logits / c)`, before the mask is applied.
            None: no cap. With a cap, no fused kernel is used, and all scores are in memory.
        bias: Added to the logits, broadcast to [b, n, t, s]; cuDNN reads it in the dtype of `q`.
            Cannot be combined with `softcap`. None: no bias.

    Returns:
        The attended values [b, t, n, h] in the dtype of `q`, which is that of `k` and `v`, too.
        They have a gradient in q, k, v and bias.

    Raises:
        AssertionError: Both `softcap` and `bias` are given.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        assert bias is None, "no network has both a soft cap and a bias"
        q, k, v = (_shard_heads(tensor_parallel.gather_axis(x, 2)) for x in (q, k, v))
        return _softcapped(q, k, v, _mask_matrix(mask, k), scale, softcap)
    return _attend(q, k, v, mask, scale, bias, gradient=True)


def attention_forward(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Mask | None = None,
) -> Float[Array, "b t n h"]:
    """Computes `softmax(h ** -0.5 q k^T) v` for each head, for programs that take no gradient of
    it. The softmax is in float32.

    Without a gradient, cuDNN needs neither padding for odd lengths nor a copy of the mask for each
    head. A gradient of it is not refused, but cuDNN then fails for odd lengths and for masks.

    Args:
        q: Queries [b, t, n, h]: batch, query positions, heads, features of a head.
        k: Keys [b, s, kv, h]: batch, key positions, key heads, features. Query head `i` reads key
            head `i // (n / kv)`.
        v: Values, with the axes of the keys.
        mask: The keys that queries attend to: a Boolean matrix that broadcasts to [b, n, t, s],
            True where a query may attend to a key, or int [b], the number of keys from the first
            on, at least 1. None: all keys. A query that attends to no key of a matrix gets the mean
            of the values (on TPUs, with the zeros that pad them).

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    return _attend(q, k, v, mask, q.shape[-1] ** -0.5, None, gradient=False)


def _shard_heads(x: Array) -> Array:
    """Shards an activation by its heads over the mesh axis `tensor`.

    Args:
        x: The activation [b, t, n, h].

    Returns:
        `x` with a sharding constraint: by heads if the axis divides their number n, otherwise
        complete on every device. `x` itself if the mesh has no such axis, or one of size 1.
    """
    return tensor_parallel.shard_axis(x, 2)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    scale: float,
    bias: Array | None,
    gradient: bool,
) -> Float[Array, "b t n h"]:
    """Chooses the kernel for the platform and the shapes, and calls it.

    The first that takes the operands is used: Pallas on a TPU, cuDNN on a GPU, XLA.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h].
        v: values, [b, s, kv, h].
        mask: the keys that queries attend to: a Boolean matrix that broadcasts to [b, n, t, s], or
            int [b], the number of keys from the first on; None: all keys.
        scale: factor of the logits.
        bias: added to the logits, broadcasts to [b, n, t, s]; None: no bias.
        gradient: whether a gradient may be taken. cuDNN then gets padded lengths and full masks.

    Returns:
        The attended values [b, t, n, h] in the dtype of `q`, complete on every device of the axis
        `tensor`.
    """
    # First complete, so that a norm before the attention sees all features, then sharded by heads.
    q, k, v = (tensor_parallel.gather_axis(x, 2) for x in (q, k, v))
    row_values = q[:, 0, 0, 0] if gradient else None
    q, k, v = (_shard_heads(x) for x in (q, k, v))
    matrix = _mask_matrix(mask, k)
    has_matrix = mask is not None and mask is matrix
    if attention_tpu.fits(q, k, matrix, bias):
        out = attention_tpu.flash_attention(q, k, v, matrix, scale)
    elif cudnn_fits(q, k, biased=bias is not None or has_matrix):
        out = _cudnn_attention(q, k, v, mask, scale, bias, row_values)
    else:
        out = _xla_attention(q, k, v, matrix, scale, bias)
    return tensor_parallel.gather_axis(_shard_heads(out), 2)


def _mask_matrix(
    mask: Mask | None, k: Float[Array, "b s kv h"]
) -> Bool[Array, "#b #n #t s"] | None:
    """Returns a mask as a Boolean matrix over queries and keys.

    Args:
        mask: None, the number of valid keys (from the first) of each sample [b], or a matrix.
        k: the keys. Their number s is the width of the matrix; nothing else of them counts.

    Returns:
        None and matrices are returned as they are, the same object. Numbers of keys become a matrix
        [b, 1, 1, s], True for the valid keys.
    """
    if mask is None or mask.ndim > 1:
        return mask
    return (jnp.arange(k.shape[1]) < mask[:, None])[:, None, None]


def _xla_attention(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, bias: Array | None
) -> Array:
    """Attention without a fused kernel: all scores are in memory.

    Operands in float16 are computed in float32.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h].
        v: values, [b, s, kv, h].
        mask: Boolean matrix that broadcasts to [b, n, t, s], True where a query may attend to a
            key; None: all keys.
        scale: factor of the logits.
        bias: added to the logits in float32, broadcasts to [b, n, t, s]; None: no bias.

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    if bias is not None:
        shape = (bias.shape[0], q.shape[2], q.shape[1], k.shape[1])
        bias = jnp.broadcast_to(bias, shape).astype(jnp.float32)
    dtype = q.dtype
    if dtype == jnp.float16:  # CPUs have no FP16 matmul
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    out = dot_product_attention(q, k, v, bias, mask, scale=scale, implementation="xla")
    return out.astype(dtype)


def cudnn_fits(
    q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, *, biased: bool
) -> bool:
    """Whether cuDNN's flash attention takes these operands and computes their gradient.

    The dtype must be BF16 or FP16, and the features of a head a multiple of 8. Heads may have up to
    128 features, the limit that all GPUs share (Hopper takes 256). Odd lengths have no gradient.
    `_cudnn_attention` pads them to even lengths, but not if there is a bias. It is not known here
    whether a gradient will be taken, so its conditions are always required.

    Args:
        q: Queries [b, t, n, h], or their shape and dtype.
        k: Keys [b, s, kv, h], or their shape and dtype. Only the length s counts.
        biased: Whether there is a bias or a mask matrix, which cuDNN reads as a bias.

    Returns:
        Whether the program is traced for a GPU and cuDNN takes the operands.
    """
    head_dim = q.shape[-1]
    if compile_target.platform() != "gpu":
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if biased and (q.shape[1] % 2 or k.shape[1] % 2):
        return False
    return head_dim % 8 == 0 and head_dim <= 128


def _cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | None,
    scale: float,
    bias: Array | None,
    row_values: Float[Array, " b"] | None,
) -> Array:
    """cuDNN's flash attention (arXiv 2205.14135), with its operands in the form that it requires.

    cuDNN requires a bias in the dtype of `q` and, for the gradient, a mask of the full shape and
    even lengths. Odd lengths are padded by one position, and the kernel receives the true length of
    each row, so that it ignores the padding.

    Args:
        q: Queries [b, t, n, h].
        k: Keys [b, s, kv, h].
        v: Values [b, s, kv, h].
        mask: The keys that queries attend to: a Boolean matrix that broadcasts to [b, n, t, s], or
            int [b], the number of keys from the first on. None: all keys.
        scale: The factor of the logits.
        bias: Added to the logits, broadcasts to [b, n, t, s]. None: no bias.
        row_values: Any number for each row, from which the true lengths are computed, so that they
            are sharded as the rows are. None: no gradient is taken.

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    batch, t, heads, _ = q.shape
    s = k.shape[1]
    query_lengths = key_lengths = None
    if mask is not None and mask.ndim == 1:
        # t for every row, but computed from the mask, for the reason that is given below
        query_lengths = jnp.maximum(jnp.minimum(mask, 1), t)
        key_lengths = mask
        mask = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, 1 if row_values is None else heads, t, s))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (bias.shape[0], heads, t, s)).astype(q.dtype)
    if row_values is not None and (t % 2 or s % 2):
        # The lengths must be sharded over devices, and mapped by `jax.vmap`, in the way the rows
        # are. A constant would not be. So each length is computed from a value of the row: `isnan`
        # gives 0 or 1, and the maximum of that and the length is the length.
        if key_lengths is None:
            query_lengths, key_lengths = (
                jnp.maximum(jnp.isnan(row_values).astype(jnp.int32), n) for n in (t, s)
            )
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) if x.shape[1] % 2 else x for x in (q, k, v)
        )
    out = dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        implementation="cudnn",
    )
    return out[:, :t]


def _softcapped(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, softcap: float
) -> Array:
    """Attention whose logits are capped by `softcap * tanh(logits / softcap)`.

    It is written out because no fused kernel has a soft cap. All scores are in memory, in float32.
    A query that attends to no key gets the mean of the values.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h].
        v: values, [b, s, kv, h].
        mask: Boolean matrix that broadcasts to [b, n, t, s], True where a query may attend to a
            key; None: all keys.
        scale: factor of the logits before the cap.
        softcap: the largest magnitude of a logit, a positive number.

    Returns:
        The attended values [b, t, n, h], in the dtype of `v`.
    """
    batch, t, heads, head_dim = q.shape
    s, kv = k.shape[1:3]
    q = q.reshape(batch, t, kv, heads // kv, head_dim)
    logits = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = softcap * jnp.tanh(logits / softcap)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, heads, t, s)).reshape(logits.shape)
        # a finite number, because a row of -inf would become NaN
        logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, t, heads, head_dim)
