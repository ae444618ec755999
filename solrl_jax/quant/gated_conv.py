"""The middle of SANA's MLP in one pass over memory: SiLU, a depthwise 3x3 convolution, and a gate (arXiv 2410.10629, 2.2).

XLA writes the SiLU before the convolution reads it, and it is five times as wide as the network. Here one kernel (Pallas, in
Triton) makes some channels of a picture, row by row, from what the linear before wrote. Elsewhere its twin is plain JAX.
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

CHANNELS = 32  # of a block of threads
# pixels of a row, filled up to a power of two; wider pictures come in twos, too few for a GPU
FEWEST = 16
WIDEST = 32


def gated_conv(
    x: LazyActivation,
    grid: tuple[int, int],
    kernel: Float[Array, "3 3 1 c"],
    bias: Float[Array, " c"],
) -> Float[Array, "b n c/2"]:
    """`y silu(g)` in the dtype of `x`, where y and g are the halves of the depthwise convolution of `silu(x)`, zero-padded.

    x: [b, n, c], of one part, each number of which depends on what lies at its own place. grid: the n pixels' rows and columns.
    """
    (part,), (height, width), dtype = x.parts, grid, jnp.dtype(x.dtype)
    channels = len(bias)
    if compile_target.platform() == "tpu":
        x = _written_as_pictures(x, grid)
    if (
        compile_target.platform() != "gpu"
        or dtype.itemsize != 2
        or channels % (2 * CHANNELS)
        or not 1 < width <= WIDEST
    ):
        value = x.value
        return twin(value.reshape(len(value), *grid, -1), kernel, bias).reshape(
            *value.shape[:2], -1
        )

    # columns after the channels are left where they are: a copy without them would be a pass over memory
    def whole(a):
        return a if not isinstance(a, ColumnView) else a.value if a.start else a.array

    arrays = [whole(a) for a in part.arrays]
    pictures = [a.reshape(len(a), *(grid if a.shape[1] > 1 else (1, 1)), -1) for a in arrays]
    run = functools.partial(in_one_pass, part.function, dtype)
    made = with_gradient(run, part.function, dtype)(kernel[None], bias[None], *pictures)
    return made.reshape(len(made), height * width, -1)


def _written_as_pictures(x: LazyActivation, grid: tuple[int, int]) -> LazyActivation:
    """The same, but a TPU writes the first array, a product, as pictures in its dtype. XLA would write float32 and copy."""
    (part,) = x.parts
    first, *others = (a.value if isinstance(a, ColumnView) else a for a in part.arrays)
    written = jax.lax.optimization_barrier(first.reshape(len(first), *grid, -1)).reshape(
        first.shape
    )
    return dataclasses.replace(x, parts=(dataclasses.replace(part, arrays=(written, *others)),))


def twin(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c/2"]:
    """What the kernel computes, in plain JAX."""
    return gate(*jnp.split(widened(x, kernel, bias), 2, axis=-1))


def widened(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c"]:
    """What is gated."""
    return convolved(silu(x).astype(x.dtype), kernel, bias)


def gate(y: Float[Array, "..."], by: Float[Array, "..."]) -> Float[Array, "..."]:
    """`y silu(by)`. HalfPrecisionWeight twice, or XLA would not fuse it with the convolution."""
    return y * silu(by).astype(y.dtype)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """SiLU in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.logistic(x32)


def convolved(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], bias: Float[Array, " c"] | None
) -> Float[Array, "b h w c"]:
    """A convolution with one filter for each channel; stride 1, zero padding.

    A sum of shifted products, which XLA fuses into one pass over memory. Its grouped convolution is far slower on CPU, above
    all the gradient. On a TPU it takes a third of the sum's cycles, by the compiler's count, and two thirds of its traffic.
    """
    # float32 inside, rounded once, as in a convolution; in BF16, rounding every product takes 2.5 times as long on CPU
    wide = x.astype(jnp.float32)
    k = kernel.astype(jnp.float32)
    y = (
        by_groups if compile_target.platform() == "tpu" and x.dtype == jnp.bfloat16 else by_shifts
    )(wide, k)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def by_shifts(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"]
) -> Float[Array, "b h w c"]:
    """The convolution as a sum of shifted products."""
    (height, width), size = x.shape[1:3], len(kernel)
    padded = jnp.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    products = (
        padded[:, i : i + height, j : j + width] * kernel[i, j]
        for i in range(size)
        for j in range(size)
    )
    return functools.reduce(operator.add, products)


