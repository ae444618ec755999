"""Common parts of the block-scaled formats: packed four-bit codes, padding to whole blocks, and the product."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

# XLA:GPU has two ways to a native block-scaled product, and neither takes every format. The custom call is cuDNN's kernel, for
# NVFP4 and MXFP8 (block_scaling_matcher.cc). The composite is Triton's, for scales in E8M0 alone (composite_rewriter.cc). Both
# expand what they do not take, without a warning. So this table chooses for CUDA, by the types of codes and of scales.
CUSTOM_CALL, COMPOSITE = "__op$block_scaled_dot", "xla.scaled_dot"
CUDA_CALLS = {
    ("float4_e2m1fn", "float8_e4m3fn"): CUSTOM_CALL,  # NVFP4
    ("float8_e4m3fn", "float8_e8m0fnu"): CUSTOM_CALL,  # MXFP8
    ("float4_e2m1fn", "float8_e8m0fnu"): COMPOSITE,  # MXFP4
}


def block_scaled_dot(
    x: Shaped[Array, "rows k"], x_scales: Shaped[Array, "rows blocks"],
    w: Shaped[Array, "n_out k"], w_scales: Shaped[Array, "n_out blocks"],
) -> Float[Array, "rows n_out"]:  # fmt: skip
    """`(x * x_scales) @ (w * w_scales).T`, accumulated in float32: codes, and one scale for each block along k.

    Native on CUDA devices that have units for it. Elsewhere XLA expands it. That is exact even in BF16: the product of a code
    and its scale has at most eight significant bits. Scales in float32 would not fit: the caller applies them to the result.
    """
    if CUDA_CALLS[x.dtype.name, x_scales.dtype.name] == COMPOSITE:
        return _composite(x, x_scales, w, w_scales)
    return jax.lax.platform_dependent(x, x_scales, w, w_scales, cuda=_custom_call, default=_composite)


def _composite(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    return jax.lax.scaled_dot(
        x, w, lhs_scale=x_scales, rhs_scale=w_scales, dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32)  # fmt: skip


def _custom_call(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    return jax.nn.scaled_matmul(x[None], w[None], x_scales[None], w_scales[None], preferred_element_type=jnp.float32)[0]


def pack(codes: Shaped[Array, "... k"]) -> UInt8[Array, "... half"]:
    """float4_e2m1fn [..., k] to bytes [..., k / 2]. XLA's own float4 arrays take a byte an element in memory."""
    return jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint8)


def unpack(packed: UInt8[Array, "... half"]) -> Shaped[Array, "... k"]:
    """Bytes [..., k / 2] to float4_e2m1fn [..., k]."""
    # The barrier prevents constant folding: XLA (jaxlib 0.10) folds this to wrong codes where the bytes are constants.
    codes = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(packed), jnp.float4_e2m1fn)
    return codes.reshape(*packed.shape[:-1], -1)


def pad_blocks(x: Float[Array, "... k"], block: int) -> Float[Array, "... padded"]:
    """`x` with zeros after its last axis, up to a multiple of `block`."""
    missing = -x.shape[-1] % block
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def nbytes(tree: Any) -> int:
    """Bytes that the arrays of a tree hold, or would hold if they are abstract."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
