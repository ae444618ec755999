"""NVFP4: E2M1 values in blocks of 16 with one E4M3 scale a block and one float32 scale above (arXiv 2509.25149, section 3).

    s_tensor = amax(x) / (448 * 6)      s_block = e4m3(amax(block) / 6 / s_tensor)      code = e2m1(x / (s_block * s_tensor))

Rounding is to nearest, ties to the even code; everything saturates; 4.5 bits a value. Weights have one float32 scale a
matrix. Activations have one a *row* (token): with one a tensor, a candidate's reward would depend on its batch mates.

"Four over six" (arXiv 2512.02010) lets the largest value of a block be 4 instead of 6 where that errs less: between 4 and 6
lies no code, and values near 5 err most. Storage and product are the same. For 4 to be within E4M3, 6 is at 256 of its 448.
The float32 scale is then a power of two: 256 divides evenly what 448 does not, so that block scales of BF16 weights lie in the
middle between two of E4M3 often, and which one it is must not depend on how XLA writes a division. Weights alone: their choice
is made once a sync, and in activations it would be a second quantisation a product.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from solrl_jax.numerics.blocks import block_scaled_dot, nbytes, pack, pad_blocks, unpack

BLOCK = 16  # values under one E4M3 scale, along the contraction axis
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FOUR_OVER_SIX_MAX = 256.0  # largest block scale where the largest value is 6; where it is 4 that is 384, which E4M3 has too
# Up to this, a tensor scale times the smallest block scale (2^-9) is a float32 that XLA flushes to zero: no finite reciprocal.
SMALLEST_SCALE = 2.0**-117


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales", "tensor_scale"], meta_fields=["n_in"])
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight matrix [in, out] in NVFP4, held as the block-scaled dot wants it: contraction axis last.

    Invariants: `w[i, o] = e2m1(codes)[o, i] * scales[o, i // 16] * tensor_scale`; two codes a byte, the even index in the low
    nibble; `in` is padded with zeros to a multiple of 16, `n_in` is the true one; leading axes (stacked layers) are free.
    """

    codes: UInt8[Array, "... n_out half_in"]
    scales: Float[Array, "... n_out blocks"]  # float8_e4m3fn
    tensor_scale: Float[Array, "..."]  # float32, one a matrix
    n_in: int

    @property
    def nbytes(self) -> int:
        """Bytes the arrays hold: 4.5 bits a value and one float32 a matrix."""
        return nbytes(self)


def quantize(w: Float[Array, "... n_in n_out"], four_over_six: bool = False) -> QTensor:
    """Quantises weight matrices, one float32 scale each. Finite input never gives NaN; an all-zero block gives zeros."""
    n_in = w.shape[-2]
    rows = pad_blocks(jnp.swapaxes(w, -1, -2).astype(jnp.float32), BLOCK)
    largest = FOUR_OVER_SIX_MAX if four_over_six else E4M3_MAX
    tensor_scale = jnp.max(jnp.abs(rows), axis=(-1, -2)) / (largest * E2M1_MAX)
    if four_over_six:
        tensor_scale = _power_of_two(tensor_scale)
    codes, scales = quantize_blocks(rows, tensor_scale[..., None, None], four_over_six)
    return QTensor(pack(codes), scales, tensor_scale, n_in)


