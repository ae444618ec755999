"""Runs the kernels of a GPU on small operands, and compares their results with plain JAX.

A driver, a library or a card can compute a wrong result without an error. `solrl doctor` therefore
runs each kernel that training would use on this device, for about a millisecond plus its
compilation. On a CPU the same functions compute the emulated results.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from solrl_jax.errors import first_line
from solrl_jax.models.layers import attention_fp8
from solrl_jax.models.layers.attention import attention
from solrl_jax.parallel import sharding
from solrl_jax.quant import fp8, int8, nvfp4
from solrl_jax.quant.formats import FORMATS, DeviceInfo
from solrl_jax.quant.matmul import matmul

ROWS = 256
N_IN = 512
N_OUT = 384
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the value of each code; bit 3 is the sign


@dataclasses.dataclass(frozen=True)
class DeviceCheck:
    """A test of one GPU kernel: the kernel and plain JAX code must agree on the same small
    operands.

    Attributes:
        name: The name of the kernel in messages, e.g. "FP8 matmul".
        kernel: The function that training calls, which runs the kernel. `find_problem` jits it.
        twin: A function that computes the same in plain float32 operations of JAX. It takes the
            arguments of `kernel` and returns as many arrays.
        make_operands: Takes no arguments, and returns the tuple of arguments for `kernel` and
            `twin`. They are random, with a fixed seed.
        tolerance: The largest accepted relative error of each result: the norm of the difference,
            divided by the norm of the twin's result.
    """

    name: str
    kernel: Callable[..., Any]
    twin: Callable[..., Any]
    make_operands: Callable[[], tuple[Any, ...]]
    tolerance: float


def checks_for(device: DeviceInfo) -> tuple[DeviceCheck, ...]:
    """Returns the checks of the kernels that a device has. Only NVIDIA GPUs have any.

    Args:
        device: The device. The compute capability of an NVIDIA GPU decides: the INT8 matmul and
            BF16 attention are checked from 8.0, the FP8 matmul from 8.9, FP8 attention from 9.0,
            and the NVFP4 matmul from 10.0. All other devices get an empty tuple.
    """
    checks = []
    if device.platform == "gpu":
        if FORMATS["nvfp4"].is_native(device):
            checks.append(NVFP4_MATMUL)
        if FORMATS["fp8"].is_native(device):
            checks.append(FP8_MATMUL)
        if FORMATS["int8"].is_native(device):
            checks.append(INT8_MATMUL)
        if device.is_cuda_from((8, 0)):
            checks.append(BF16_ATTENTION)
        if device.is_cuda_from((9, 0)):
            checks.append(FP8_ATTENTION)
    return tuple(checks)


def run(checks: Sequence[DeviceCheck]) -> dict[str, str | None]:
    """Runs checks on the default device, one after another.

    Args:
        checks: The checks to run, usually the result of `checks_for`.

    Returns:
        For each check, by its name: None if its kernel is correct, else the problem as
        `find_problem` returns it, e.g. "returns zeros". An error of the kernel is a problem, too.
    """
    return {check.name: find_problem(check) for check in checks}


def find_problem(check: DeviceCheck) -> str | None:
    """Runs one check on the default device.

    A kernel is correct if each of its results is finite, is not all zero, and agrees with that of
    the twin, in shape and in values up to the tolerance.

    Args:
        check: The kernel, its twin (the same computation in plain JAX), their operands, and the
            tolerance.

    Returns:
        None if the kernel is correct, else the first problem, e.g. "returns zeros", or "fails: "
        and the first line of an error of the operands, the kernel or the twin.
    """
    try:
        operands = check.make_operands()
        outputs = _to_numpy(sharding.jit(check.kernel)(*operands))
        with jax.default_matmul_precision("highest"):
            expected = _to_numpy(check.twin(*operands))
    except Exception as error:  # JAX, XLA, cuDNN and cuBLAS raise errors of many types
        return f"fails: {first_line(error)}"
    shapes = [[array.shape for array in arrays] for arrays in (outputs, expected)]
    if shapes[0] != shapes[1]:
        return f"returns arrays of shapes {shapes[0]}; expected {shapes[1]}"
    for ours, plain in zip(outputs, expected, strict=True):
        if not np.isfinite(ours).all():
            return "returns NaN or infinite values"
        if not ours.any():
            return "returns zeros"
        difference = np.linalg.norm(ours - plain) / np.linalg.norm(plain)
        if not difference <= check.tolerance:  # also if the twin returns NaN
            return (
                f"differs from plain JAX by {difference:.2g} of its norm; expected at most "
                f"{check.tolerance:g}"
            )
    return None


def cudnn_warnings(version: str, device: DeviceInfo) -> list[str]:
    """Names the known faults of a version of cuDNN that concern a device.

    Args:
        version: The version, beginning with two numbers, for example "9.12.0".
        device: The device that cuDNN runs on.

    Returns:
        One sentence per fault, without a full stop; an empty list if there is none. Two faults are
        known. Before cuDNN 9.18, gradients of attention with padded lengths can be NaN on GPUs of
        compute capability 9.x (Hopper). FP8 attention of cuDNN 9.24 with BF16 output can return
        zeros on GPUs of compute capability 9.0 or higher.

    Raises:
        ValueError: If the version does not begin with two numbers and a dot between them.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    warnings = []
    if device.is_cuda_from((9, 0)) and device.capability[0] == 9 and (major, minor) < (9, 18):
        warnings.append(
            f"cuDNN {version}: before 9.18, gradients of attention with padded lengths can be NaN "
            "on Hopper; expected 9.18 or newer"
        )
    if device.is_cuda_from((9, 0)) and (major, minor) == (9, 24):
        warnings.append(
            f"cuDNN {version}: 9.24 can return zeros from FP8 attention with BF16 output; expected "
            "another version"
        )
    return warnings