def by_groups(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"]
) -> Float[Array, "b h w c"]:
    """The convolution as XLA's, a group for each channel. Where no precision is asked for, a TPU multiplies in BF16."""
    padding = [(len(kernel) // 2,) * 2] * 2
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=layout, feature_group_count=x.shape[-1]
    )


def with_gradient(
    run: Callable[..., Array], function: Callable[..., Array], dtype: DTypeLike
) -> Callable[..., Array]:
    """`twin` of `function(*pictures)` by the kernel that `run` runs, with its gradient: of the gate by the kernel, else by XLA.

    It is called with the convolution's kernel [1, 3, 3, 1, c] and bias [1, c], and pictures.
    """
    one = shard_map_kernel(run)

    def before(kernel: Array, bias: Array, *pictures: Array) -> Array:
        wide = function(*(a[..., : bias.shape[-1]].astype(jnp.float32) for a in pictures)).astype(
            dtype
        )
        return widened(wide, kernel[0], bias[0])

    f = jax.custom_vjp(lambda *arrays: one(*arrays))
    f.defvjp(
        lambda *arrays: (one(*arrays), arrays),
        lambda arrays, g: jax.vjp(before, *arrays)[1](one(*arrays, g)),
    )
    return f


def in_one_pass(
    function: Callable[..., Array],
    dtype: DTypeLike,
    kernel: Array,
    bias: Array,
    *pictures: Array,
    interpret: bool = False,
) -> Float[Array, "b h w _"]:
    """The kernel. c is a multiple of twice `CHANNELS`, and w at most `WIDEST`.

    pictures: what `function` takes, [b, h, w, c] or with 1 for some; channels after c are not read. One more is the gradient
    [b, h, w, c / 2] of the result: then the gradient [b, h, w, c] of what is gated is made instead.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton as plgpu

    (batch, height, width, _), channels = pictures[0].shape, bias.shape[-1]
    backward = pictures[-1].shape[-1] == channels // 2
    made = channels if backward else channels // 2

    def spec(a):
        return pl.BlockSpec(
            (None, *a.shape[1:]), lambda b, c: (b if len(a) > 1 else 0, *(0,) * (a.ndim - 1))
        )

    arrays = (kernel[:, :, :, 0], bias, *pictures)
    filled = power_of_two(width, FEWEST)
    out = jax.ShapeDtypeStruct((batch, height, width, made), dtype)
    return pl.pallas_call(
        functools.partial(_body, pl, plgpu, filled, function, backward), grid=(batch, channels // 2 // CHANNELS),
        in_specs=[spec(a) for a in arrays], out_specs=spec(out), out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1), interpret=interpret, name="gated_conv",
    )(*arrays)  # fmt: skip


def _body(
    pl: Any, plgpu: Any, filled: int, function: Callable[..., Array], backward: bool, *refs: Any
) -> None:
    """Within the kernel: `CHANNELS` channels of a picture, row by row, from references to the operands and to the result."""
    kernel, bias, *pictures, out = refs
    gradient = pictures.pop() if backward else None
    (height, width, _), channels, dtype = pictures[0].shape, bias.shape[0], out.dtype
    starts = [pl.program_id(1) * CHANNELS + half for half in (0, channels // 2)]
    column = jnp.arange(filled)
    # a row of pixels moved by one is a product with zeros and ones, exact
    to_left, to_right = ((column[None] == column[:, None] + by).astype(dtype) for by in (-1, 1))

    def at(row, start):
        return (row, pl.ds(0, filled), pl.ds(start, CHANNELS))

    inside = column[:, None] < width
    taps = [
        [[kernel[i, j, pl.ds(n, CHANNELS)].astype(jnp.float32) for j in range(3)] for i in range(3)]
        for n in starts
    ]
    offsets = [bias[pl.ds(n, CHANNELS)].astype(jnp.float32) for n in starts]

    def load(ref: Any, row: Any, start: Any) -> Array:  # of one row [filled or 1, CHANNELS or 1]
        h, w, c = ref.shape
        if c == w == 1:
            return ref[0, 0, 0].astype(jnp.float32)
        one = jnp.int32(0)
        place = (
            row if h > 1 else one,
            pl.ds(0, filled) if w > 1 else one,
            pl.ds(start, CHANNELS) if c > 1 else one,
        )
        mask = None if w == 1 else inside if c > 1 else inside[:, 0]
        values = plgpu.load(ref.at[place], mask=mask, other=None if w == 1 else 0).astype(
            jnp.float32
        )
        return values if w > 1 and c > 1 else values[:, None] if w > 1 else values[None]

    def moved(row: Any, start: Any) -> tuple[Array, ...]:
        there = inside & (row < height)
        last = jnp.minimum(row, height - 1)
        x = function(*(load(ref, last, start) for ref in pictures)).astype(dtype)
        y = jnp.where(there, silu(x), 0.0).astype(dtype)

        def by(shift):
            return jnp.dot(shift, y, preferred_element_type=jnp.float32)

        return by(to_left), y.astype(jnp.float32), by(to_right)

    def step(row: Array, before: Any) -> Any:
        rows = [(*of_half, moved(row + 1, n)) for of_half, n in zip(before, starts, strict=True)]

        def product(half, i, j):
            return rows[half][i][j] * taps[half][i][j]

        def summed(half):
            return sum(product(half, i, j) for i in range(3) for j in range(3)) + offsets[half]

        y = summed(0).astype(dtype)
        by = summed(1).astype(dtype)
        results = [gate(y, by)]
        if gradient is not None:
            g = load(gradient, row, starts[0]).astype(dtype)
            wide = by.astype(jnp.float32)
            slope = jax.lax.logistic(wide) * (1 + wide * (1 - jax.lax.logistic(wide)))
            results = [
                g * silu(by).astype(dtype),
                ((g * y).astype(jnp.float32) * slope).astype(dtype),
            ]
        for start, result in zip(starts, results, strict=False):
            plgpu.store(out.at[at(row, start)], result, mask=inside)
        return tuple(of_half[1:] for of_half in rows)

    nothing = (jnp.zeros((filled, CHANNELS), jnp.float32),) * 3
    jax.lax.fori_loop(0, height, step, tuple((nothing, moved(0, n)) for n in starts))
