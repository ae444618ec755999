"""Softmax attention for all networks. Only this module chooses the kernel.

Scaled dot-product attention (arXiv 1706.03762, section 3.2.1). Several query heads may share the
keys and values of one head (arXiv 2305.13245). Two options change the logits: the soft cap of Gemma
2 (arXiv 2408.00118, section 2), and an added bias, which T5 uses for relative positions (arXiv
1910.10683, section 2.1).
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import dot_product_attention
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers import attention_tpu
from solrl_jax.quant import compile_target, sequence_parallel, tensor_parallel
from solrl_jax.quant.leaf import MATMUL
from solrl_jax.quant.sharded_kernel import shard_map_kernel

# Either a Boolean matrix, True where a query may attend to a key; or the number of keys, counted
# from the first, that all queries of a sample attend to. cuDNN takes such numbers as sequence
# lengths; for the other kernels they are converted to a matrix.
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

    The kernel depends on platform and shapes: Pallas on TPUs, cuDNN on GPUs, otherwise XLA. Under
    tensor parallelism, each device computes some of the heads, and the result is gathered. Under
    sequence parallelism (inside `quant.sequence_parallel.shard_tokens`), `q` holds the queries of
    this device, and `k` and `v` hold those of all devices.

    Args:
        q: Queries: batch, query positions, heads, features of a head.
        k: Keys: batch, key positions, key heads, features. There may be fewer key heads than query
            heads: query head `i` reads key head `i // (n / kv)`.
        v: Values, of the shape of `k`.
        mask: Which keys queries attend to. Either a Boolean matrix with four axes that broadcasts
            to [b, n, t, s], True where a query may attend to a key; or int32 [b], the number of
            leading keys that are valid, at least 1. None: all keys. A query with no key in the
            matrix gets a mean of the values (on TPUs with the zeros that pad them), so that the
            outputs of padding are finite. Under sequence parallelism, a matrix is the same for all
            heads and queries [b or 1, 1, 1, s].
        scale: The factor of the logits. None: `h ** -0.5`.
        softcap: A number c that replaces the logits by `c tanh(logits / c)`, before the mask is
            applied. It needs memory for all scores. None: no cap.
        bias: Added to the logits, broadcast to [b, n, t, s]. None: no bias. Cannot be combined with
            `softcap`.

    Returns:
        The attended values [b, t, n, h] in the dtype of `q`, which `k` and `v` must share.
        Differentiable in q, k, v and bias.

    Raises:
        AssertionError: Both `softcap` and `bias` are given; or, under sequence parallelism without
            a `softcap`, a bias is given or there are fewer key heads than query heads.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        assert bias is None, "no network has both a soft cap and a bias"
        q, k, v = (_shard_heads(tensor_parallel.gather_axis(x, 2)) for x in (q, k, v))
        return _softcapped(q, k, v, _mask_matrix(mask, k), scale, softcap)
    return _attend(q, k, v, mask, scale, bias, gradient=True)


@jax.custom_vjp
def attention_forward(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    v: Float[Array, "b s kv h"],
    mask: Mask | None = None,
) -> Float[Array, "b t n h"]:
    """Computes `softmax(h ** -0.5 q k^T) v` for each head, for programs that hardly ever take a
    gradient. The softmax is in float32.

    It needs less memory on GPUs than `attention`, but its gradient evaluates `attention` once more.
    Under sequence parallelism (inside `quant.sequence_parallel.shard_tokens`), `q` holds the
    queries of this device, and `k` and `v` hold those of all devices.

    Args:
        q: Queries [b, t, n, h]: batch, query positions, heads, features of a head.
        k: Keys [b, s, kv, h]: batch, key positions, key heads, features. There may be fewer key
            heads than query heads: query head `i` reads key head `i // (n / kv)`.
        v: Values, of the shape of `k`.
        mask: Which keys queries attend to. Either a Boolean matrix with four axes that broadcasts
            to [b, n, t, s], True where a query may attend to a key; or int32 [b], the number of
            leading keys that are valid, at least 1. None: all keys. A query with no key in the
            matrix gets a mean of the values (on TPUs with the zeros that pad them). Under sequence
            parallelism, a matrix is the same for all heads and queries [b or 1, 1, 1, s].

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`. They have a gradient in q, k and v.

    Raises:
        AssertionError: Under sequence parallelism, there are fewer key heads than query heads.
    """
    return _attend(q, k, v, mask, q.shape[-1] ** -0.5, None, gradient=False)


def _forward_pass(q, k, v, mask):
    """Computes `attention_forward`, and keeps its operands: its forward rule for `jax.custom_vjp`.

    Args:
        q: Queries [b, t, n, h].
        k: Keys [b, s, kv, h].
        v: Values [b, s, kv, h].
        mask: The keys that queries attend to.

    Returns:
        The attended values [b, t, n, h], and the tuple (q, k, v, mask) for `_backward_pass`.
    """
    return attention_forward(q, k, v, mask), (q, k, v, mask)


def _backward_pass(operands, cotangent):
    """Computes the gradient of `attention_forward` by evaluating `attention`: its backward rule for
    `jax.custom_vjp`.

    Args:
        operands: The tuple (queries, keys, values, mask).
        cotangent: The gradient with respect to the attended values [b, t, n, h].

    Returns:
        The gradients with respect to queries, keys and values, and None for the mask.
    """
    *arrays, mask = operands
    _, gradient = jax.vjp(lambda q, k, v: attention(q, k, v, mask), *arrays)
    return (*gradient(cotangent), None)


attention_forward.defvjp(_forward_pass, _backward_pass)


def _shard_heads(x: Array) -> Array:
    """Constrains an activation to be sharded by its heads over the mesh axis `tensor`.

    Args:
        x: The activation [b, t, n, h].

    Returns:
        The same values: sharded if the size of the axis divides the number of heads n, otherwise
        replicated over it. The sharding of the other axes is left to the partitioner. `x` itself if
        the mesh has no such axis, or one of size 1.
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
    """Runs the attention kernel for the platform and shapes: Pallas on a TPU, cuDNN on a GPU, or
    XLA where neither takes the operands.

    Under sequence parallelism (`_attend_to_all`), the queries are those of this device, keys and
    values those of all devices, and `bias` must be None.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h]; kv divides n, and is n under sequence parallelism.
        v: values, [b, s, kv, h].
        mask: which keys queries attend to: a Boolean matrix that broadcasts to [b, n, t, s] (under
            sequence parallelism [b or 1, 1, 1, s], equal for all heads and queries), or int [b],
            the number of leading valid keys of each sample; None: all keys.
        scale: factor of the logits.
        bias: added to the logits, broadcasts to [b, n, t, s]; None: no bias.
        gradient: whether a gradient may be taken. If so, operands are passed to cuDNN in the form
            that its gradient requires, which takes more memory.

    Returns:
        The attended values [b, t, n, h] in the dtype of `q`, replicated over the mesh axis
        `tensor`.
    """
    # First complete, so that a norm before the attention sees all features, then sharded by heads.
    q, k, v = (tensor_parallel.gather_axis(x, 2) for x in (q, k, v))
    row_values = q[:, 0, 0, 0] if gradient else None
    q, k, v = (_shard_heads(x) for x in (q, k, v))
    if sequence_parallel.tokens_are_sharded():
        assert bias is None, "no network with sequence parallelism has a bias"
        out = _attend_to_all(q, k, v, mask, scale, gradient)
    else:
        out = _run_kernel(q, k, v, mask, scale, bias, row_values)
    return tensor_parallel.gather_axis(_shard_heads(out), 2)


def _run_kernel(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    scale: float,
    bias: Array | None,
    row_values: Float[Array, " b"] | None,
) -> Float[Array, "b t n h"]:
    """Runs the attention kernel for the platform and shapes, on the heads as they are sharded.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h].
        v: values, [b, s, kv, h].
        mask: which keys queries attend to: a Boolean matrix that broadcasts to [b, n, t, s], True
            for the keys to attend to; int [b], the number of leading valid keys of each sample; or
            None, all keys.
        scale: factor of the logits.
        bias: added to the logits, broadcasts to [b, n, t, s]; None: no bias.
        row_values: one number per sample, of any value, if a gradient may be taken; else None.
            Only its sharding counts, and only for `_cudnn_attention`.

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    matrix = _mask_matrix(mask, k)
    has_matrix = mask is not None and mask is matrix
    if attention_tpu.flash_attention_fits(q, k, matrix, bias):
        return attention_tpu.flash_attention(q, k, v, matrix, scale)
    if cudnn_fits(q, k, biased=bias is not None or has_matrix):
        return _cudnn_attention(q, k, v, mask, scale, bias, row_values)
    return _xla_attention(q, k, v, matrix, scale, bias)


def _mask_matrix(
    mask: Mask | None, k: Float[Array, "b s kv h"]
) -> Bool[Array, "#b #n #t s"] | None:
    """Converts a mask to a Boolean matrix over queries and keys.

    Args:
        mask: None, a Boolean matrix, or int [b], the number of leading valid keys of each sample.
        k: the keys, for their number s.

    Returns:
        For numbers of keys, a matrix [b, 1, 1, s], True for the valid ones. Otherwise `mask`
        itself, a matrix or None.
    """
    if mask is None or mask.ndim > 1:
        return mask
    return (jnp.arange(k.shape[1]) < mask[:, None])[:, None, None]


def _xla_attention(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, bias: Array | None
) -> Array:
    """Computes attention without a fused kernel: all scores are in memory.

    Logits and softmax are in float32; the matmuls take operands in their own dtype, except float16
    ones, which are cast to float32. kv may be a divisor of n.

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
    """Whether the program is traced for a GPU (of any generation) and cuDNN's flash attention takes
    these operands, also for a gradient.

    The operands must be BF16 or FP16, and the number of features of a head must be a multiple of 8,
    up to 128. With a bias or a mask matrix, both lengths must be even. Without them, lengths may be
    odd: `_cudnn_attention` pads where cuDNN requires it.

    Args:
        q: Queries [b, t, n, h], or their shape and dtype.
        k: Keys [b, s, kv, h], or their shape and dtype. Only the length s counts.
        biased: Whether there is a bias or a mask matrix (which cuDNN reads as a bias).

    Returns:
        True if `_cudnn_attention` may be called.
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
    """Calls cuDNN's flash attention (arXiv 2205.14135), with the operands in the form that it
    requires. Call it only if `cudnn_fits` is True.

    For a gradient, cuDNN requires even lengths and a mask matrix of the full shape [b, n, t, s]. If
    a gradient may be taken, the matrix is broadcast to this shape, and an odd length is padded by
    one position, which the kernel ignores. Otherwise no length is padded, and the matrix is
    broadcast in all axes but that of heads. Numbers of keys are passed as lengths of the sequences.

    Args:
        q: Queries [b, t, n, h].
        k: Keys [b, s, kv, h].
        v: Values [b, s, kv, h].
        mask: Which keys queries attend to: a Boolean matrix that broadcasts to [b, n, t, s], or int
            [b], the number of leading valid keys. None: all keys.
        scale: The factor of the logits.
        bias: Added to the logits after it is cast to the dtype of `q`, broadcasts to [b, n, t, s].
            None: no bias.
        row_values: If a gradient may be taken: one number per sample, of any value. It only carries
            the sharding of the batch over to the lengths that are passed to the kernel. None: no
            gradient is taken.

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
        mask_heads = mask.shape[1] if row_values is None else heads
        mask = jnp.broadcast_to(mask, (batch, mask_heads, t, s))
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


def _attend_to_all(
    q: Array, k: Array, v: Array, mask: Mask | None, scale: float, gradient: bool
) -> Float[Array, "b t n h"]:
    """Computes attention under sequence parallelism, from the tokens of each device to all keys.

    XLA's partitioner cannot partition fused kernels where `sequence` is a manual axis, so each
    device calls them with its own rows and heads. The gradients of keys and values are sums over
    the queries of all devices. Kernels round these sums, so they must not be split. In the backward
    pass, devices therefore exchange their queries (an all-to-all), and each runs the kernel again
    for some (sample, head) pairs, with the queries of all devices. Pairs are repeated if their
    number is not a multiple of the number of devices. JAX adds up the gradients of keys and values
    over the devices, so they are gathered on the first device, and the others return zeros. The
    result is named "matmul", so gradient checkpointing "matmuls" keeps it.

    Args:
        q: Queries of the tokens of this device [b, t, n, h].
        k: Keys of all tokens [b, s, n, h].
        v: Values of all tokens [b, s, n, h].
        mask: Which keys queries attend to: a Boolean matrix [1 or b, 1, 1, s], or int [b], the
            number of leading valid keys. None: all keys.
        scale: The factor of the logits.
        gradient: Whether a gradient may be taken. If so, operands are passed to cuDNN in the form
            that its gradient requires.

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    assert q.shape[2] == k.shape[2], "no network with sequence parallelism shares key heads"
    masks: tuple[Array, ...] = ()
    if mask is not None:
        # without the axes of heads and queries, so that a mask is not taken for an array of heads
        masks = (mask if mask.ndim == 1 else mask.squeeze((1, 2)),)

    def kernel(q: Array, k: Array, v: Array, *masks: Array) -> Array:
        mask = masks[0] if masks else None
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        return _run_kernel(q, k, v, mask, scale, None, q[:, 0, 0, 0] if gradient else None)

    def pull_back(q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, ...]:
        *masks, g = others
        batch, _, heads, _ = q.shape
        pairs = batch * heads  # of a sample and a head

        def by_pairs(x: Array) -> Array:
            return x.swapaxes(1, 2).reshape(pairs, x.shape[1], 1, x.shape[3])

        def by_samples(x: Array) -> Array:
            return x.reshape(batch, heads, x.shape[1], x.shape[3]).swapaxes(1, 2)

        own_q, own_g = (sequence_parallel.tokens_to_pairs(by_pairs(x)) for x in (q, g))
        own_k, own_v = (sequence_parallel.select_own_pairs(by_pairs(x)) for x in (k, v))
        per_sample = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in masks)
        own_masks = [
            sequence_parallel.select_own_pairs(jnp.repeat(x, heads, axis=0)) for x in per_sample
        ]
        _, vjp = jax.vjp(lambda q, k, v: kernel(q, k, v, *own_masks), own_q, own_k, own_v)
        g_q, g_k, g_v = vjp(own_g)
        return (
            by_samples(sequence_parallel.pairs_to_tokens(g_q, pairs)),
            by_samples(sequence_parallel.gather_on_first(g_k, pairs)),
            by_samples(sequence_parallel.gather_on_first(g_v, pairs)),
        )

    forward = shard_map_kernel(kernel, heads_axis=2)
    backward = shard_map_kernel(pull_back, heads_axis=2)
    attend = jax.custom_vjp(lambda *arrays: forward(*arrays))
    attend.defvjp(
        lambda *arrays: (forward(*arrays), arrays),
        lambda arrays, g: (*backward(*arrays, g), *[None for _ in masks]),
    )
    # Gradient checkpointing keeps it, as it keeps the output of the kernels on one device.
    return checkpoint_name(attend(q, k, v, *masks), MATMUL)


def _softcapped(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, softcap: float
) -> Array:
    """Computes attention whose logits are replaced by `softcap * tanh(logits / softcap)`.

    All scores are in memory, in float32. A query that attends to no key gets the mean of the
    values.

    Args:
        q: queries, [b, t, n, h].
        k: keys, [b, s, kv, h]. kv divides n, and n / kv consecutive query heads share a key head.
        v: values, [b, s, kv, h].
        mask: Boolean matrix that broadcasts to [b, n, t, s], True where a query may attend to a
            key; None: all keys.
        scale: factor of the logits before the cap.
        softcap: the bound of the logits' magnitude, a positive number.

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
