"""The middle of SANA's MLP in one pass over memory: SiLU, depthwise 3x3 convolution, gate.

See arXiv 2410.10629, section 2.2. XLA writes the result of the SiLU before the convolution reads it, and it
has five times as many channels as the network. On GPUs, one Triton kernel (written in Pallas) computes some
channels of an image, row by row, from the output of the linear layer before. Elsewhere `reference` computes
the same in plain JAX.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import ColumnView, LazyActivation
from solrl_jax.quant.sharded_kernel import power_of_two, shard_map_kernel

CHANNELS = 32  # channels that one Triton program computes
MIN_WIDTH = 16  # the kernel pads rows of pixels to a power of two that is at least this
MAX_WIDTH = 32  # wider images come in batches of two, too few programs for a GPU


def gated_conv(
    x: LazyActivation,
    grid: tuple[int, int],
    kernel: Float[Array, "3 3 1 c"],
    bias: Float[Array, " c"],
) -> Float[Array, "b n c/2"]:
    """Computes `y * silu(g)`, where y and g are the halves of the depthwise convolution of `silu(x)`.

    Args:
      x: The pixels [b, n, c] as one lazy part, each value of which depends only on the same place of the
        part's arrays, as after a linear layer.
      grid: The number of rows and of columns of the n pixels.
      kernel: The filters of the convolution, which has zero padding.
      bias: The bias of the convolution.

    Returns:
      The gated pixels, in the dtype of `x`.
    """
    (part,) = x.parts
    height, width = grid
    dtype = jnp.dtype(x.dtype)
    channels = len(bias)
    if compile_target.platform() == "tpu":
        x = _materialize_matmul(x, grid)
    fits = dtype.itemsize == 2 and channels % (2 * CHANNELS) == 0 and 1 < width <= MAX_WIDTH
    if compile_target.platform() != "gpu" or not fits:
        value = x.value
        images = value.reshape(len(value), *grid, -1)
        return reference(images, kernel, bias).reshape(*value.shape[:2], -1)

    def to_images(a: Array | ColumnView) -> Array:
        # Padding after the channels stays where it is: a copy without it would be a pass over memory.
        if isinstance(a, ColumnView):
            a = a.value if a.start else a.array
        return a.reshape(len(a), *(grid if a.shape[1] > 1 else (1, 1)), -1)

    arrays = [to_images(a) for a in part.arrays]
    run = functools.partial(triton_kernel, part.function, dtype)
    out = with_gradient(run, part.function, dtype)(kernel[None], bias[None], *arrays)
    return out.reshape(len(out), height * width, -1)


def _materialize_matmul(x: LazyActivation, grid: tuple[int, int]) -> LazyActivation:
    """The same activation, whose first array (a matmul) a TPU writes as images in its own dtype.

    XLA would write it in float32, and copy it.
    """
    (part,) = x.parts
    first, *others = (a.value if isinstance(a, ColumnView) else a for a in part.arrays)
    images = jax.lax.optimization_barrier(first.reshape(len(first), *grid, -1))
    arrays = (images.reshape(first.shape), *others)
    return dataclasses.replace(x, parts=(dataclasses.replace(part, arrays=arrays),))


def reference(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c/2"]:
    """Computes what the kernel computes, in plain JAX."""
    y, gate = jnp.split(_activated_conv(x, kernel, bias), 2, axis=-1)
    return apply_gate(y, gate)


def _activated_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c"]:
    """The convolution of `silu(x)`, before the gate."""
    return depthwise_conv(silu(x).astype(x.dtype), kernel, bias)


def apply_gate(y: Float[Array, "..."], gate: Float[Array, "..."]) -> Float[Array, "..."]:
    """`y * silu(gate)`. The SiLU is rounded before the product; XLA fuses it with the convolution so."""
    return y * silu(gate).astype(y.dtype)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x sigmoid(x)` in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.logistic(x32)


def depthwise_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], bias: Float[Array, " c"] | None
) -> Float[Array, "b h w c"]:
    """A convolution with one filter per channel, stride 1 and zero padding.

    On CPUs and GPUs, it is a sum of shifted products, which XLA fuses into one pass over memory. XLA's grouped
    convolution is far slower on CPU, above all its gradient. On a TPU, the grouped convolution takes a third
    of the cycles of the sum (by the compiler's count) and two thirds of its memory traffic.

    Args:
      x: The images.
      kernel: The filters. k is odd.
      bias: The bias, or None.

    Returns:
      The convolved images, in the dtype of `x`, rounded once.
    """
    # in float32, rounded once: in BF16, rounding each product takes 2.5 times as long on CPU
    x32 = x.astype(jnp.float32)
    kernel32 = kernel.astype(jnp.float32)
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
    """The depthwise convolution as a sum of shifted products."""
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
    """The depthwise convolution as XLA's grouped convolution, with one group per channel.

    At the default precision, a TPU multiplies in BF16.
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


def with_gradient(
    run: Callable[..., Array], function: Callable[..., Array], dtype: DTypeLike
) -> Callable[..., Array]:
    """Adds a gradient and sharding to the kernel.

    The kernel computes the gradient of the gate, and XLA computes the rest.

    Args:
      run: The kernel: `triton_kernel` with its first two arguments.
      function: Computes the input of the layer from arrays of images.
      dtype: The dtype of the result.

    Returns:
      A differentiable function of the filters [1, 3, 3, 1, c], the bias [1, c] and arrays of images. It equals
      `reference` of `function` of the images.
    """
    sharded = shard_map_kernel(run)

    def ungated(kernel: Array, bias: Array, *images: Array) -> Array:
        x = function(*(a[..., : bias.shape[-1]].astype(jnp.float32) for a in images))
        return _activated_conv(x.astype(dtype), kernel[0], bias[0])

    def forward(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        return sharded(*arrays), arrays

    def backward(arrays: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        return jax.vjp(ungated, *arrays)[1](sharded(*arrays, g))

    f = jax.custom_vjp(lambda *arrays: sharded(*arrays))
    f.defvjp(forward, backward)
    return f


def triton_kernel(
    function: Callable[..., Array],
    dtype: DTypeLike,
    kernel: Array,
    bias: Array,
    *images: Array,
    interpret: bool = False,
) -> Float[Array, "b h w _"]:
    """Computes the layer, or the gradient of its gate, in one pass over memory.

    Args:
      function: Computes the input of the layer from `images`, elementwise.
      dtype: The dtype of the result, of 16 bits.
      kernel: The filters [1, 3, 3, 1, c]. c is a multiple of `2 * CHANNELS`.
      bias: The bias [1, c].
      *images: Arrays [b, h, w, c], where any axis may have size 1. w is at most `MAX_WIDTH`. Channels after
        the first c are not read. One more array [b, h, w, c / 2] is the gradient of the result.
      interpret: Whether to run the kernel in Pallas' interpreter, which needs no GPU.

    Returns:
      The gated images [b, h, w, c / 2], or, if their gradient is given, the gradient [b, h, w, c] of what
      the gate reads.
    """
    from jax.experimental import pallas as pl  # imported here because the import takes a second
    from jax.experimental.pallas import triton as plgpu

    batch, height, width, _ = images[0].shape
    channels = bias.shape[-1]
    backward = images[-1].shape[-1] == channels // 2
    out_channels = channels if backward else channels // 2

    def spec(a: Any) -> Any:
        """One whole image per program."""
        zeros = (0,) * (a.ndim - 1)
        return pl.BlockSpec((None, *a.shape[1:]), lambda b, c: (b if len(a) > 1 else 0, *zeros))

    arrays = (kernel[:, :, :, 0], bias, *images)
    padded_width = power_of_two(width, MIN_WIDTH)
    out = jax.ShapeDtypeStruct((batch, height, width, out_channels), dtype)
    call = pl.pallas_call(
        functools.partial(_kernel_body, pl, plgpu, padded_width, function, backward),
        grid=(batch, channels // 2 // CHANNELS),
        in_specs=[spec(a) for a in arrays],
        out_specs=spec(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_conv",
    )
    return call(*arrays)


def _kernel_body(
    pl: Any,
    plgpu: Any,
    padded_width: int,
    function: Callable[..., Array],
    backward: bool,
    *refs: Any,
) -> None:
    """Runs inside the kernel: computes `CHANNELS` channels of both halves of one image, row by row.

    Args:
      pl: The module `jax.experimental.pallas`.
      plgpu: The module `jax.experimental.pallas.triton`.
      padded_width: The number of pixels of a row, padded to a power of two.
      function: Computes the input of the layer.
      backward: Whether the last input is the gradient of the result.
      *refs: References to the operands, then to the result.
    """
    kernel, bias, *images, out = refs
    gradient = images.pop() if backward else None
    height, width, _ = images[0].shape
    channels = bias.shape[0]
    dtype = out.dtype
    # the first channel of each half: of the values, and of the gates
    starts = [pl.program_id(1) * CHANNELS + half for half in (0, channels // 2)]
    column = jnp.arange(padded_width)
    inside = column[:, None] < width
    # A row of pixels is shifted by a matmul with zeros and ones, which is exact.
    shift_left, shift_right = (
        (column[None] == column[:, None] + by).astype(dtype) for by in (-1, 1)
    )

    taps = []
    biases = []
    for start in starts:
        block = pl.ds(start, CHANNELS)
        taps.append([[kernel[i, j, block].astype(jnp.float32) for j in range(3)] for i in range(3)])
        biases.append(bias[block].astype(jnp.float32))

    def load(ref: Any, row: Any, start: Any) -> Array:
        """One row [padded_width or 1, CHANNELS or 1] of an operand, in float32."""
        h, w, c = ref.shape
        if c == w == 1:
            return ref[0, 0, 0].astype(jnp.float32)
        zero = jnp.int32(0)
        place = (
            row if h > 1 else zero,
            pl.ds(0, padded_width) if w > 1 else zero,
            pl.ds(start, CHANNELS) if c > 1 else zero,
        )
        if w == 1:
            return plgpu.load(ref.at[place], mask=None, other=None).astype(jnp.float32)[None]
        if c == 1:
            values = plgpu.load(ref.at[place], mask=inside[:, 0], other=0).astype(jnp.float32)
            return values[:, None]
        return plgpu.load(ref.at[place], mask=inside, other=0).astype(jnp.float32)

    def load_shifted(row: Any, start: Any) -> tuple[Array, ...]:
        """One row of `silu(input)`, shifted by -1, 0 and 1 pixels. Zeros outside of the image."""
        inside_image = inside & (row < height)
        last_row = jnp.minimum(row, height - 1)
        x = function(*(load(ref, last_row, start) for ref in images)).astype(dtype)
        y = jnp.where(inside_image, silu(x), 0.0).astype(dtype)

        def shift(matrix: Array) -> Array:
            return jnp.dot(matrix, y, preferred_element_type=jnp.float32)

        return shift(shift_left), y.astype(jnp.float32), shift(shift_right)

    def step(row: Array, previous: Any) -> Any:
        """Computes one row of the result. `previous`: the two input rows before, for each half."""
        rows = [
            (*two_rows, load_shifted(row + 1, start))
            for two_rows, start in zip(previous, starts, strict=True)
        ]

        def convolve(half: int) -> Array:
            products = (rows[half][i][j] * taps[half][i][j] for i in range(3) for j in range(3))
            return sum(products) + biases[half]

        y = convolve(0).astype(dtype)
        gate = convolve(1).astype(dtype)
        results = [apply_gate(y, gate)]
        if gradient is not None:
            g = load(gradient, row, starts[0]).astype(dtype)
            gate32 = gate.astype(jnp.float32)
            sigmoid = jax.lax.logistic(gate32)
            slope = sigmoid * (1 + gate32 * (1 - jax.lax.logistic(gate32)))
            results = [
                g * silu(gate).astype(dtype),
                ((g * y).astype(jnp.float32) * slope).astype(dtype),
            ]
        for start, result in zip(starts, results, strict=False):
            place = (row, pl.ds(0, padded_width), pl.ds(start, CHANNELS))
            plgpu.store(out.at[place], result, mask=inside)
        return tuple(three_rows[1:] for three_rows in rows)

    zeros = (jnp.zeros((padded_width, CHANNELS), jnp.float32),) * 3
    first_rows = tuple((zeros, load_shifted(0, start)) for start in starts)
    jax.lax.fori_loop(0, height, step, first_rows)