def _to_numpy(outputs: Any) -> list[np.ndarray]:
    """Returns the arrays of a pytree in float64, on the host, in the order of its leaves.

    Args:
        outputs: A pytree of arrays, or one array.
    """
    return [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(outputs)]


def _plain_dot(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_out n_in"]
) -> Float[Array, "rows n_out"]:
    """Returns `x @ w.T` in float32, for the plain-JAX twins of the NVFP4, FP8 and INT8 matmuls.
    `find_problem` sets its precision to the highest.

    Args:
        x: The activations, float32.
        w: The weight with its outputs first, float32.
    """
    return jnp.einsum("ri,oi->ro", x, w)


def _nvfp4_operands() -> tuple[Any, ...]:
    """Returns random operands of an NVFP4 matmul, the same ones in each call.

    Returns:
        A tuple of four arrays: the codes of the activations, uint8 [256, 256] with two codes per
        byte; the scales of their blocks of 16 codes, float8_e4m3fn [256, 32]; the codes of the
        weight, uint8 [384, 256]; and its scales, float8_e4m3fn [384, 32]. The first axis of the
        weight is that of its outputs.
    """
    rng = np.random.default_rng(0)

    def draw(rows):
        codes = rng.integers(0, 256, (rows, N_IN // 2), np.uint8)
        scales = rng.uniform(0.25, 4.0, (rows, N_IN // nvfp4.BLOCK)).astype(np.float32)
        return jnp.asarray(codes), jnp.asarray(scales).astype(jnp.float8_e4m3fn)

    return (*draw(ROWS), *draw(N_OUT))


def _nvfp4_kernel(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    """Computes the block-scaled matmul with which training explores in NVFP4: activations times the
    transposed weight.

    Args:
        x: E2M1 codes of the activations, two per byte with the first one in the low four bits,
            uint8 [rows, n_in / 2].
        x_scales: The scales of the blocks of 16 codes of `x`, float8_e4m3fn [rows, n_in / 16].
        w: E2M1 codes of the weight, packed like `x`, uint8 [n_out, n_in / 2].
        w_scales: The scales of the blocks of `w`, float8_e4m3fn [n_out, n_in / 16].

    Returns:
        The product, BF16 [rows, n_out].
    """
    codes = nvfp4.unpack(x), x_scales, nvfp4.unpack(w), w_scales
    return nvfp4.block_scaled_dot(*codes, jnp.bfloat16)


def _nvfp4_twin(x: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    """Computes the matmul of `_nvfp4_kernel` from values that are looked up and scaled in float32.

    Args:
        x: Packed codes of the activations, uint8 [rows, n_in / 2].
        x_scales: The scales of the blocks of 16 codes of `x`, float8_e4m3fn [rows, n_in / 16].
        w: Packed codes of the weight, uint8 [n_out, n_in / 2].
        w_scales: The scales of the blocks of `w`, float8_e4m3fn [n_out, n_in / 16].

    Returns:
        The product, float32 [rows, n_out].
    """
    return _plain_dot(_decode_nvfp4(x, x_scales), _decode_nvfp4(w, w_scales))


def _decode_nvfp4(
    packed: UInt8[Array, "rows half"], scales: Float[Array, "rows blocks"]
) -> Float[Array, "rows n_in"]:
    """Looks up packed E2M1 codes and multiplies them by their block scales.

    Args:
        packed: Two codes per byte, the first one in the low four bits, uint8 [rows, n_in / 2].
        scales: The scale of each block of 16 codes, of any float dtype, [rows, n_in / 16].

    Returns:
        The values, float32 [rows, n_in].
    """
    table = jnp.asarray([*E2M1, *(-value for value in E2M1)], jnp.float32)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return table[codes] * jnp.repeat(scales.astype(jnp.float32), nvfp4.BLOCK, axis=1)


def _fp8_operands() -> tuple[Any, ...]:
    """Returns random operands of an FP8 matmul, the same ones in each call.

    Returns:
        A tuple of the activations, BF16 [256, 512], and the quantized weight, an `fp8.FP8Tensor`
        [512, 384].
    """
    x, w = _random_matrices()
    return x, fp8.quantize(w)


def _random_matrices() -> tuple[Array, Array]:
    """Returns random activations, BF16 [256, 512], and a random weight, float32 [512, 384], the
    same ones in each call.
    """
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((ROWS, N_IN)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((N_IN, N_OUT)), jnp.float32)


def _fp8_twin(x: Float[Array, "rows n_in"], w: fp8.FP8Tensor) -> Float[Array, "rows n_out"]:
    """Returns `x @ w` in float32, with the activations quantized to FP8 as the kernel does.

    Args:
        x: The activations [rows, n_in], BF16. Each row is quantized with a scale of its own.
        w: The quantized weight [n_in, n_out].
    """
    codes, scales = fp8.encode([x.astype(jnp.float32)])
    return _plain_dot(codes[0].astype(jnp.float32) * scales[0], w.dequantize().T)


def _int8_operands() -> tuple[Any, ...]:
    """Returns random operands of an INT8 matmul, the same ones in each call.

    Returns:
        A tuple of the activations, BF16 [256, 512], and the quantized weight, an `int8.INT8Tensor`
        [512, 384].
    """
    x, w = _random_matrices()
    return x, int8.quantize(w)


def _int8_twin(x: Float[Array, "rows n_in"], w: int8.INT8Tensor) -> Float[Array, "rows n_out"]:
    """Returns `x @ w` in float32, with the activations quantized to INT8 as the kernel does.

    Args:
        x: The activations [rows, n_in], BF16. Each row is quantized with a scale of its own.
        w: The quantized weight [n_in, n_out].
    """
    codes, scales = int8.encode([x.astype(jnp.float32)])
    return _plain_dot(codes[0].astype(jnp.float32) * scales[0], w.dequantize().T)


def _attention_operands() -> tuple[Any, ...]:
    """Returns random operands of a cross-attention and of its gradient, the same ones in each call.

    Returns:
        A tuple of five arrays: queries [2, 256, 4, 64], keys and values [2, 77, 4, 64] each, all
        BF16 with the axes batch, positions, heads and features; the number of keys that each sample
        attends to, int32 [2] (13 and 77); and the cotangent of the result, BF16 [2, 256, 4, 64].
    """
    rng = np.random.default_rng(2)
    shapes = [(2, length, 4, 64) for length in (256, 77, 77, 256)]
    q, k, v, cotangent = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    return q, k, v, jnp.asarray([13, 77], jnp.int32), cotangent


def _with_gradient(
    attend: Callable[..., Array],
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s n h"],
    v: Float[Array, "b s n h"],
    num_keys: Int[Array, " b"],
    cotangent: Float[Array, "b t n h"],
) -> tuple[Array, ...]:
    """Returns `attend(q, k, v, num_keys)` and the cotangents of queries, keys and values.

    Args:
        attend: An attention function of these four arguments.
        q: The queries, [batch, t positions, heads, features].
        k: The keys, [batch, s positions, heads, features].
        v: The values, of the shape of `k`.
        num_keys: The number of keys that each sample attends to, from the first one on, int
            [batch].
        cotangent: The cotangent of the result. It is cast to the dtype of the result.

    Returns:
        Four arrays: the result, and the cotangents with the shapes and dtypes of `q`, `k` and `v`.
    """
    out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, num_keys), q, k, v)
    return out, *pull_back(cotangent.astype(out.dtype))


def _attention_kernel(*operands: Array) -> tuple[Array, ...]:
    """Computes attention and its gradient by `attention`, the function that all networks call.

    Args:
        *operands: Five arrays, as `_attention_operands` returns them: queries, keys, values, the
            number of keys of each sample, and the cotangent of the result.

    Returns:
        Four BF16 arrays: the result, and the cotangents of queries, keys and values.
    """
    return _with_gradient(attention, *operands)


def _attention_twin(*operands: Array) -> tuple[Array, ...]:
    """Computes attention and its gradient as `_attention_kernel` does, but in plain float32
    operations.

    Args:
        *operands: Five arrays, as `_attention_operands` returns them: queries, keys, values, the
            number of keys of each sample, and the cotangent of the result.

    Returns:
        Four arrays: the result in float32, and the cotangents of queries, keys and values in BF16.
    """
    return _with_gradient(_plain_attention, *operands)


def _plain_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s n h"],
    v: Float[Array, "b s n h"],
    num_keys: Int[Array, " b"],
) -> Float[Array, "b t n h"]:
    """Returns `softmax(h ** -0.5 q k^T) v` over the first `num_keys` keys of each sample, in
    float32.

    Args:
        q: The queries, [batch, t positions, heads, features], of any float dtype.
        k: The keys, [batch, s positions, heads, features].
        v: The values, of the shape of `k`.
        num_keys: The number of keys that each sample attends to, from the first one on, int
            [batch], at least 1.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    logits = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", q, k)
    mask = jnp.arange(k.shape[1]) < num_keys[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _fp8_attention_operands() -> tuple[Any, ...]:
    """Returns random queries, keys and values of a self-attention, the same ones in each call.

    Returns:
        A tuple of three arrays, float8_e4m3fn [1, 512, 4, 128] with the axes batch, positions,
        heads and features.
    """
    rng = np.random.default_rng(3)
    arrays = (rng.standard_normal((1, 512, 4, 128)) for _ in range(3))
    return tuple(jnp.asarray(array, jnp.float32).astype(attention_fp8.E4M3) for array in arrays)


NVFP4_MATMUL = DeviceCheck(
    "NVFP4 matmul", _nvfp4_kernel, _nvfp4_twin, _nvfp4_operands, tolerance=0.01
)
FP8_MATMUL = DeviceCheck("FP8 matmul", matmul, _fp8_twin, _fp8_operands, tolerance=0.01)
INT8_MATMUL = DeviceCheck("INT8 matmul", matmul, _int8_twin, _int8_operands, tolerance=0.01)
BF16_ATTENTION = DeviceCheck(
    "BF16 attention", _attention_kernel, _attention_twin, _attention_operands, tolerance=0.03
)
FP8_ATTENTION = DeviceCheck(
    "FP8 attention",
    attention_fp8.attention_fp8,
    attention_fp8.reference,
    _fp8_attention_operands,
    tolerance=0.1,
)
