"""INT8: one float32 scale per output channel of a weight, and one per row (token) of activations.

    scale = amax / 127      code = round(x * 127 / amax)

Codes are symmetric, from -127 to 127, and round to nearest, ties to even. Both scales are constant
along the contraction, so they are applied to the result. The matmul itself multiplies plain INT8
matrices and accumulates in INT32. The sums are exact, so that every platform and every order of
summation gives the same bits: a device without INT8 units emulates the format exactly. XLA:CPU, for
example, multiplies the codes as INT32.

TPU v5e, v5p and v6e, and NVIDIA GPUs from the A100 on, multiply INT8 twice as fast as BF16.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from solrl_jax.quant import compile_target, tensor_parallel
from solrl_jax.quant.lazy import LazyActivation, row_amax
from solrl_jax.quant.leaf import Matrix, QuantizedWithInput

CODE_MAX = 127
SMALLEST_SCALE = 2.0**-126  # smaller float32 numbers are subnormal, and XLA flushes them to zero
ROUNDER = 1.5 * 2.0**23  # the distance between float32 numbers of this size is 1
ROUNDER_BITS = 0x4B400000  # the bits of `ROUNDER`
MAX_INPUTS = (2**31 - 1) // CODE_MAX**2  # longer sums of products of codes could exceed INT32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class INT8Tensor(QuantizedWithInput):
    """A weight matrix [in, out] in INT8: `w[i, o] = codes[o, i] * scales[o]`, 8 bits per value.

    The contraction axis of `codes` is last, the layout that cuBLAS requires of INT8 operands. TPUs
    multiply both layouts in the same time. `quantize` makes such leaves from arrays.

    Attributes:
        output_axes: A class attribute: by field, the axis of the outputs, which may be sharded over
            the mesh axis `tensor`: the second to last of `codes` and the last of `scales`.
        codes: The values [..., out, in], int8, from -127 to 127.
        scales: One scale per output channel [..., out], float32.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -1}

    codes: Int8[Array, "... n_out n_in"]
    scales: Float[Array, "... n_out"]

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """Computes `x @ w` for a single matrix, with both operands in INT8, accumulated in INT32.

        The rows of `x` are quantized by `encode`, once for all matmuls that read `x`. The scales of
        rows and columns are applied to the sums in float32, and the result is rounded to the dtype
        of `x`.

        Args:
            x: The input [b, s, in].

        Returns:
            The result [b, s, out] in the dtype of `x`, as a lazy activation that is an array
            already, marked as containing a quantized matmul. It is complete on every device of the
            mesh axis `tensor`, and has the `grid` (the size of the image, or None) of `x`. Rows
            with a non-finite input value become NaN or infinite.
        """
        codes, scales = x.encode(encode)
        shape = (*codes.shape[:2], self.codes.shape[0])
        if x.grid is not None and compile_target.platform() == "tpu":
            # as images, because XLA would copy the result for the convolution that follows
            codes = codes.reshape(len(codes), *x.grid, -1)
            scales = scales.reshape(len(codes), *x.grid, 1)
        sums = jax.lax.dot_general(
            codes,
            self.codes,
            dimension_numbers=(((codes.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        y = (sums.astype(jnp.float32) * scales * self.scales).astype(x.dtype).reshape(shape)
        result = LazyActivation.from_array(tensor_parallel.gather_axis(y), exact=False)
        return dataclasses.replace(result, grid=x.grid)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the matrix that the leaf represents, the codes times their scales: [..., in, out]
        in float32.
        """
        return jnp.swapaxes(self.codes.astype(jnp.float32) * self.scales[..., None], -1, -2)


def quantize(w: Matrix) -> INT8Tensor:
    """Quantizes weight matrices to INT8, with one scale per output channel.

    Args:
        w: Matrices [..., in, out] of a floating-point dtype, on the device or in NumPy. `in` is
            from 1 to `MAX_INPUTS` (133,144).

    Returns:
        The leaf, of JAX arrays: the int8 codes [..., out, in], with `in` last, and the float32
        scales [..., out]. The scale of an output channel is its largest magnitude divided by 127. A
        channel whose scale would be subnormal (below 2^-126; also a channel of zeros) has zero
        codes; a channel with a non-finite value has a non-finite scale.

    Raises:
        ValueError: If the matrices have more than `MAX_INPUTS` (133,144) inputs.
    """
    if w.shape[-2] > MAX_INPUTS:
        raise ValueError(
            f"w has {w.shape[-2]} inputs; INT8 accumulates at most {MAX_INPUTS} products in INT32"
        )
    codes, scales = encode([jnp.swapaxes(w, -1, -2).astype(jnp.float32)])
    return INT8Tensor(codes[0], scales[0][..., 0])


def encode(
    parts: Sequence[Float[Array, "..."]],
) -> tuple[list[Int8[Array, "..."]], list[Float[Array, "..."]]]:
    """Quantizes rows to INT8 (an encoder for `LazyActivation.encode`).

    The scale of a row is its largest magnitude over all parts, divided by 127. Codes round to
    nearest, ties to even.

    Args:
        parts: The columns of the rows as one or more float32 arrays [..., n_i], the first columns
            first.

    Returns:
        A pair (codes, scales). The codes are a list with one array per part, int8 [..., n_i]. The
        scales are a list of one array [..., 1], float32. A row of zeros (or whose scale would be
        below 2^-126) has zero codes. A row with a NaN or an infinity has a non-finite scale, and
        codes without a meaning.
    """
    amax = row_amax(parts)
    scale = amax / CODE_MAX
    # one division per row: a TPU divides in several instructions
    factor = jnp.where(scale >= SMALLEST_SCALE, CODE_MAX / amax, 0.0)
    # amax * factor exceeds 127 by rounding alone, so that its code is 127
    return [_round(x * factor) for x in parts], [scale]


def _round(x: Float[Array, "..."]) -> Int8[Array, "..."]:
    """Rounds to the nearest integer, ties to even, without a rounding instruction, which Triton
    lacks.

    Adding `ROUNDER` in float32 rounds, and the last bits of the sum are the integer.

    Args:
        x: Float32 numbers from -127 to 127 (or beyond by a rounding error). The result for others
            and for NaN is arbitrary.

    Returns:
        The integers, int8, of the shape of `x`.
    """
    bits = jax.lax.bitcast_convert_type(x + ROUNDER, jnp.int32)
    return (bits - ROUNDER_BITS).astype(jnp.int8)
