"""Softmax attention in FP8 (E4M3), for exploration: cuDNN's on Hopper and later, and its twin on a CPU.

Both products have operands of eight bits, and the result has eight, too. They stand under no scale. E4M3 has three bits after
the first from 2^-6 to 448, so that a scale would change what saturates and what vanishes, and nothing between. Queries and
keys are normalised before (RMSNorm). Of values nothing is known beforehand; those beyond 448 saturate. Probabilities are at
most 1: they are rounded 256 times as large, and keep their three bits down to 2^-14.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention_forward
from solrl_jax.quant import compile_target, tensor_parallel
from solrl_jax.quant.lazy import rounded

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
PEAK = 256.0  # what a probability of 1 is rounded as


def attention_fp8(
    q: Float[Array, "b t n h"], k: Float[Array, "b s n h"], v: Float[Array, "b s n h"]
) -> Float[Array, "b t n h"]:
    """`softmax(h ** -0.5 q k^T) v` for each head, operands and result in E4M3. It has no gradient, no mask and no bias."""
    if compile_target.platform() == "cpu":
        return twin(q, k, v)
    if not compile_target.attends_in_fp8() or q.shape[-1] % 16 or q.shape[-1] > 128:
        # the twin would write all scores: BF16's kernel, which rounds probabilities less
        return rounded(attention_forward(*(x.astype(jnp.bfloat16) for x in (q, k, v))), E4M3)
    q, k, v = (tensor_parallel.split(tensor_parallel.join(x, 2), 2) for x in (q, k, v))
    return tensor_parallel.join(tensor_parallel.split(_cudnn(q, k, v), 2), 2)


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    from jax._src.cudnn import (
        fused_attention_stablehlo as cudnn,
    )  # `jax.nn` passes no operands of eight bits

    def number(x):
        return jnp.full((1, 1, 1, 1), x, jnp.float32)

    scales: Any = dict.fromkeys(cudnn.fp8_params_keys, number(1)) | {
        "scale_s": number(PEAK),
        "descale_s": number(1 / PEAK),
    }
    return cudnn.dot_product_attention(
        q, k, v, fp8_params=scales, scale=q.shape[-1] ** -0.5, use_fp8=True
    )[0]


def twin(q: Array, k: Array, v: Array) -> Array:
    """What cuDNN computes, in plain JAX with all scores in memory."""
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    scores = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", *wide[:2])
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    codes = (PEAK * powers).astype(E4M3).astype(jnp.float32)
    sums = PEAK * powers.sum(-1).swapaxes(1, 2)[..., None]
    return rounded(jnp.einsum("bnts,bsnh->btnh", codes, wide[2]) / sums, E4M3)
