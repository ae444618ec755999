"""FP8: E4M3 under one float32 scale an output channel of a weight, and one a row (token) of activations.

    scale = amax / 448      code = e4m3(clip(x / scale))

Both scales are constant along the contraction, so they multiply its result, and the product itself is one of plain FP8
matrices. That is what cuBLAS computes on Ada, Hopper and later: XLA's GEMM rewriter (gemm_rewriter.cc) matches a dot whose two
operands are E4M3 as they are, or E4M3 converted and multiplied by a *scalar* each. The former needs no pattern to survive other
passes, and a scale per channel could not be part of the latter. Where there is no FP8 unit, XLA converts the operands, exactly.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics.blocks import nbytes

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # below it float32 is flushed to zero


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FP8Tensor:
    """A weight matrix [in, out] in FP8: `w[i, o] = codes[o, i] * scales[o]`; leading axes (stacked layers) are free.

    The contraction axis is last: cuBLAS multiplies FP8 in that layout alone before Blackwell, and would get a transposed copy.
    """

    codes: Float[Array, "... n_out n_in"]  # float8_e4m3fn
    scales: Float[Array, "... n_out"]  # float32

    @property
    def nbytes(self) -> int:
        """Bytes the arrays hold: 8 bits a value and one float32 an output channel."""
        return nbytes(self)


def quantize(w: Float[Array, "... n_in n_out"]) -> FP8Tensor:
    return FP8Tensor(*quantize_rows(jnp.swapaxes(w, -1, -2).astype(jnp.float32)))


def dequantize(q: FP8Tensor) -> Float[Array, "... n_in n_out"]:
    """The float32 matrix [..., in, out] that `q` stands for."""
    return jnp.swapaxes(q.codes.astype(jnp.float32) * q.scales[..., None], -1, -2)


def quantize_rows(x: Float[Array, "... k"]) -> tuple[Array, Float[Array, "..."]]:
    """Codes (float8_e4m3fn) of float32 `x` and the scale of each of its rows; a row too small for a scale has zero codes."""
    scales = jnp.max(jnp.abs(x), axis=-1) / E4M3_MAX
    divisor = jnp.where(scales >= SMALLEST_SCALE, scales, jnp.inf)[..., None]
    # E4M3 does not saturate by itself: above 464 it gives NaN
    return jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), scales


def scaled_matmul(x: Float[Array, "rows n_in"], q: FP8Tensor) -> Float[Array, "rows n_out"]:
    """`x @ w` with both operands in FP8, accumulated in float32, in the dtype of `x`."""
    codes, scales = quantize_rows(x.astype(jnp.float32))
    y = jax.lax.dot_general(codes, q.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (y * scales[:, None] * q.scales).astype(x.dtype)
