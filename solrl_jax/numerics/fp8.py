"""FP8: E4M3 under one float32 scale an output channel of a weight, and one a row (token) of activations.

    scale = amax / 448      code = e4m3(clip(x / scale))

Both scales are constant along the contraction. So they multiply the result, and the product itself is one of plain FP8
matrices, which is what cuBLAS computes on Ada, Hopper and later. XLA's GEMM rewriter (gemm_rewriter.cc) matches a dot of two
E4M3 operands, and a dot of two operands that are converted from E4M3 and multiplied by a *scalar* each. This file uses the
first: no other pass can break that pattern, and a scale per channel does not fit the second. Where there is no FP8 unit, XLA
converts the operands, exactly.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics.leaf import Matrix, Quantized

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # below it float32 is flushed to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Tensor(Quantized):
    """A weight matrix [in, out] in FP8: `w[i, o] = codes[o, i] * scales[o]`; 8 bits a value.

    The contraction axis is last: before Blackwell, cuBLAS multiplies FP8 in that layout alone, and would get a transposed copy.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -1}

    codes: Float[Array, "... n_out n_in"]  # float8_e4m3fn
    scales: Float[Array, "... n_out"]  # float32

    def multiply(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` with both operands in FP8, accumulated in float32, in the dtype of `x`."""
        codes, scales = quantize_rows(x.astype(jnp.float32))
        y = jax.lax.dot_general(codes, self.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return (y * scales[:, None] * self.scales).astype(x.dtype)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.scales[..., None], -1, -2)


def quantize(w: Matrix) -> FP8Tensor:
    return FP8Tensor(*quantize_rows(jnp.swapaxes(w, -1, -2).astype(jnp.float32)))


def quantize_rows(x: Float[Array, "*rows k"]) -> tuple[Float[Array, "*rows k"], Float[Array, "*rows"]]:
    """Codes (float8_e4m3fn) of float32 `x` and the scale of each of its rows; a row too small for a scale has zero codes."""
    scales = jnp.max(jnp.abs(x), axis=-1) / E4M3_MAX
    divisor = jnp.where(scales >= SMALLEST_SCALE, scales, jnp.inf)[..., None]
    # E4M3 does not saturate by itself: above 464 it gives NaN
    return jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), scales
