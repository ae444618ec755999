"""NVFP4 (arXiv 2509.25149, section 3): E2M1 values in blocks of 16, with two levels of scales.

    s_tensor = amax(x) / (448 * 6)
    s_block  = e4m3(amax(block) / 6 / s_tensor)
    code     = e2m1(x / (s_block * s_tensor))

Values round to nearest, ties to the even code, and everything saturates. A weight has one float32
scale per matrix. Activations have one float32 scale per *row* (token): with one per tensor, the
reward of a candidate would depend on the other samples of its batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from solrl_jax.quant.lazy import LazyActivation, row_amax
from solrl_jax.quant.leaf import Matrix, QuantizedWithInput, scale_lazily
from solrl_jax.quant.sequence_parallel import tokens_are_sharded
from solrl_jax.quant.sharded_kernel import shard_map_kernel

BLOCK = 16  # values that share one E4M3 scale, along the contraction axis
E2M1_MAX = 6.0
E4M3_MAX = 448.0
CONTRACTION_MULTIPLE = 64  # cuDNN's block-scaled matmul takes contractions that are multiples of it
TILE = 128  # ... and numbers of rows and outputs that are multiples of this
# Up to this tensor scale, its product with the smallest block scale (2^-9) is a float32 number that
# XLA flushes to zero, so that the reciprocal would not be finite.
SMALLEST_SCALE = 2.0**-117


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Tensor(QuantizedWithInput):
    """A weight matrix [in, out] in NVFP4, 4.5 bits per value.

    `w[i, o] = e2m1(codes)[o, i] * scales[o, i // 16] * tensor_scale`. The contraction axis is last,
    as the block-scaled dot takes it. Inputs are padded with zeros to a multiple of 64, and outputs
    to a multiple of 128. `quantize` makes such leaves from arrays.

    Attributes:
        output_axes: A class attribute: by field, the axis of the outputs, which may be sharded over
            the mesh axis `tensor`: the second to last of `codes` and of `scales`.
        codes: The values [..., padded out, padded in / 2], uint8. Each byte holds two E2M1 codes,
            the one of the even index in the low four bits.
        scales: The block scales [..., padded out, padded in / 16], float8_e4m3fn.
        tensor_scale: One scale per matrix [...], float32.
        n_in: The number of inputs without padding. Static: part of the tree's structure.
        n_out: The number of outputs without padding. Static: part of the tree's structure.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"codes": -2, "scales": -2}

    codes: UInt8[Array, "... padded_out half_in"]
    scales: Float[Array, "... padded_out blocks"]
    tensor_scale: Float[Array, "..."]
    n_in: int = dataclasses.field(metadata={"static": True})
    n_out: int = dataclasses.field(metadata={"static": True})

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Computes `x @ w` with both operands in NVFP4, accumulated in float32. Each row of `x` is
        quantized with a scale of its own.

        Args:
            x: Activations [rows, n_in] of a floating-point dtype. The leaf must hold a single
                matrix.

        Returns:
            The result [rows, n_out] in the dtype of `x`, in memory and complete on every device of
            the mesh axis `tensor`.

        Raises:
            ValueError: If `x` does not have `n_in` columns.
        """
        # a narrower input would be padded to the width of the codes without notice
        if x.shape[-1] != self.n_in:
            raise ValueError(f"x has {x.shape[-1]} columns, but the weight has {self.n_in} rows")
        return super().matmul(x)

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """Computes `x @ w` with both operands in NVFP4, accumulated in float32.

        The rows of `x` are quantized by `encode`, once for all matmuls that read `x`. The float32
        scales of the rows and of the matrix are applied by the kernel that reads the lazy result.

        Args:
            x: The input [b, s, n_in]. The leaf must hold a single matrix. A wrong width is not
                detected if it becomes the same multiple of 64 when padded.

        Returns:
            A lazy activation [b, s, n_out] in the dtype of `x`, complete on every device of the
            mesh axis `tensor`. Rows with a non-finite input value become NaN or infinite.
        """
        codes, scales, row_scale = x.encode(encode)
        y = block_scaled_dot(
            unpack(codes.reshape(-1, codes.shape[-1])),
            scales.reshape(-1, scales.shape[-1]),
            unpack(self.codes),
            self.scales,
            x.dtype,
        )
        y = y.reshape(*codes.shape[:2], -1)
        return scale_lazily(y, row_scale, self.tensor_scale.reshape(1, 1, 1), width=self.n_out)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the matrix that the leaf represents, the codes times both levels of scales: [...,
        n_in, n_out] without padding, in float32.
        """
        codes = unpack(self.codes).astype(jnp.float32)
        blocks = codes.reshape(*codes.shape[:-1], -1, BLOCK)
        blocks = blocks * self.scales.astype(jnp.float32)[..., None]
        padded = blocks.reshape(codes.shape) * self.tensor_scale[..., None, None]
        return jnp.swapaxes(padded[..., : self.n_out, : self.n_in], -1, -2)


