"""The middle of SANA's MLP in one pass over memory: SiLU, a depthwise 3x3 convolution, and a gate (arXiv 2410.10629, 2.2).

XLA writes the SiLU before the convolution reads it, and it is five times as wide as the network. Here one kernel (Pallas, in
Triton) makes some channels of a picture, row by row, from what the linear before wrote. Elsewhere its twin is plain JAX.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics import target
from solrl_jax.numerics.rows import on_rows

CHANNELS = 32  # of a block of threads
FEWEST, WIDEST = 16, 32  # pixels of a row, filled up to a power of two; wider pictures come in twos, too few for a GPU


def gated_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]
) -> Float[Array, "b h w c/2"]:
    """`y silu(g)` in the dtype of `x`, where y and g are the halves of the depthwise convolution of `silu(x)`, zero-padded."""
    fits = x.dtype.itemsize == 2 and x.shape[-1] % (2 * CHANNELS) == 0 and x.shape[2] <= WIDEST
    if target.platform() != "gpu" or not fits:
        return twin(x, kernel, bias)
    return with_gradient(in_one_pass)(x, kernel, bias)


def twin(x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]) -> Float[Array, "b h w c/2"]:
    """What the kernel computes, in plain JAX."""
    return gate(*jnp.split(widened(x, kernel, bias), 2, axis=-1))


def widened(x: Float[Array, "b h w c"], kernel: Float[Array, "3 3 1 c"], bias: Float[Array, " c"]) -> Float[Array, "b h w c"]:
    """What is gated."""
    return convolved(silu(x).astype(x.dtype), kernel, bias)


def gate(y: Float[Array, "..."], by: Float[Array, "..."]) -> Float[Array, "..."]:
    """`y silu(by)`. Rounded twice, or XLA would not fuse it with the convolution."""
    return y * silu(by).astype(y.dtype)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """SiLU in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.logistic(x32)


def convolved(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], bias: Float[Array, " c"] | None
) -> Float[Array, "b h w c"]:
    """A convolution with one filter for each channel; stride 1, zero padding.

    A sum of shifted products, which XLA fuses into one pass over memory on every backend. Its grouped convolution is far slower
    on CPU, above all the gradient.
    """
    # float32 inside, rounded once, as in a convolution; in BF16, rounding every product takes 2.5 times as long on CPU
    (height, width), size, k = x.shape[1:3], len(kernel), kernel[:, :, 0].astype(jnp.float32)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    y = sum(padded[:, i : i + height, j : j + width] * k[i, j] for i in range(size) for j in range(size))
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def with_gradient(run: Any) -> Any:
    """`twin` by the kernel that `run` runs, and its gradient: of the gate by the kernel, before it by XLA."""
    each = lambda *arrays: on_rows(lambda x, kernel, bias, *g: run(x, kernel[0], bias[0], *g))(*arrays)
    one = lambda x, kernel, bias, *g: each(x, kernel[None], bias[None], *g)
    f = jax.custom_vjp(lambda *arrays: one(*arrays))
    f.defvjp(lambda *arrays: (one(*arrays), arrays), lambda arrays, g: jax.vjp(widened, *arrays)[1](one(*arrays, g)))
    return f


def in_one_pass(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "3 3 1 c"],
    bias: Float[Array, " c"],
    gradient: Float[Array, "b h w c/2"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "b h w _"]:
    """The kernel. `x` is in 16 bits, c a multiple of twice `CHANNELS`, and w at most `WIDEST`.

    gradient: of the result; then the gradient [b, h, w, c] of what is gated is made instead.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton as plgpu

    (batch, height, width, channels), half = x.shape, x.shape[-1] // 2
    filled = 1 << (max(width, FEWEST) - 1).bit_length()
    picture = lambda n: pl.BlockSpec((None, height, width, n), lambda b, c: (b, 0, 0, 0))
    shared = lambda *shape: pl.BlockSpec(shape, lambda b, c: (0,) * len(shape))
    made = half if gradient is None else channels
    return pl.pallas_call(
        partial(_body, pl, plgpu, filled), grid=(batch, half // CHANNELS),
        in_specs=[picture(channels), shared(3, 3, channels), shared(channels), *[picture(half)] * (gradient is not None)],
        out_specs=picture(made), out_shape=jax.ShapeDtypeStruct((batch, height, width, made), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret, name="gated_conv",
    )(x, kernel[:, :, 0], bias, *([] if gradient is None else [gradient]))  # fmt: skip


def _body(pl: Any, plgpu: Any, filled: int, x: Any, kernel: Any, bias: Any, *others: Any) -> None:
    """Within the kernel: `CHANNELS` channels of a picture, row by row, from references to the operands and to the result."""
    (height, width, channels), dtype, (*gradient, out) = x.shape, x.dtype, others
    starts, column = [pl.program_id(1) * CHANNELS + half for half in (0, channels // 2)], jnp.arange(filled)
    # a row of pixels moved by one is a product with zeros and ones, exact
    to_left, to_right = ((column[None] == column[:, None] + by).astype(dtype) for by in (-1, 1))
    at = lambda row, start: (row, pl.ds(0, filled), pl.ds(start, CHANNELS))
    inside = column[:, None] < width
    taps = [[[kernel[i, j, pl.ds(n, CHANNELS)].astype(jnp.float32) for j in range(3)] for i in range(3)] for n in starts]
    offsets = [bias[pl.ds(n, CHANNELS)].astype(jnp.float32) for n in starts]

    def moved(row: Any, start: Any) -> tuple[Array, ...]:
        there = inside & (row < height)
        y = silu(plgpu.load(x.at[at(jnp.minimum(row, height - 1), start)], mask=there, other=0)).astype(dtype)
        by = lambda shift: jnp.dot(shift, y, preferred_element_type=jnp.float32)
        return by(to_left), y.astype(jnp.float32), by(to_right)

    def step(row: Array, before: Any) -> Any:
        rows = [(*of_half, moved(row + 1, n)) for of_half, n in zip(before, starts, strict=True)]
        product = lambda half, i, j: rows[half][i][j] * taps[half][i][j]
        summed = lambda half: sum(product(half, i, j) for i in range(3) for j in range(3)) + offsets[half]
        y, by = summed(0).astype(dtype), summed(1).astype(dtype)
        results = [gate(y, by)]
        if gradient:
            g, wide = plgpu.load(gradient[0].at[at(row, starts[0])], mask=inside, other=0), by.astype(jnp.float32)
            slope = jax.lax.logistic(wide) * (1 + wide * (1 - jax.lax.logistic(wide)))
            results = [g * silu(by).astype(dtype), ((g * y).astype(jnp.float32) * slope).astype(dtype)]
        for start, result in zip(starts, results, strict=False):
            plgpu.store(out.at[at(row, start)], result, mask=inside)
        return tuple(of_half[1:] for of_half in rows)

    nothing = (jnp.zeros((filled, CHANNELS), jnp.float32),) * 3
    jax.lax.fori_loop(0, height, step, tuple((nothing, moved(0, n)) for n in starts))
