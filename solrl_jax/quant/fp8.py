"""FP8 (E4M3) weights and activations, with one float32 scale per output channel and per token.

A token is a row of activations.

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
    cuBLAS multiplies FP8; XLA would transpose any other into a copy. `quantize` makes such leaves
    from arrays.

    Attributes:
        output_axes: A class attribute: by field, the axis of the outputs, which may be sharded over
            the mesh axis `tensor`: the second to last of `codes` and the last of `scales`.
        codes: The values [..., out, in], float8_e4m3fn.
        scales: One scale per output channel [..., out], float32.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -1}

    codes: Float[Array, "... n_out n_in"]
    scales: Float[Array, "... n_out"]

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """Computes `x @ w` for a single matrix, with both operands in FP8.

        The rows of `x` are quantized by `encode`, once for all matmuls that read `x`. Sums are
        accumulated in float32 (on Hopper with fast accumulation) and written in the dtype of `x`.
        The scales of rows and columns are applied by the kernel that reads the lazy result.

        Args:
            x: The input [b, s, in] in BF16 or float32 (unscaled sums could exceed the range of
                FP16).

        Returns:
            A lazy activation [b, s, out] in the dtype of `x`, complete on every device of the mesh
            axis `tensor`. Rows with a non-finite input value become NaN or infinite.
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
        """Returns the matrix that the leaf represents, the codes times their scales: [..., in, out]
        in float32.
        """
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.scales[..., None], -1, -2)


def quantize(w: Matrix) -> FP8Tensor:
    """Quantizes weight matrices to FP8, with one scale per output channel.

    Args:
        w: Matrices [..., in, out] of a floating-point dtype, on the device or in NumPy. `in` is at
            least 1.

    Returns:
        The leaf, of JAX arrays: the codes [..., out, in] in E4M3, with `in` last, and the float32
        scales [..., out]. The scale of an output channel is its largest magnitude divided by 448. A
        channel whose scale is subnormal (below 2^-126; also a channel of zeros) has zero codes; a
        channel with a non-finite value dequantizes to NaN.
    """
    codes, scales = encode([jnp.swapaxes(w, -1, -2).astype(jnp.float32)])
    return FP8Tensor(codes[0], scales[0][..., 0])


def encode(
    parts: Sequence[Float[Array, "..."]],
) -> tuple[list[Float[Array, "..."]], list[Float[Array, "..."]]]:
    """Quantizes rows to FP8 (an encoder for `LazyActivation.encode`).

    The scale of a row is its largest magnitude over all parts, divided by 448. Codes round to
    nearest, ties to even.

    Args:
        parts: The columns of the rows as one or more float32 arrays [..., n_i], the first columns
            first.

    Returns:
        A pair (codes, scales). The codes are a list with one array per part, float8_e4m3fn [...,
        n_i]. The scales are a list of one array [..., 1], float32. A row of zeros (or whose scale
        would be below 2^-126) has zero codes. A row with a NaN or an infinity has a non-finite
        scale, so that its matmul is not finite either.
    """
    scale = row_amax(parts) / E4M3_MAX
    divisor = jnp.where(scale >= SMALLEST_SCALE, scale, jnp.inf)
    # the cast to E4M3 does not saturate: magnitudes above 464 would become NaN
    codes = [jnp.clip(x / divisor, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn) for x in parts]
    return codes, [scale]
