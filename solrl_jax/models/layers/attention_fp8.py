"""Softmax attention in FP8 (E4M3) for exploration: cuDNN's on Hopper and later, plain JAX on CPUs.

Both matmuls have 8-bit operands, and the result has 8 bits, too. There are no scales: E4M3 keeps
three mantissa bits from 2^-6 to 448, so a scale would change only which values saturate or vanish.
Queries and keys are normalized before (RMSNorm). Values are not bounded, and saturate beyond 448.
Probabilities are at most 1: they are quantized 256 times as large, and so keep their mantissa bits
down to 2^-14.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention_forward
from solrl_jax.quant import compile_target, tensor_parallel
from solrl_jax.quant.lazy import cast_saturating
from solrl_jax.quant.sequence_parallel import tokens_are_sharded
from solrl_jax.quant.sharded_kernel import shard_map_kernel

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
PROBABILITY_SCALE = 256.0  # the value that a probability of 1 is quantized as


def attention_fp8(
    q: Float[Array, "b t n h"], k: Float[Array, "b s n h"], v: Float[Array, "b s n h"]
) -> Float[Array, "b t n h"]:
    """Computes `softmax(h ** -0.5 q k^T) v` for each head, in FP8, without a mask. No gradient may
    be taken of the result, which is not checked.

    The matmuls run in FP8 on GPUs from Hopper on, if a head has a multiple of 16 features, up to
    128. On CPUs, plain JAX gives the same rounding for any head. On all other devices, and on GPUs
    for other heads, the matmuls run in BF16. Except on CPUs, under tensor parallelism each device
    computes some of the heads, and the result is gathered. Under sequence parallelism, `q` holds
    the queries of this device, and `k` and `v` hold those of all devices.

    Args:
        q: Queries in E4M3: batch, query positions, heads, features of a head.
        k: Keys in E4M3: batch, key positions, heads, features.
        v: Values in E4M3, of the shape of `k`.

    Returns:
        The attended values [b, t, n, h] in E4M3, clipped to +-448.
    """
    if compile_target.platform() == "cpu":
        return reference(q, k, v)
    if not compile_target.cudnn_attends_in_fp8() or q.shape[-1] % 16 or q.shape[-1] > 128:
        out = attention_forward(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
        return cast_saturating(out, E4M3)
    q, k, v = (tensor_parallel.shard_axis(tensor_parallel.gather_axis(x, 2), 2) for x in (q, k, v))
    # XLA's partitioner cannot partition cuDNN's call where `sequence` is a manual axis.
    attend = _cudnn_attention
    if tokens_are_sharded():
        attend = shard_map_kernel(_cudnn_attention, heads_axis=2)
    out = tensor_parallel.shard_axis(attend(q, k, v), 2)
    return tensor_parallel.gather_axis(out, 2)


def _cudnn_attention(q: Array, k: Array, v: Array) -> Array:
    """Calls cuDNN's FP8 attention, `softmax(h ** -0.5 q k^T) v` without a mask.

    Needs a GPU from Hopper on, and h must be a multiple of 16, up to 128; neither is checked.
    Probabilities are quantized after multiplication by 256 (`PROBABILITY_SCALE`), so that small
    ones keep their precision. No other number is scaled.

    Args:
        q: Queries [b, t, n, h], E4M3.
        k: Keys [b, s, n, h], E4M3.
        v: Values [b, s, n, h], E4M3.

    Returns:
        The attended values in E4M3, clipped to +-448, with the shape of `q`.
    """
    # From `jax._src`, because `jax.nn.dot_product_attention` accepts no 8-bit operands.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def scalar(x: float) -> Array:
        return jnp.full((1, 1, 1, 1), x, jnp.float32)

    scales: Any = dict.fromkeys(cudnn.fp8_params_keys, scalar(1))
    scales["scale_s"] = scalar(PROBABILITY_SCALE)
    scales["descale_s"] = scalar(1 / PROBABILITY_SCALE)
    out, *_ = cudnn.dot_product_attention(
        q, k, v, fp8_params=scales, scale=q.shape[-1] ** -0.5, use_fp8=True
    )
    return out


def reference(q: Array, k: Array, v: Array) -> Array:
    """Computes `softmax(h ** -0.5 q k^T) v` for each head in plain JAX, with the rounding of
    cuDNN's FP8 attention.

    Logits and sums are in float32. The exponentials of the logits less their maximum over all keys,
    times 256 (`PROBABILITY_SCALE`), are rounded to E4M3 for the product with the values; their sum,
    which normalizes the result, is taken before this rounding. All scores are in memory.

    Args:
        q: queries [b, t, n, h] in E4M3: batch, positions, heads, features of a head.
        k: keys [b, s, n, h] in E4M3.
        v: values [b, s, n, h] in E4M3.

    Returns:
        The attended values [b, t, n, h] in E4M3, clipped to +-448.
    """
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    logits = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", q32, k32)
    powers = jnp.exp(logits - logits.max(-1, keepdims=True))
    codes = (PROBABILITY_SCALE * powers).astype(E4M3).astype(jnp.float32)
    sums = PROBABILITY_SCALE * powers.sum(-1).swapaxes(1, 2)[..., None]
    return cast_saturating(jnp.einsum("bnts,bsnh->btnh", codes, v32) / sums, E4M3)
