"""Flash attention on TPUs: JAX's Pallas kernel, called on each device with its own rows and heads.

The kernel (`jax.experimental.pallas.ops.tpu.flash_attention`) takes lengths that are multiples of
its blocks. Padding is distinguished from tokens in the same way as masked keys are: by a segment
number.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.heads import heads_first, heads_last
from solrl_jax.quant import compile_target
from solrl_jax.quant.sharded_kernel import shard_map_kernel

TILE = 128  # a block is a multiple of this many positions


class BlockLimits(NamedTuple):
    """The largest numbers of positions that a block of queries or keys may have, multiples of 128.

    Larger blocks are faster: with 1152 positions, the kernel takes 10.5 million cycles on a TPU v6e
    in blocks of 128, and 1.3 million in one block (12 samples, 24 heads of 128 features). The
    limits are those with which the forward and the backward kernel fit the vector memory that the
    compiler allows a kernel on TPU v5e, v5p, v6e and TPU7x.

    Attributes:
        forward: The limit of the kernel that attends.
        backward: The limit of the kernels that compute its gradient.
    """

    forward: int
    backward: int


def flash_attention_fits(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    mask: Bool[Array, "#b #n #t s"] | None,
    bias: Float[Array, "#b #n t s"] | None,
) -> bool:
    """Whether the program is traced for TPUs and `flash_attention` takes these operands.

    It requires as many key heads as query heads, each with up to 128 features or a multiple of 128;
    a mask that is the same for all queries and heads; and no bias.

    Args:
        q: queries [b, t, n, h], of any length.
        k: keys [b, s, kv, h].
        mask: Boolean matrix over batch, heads, queries and keys, True where a query may attend to a
            key. Its axes for heads and queries must have the size 1. None: all keys.
        bias: addition to the logits. Must be None.

    Returns:
        True if `flash_attention` may be called with these operands.
    """
    head_dim = q.shape[-1]
    if compile_target.platform() != "tpu" or bias is not None:
        return False
    if mask is not None and mask.shape[1:3] != (1, 1):
        return False
    return k.shape[2] == q.shape[2] and (head_dim <= TILE or head_dim % TILE == 0)


def flash_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s n h"],
    v: Float[Array, "b s n h"],
    mask: Bool[Array, "#b 1 1 s"] | None,
    scale: float,
) -> Float[Array, "b t n h"]:
    """Computes `softmax(scale * q k^T) v` for each head by JAX's Pallas kernel for TPUs. The
    softmax is in float32.

    Call it only if `flash_attention_fits` is True. Differentiable in q, k and v. Lengths are padded
    to multiples of the kernel's blocks (`block_size`), and the result is cut to its true length.

    A mesh, if one is set, must have the axis `tensor`, over which heads are divided. Samples are
    divided over all axes but `tensor` and `sequence`. If the size of these axes does not divide the
    number of heads or of samples, every device computes all heads or all samples.

    Args:
        q: Queries [b, t, n, h]: batch, query positions, heads, features of a head.
        k: Keys [b, s, n, h]: batch, key positions, heads, features.
        v: Values, of the shape of `k`.
        mask: Boolean [b or 1, 1, 1, s], True for keys that all queries attend to. None: all keys. A
            sample with no such key gets a mean of the values and of the zeros that pad them.
        scale: The factor of the logits.

    Returns:
        The attended values [b, t, n, h], in the dtype of `q`.
    """
    batch, t, _, head_dim = q.shape
    s = k.shape[1]
    masked = jnp.zeros((1, s), jnp.int32) if mask is None else 1 - mask[:, 0, 0].astype(jnp.int32)
    masked = jnp.broadcast_to(masked, (batch, s))
    limit = _block_limits(q).forward
    masked = jnp.pad(masked, ((0, 0), (0, -s % block_size(s, limit))), constant_values=1)

    def pad(x: Array) -> Array:
        x = x.reshape(*x.shape[:2], -1)
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_size(x.shape[1], limit)), (0, 0)))

    q, k, v = (heads_first(pad(x), head_dim) for x in (q, k, v))
    attended = heads_last(_attend(scale, q, k, v, masked))
    return attended[:, :t].reshape(batch, t, -1, head_dim)


def block_size(length: int, limit: int) -> int:
    """Returns the number of positions per block that divides a length into as few equal blocks as
    the limit allows.

    Args:
        length: The number of positions, at least 1. The last block is padded.
        limit: The largest block, a multiple of 128 (`TILE`).

    Returns:
        The size, a multiple of 128. That of the padded length is the same.
    """
    count = -(-length // limit)
    return -(-length // (count * TILE)) * TILE


def _block_limits(q: Float[Array, "..."]) -> BlockLimits:
    """Returns the limits of blocks for queries [..., h], by their dtype and h alone: smaller ones
    for float32, and for heads of more than 128 features h.
    """
    is_wide = q.dtype == jnp.float32
    if q.shape[-1] > TILE:
        return BlockLimits(256, 256) if is_wide else BlockLimits(512, 512)
    return BlockLimits(768, 768) if is_wide else BlockLimits(1280, 1024)


def _attend(scale: float, *arrays: Array) -> Float[Array, "b n t h"]:
    """Runs `_kernel` on each device with its own rows and heads, and defines its gradient.

    A mesh, if one is set, must have the axis `tensor` (`shard_map_kernel`). The backward pass runs
    the forward pass again, because the kernel does not return the statistics of its softmax.
    Float32 operands are multiplied at the highest precision.

    Args:
        scale: The factor of the logits.
        *arrays: Four arrays: queries [b, n, t, h], keys [b, n, s, h], values [b, n, s, h], and an
            int32 mask [b, s], which is 0 for keys that queries attend to and 1 for all others. t
            and s are multiples of `block_size(t, limit)` and `block_size(s, limit)`, where limit is
            the `forward` of `_block_limits`.

    Returns:
        The attended values [b, n, t, h], in the dtype of the queries.
    """
    # Mosaic takes no BF16 operands at a precision above the default
    precision = "highest" if arrays[0].dtype == jnp.float32 else "default"
    with_precision = jax.default_matmul_precision(precision)
    forward = shard_map_kernel(with_precision(functools.partial(_kernel, scale)), heads_axis=1)

    def gradient(q, k, v, masked, g):
        return jax.vjp(lambda q, k, v: _kernel(scale, q, k, v, masked), q, k, v)[1](g)

    backward = shard_map_kernel(with_precision(gradient), heads_axis=1)
    attend = jax.custom_vjp(lambda *operands: forward(*operands))
    attend.defvjp(
        lambda *operands: (forward(*operands), operands),
        lambda operands, g: (*backward(*operands, g), None),
    )
    return attend(*arrays)


def _kernel(
    scale: float, q: Array, k: Array, v: Array, masked: Int[Array, "b s"]
) -> Float[Array, "b n t h"]:
    """Calls JAX's Pallas flash attention.

    Args:
        scale: The factor of the logits.
        q: Queries [b, n, t, h]; t is a multiple of `block_size(t, limit)`, where limit is
            `_block_limits(q).forward`.
        k: Keys [b, n, s, h]; s is a multiple of `block_size(s, limit)`, with the same limit.
        v: Values [b, n, s, h].
        masked: int32 [b, s], 0 for keys that queries attend to, 1 for all others.

    Returns:
        The attended values [b, n, t, h], in the dtype of `q`.
    """
    # imported here because the import takes a second
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    limits = _block_limits(q)
    t, s = (block_size(x.shape[2], limits.forward) for x in (q, k))
    forward = {"block_q": t, "block_k_major": s, "block_k": s, "block_b": 1}
    t, s = (_largest_divisor(block, limits.backward) for block in (t, s))
    dkv = {"block_q_major_dkv": t, "block_q_dkv": t, "block_k_major_dkv": s, "block_k_dkv": s}
    dq = {"block_q_dq": t, "block_k_major_dq": s, "block_k_dq": s}
    query_segments = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    return pallas.flash_attention(
        q,
        k,
        v,
        segment_ids=pallas.SegmentIds(query_segments, masked),
        sm_scale=scale,
        block_sizes=pallas.BlockSizes(**forward, **dkv, **dq),
    )


def _largest_divisor(block: int, limit: int) -> int:
    """Returns the largest multiple of 128 (`TILE`) that divides `block` and is at most `limit`.

    Args:
        block: The number of positions of a block, a multiple of 128.
        limit: The largest number to return, a multiple of 128.
    """
    return next(size for size in range(limit, 0, -TILE) if block % size == 0)
