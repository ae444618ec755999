"""FP8: E4M3 under one float32 scale an output channel of a weight, and one a row (token) of activations.

    scale = amax / 448      code = e4m3(clip(x / scale))

Both scales are constant along the contraction. So they multiply the result, and the product itself is one of plain FP8
matrices, which is what cuBLAS computes on Ada, Hopper and later. XLA's GEMM rewriter (gemm_rewriter.cc) matches a dot of two
E4M3 operands, and a dot of two operands that are converted from E4M3 and multiplied by a *scalar* each. This file uses the
first: no other pass can break that pattern, and a scale per channel does not fit the second. Where there is no FP8 unit, XLA
converts the operands, exactly.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant.lazy import LazyActivation, largest
from solrl_jax.quant.leaf import Coded, Matrix, scaled

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # below it float32 is flushed to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Tensor(Coded):
    """A weight matrix [in, out] in FP8: `w[i, o] = codes[o, i] * scales[o]`; 8 bits a value.

    The contraction axis is last: before Blackwell, cuBLAS multiplies FP8 in that layout alone, and would get a transposed copy.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -1}

    codes: Float[Array, "... n_out n_in"]  # float8_e4m3fn
    scales: Float[Array, "... n_out"]  # float32

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` with both operands in FP8, accumulated in float32; scales are applied where the result is read."""
        codes, scales = x.encoded(encode)
        # Hopper sums the slower at a higher one
        contract = (((2,), (1,)), ((), ()))
        fast = jax.lax.Precision.DEFAULT
        y = jax.lax.dot_general(codes, self.codes, contract, fast, preferred_element_type=x.dtype)
        return scaled(y, scales, self.scales[None, None], width=y.shape[-1])

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.scales[..., None], -1, -2)


def quantize(w: Matrix) -> FP8Tensor:
    codes, scales = encode([jnp.swapaxes(w, -1, -2).astype(jnp.float32)])
    return FP8Tensor(codes[0], scales[0][..., 0])


def encode(
    parts: Sequence[Float[Array, "..."]],
) -> tuple[list[Float[Array, "..."]], list[Float[Array, "..."]]]:
    """Codes (float8_e4m3fn) of float32 rows [..., k], in parts along k, and the scale [..., 1] of each row.

    A row too small for a scale has zero codes.
    """
    scale = largest(parts) / E4M3_MAX
    divisor = jnp.where(scale >= SMALLEST_SCALE, scale, jnp.inf)
    # E4M3 does not saturate by itself: above 464 it gives NaN
    return [jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn) for x in parts], [
        scale
    ]
