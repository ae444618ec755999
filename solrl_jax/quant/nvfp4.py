"""NVFP4: E2M1 values in blocks of 16 with one E4M3 scale a block and one float32 scale above (arXiv 2509.25149, section 3).

    s_tensor = amax(x) / (448 * 6)      s_block = e4m3(amax(block) / 6 / s_tensor)      code = e2m1(x / (s_block * s_tensor))

Rounding is to nearest, ties to the even code. Everything saturates. Weights have one float32 scale a matrix. Activations have
one a *row* (token): with one a tensor, a candidate's reward would depend on the other rows of its batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from solrl_jax.quant.lazy import LazyActivation, largest
from solrl_jax.quant.leaf import Coded, Matrix, scaled

BLOCK = 16  # values under one E4M3 scale, along the contraction axis
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FILL = 64  # a contraction is filled up to a multiple of it, which is what cuDNN's product reads
TILE = 128  # rows and outputs of cuDNN's product
# Up to this, a tensor scale times the smallest block scale (2^-9) is a float32 that XLA flushes to zero: no finite reciprocal.
SMALLEST_SCALE = 2.0**-117


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Tensor(Coded):
    """A weight matrix [in, out] in NVFP4, contraction axis last, as the block-scaled dot takes it; 4.5 bits a value.

    Invariants: `w[i, o] = e2m1(codes)[o, i] * scales[o, i // 16] * tensor_scale`. Two codes a byte, the even index in the low
    nibble. `in` and `out` are filled up with zeros to multiples of 64 and 128; `n_in` and `n_out` are the true ones.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -2}

    codes: UInt8[Array, "... filled_out half_in"]
    scales: Float[Array, "... filled_out blocks"]  # float8_e4m3fn
    tensor_scale: Float[Array, "..."]  # float32, one a matrix
    n_in: int = dataclasses.field(metadata={"static": True})
    n_out: int = dataclasses.field(metadata={"static": True})

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        if x.shape[-1] != self.n_in:  # a narrower one would be filled up, as the codes are
            raise ValueError(
                f"x: has {x.shape[-1]} columns; accepted: {self.n_in}, the rows of the weight"
            )
        return super().matmul(x)

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` with both operands in NVFP4, accumulated in float32; float32 scales are applied where the result is read."""
        codes, scales, row_scale = x.encoded(encode)

        def rows(a):
            return a.reshape(-1, a.shape[-1])

        y = block_scaled_dot(
            unpack(rows(codes)), rows(scales), unpack(self.codes), self.scales, x.dtype
        )
        return scaled(
            y.reshape(*codes.shape[:2], -1),
            row_scale,
            self.tensor_scale.reshape(1, 1, 1),
            width=self.n_out,
        )

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        codes = unpack(self.codes).astype(jnp.float32)
        blocks = (
            codes.reshape(*codes.shape[:-1], -1, BLOCK) * self.scales.astype(jnp.float32)[..., None]
        )
        rows = blocks.reshape(codes.shape) * self.tensor_scale[..., None, None]
        return jnp.swapaxes(rows[..., : self.n_out, : self.n_in], -1, -2)


def quantize(w: Matrix) -> NVFP4Tensor:
    """NVFP4 of weight matrices [..., in, out], one float32 scale each. Finite input never gives NaN."""
    n_in, n_out = w.shape[-2:]
    rows = jnp.swapaxes(w, -1, -2).astype(jnp.float32)
    tensor_scale = jnp.max(jnp.abs(rows), axis=(-1, -2)) / (E4M3_MAX * E2M1_MAX)
    rows = jnp.pad(rows, [(0, 0)] * (w.ndim - 2) + [(0, -n_out % TILE), (0, -n_in % FILL)])
    values, scales = round_blocks(rows, tensor_scale[..., None, None])
    return NVFP4Tensor(pack(values.astype(jnp.float4_e2m1fn)), scales, tensor_scale, n_in, n_out)


def encode(parts: Sequence[Float[Array, "..."]]) -> tuple[list[Array], list[Array], list[Array]]:
    """Packed codes and block scales of float32 rows [..., k], in parts along k, and the float32 scale [..., 1] of each row."""
    scale = largest(parts) / (E4M3_MAX * E2M1_MAX)
    missing = -sum(x.shape[-1] for x in parts) % FILL

    def fill(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

    rounded = [round_blocks(x, scale) for x in (*parts[:-1], fill(parts[-1]))]
    return [nibbles(values) for values, _ in rounded], [scales for _, scales in rounded], [scale]


def round_blocks(
    x: Float[Array, "*rows k"], scale: Float[Array, "..."]
) -> tuple[Float[Array, "*rows k"], Float[Array, "*rows blocks"]]:
    """Values that the codes (float4_e2m1fn) are rounded from, at most 6, and block scales (float8_e4m3fn, one for 16 values).

    scale: float32; it broadcasts against `x` with a last axis of one.
    The order of operations (reciprocals, not divisions) is that of torchao and Transformer Engine, so that ties round the same
    way. torchao lifts block scales to 2^-6; here the subnormal scales of E4M3 are used, and a block whose scale rounds to zero
    gets zero codes.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    usable = scale > SMALLEST_SCALE
    safe = jnp.where(usable, scale, 1.0)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    # E4M3 does not saturate by itself: above 464 it gives NaN
    scales = jnp.minimum(jnp.where(usable, amax / E2M1_MAX / safe, 0.0), E4M3_MAX).astype(
        jnp.float8_e4m3fn
    )
    s32 = scales.astype(jnp.float32)
    reciprocal = jnp.where(s32 > 0, (1.0 / safe) / jnp.where(s32 > 0, s32, 1.0), 0.0)
    return jnp.clip(blocks * reciprocal[..., None], -E2M1_MAX, E2M1_MAX).reshape(x.shape), scales


def nibbles(values: Float[Array, "*rows k"]) -> UInt8[Array, "*rows half"]:
    """`pack(values.astype(float4_e2m1fn))` of values up to 6, by comparisons: Triton has no type of four bits."""
    size = jnp.abs(values)
    above = [
        size > 0.25,
        size >= 0.75,
        size > 1.25,
        size >= 1.75,
        size > 2.5,
        size >= 3.5,
        size > 5.0,
    ]  # ties to even codes
    sign = jax.lax.bitcast_convert_type(values, jnp.uint32) >> 28 & 8
    codes = sum(test.astype(jnp.uint32) for test in above) | sign
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return jnp.sum(
        pairs << 4 * jax.lax.broadcasted_iota(jnp.uint32, pairs.shape, pairs.ndim - 1), axis=-1
    ).astype(jnp.uint8)


def block_scaled_dot(
    x: Shaped[Array, "rows k"], x_scales: Shaped[Array, "rows blocks"],
    w: Shaped[Array, "n_out k"], w_scales: Shaped[Array, "n_out blocks"], dtype: DTypeLike = jnp.float32,
) -> Float[Array, "rows n_out"]:  # fmt: skip
    """`(x * x_scales) @ (w * w_scales).T` in `dtype`, accumulated in float32: codes, and one scale for each block along k.

    Native on CUDA devices that have units for it: cuDNN's kernel, by XLA's custom call (block_scaling_matcher.cc). Elsewhere
    XLA expands the product. That is exact even in BF16: the product of a code and its scale has at most eight significant bits.
    Scales in float32 would not fit: the caller applies them to the result.
    """
    operands = (x, x_scales, w, w_scales)
    return jax.lax.platform_dependent(
        *operands, cuda=partial(_custom_call, dtype), default=partial(_composite, dtype)
    )


def _composite(dtype: DTypeLike, x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    return jax.lax.scaled_dot(
        x, w, lhs_scale=x_scales, rhs_scale=w_scales, dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=dtype)  # fmt: skip


def _custom_call(dtype: DTypeLike, x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    """cuDNN takes multiples of 128 rows and outputs. XLA would fill them up too, but then copies the whole result."""
    filled = [jnp.pad(a, ((0, -len(a) % TILE), (0, 0)))[None] for a in (x, w, x_scales, w_scales)]
    return jax.nn.scaled_matmul(*filled, preferred_element_type=dtype)[0, : len(x), : len(w)]


def pack(codes: Shaped[Array, "... k"]) -> UInt8[Array, "... half"]:
    """float4_e2m1fn [..., k] to bytes [..., k / 2]. XLA's own float4 arrays take a byte an element in memory."""
    return jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint8)


def unpack(packed: UInt8[Array, "... half"]) -> Shaped[Array, "... k"]:
    """Bytes [..., k / 2] to float4_e2m1fn [..., k]."""
    # The barrier prevents constant folding: XLA (jaxlib 0.10) folds this to wrong codes where the bytes are constants.
    codes = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(packed), jnp.float4_e2m1fn)
    return codes.reshape(*packed.shape[:-1], -1)
