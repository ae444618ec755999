"""NVFP4: E2M1 values in blocks of 16 with one E4M3 scale a block and one float32 scale above (arXiv 2509.25149, section 3).

    s_tensor = amax(x) / (448 * 6)      s_block = e4m3(amax(block) / 6 / s_tensor)      code = e2m1(x / (s_block * s_tensor))

Rounding is to nearest, ties to the even code. Everything saturates. Weights have one float32 scale a matrix. Activations have
one a *row* (token): with one a tensor, a candidate's reward would depend on the other rows of its batch.

"Four over six" (arXiv 2512.02010): the largest value of a block becomes 4 instead of 6 where that gives the smaller error.
There is no code between 4 and 6, so values near 5 have the largest errors. Storage and product are the same. A block scale for
4 is 6 / 4 of the one for 6, so the largest one for 6 is 256 instead of 448 to leave room. 256 is a power of two, and block
scales of BF16 weights then often lie half-way between two numbers of E4M3. Which of the two is taken must not depend on how XLA
writes a division, so the float32 scale is a power of two as well: dividing by it is exact. Only weights use four over six: the
choice is made once a sync. For activations it would be a second quantisation in each product.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from solrl_jax.numerics.blocks import block_scaled_dot, pack, pad_blocks, unpack
from solrl_jax.numerics.leaf import Matrix, Quantized

BLOCK = 16  # values under one E4M3 scale, along the contraction axis
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FOUR_OVER_SIX_MAX = 256.0  # the largest block scale for 6; the one for 4 is then at most 384, which E4M3 has too
# Up to this, a tensor scale times the smallest block scale (2^-9) is a float32 that XLA flushes to zero: no finite reciprocal.
SMALLEST_SCALE = 2.0**-117


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor(Quantized):
    """A weight matrix [in, out] in NVFP4, contraction axis last, as the block-scaled dot takes it; 4.5 bits a value.

    Invariants: `w[i, o] = e2m1(codes)[o, i] * scales[o, i // 16] * tensor_scale`. Two codes a byte, the even index in the low
    nibble. `in` is padded with zeros to a multiple of 16; `n_in` is the true one.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -2}

    codes: UInt8[Array, "... n_out half_in"]
    scales: Float[Array, "... n_out blocks"]  # float8_e4m3fn
    tensor_scale: Float[Array, "..."]  # float32, one a matrix
    n_in: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` with both operands in NVFP4, accumulated in float32, in the dtype of `x`."""
        rows = pad_blocks(x.astype(jnp.float32), BLOCK)
        row_scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / (E4M3_MAX * E2M1_MAX)
        codes, scales = quantize_blocks(rows, row_scale)
        y = block_scaled_dot(codes, scales, unpack(self.codes), self.scales)
        return (y * row_scale * self.tensor_scale).astype(x.dtype)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        codes = unpack(self.codes).astype(jnp.float32)
        blocks = codes.reshape(*codes.shape[:-1], -1, BLOCK) * self.scales.astype(jnp.float32)[..., None]
        rows = blocks.reshape(codes.shape) * self.tensor_scale[..., None, None]
        return jnp.swapaxes(rows[..., : self.n_in], -1, -2)


def quantize(w: Matrix, four_over_six: bool = False) -> QTensor:
    """NVFP4 of weight matrices [..., in, out], one float32 scale each. Finite input never gives NaN.

    four_over_six: see above.
    """
    n_in = w.shape[-2]
    rows = pad_blocks(jnp.swapaxes(w, -1, -2).astype(jnp.float32), BLOCK)
    largest = FOUR_OVER_SIX_MAX if four_over_six else E4M3_MAX
    tensor_scale = jnp.max(jnp.abs(rows), axis=(-1, -2)) / (largest * E2M1_MAX)
    if four_over_six:
        tensor_scale = _power_of_two(tensor_scale)
    codes, scales = quantize_blocks(rows, tensor_scale[..., None, None], four_over_six)
    return QTensor(pack(codes), scales, tensor_scale, n_in)


def _power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The smallest power of two that is at least `x`; beyond 0 to 2^100 `x` itself, so that nothing finite overflows."""
    mantissa, exponent = jnp.frexp(x)
    power = jnp.ldexp(1.0, jnp.where(mantissa > 0.5, exponent, exponent - 1))
    return jnp.where((x > 0) & (x < 2.0**100), power, x)


def quantize_blocks(
    x: Float[Array, "*rows k"], scale: Float[Array, "..."], four_over_six: bool = False
) -> tuple[Shaped[Array, "*rows k"], Float[Array, "*rows blocks"]]:
    """Codes (float4_e2m1fn) and block scales (float8_e4m3fn, one for 16 values) of `x` under a given float32 `scale`.

    `scale` broadcasts against `x` with a last axis of one. The order of operations (reciprocals, not divisions) is that of
    torchao and Transformer Engine, so that ties round the same way. torchao lifts block scales to 2^-6; here the subnormal
    scales of E4M3 are used, and a block whose scale rounds to zero gets zero codes.

    four_over_six: of the two scales, one for a largest value of 6 and one for 4, each block takes the one with the smaller
    squared error, and the one for 6 if they are equal. If `scale` is a power of two, the choice does not depend on the program.
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
        """In squares of a 1024th of `largest`, rounded to integers: their sum does not depend on the order of its terms."""
        per_scale = 1024 / jnp.maximum(largest.astype(jnp.float32), 2.0**-9)
        stands_for = codes_under(scales).astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
        off = stands_for - blocks * (1.0 / safe)[..., None]
        return jnp.sum(jnp.round(off * per_scale[..., None]) ** 2, axis=-1)

    scales = scales_for(E2M1_MAX)
    if four_over_six:
        wider = scales_for(4.0)
        scales = jnp.where(error(wider, wider) < error(scales, wider), wider, scales)
    return codes_under(scales).reshape(x.shape), scales
