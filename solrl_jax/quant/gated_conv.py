"""The middle of SANA's MLP: SiLU, depthwise 3x3 convolution, gate (arXiv 2410.10629, sec. 2.2)."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import ColumnView, LazyActivation
from solrl_jax.quant.sequence_parallel import neighbor_tokens, tokens_are_sharded


def gated_conv(
    x: LazyActivation,
    grid: tuple[int, int],
    kernel: Float[Array, "3 3 1 c"],
    bias: Float[Array, " c"],
) -> Float[Array, "b n c/2"]:
    """Computes `y * silu(g)`, where y and g are the first and the second half of the channels of
    `conv(silu(x)) + bias`, a depthwise 3x3 convolution.

    Under sequence parallelism, a device has some rows of the pixels, and fetches the rows next to
    its own. Both SiLUs and the convolution are computed in float32, and each of these three
    results is rounded to the dtype of `x`.

    Args:
        x: The pixels [b, n, c], row by row; c is even. On a TPU, unless the attribute `x.grid` (the
            size of the image) is set, `x` must be one lazy part whose first array is the result of
            a matmul, with all c channels. That array is written to memory.
        grid: The number of rows and of columns of the n pixels (of this device, under sequence
            parallelism); their product is n. It equals `x.grid` if that is set, which is not
            checked.
        kernel: The filters [3, 3, 1, c] of the convolution, which has stride 1 and zero padding.
        bias: The bias [c] of the convolution.

    Returns:
        The gated pixels [b, n, c / 2] in the dtype of `x`.

    Raises:
        ValueError: On a TPU, if `x.grid` is None and `x` has several parts, as after
            `LazyActivation.concat`.
    """
    # A matmul in INT8 on a TPU writes images already (`LazyActivation.grid`).
    if compile_target.platform() == "tpu" and x.grid is None:
        x = _materialize_matmul(x, grid)
    value = x.value
    images = value.reshape(len(value), *grid, -1)
    images = silu(images).astype(images.dtype)
    if tokens_are_sharded():
        y = _conv_of_own_rows(images, kernel, bias)
    else:
        y = depthwise_conv(images, kernel, bias)
    y, gate = jnp.split(y, 2, axis=-1)
    # The SiLU is rounded before the product, so that XLA fuses it with the convolution.
    return (y * silu(gate).astype(y.dtype)).reshape(*value.shape[:2], -1)


def _conv_of_own_rows(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c"]:
    """Computes `depthwise_conv` under sequence parallelism: fetches (k - 1) / 2 rows of pixels on
    either side from the neighboring devices.

    Rows are exchanged in float32, so that the gradient of a row is rounded once, after the parts of
    all devices are added. The convolution gets them in float32, so a TPU does not round the filters
    to BF16.

    Args:
        x: The rows of pixels of this device [b, rows, columns, c], at least (k - 1) / 2 rows.
        kernel: The filters [k, k, 1, c]; k is odd.
        bias: One number per channel [c].

    Returns:
        The convolved rows of this device, in the dtype of `x`.
    """
    batch, rows, columns, channels = x.shape
    margin = len(kernel) // 2
    pixels = x.astype(jnp.float32).reshape(batch, -1, channels)
    before, after = neighbor_tokens(pixels, margin * columns)
    pixels = jnp.concatenate([before, pixels, after], axis=1)
    y = depthwise_conv(pixels.reshape(batch, -1, columns, channels), kernel, bias)
    return y[:, margin : margin + rows].astype(x.dtype)


def _materialize_matmul(x: LazyActivation, grid: tuple[int, int]) -> LazyActivation:
    """Makes XLA write the matmul that an activation begins with to memory, in the matmul's own
    dtype.

    On a TPU, XLA would otherwise write it in float32 and copy it. An optimization barrier on the
    array as images [b, rows, columns, c] prevents that.

    Args:
        x: The activation [b, n, c] as one lazy part, whose first array is the result of a matmul
            and is used with all its rows.
        grid: The number of rows and of columns of the n pixels.

    Returns:
        The same activation, lazy as before, that reads the array behind the barrier. All column
        views become arrays.

    Raises:
        ValueError: If `x` has several parts, as after `LazyActivation.concat`.
    """
    (part,) = x.parts
    first, *others = (a.value if isinstance(a, ColumnView) else a for a in part.arrays)
    images = jax.lax.optimization_barrier(first.reshape(len(first), *grid, -1))
    arrays = (images.reshape(first.shape), *others)
    return dataclasses.replace(x, parts=(dataclasses.replace(part, arrays=arrays),))


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `x sigmoid(x)`, elementwise.

    Args:
        x: An array of any shape and floating-point dtype.

    Returns:
        An array of the shape of `x`, float32 for every dtype.
    """
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.logistic(x32)


def depthwise_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], bias: Float[Array, " c"] | None
) -> Float[Array, "b h w c"]:
    """Computes a convolution with one filter per channel, stride 1 and zero padding.

    Args:
        x: The images [b, h, w, c].
        kernel: The filters [k, k, 1, c]; k is odd. As usual for networks, they are not flipped.
        bias: One number per channel [c], added to every pixel; or None.

    Returns:
        The convolved images [b, h, w, c] in the dtype of `x`, computed in float32 and rounded once.
        BF16 images on a TPU use XLA's grouped convolution (`conv_by_groups`). JAX's default matmul
        precision would round its filters to BF16; `sharding.jit` sets "highest", which does not.
    """
    # in float32, rounded once: in BF16, rounding each product takes 2.5 times as long on CPU
    x32 = x.astype(jnp.float32)
    kernel32 = kernel.astype(jnp.float32)
    # On CPU, XLA's grouped convolution is far slower than the sum, above all its gradient. On a TPU
    # it takes a third of the cycles (by the compiler's count) and two thirds of the memory traffic.
    if compile_target.platform() == "tpu" and x.dtype == jnp.bfloat16:
        y = conv_by_groups(x32, kernel32)
    else:
        y = conv_by_shifts(x32, kernel32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def conv_by_shifts(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"]
) -> Float[Array, "b h w c"]:
    """Computes the depthwise convolution (stride 1, zero padding) as a sum of shifted products.

    Args:
        x: The images [b, h, w, c], float32.
        kernel: One filter per channel [k, k, 1, c], float32; k is odd.

    Returns:
        The convolved images [b, h, w, c], float32.
    """
    height, width = x.shape[1:3]
    size = len(kernel)
    margin = (size // 2, size // 2)
    padded = jnp.pad(x, ((0, 0), margin, margin, (0, 0)))
    products = (
        padded[:, i : i + height, j : j + width] * kernel[i, j]
        for i in range(size)
        for j in range(size)
    )
    return functools.reduce(operator.add, products)


def conv_by_groups(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"]
) -> Float[Array, "b h w c"]:
    """Computes the depthwise convolution (stride 1, zero padding) as XLA's grouped convolution.

    There is one group per channel. At the default precision, a TPU rounds both operands to BF16.

    Args:
        x: The images [b, h, w, c], float32.
        kernel: One filter per channel [k, k, 1, c], float32; k is odd.

    Returns:
        The convolved images [b, h, w, c], float32.
    """
    margin = (len(kernel) // 2, len(kernel) // 2)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, 1),
        padding=[margin, margin],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )
