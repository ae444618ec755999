"""MXFP4 and MXFP8: blocks of 32 under one power of two each (OCP Microscaling Formats 1.0, sections 5.2, 5.3 and 6.3).

    scale = 2^(floor(log2(amax(block))) - emax)      code = element(clip(x / scale))      emax: 2 for E2M1, 8 for E4M3

Rounding is to nearest, ties to the even code. The specification's scale lets the largest values of a block saturate: in E2M1
those beyond 6 / 8 of the next power of two, in E4M3 those beyond 7 / 8. E8M0 has the range of float32, so there is no second
scale for a row or a matrix, and a candidate's reward does not depend on the other rows of its batch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from solrl_jax.numerics.blocks import block_scaled_dot, pack, pad_blocks, unpack
from solrl_jax.numerics.leaf import Matrix, Quantized

BLOCK = 32  # values under one E8M0 scale, along the contraction axis
# element type: (largest value, exponent of the largest power of two)
ELEMENTS = {jnp.float4_e2m1fn: (6.0, 2), jnp.float8_e4m3fn: (448.0, 8)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXTensor(Quantized):
    """A weight matrix [in, out] in MXFP4 or MXFP8, contraction axis last, as the block-scaled dot takes it; 4.25 or 8.25 bits a
    value.

    Invariants: `w[i, o] = element(codes)[o, i] * scales[o, i // 32]`. Codes are float8_e4m3fn [..., out, in], or E2M1 two a
    byte, the even index in the low nibble. `in` is padded with zeros to a multiple of 32; `n_in` is the true one.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -2}

    codes: Float[Array, "... n_out padded_in"] | UInt8[Array, "... n_out half_in"]
    scales: Shaped[Array, "... n_out blocks"]  # float8_e8m0fnu
    n_in: int = dataclasses.field(metadata={"static": True})

    @property
    def elements(self) -> Shaped[Array, "... n_out padded_in"]:
        """The codes in their own type, an array element each."""
        return unpack(self.codes) if self.codes.dtype == jnp.uint8 else self.codes

    def multiply(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` with both operands in the format, accumulated in float32, in the dtype of `x`."""
        w = self.elements
        codes, scales = quantize_blocks(pad_blocks(x.astype(jnp.float32), BLOCK), w.dtype.type)
        return block_scaled_dot(codes, scales, w, self.scales).astype(x.dtype)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        codes = self.elements.astype(jnp.float32)
        rows = codes.reshape(*codes.shape[:-1], -1, BLOCK) * self.scales.astype(jnp.float32)[..., None]
        return jnp.swapaxes(rows.reshape(codes.shape)[..., : self.n_in], -1, -2)


def quantize(element: Any, w: Matrix) -> MXTensor:
    """Weight matrices [..., in, out] in MXFP4 or MXFP8, by the type of `element`."""
    rows = pad_blocks(jnp.swapaxes(w, -1, -2).astype(jnp.float32), BLOCK)
    codes, scales = quantize_blocks(rows, element)
    return MXTensor(pack(codes) if element == jnp.float4_e2m1fn else codes, scales, w.shape[-2])


def quantize_blocks(x: Float[Array, "... k"], element: Any) -> tuple[Shaped[Array, "... k"], Shaped[Array, "... blocks"]]:
    """Codes (of type `element`) and block scales (float8_e8m0fnu, one for 32 values) of float32 `x`.

    Equal to torchao's floor mode, with one exception: where a scale would be below 2^-126, the smallest float32 that XLA does
    not flush to zero, the block has the smallest scale and zero codes. A block with a NaN has NaN for its scale.
    """
    largest, exponent = ELEMENTS[element]
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    biased = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23) - exponent  # exponents as float32 and E8M0 both hold them
    divisor = jnp.where(biased >= 1, jax.lax.bitcast_convert_type(biased << 23, jnp.float32), jnp.inf)
    # E4M3 does not saturate by itself: above 464 it gives NaN
    codes = jnp.clip(blocks / divisor[..., None], -largest, largest).astype(element).reshape(x.shape)
    bits = jnp.where(jnp.isnan(amax), 255, jnp.maximum(biased, 0)).astype(jnp.uint8)
    return codes, jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
