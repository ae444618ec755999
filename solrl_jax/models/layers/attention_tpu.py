"""Flash attention on TPUs: JAX's kernel in Pallas (`jax.experimental.pallas.ops.tpu.flash_attention`), one call a device.

XLA cannot divide a kernel in Pallas over devices, so each device is given its rows and heads. The kernel takes lengths that
are multiples of 128. Positions that fill them up are told from tokens as masked keys are: by a segment number.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.quant import compile_target
from solrl_jax.quant.sharded_kernel import shard_map_kernel

TILE = 128  # positions; a length is filled up to a multiple of it
LARGEST = 512  # positions of a block that lies in a TPU's vector memory


def fits(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s kv h"],
    mask: Bool[Array, "#b #n #t s"] | None,
    bias: Float[Array, "#b #n t s"] | None,
) -> bool:
    """Whether a program is traced for TPUs, and the kernel takes these operands.

    It wants as many heads of keys as of queries, at most 128 wide or a multiple of that; a mask of keys alone; no bias.
    """
    head = q.shape[-1]
    of_keys = mask is None or mask.shape[1:3] == (1, 1)
    shaped = k.shape[2] == q.shape[2] and (head <= TILE or head % TILE == 0)
    return compile_target.platform() == "tpu" and shaped and of_keys and bias is None


def flash(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s n h"],
    v: Float[Array, "b s n h"],
    mask: Bool[Array, "#b 1 1 s"] | None,
    scale: float,
) -> Float[Array, "b t n h"]:
    """`softmax(scale * q k^T) v` over the keys that `mask` has, in the dtype of `q`; softmax in float32.

    Where the mask has no key, the result is the mean of the values and of the zeros that fill them up.
    """
    (batch, t), s = q.shape[:2], k.shape[1]
    masked = jnp.zeros((1, s), jnp.int32) if mask is None else 1 - mask[:, 0, 0].astype(jnp.int32)
    masked = jnp.pad(
        jnp.broadcast_to(masked, (batch, s)), ((0, 0), (0, -s % TILE)), constant_values=1
    )

    def fill(x):
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0)))

    return _attend(scale, *(fill(x).swapaxes(1, 2) for x in (q, k, v)), masked).swapaxes(1, 2)[
        :, :t
    ]


def _attend(scale: float, *arrays: Array) -> Float[Array, "b n t h"]:
    """The kernel with its gradient. The gradient makes the forward pass again: the kernel keeps its statistics to itself."""
    # Mosaic takes no BF16 at a precision above the default
    at = jax.default_matmul_precision("highest" if arrays[0].dtype == jnp.float32 else "default")
    forward = shard_map_kernel(at(functools.partial(_kernel, scale)), by_heads=True)

    def gradient(q, k, v, masked, g):
        return jax.vjp(lambda q, k, v: _kernel(scale, q, k, v, masked), q, k, v)[1](g)

    backward = shard_map_kernel(at(gradient), by_heads=True)
    attend = jax.custom_vjp(lambda *a: forward(*a))
    attend.defvjp(lambda *a: (forward(*a), a), lambda a, g: (*backward(*a, g), None))
    return attend(*arrays)


def _kernel(
    scale: float, q: Array, k: Array, v: Array, masked: Int[Array, "b s"]
) -> Float[Array, "b n t h"]:
    """q, k, v: [rows, heads, positions, head]; masked: 0 for keys that are looked at, else 1."""
    from jax.experimental.pallas.ops.tpu.flash_attention import (
        BlockSizes,
        SegmentIds,
        flash_attention,
    )  # takes a second

    t, s = (
        next(size for size in (LARGEST, 256, TILE) if n % size == 0)
        for n in (q.shape[2], k.shape[2])
    )
    forward = {"block_q": t, "block_k_major": s, "block_k": s, "block_b": 1}
    dkv = {"block_q_major_dkv": t, "block_q_dkv": t, "block_k_major_dkv": s, "block_k_dkv": s}
    dq = {"block_q_dq": t, "block_k_major_dq": s, "block_k_dq": s}
    segments = SegmentIds(jnp.zeros((q.shape[0], q.shape[2]), jnp.int32), masked)
    return flash_attention(
        q,
        k,
        v,
        segment_ids=segments,
        sm_scale=scale,
        block_sizes=BlockSizes(**forward, **dkv, **dq),
    )
