"""Flash attention on TPUs: JAX's Pallas kernel, called on each device with its own rows and heads.

The kernel (`jax.experimental.pallas.ops.tpu.flash_attention`) takes lengths that are multiples of
128. Padding is distinguished from tokens in the same way as masked keys are: by a segment number.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.quant import compile_target
from solrl_jax.quant.sharded_kernel import shard_map_kernel

TILE = 128  # lengths are padded to multiples of this
BLOCK_SIZES = (
    512,
    256,
    TILE,
)  # positions per block: the largest one that divides the length is used


def fits(
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

    Call it only if `fits` is True. Differentiable in q, k and v. Lengths are padded to multiples of
    128 (`TILE`), and the result is cut to its true length. Heads are divided over the mesh axis
    `tensor`, which a mesh, if one is set, must have.

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
    batch, t = q.shape[:2]
    s = k.shape[1]
    masked = jnp.zeros((1, s), jnp.int32) if mask is None else 1 - mask[:, 0, 0].astype(jnp.int32)
    masked = jnp.broadcast_to(masked, (batch, s))
    masked = jnp.pad(masked, ((0, 0), (0, -s % TILE)), constant_values=1)

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0)))

    q, k, v = (pad(x).swapaxes(1, 2) for x in (q, k, v))
    return _attend(scale, q, k, v, masked).swapaxes(1, 2)[:, :t]


def _attend(scale: float, *arrays: Array) -> Float[Array, "b n t h"]:
    """Runs `_kernel` on each device with its own rows and heads, and defines its gradient.

    The backward pass runs the forward pass again, because the kernel does not return the statistics
    of its softmax. Float32 operands are multiplied at the highest precision.

    Args:
        scale: The factor of the logits.
        *arrays: Four arrays: queries [b, n, t, h], keys [b, n, s, h], values [b, n, s, h], and an
            int32 mask [b, s], which is 0 for keys that queries attend to and 1 for all others. t
            and s are multiples of 128.

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

    Along each axis, it uses the largest of `BLOCK_SIZES` that divides the length.

    Args:
        scale: The factor of the logits.
        q: Queries [b, n, t, h]; t is a multiple of 128 (`TILE`).
        k: Keys [b, n, s, h]; s is a multiple of 128.
        v: Values [b, n, s, h].
        masked: int32 [b, s], 0 for keys that queries attend to, 1 for all others.

    Returns:
        The attended values [b, n, t, h], in the dtype of `q`.
    """
    # imported here because the import takes a second
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    t, s = (next(size for size in BLOCK_SIZES if n % size == 0) for n in (q.shape[2], k.shape[2]))
    forward = {"block_q": t, "block_k_major": s, "block_k": s, "block_b": 1}
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