def quantize(w: Matrix) -> NVFP4Tensor:
    """Quantizes weight matrices to NVFP4. 16 consecutive inputs of an output share a block scale.

    Args:
        w: Matrices [..., in, out] of a floating-point dtype, on the device or in NumPy. No axis is
            empty. Inputs are padded with zeros to a multiple of 64, and outputs to one of 128.

    Returns:
        The leaf, of JAX arrays, with a tensor scale per matrix: the largest magnitude divided by
        448 * 6. A finite matrix never yields NaN. A matrix whose tensor scale is at most 2^-117,
        also one of zeros, becomes zero. A matrix with a non-finite value dequantizes to NaN as a
        whole.
    """
    n_in, n_out = w.shape[-2:]
    rows = jnp.swapaxes(w, -1, -2).astype(jnp.float32)
    tensor_scale = jnp.max(jnp.abs(rows), axis=(-1, -2)) / (E4M3_MAX * E2M1_MAX)
    padding = [(0, 0)] * (w.ndim - 2) + [(0, -n_out % TILE), (0, -n_in % CONTRACTION_MULTIPLE)]
    rows = jnp.pad(rows, padding)
    values, scales = scale_blocks(rows, tensor_scale[..., None, None])
    return NVFP4Tensor(pack(values.astype(jnp.float4_e2m1fn)), scales, tensor_scale, n_in, n_out)


def encode(parts: Sequence[Float[Array, "..."]]) -> tuple[list[Array], list[Array], list[Array]]:
    """Quantizes rows to NVFP4 (an encoder for `LazyActivation.encode`).

    The scale of a row is its largest magnitude over all parts, divided by 448 * 6. It takes the
    place of the tensor scale.

    Args:
        parts: The columns of the rows as one or more float32 arrays [..., n_i], the first columns
            first. All widths n_i but the last are multiples of 16.

    Returns:
        A triple (codes, block scales, row scales):

        * A list with the packed codes of each part, two per byte: uint8 [..., n_i / 2].
        * A list with the block scales of each part, float8_e4m3fn [..., n_i / 16].
        * A list of one array, the scales of the rows [..., 1], float32.

        The last part is first padded with zeros, so that the widths n_i add up to a multiple of 64.
        A row whose scale is at most 2^-117 has zero codes. A row with a NaN or an infinity has a
        non-finite scale, so that its matmul is not finite either.
    """
    scale = row_amax(parts) / (E4M3_MAX * E2M1_MAX)
    padding = -sum(x.shape[-1] for x in parts) % CONTRACTION_MULTIPLE
    *full, last = parts
    if padding:
        last = jnp.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, padding)])
    scaled = [scale_blocks(x, scale) for x in (*full, last)]
    codes = [encode_packed(values) for values, _ in scaled]
    return codes, [scales for _, scales in scaled], [scale]