def _power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest that is at least `x`; what is not between 0 and 2^100 stays as it is, so that nothing finite overflows."""
    mantissa, exponent = jnp.frexp(x)
    power = jnp.ldexp(1.0, jnp.where(mantissa > 0.5, exponent, exponent - 1))
    return jnp.where((x > 0) & (x < 2.0**100), power, x)


def dequantize(q: QTensor) -> Float[Array, "... n_in n_out"]:
    """The float32 matrix [..., in, out] that `q` stands for."""
    rows = _under_block_scales(q, jnp.float32) * q.tensor_scale[..., None, None]
    return jnp.swapaxes(rows[..., : q.n_in], -1, -2)


def quantize_blocks(x: Float[Array, "... k"], scale: Float[Array, "..."], four_over_six: bool = False) -> tuple[Array, Array]:
    """Codes (float4_e2m1fn [..., k]) and block scales (float8_e4m3fn [..., k / 16]) of `x` under a given float32 `scale`.

    `scale` broadcasts against `x` with a last axis of one. The order of operations (reciprocals, not divisions) is that of
    torchao and Transformer Engine, so that ties fall the same way. Unlike torchao, which lifts block scales to 2^-6, the
    subnormal scales of E4M3 are used, and a block whose scale rounds to zero gets zero codes.

    four_over_six: of the scales that make a block's largest value 6 and 4, the one with the smaller squared error; 6 if equal.
    Where `scale` is a power of two, as `quantize` has it then, the choice is the same in whatever program this is a part of.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    usable = scale > SMALLEST_SCALE
    safe = jnp.where(usable, scale, 1.0)
    amax = jnp.max(jnp.abs(blocks), axis=-1)

    def scales_for(largest: float) -> Array:
        # E4M3 does not saturate by itself: above 464 it gives NaN
        return jnp.minimum(jnp.where(usable, amax / largest / safe, 0.0), E4M3_MAX).astype(jnp.float8_e4m3fn)

    def codes_under(scales: Array) -> Array:
        s32 = scales.astype(jnp.float32)
        reciprocal = jnp.where(s32 > 0, (1.0 / safe) / jnp.where(s32 > 0, s32, 1.0), 0.0)
        return jnp.clip(blocks * reciprocal[..., None], -E2M1_MAX, E2M1_MAX).astype(jnp.float4_e2m1fn)

    def error(scales: Array, largest: Array) -> Array:
        """In squares of a 1024th of the scales `largest`, whole ones: however they are added up, the sum is the same."""
        per_scale = 1024 / jnp.maximum(largest.astype(jnp.float32), 2.0**-9)
        stands_for = codes_under(scales).astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
        off = stands_for - blocks * (1.0 / safe)[..., None]
        return jnp.sum(jnp.round(off * per_scale[..., None]) ** 2, axis=-1)

    scales = scales_for(E2M1_MAX)
    if four_over_six:
        wider = scales_for(4.0)
        scales = jnp.where(error(wider, wider) < error(scales, wider), wider, scales)
    return codes_under(scales).reshape(x.shape), scales


def scaled_matmul(x: Float[Array, "rows n_in"], q: QTensor) -> Float[Array, "rows n_out"]:
    """`x @ w` with both operands in NVFP4, accumulated in float32, in the dtype of `x`."""
    rows = pad_blocks(x.astype(jnp.float32), BLOCK)
    row_scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / (E4M3_MAX * E2M1_MAX)
    codes, scales = quantize_blocks(rows, row_scale)
    y = block_scaled_dot(codes, scales, unpack(q.codes), q.scales)
    return (y * row_scale * q.tensor_scale).astype(x.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class WeightOnly:
    """A weight matrix in NVFP4 whose product is with activations as they are: it saves memory, and no time."""

    weight: QTensor

    @property
    def nbytes(self) -> int:
        return nbytes(self)


def quantize_weight_only(w: Float[Array, "... n_in n_out"]) -> WeightOnly:
    return WeightOnly(quantize(w))


def weight_only_matmul(x: Float[Array, "rows n_in"], q: WeightOnly) -> Float[Array, "rows n_out"]:
    """`x @ w` in the dtype of `x`, which holds the weight but for its tensor scale exactly, accumulated in float32."""
    w = _under_block_scales(q.weight, x.dtype)[:, : q.weight.n_in]
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (y * q.weight.tensor_scale).astype(x.dtype)


def _under_block_scales(q: QTensor, dtype: jnp.dtype) -> Float[Array, "... n_out padded_in"]:
    """What the codes stand for under their block scales: e2m1 x e4m3, which is exact in bfloat16."""
    codes = unpack(q.codes).astype(dtype)
    return (codes.reshape(*codes.shape[:-1], -1, BLOCK) * q.scales.astype(dtype)[..., None]).reshape(codes.shape)
