"""FP8 (E4M3): one float32 scale per output channel of a weight, and one per row (token) of
activations.

    scale = amax / 448      code = e4m3(clip(x / scale))

Both scales are constant along the contraction, so they can be applied to the result. The matmul
itself multiplies plain FP8 matrices, which is what cuBLAS computes on Ada, Hopper and later GPUs.
XLA's GEMM rewriter (gemm_rewriter.cc) recognizes a dot of two E4M3 operands, and a dot of two
operands that are converted from E4M3 and multiplied by one *scalar* each. This module emits the
first form: no other pass can break that pattern, and scales per channel do not fit the second form.
On devices without FP8 units, XLA converts the operands, which is exact.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant.lazy import LazyActivation, row_amax
from solrl_jax.quant.leaf import Matrix, QuantizedWithInput, scale_lazily

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # smaller float32 numbers are subnormal, and XLA flushes them to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Tensor(QuantizedWithInput):
    """A weight matrix [in, out] in FP8: `w[i, o] = codes[o, i] * scales[o]`, 8 bits per value.

    The contraction axis of `codes` is last. Before Blackwell, this is the only layout in which
    cuBLAS multiplies FP8; XLA would transpose any other into a copy.

    Attributes:
        codes: The values [..., out, in], float8_e4m3fn.
        scales: One scale per output channel [..., out], float32.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -1}

    codes: Float[Array, "... n_out n_in"]
    scales: Float[Array, "... n_out"]

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` with both operands in FP8, accumulated in float32. The reader applies the
        scales.
        """
        codes, scales = x.encode(encode)
        y = jax.lax.dot_general(
            codes,
            self.codes,
            dimension_numbers=(((2,), (1,)), ((), ())),
            # a higher precision makes Hopper accumulate more slowly
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=x.dtype,
        )
        return scale_lazily(y, scales, self.scales[None, None], width=y.shape[-1])

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """The codes times their scales, [..., in, out], in float32."""
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.scales[..., None], -1, -2)


def quantize(w: Matrix) -> FP8Tensor:
    """Quantizes weight matrices [..., in, out] to FP8, with one scale per output channel."""
    codes, scales = encode([jnp.swapaxes(w, -1, -2).astype(jnp.float32)])
    return FP8Tensor(codes[0], scales[0][..., 0])


def encode(
    parts: Sequence[Float[Array, "..."]],
) -> tuple[list[Float[Array, "..."]], list[Float[Array, "..."]]]:
    """Quantizes rows to FP8 (an encoder for `LazyActivation.encode`).

    Args:
        parts: Float32 arrays [..., n_i] that lie side by side along the last axis.

    Returns:
        The codes of each part, float8_e4m3fn [..., n_i], and the scales of the rows [[..., 1]],
        float32. A row whose scale would be subnormal has zero codes.
    """
    scale = row_amax(parts) / E4M3_MAX
    divisor = jnp.where(scale >= SMALLEST_SCALE, scale, jnp.inf)
    # the cast to E4M3 does not saturate: magnitudes above 464 would become NaN
    codes = [jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn) for x in parts]
    return codes, [scale]