def scale_blocks(
    x: Float[Array, "*rows k"], scale: Float[Array, "..."]
) -> tuple[Float[Array, "*rows k"], Float[Array, "*rows blocks"]]:
    """Divides each block of 16 values by its scales.

    The scale of a block is its largest magnitude, divided by 6 and by `scale`, rounded to E4M3 and
    at most 448; a block whose scale rounds to zero becomes zero. Values are multiplied by `(1 /
    scale) / block_scale`, as in torchao and Transformer Engine, so that ties round the same way.

    Args:
        x: Float32 rows [..., k]; k is a multiple of 16. Blocks lie along the last axis.
        scale: The float32 scale of the whole tensor or of each row, which multiplies the block
            scales. It broadcasts against `x`, with a last axis of 1. Where it is at most 2^-117 or
            NaN, block scales and finite values of `x` become zero, and infinite ones become NaN.

    Returns:
        The float32 values [..., k], clipped to magnitudes up to 6, and the block scales [..., k /
        16], float8_e4m3fn. Casting the values to E2M1 gives the codes. NaN stays NaN, but not in a
        Triton kernel.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    usable = scale > SMALLEST_SCALE
    safe_scale = jnp.where(usable, scale, 1.0)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    # the cast to E4M3 does not saturate: magnitudes above 464 would become NaN
    block_scale = jnp.minimum(jnp.where(usable, amax / E2M1_MAX / safe_scale, 0.0), E4M3_MAX)
    # Subnormal scales are used. torchao raises them to at least 2^-6.
    scales = block_scale.astype(jnp.float8_e4m3fn)
    scales32 = scales.astype(jnp.float32)
    positive = jnp.where(scales32 > 0, scales32, 1.0)
    reciprocal = jnp.where(scales32 > 0, (1.0 / safe_scale) / positive, 0.0)
    values = jnp.clip(blocks * reciprocal[..., None], -E2M1_MAX, E2M1_MAX)
    return values.reshape(x.shape), scales


def encode_packed(values: Float[Array, "*rows k"]) -> UInt8[Array, "*rows half"]:
    """Rounds float32 numbers to E2M1 and packs two codes per byte, by comparisons alone, because
    Triton has no E2M1.

    Args:
        values: Float32 numbers [..., k]; k is even. They round to nearest, ties to the even code.
            Magnitudes above 6 saturate, NaN becomes zero, and zeros keep their sign.

    Returns:
        Bytes, uint8 [..., k / 2], with the code of the even index in the low four bits (as `pack`).
    """
    size = jnp.abs(values)
    # A code is the number of thresholds below the magnitude. Ties go to the even code, so that
    # thresholds alternate between > and >=.
    thresholds = [
        size > 0.25,
        size >= 0.75,
        size > 1.25,
        size >= 1.75,
        size > 2.5,
        size >= 3.5,
        size > 5.0,
    ]
    sign = jax.lax.bitcast_convert_type(values, jnp.uint32) >> 28 & 8
    codes = sum(above.astype(jnp.uint32) for above in thresholds) | sign
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    index_in_pair = jax.lax.broadcasted_iota(jnp.uint32, pairs.shape, pairs.ndim - 1)
    return jnp.sum(pairs << 4 * index_in_pair, axis=-1).astype(jnp.uint8)


def block_scaled_dot(
    x: Shaped[Array, "rows k"],
    x_scales: Shaped[Array, "rows blocks"],
    w: Shaped[Array, "n_out k"],
    w_scales: Shaped[Array, "n_out blocks"],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "rows n_out"]:
    """Computes `(x * x_scales) @ (w * w_scales).T`, where a scale multiplies its block of 16 codes.

    It accumulates in float32. On Blackwell GPUs it is cuDNN's block-scaled matmul; on other devices
    XLA multiplies the codes by their scales first. In CUDA programs under sequence parallelism,
    each device multiplies its own rows (`_on_own_rows`). Callers apply the float32 scales of NVFP4
    (per tensor or row) to the result.

    Args:
        x: Codes of the activations [rows, k], float4_e2m1fn. For CUDA, k is a multiple of 64.
        x_scales: The scale of each block of 16 codes of `x`, [rows, k / 16], float8_e4m3fn.
        w: Codes of the weight [n_out, k], outputs first, float4_e2m1fn.
        w_scales: The scale of each block of 16 codes of `w`, [n_out, k / 16], float8_e4m3fn.
        dtype: The dtype of the result.

    Returns:
        The product [rows, n_out] in `dtype`.
    """
    # XLA's custom call for cuDNN is that of block_scaling_matcher.cc. Elsewhere a code times its
    # scale is exact even in BF16: it has at most eight significant bits.
    cudnn = partial(_cudnn_scaled_dot, dtype)
    return jax.lax.platform_dependent(
        x,
        x_scales,
        w,
        w_scales,
        cuda=partial(_on_own_rows, cudnn) if tokens_are_sharded() else cudnn,
        default=partial(_xla_scaled_dot, dtype),
    )


def _on_own_rows(
    dot: Callable[..., Array], x: Array, x_scales: Array, w: Array, w_scales: Array
) -> Array:
    """Calls a matmul on each device with its own rows and all outputs, under sequence parallelism,
    where XLA cannot partition the call.

    `x` already holds the rows of one device along `sequence`. They are split over all other mesh
    axes but `tensor`. If their number is not a multiple of the number of shards, every device
    multiplies all rows of `x`.

    Args:
        dot: The matmul, a function (x, x_scales, w, w_scales) -> [rows, n_out].
        x: Codes of the activations [rows, k].
        x_scales: The block scales of `x`, [rows, k / 16].
        w: Codes of the weight [n_out, k].
        w_scales: The block scales of `w`, [n_out, k / 16].

    Returns:
        The product [rows, n_out].
    """

    def kernel(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
        return dot(x, x_scales, w[0], w_scales[0])

    # an array with a single row is replicated
    return shard_map_kernel(kernel)(x, x_scales, w[None], w_scales[None])


def _xla_scaled_dot(
    dtype: DTypeLike, x: Array, x_scales: Array, w: Array, w_scales: Array
) -> Array:
    """Computes the block-scaled matmul `(x * x_scales) @ (w * w_scales).T` by XLA's `scaled_dot`.

    Args:
        dtype: The dtype of the result.
        x: Codes of the activations [rows, k], float4_e2m1fn.
        x_scales: One scale per block of 16 codes of `x`, [rows, k / 16], float8_e4m3fn.
        w: Codes of the weight [n_out, k], float4_e2m1fn.
        w_scales: One scale per block of 16 codes of `w`, [n_out, k / 16], float8_e4m3fn.

    Returns:
        The product [rows, n_out] in `dtype`.
    """
    return jax.lax.scaled_dot(
        x,
        w,
        lhs_scale=x_scales,
        rhs_scale=w_scales,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=dtype,
    )


def _cudnn_scaled_dot(
    dtype: DTypeLike, x: Array, x_scales: Array, w: Array, w_scales: Array
) -> Array:
    """Computes the block-scaled matmul `(x * x_scales) @ (w * w_scales).T` by cuDNN. On GPUs older
    than Blackwell, XLA emulates it.

    Rows and outputs are padded with zeros to multiples of 128 for cuDNN, and the padding is cut
    from the result. XLA would pad them, too, but would also copy the whole result.

    Args:
        dtype: The dtype of the result.
        x: Codes of the activations [rows, k], float4_e2m1fn. k is a multiple of 64.
        x_scales: One scale per block of 16 codes of `x`, [rows, k / 16], float8_e4m3fn.
        w: Codes of the weight [n_out, k], float4_e2m1fn.
        w_scales: One scale per block of 16 codes of `w`, [n_out, k / 16], float8_e4m3fn.

    Returns:
        The product [rows, n_out] in `dtype`.
    """
    padded = [jnp.pad(a, ((0, -len(a) % TILE), (0, 0)))[None] for a in (x, w, x_scales, w_scales)]
    return jax.nn.scaled_matmul(*padded, preferred_element_type=dtype)[0, : len(x), : len(w)]


def pack(codes: Shaped[Array, "... k"]) -> UInt8[Array, "... half"]:
    """Packs pairs of codes into bytes. XLA's own float4 arrays take one byte per element in memory.

    Args:
        codes: float4_e2m1fn codes [..., k]; k is even.

    Returns:
        Bytes, uint8 [..., k / 2]. The code of the even index is in the low four bits.
    """
    return jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint8)


def unpack(packed: UInt8[Array, "... half"]) -> Shaped[Array, "... k"]:
    """Unpacks bytes of two codes each; the inverse of `pack`.

    Args:
        packed: Bytes, uint8 [..., k / 2], with the code of the even index in the low four bits.

    Returns:
        The codes, float4_e2m1fn [..., k].
    """
    # Without the barrier, XLA (jaxlib 0.10) folds constant bytes to wrong codes.
    codes = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(packed), jnp.float4_e2m1fn)
    return codes.reshape(*packed.shape[:-1], -1)
