"""The step `kernels`: each fused kernel and its twin in plain JAX, at the released sizes.

A figure has the largest difference of the results and the seconds of both. The programs of a group
of kernels are compiled at once, in threads, before the first of them is measured, so that a step
that runs out of time keeps the groups that it has measured. On a CPU the kernels are interpreted.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.record import Task
from bench.timing import timed
from solrl_jax.models.layers import attention as softmax
from solrl_jax.models.layers import attention_fp8
from solrl_jax.models.layers.modulation import modulate
from solrl_jax.models.layers.norm import layer_norm, rms_norm
from solrl_jax.models.layers.rotary import rotate, rotation_table
from solrl_jax.parallel import sharding
from solrl_jax.quant import compile_target, fp8, lazy, linear_attention, nvfp4
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.lazy import LazyActivation, LazyPart
from solrl_jax.quant.matmul import matmul

BF16 = jnp.bfloat16
ENCODERS = {"fp8": fp8.encode, "nvfp4": nvfp4.encode, "bf16": partial(lazy.cast_rows, BF16)}
AXES = (16, 56, 56)  # FLUX.1: the features of a head that each coordinate of a position rotates


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the networks' layers. The defaults are those of the released models.

    Attributes:
      sana: batch, rows and columns of tokens, heads, features of a head, and text tokens.
      flux: batch, text tokens, image tokens, heads, and features of a head.
      sd3: batch, tokens of text and image together (an odd number), heads, and features of a head.
    """

    sana: tuple[int, int, int, int, int, int] = (16, 32, 32, 70, 32, 300)
    flux: tuple[int, int, int, int, int] = (12, 128, 1024, 24, 128)
    sd3: tuple[int, int, int, int] = (1, 4429, 38, 64)


SMALL = Sizes((2, 4, 4, 2, 32, 12), (2, 8, 16, 2, 128), (1, 29, 2, 64))


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, the function that it should equal, and the shapes of their arguments.

    Attributes:
      ours: a function of arrays that calls the kernel.
      twin: the same function in plain JAX. Its result may be in a wider dtype.
      shapes: one `jax.ShapeDtypeStruct` per argument.
      scale: the standard deviation of the random arguments.
    """

    name: str
    ours: Callable[..., Any]
    twin: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    scale: float = 1.0


def kernels(task: Task) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every case, group by group. All of a group are compiled first: compiling threads would delay
    the calls that are measured.
    """
    sizes = Sizes() if compile_target.platform() == "gpu" else SMALL
    for group in groups():
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = [
                (case, threads.submit(compile_case, case.ours, case.shapes),
                 threads.submit(compile_case, case.twin, case.shapes))
                for case in group(sizes)
            ]  # fmt: skip
        for case, ours, twin in compiled:
            yield case.name, partial(compare, case, ours, twin, task.repeat)


def compile_case(
    f: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Any, float]:
    """Compiles a function as training does.

    Returns:
      The compiled function, and the seconds that lowering and compiling took.
    """
    began = time.perf_counter()
    return sharding.jit(f).lower(*shapes).compile(), time.perf_counter() - began


def compare(case: Case, ours: Future[Any], twin: Future[Any], repeat: int) -> dict[str, Any]:
    """Runs both functions on the same random arguments.

    Returns:
      `difference`: the largest difference of two elements, divided by the twin's largest magnitude;
      `alike`: the share of equal elements, if both results have the same dtype;
      `finite`: whether the kernel's results are; `times`: seconds of the twin over the kernel's.
    """
    arrays = [
        (case.scale * jax.random.normal(jax.random.key(i), shape.shape)).astype(shape.dtype)
        for i, shape in enumerate(case.shapes)
    ]
    kernel, compile_seconds = ours.result()
    results = jax.tree.leaves(kernel(*arrays))
    seconds, _ = timed(lambda: kernel(*arrays), repeat)
    figures: dict[str, Any] = {"seconds": seconds, "compile_seconds": round(compile_seconds, 2)}
    figures["finite"] = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in results)
    try:
        plain, _ = twin.result()
        expected = jax.tree.leaves(plain(*arrays))
        twin_seconds, _ = timed(lambda: plain(*arrays), repeat)
    except Exception as error:  # for instance out of memory: the kernel's own figures stay
        return figures | {"twin_error": f"{type(error).__name__}: {str(error)[:200]}"}
    pairs = [_difference(x, y) for x, y in zip(results, expected, strict=True)]
    figures["difference"] = max(float(difference) for difference, _ in pairs)
    figures["alike"] = min(float(alike) for _, alike in pairs)
    return figures | {"twin_seconds": twin_seconds, "times": round(twin_seconds / seconds, 3)}


@jax.jit
def _difference(ours: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = ours.astype(jnp.float32)
    reference = expected.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(reference).max(), 1e-30)
    alike = (wide == expected.astype(ours.dtype).astype(jnp.float32)).mean()
    return jnp.abs(wide - reference).max() / largest, alike


def groups() -> tuple[Callable[[Sizes], Iterator[Case]], ...]:
    """The groups of kernels, each with the quickest ones to compile first."""
    return one_pass_cases, linear_attention_cases, attention_cases, matmul_cases


def cases(sizes: Sizes) -> Iterator[Case]:
    """All kernels, group by group."""
    for group in groups():
        yield from group(sizes)


def shape(*lengths: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(lengths, dtype)


def times(*factors: jax.Array) -> jax.Array:
    """The product of a quantized matmul's result and its scales."""
    y, row, column = factors
    return y * row * column


def product(y: jax.Array, row: jax.Array, column: jax.Array) -> LazyActivation:
    """The result of a quantized matmul whose scales are not applied yet."""
    return LazyActivation((LazyPart(times, (y, row, column), exact=False),), y.dtype)


def product_shapes(batch: int, tokens: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the arguments of `product`, and of a bias."""
    wide = jnp.float32
    scales = shape(batch, tokens, 1, dtype=wide), shape(1, 1, width, dtype=wide)
    return shape(batch, tokens, width), *scales, shape(1, 1, width)


def one_pass_cases(sizes: Sizes) -> Iterator[Case]:
    """`quant.lazy.triton_kernel`: what a quantized matmul or an attention reads."""
    batch, rows, columns, heads, head, _ = sizes.sana
    flux, text, image, flux_heads, flux_head = sizes.flux
    width = flux_heads * flux_head

    def case(
        name: str, encoder: str, make: Callable[..., list[LazyActivation]], *shapes: Any
    ) -> Case:
        def run(by: Callable[..., Any], *arrays: jax.Array) -> Any:
            return by(ENCODERS[encoder], [stretch.parts for stretch in make(*arrays)])

        kernel = partial(lazy.triton_kernel, interpret=compile_target.platform() != "gpu")
        return Case(
            f"one_pass {name} {encoder}", partial(run, kernel), partial(run, lazy.reference), shapes
        )

    def modulated(x: jax.Array, shift: jax.Array, factor: jax.Array) -> list[LazyActivation]:
        norm = partial(layer_norm, eps=1e-6, width=x.shape[-1])
        return [LazyActivation.from_array(x).map(norm).map(modulate, shift, factor)]

    def activated(
        y: jax.Array, row: jax.Array, column: jax.Array, bias: jax.Array
    ) -> list[LazyActivation]:
        return [product(y, row, column).map(jnp.add, bias).map(jax.nn.gelu)]

    def single(x: jax.Array, *arguments: jax.Array) -> list[LazyActivation]:
        return [LazyActivation.from_array(x).concat(activated(*arguments)[0])]

    def queries(*arguments: jax.Array) -> list[LazyActivation]:
        *streams, factor = arguments
        made = []
        position = 0
        positions = np.zeros((3, text + image))
        positions[2, text:] = np.arange(image)
        rotation = rotation_table(positions, AXES, 10_000.0)
        for stream in (streams[:4], streams[4:]):
            normed = product(*stream[:3]).map(jnp.add, stream[3]).map(_by_head, factor)
            made.append(rotate(normed, rotation, position))
            position = text
        return made

    modulated_shapes = {
        "norm, SANA": [(batch, rows * columns, heads * head), *[(batch, 1, heads * head)] * 2],
        "norm, FLUX.1": [(flux, image, width), *[(flux, 1, width)] * 2],
    }
    for name, lengths in modulated_shapes.items():
        for encoder in ("fp8", "nvfp4"):
            yield case(name, encoder, modulated, *(shape(*each) for each in lengths))
    for encoder in ("fp8", "nvfp4"):
        yield case("GELU, FLUX.1", encoder, activated, *product_shapes(flux, image, 4 * width))
    wide = shape(flux, text + image, width), *product_shapes(flux, text + image, 4 * width)
    yield case("attention and GELU, FLUX.1", "fp8", single, *wide)
    both = *product_shapes(flux, text, width), *product_shapes(flux, image, width)
    yield case("queries, FLUX.1", "bf16", queries, *both, shape(1, 1, flux_head))


def _by_head(x: jax.Array, factor: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:-1], -1, factor.shape[-1])
    return rms_norm(heads, factor, 1e-6).astype(x.dtype).reshape(x.shape)


def linear_attention_cases(sizes: Sizes) -> Iterator[Case]:
    """SANA's linear attention and MHLA's, and their gradients, beside the twin in BF16."""
    batch, rows, columns, heads, head, _ = sizes.sana
    shapes = (shape(batch, rows * columns, heads * head),) * 3
    blocks = linear_attention.Blocks((4, 4), (rows, columns), 1e-6, 1e-6)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        inputs = (
            LazyActivation.from_array(q),
            LazyActivation.from_array(k),
            LazyActivation.from_array(v),
        )
        return linear_attention.linear_attention(*inputs, heads)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mix = jnp.full((blocks.count,) * 2, 1 / blocks.count)
        inputs = (
            LazyActivation.from_array(q),
            LazyActivation.from_array(k),
            LazyActivation.from_array(v),
        )
        return linear_attention.linear_attention(*inputs, heads, blocks, mix)

    def mixed_twin(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mix = jnp.full((blocks.count,) * 2, 1 / blocks.count)
        return linear_attention.mixed_reference(q, k, v, heads, blocks=blocks, mix=mix)

    twin = partial(linear_attention.plain_reference, heads=heads)
    yield Case("linear attention, SANA", ours, twin, shapes)
    yield Case("linear attention, gradient", gradient(ours), gradient(twin), (*shapes, shapes[0]))
    yield Case("linear attention, MHLA", mixed, mixed_twin, shapes)


def gradient(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradient of a function of arrays. Its last argument is that of the function's result."""

    def pulled(*arrays: jax.Array) -> Any:
        *inputs, g = arrays
        return jax.vjp(f, *inputs)[1](g)

    return pulled


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """cuDNN's flash attention in BF16 and FP8, beside XLA's matmuls and softmax."""
    batch, rows, columns, _, _, text = sizes.sana
    flux, flux_text, flux_image, flux_heads, flux_head = sizes.flux
    sd3, tokens, sd3_heads, sd3_head = sizes.sd3
    lengths = {
        "FLUX.1": [(flux, flux_text + flux_image, flux_heads, flux_head)] * 3,
        "SD3.5": [(sd3, tokens, sd3_heads, sd3_head)] * 3,
    }
    for name, shapes in lengths.items():
        each = tuple(shape(*lengths) for lengths in shapes)
        yield Case(f"attention, {name}", softmax.attention, plain_attention, each)
        pulled = gradient(softmax.attention), gradient(plain_attention)
        yield Case(f"attention, {name}, gradient", *pulled, (*each, each[0]))
        eight = tuple(shape(*lengths, dtype=attention_fp8.E4M3) for lengths in shapes)
        yield Case(
            f"attention in FP8, {name}", attention_fp8.attention_fp8, attention_fp8.reference, eight
        )  # fmt: skip

    def masked(attend: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        is_visible = np.arange(text)[None] < (np.arange(batch)[:, None] % 7 + 1) * text // 8
        return attend(*arrays, mask=jnp.asarray(is_visible)[:, None, None])

    cross = shape(batch, rows * columns, 20, 112), *[shape(batch, text, 20, 112)] * 2
    ours = partial(masked, softmax.attention)
    twin = partial(masked, plain_attention)
    yield Case("attention to the text, SANA", ours, twin, cross)
    pulled = gradient(ours), gradient(twin)
    yield Case("attention to the text, gradient", *pulled, (*cross, cross[0]))


def plain_attention(*arrays: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax attention that writes all scores to memory."""
    q, k, v = arrays
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")


def matmul_cases(sizes: Sizes) -> Iterator[Case]:
    """A quantized matmul beside the float32 product of the numbers that its codes stand for."""
    flux, _, image, heads, head = sizes.flux
    width = heads * head
    shapes = shape(flux * image, width), shape(width, 4 * width)

    def ours(quantize: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul(x, quantize(w))

    def twin(form: str, x: jax.Array, w: jax.Array) -> jax.Array:
        quantize: Any = FORMATS[form].quantize
        return decoded(form, x) @ quantize(w).dequantize()

    for form in ("fp8", "nvfp4"):
        both = partial(ours, FORMATS[form].quantize), partial(twin, form)
        yield Case(f"matmul with quantization, {form}", *both, shapes)


def decoded(form: str, x: jax.Array) -> jax.Array:
    """The numbers that the codes of activations [rows, n] stand for, in float32."""
    wide = x.astype(jnp.float32)
    if form == "fp8":
        (codes,), (scale,) = fp8.encode([wide])
        return codes.astype(jnp.float32) * scale
    (codes,), (scales,), (scale,) = nvfp4.encode([wide])
    values = nvfp4.unpack(codes).astype(jnp.float32)
    return values * jnp.repeat(scales.astype(jnp.float32), nvfp4.BLOCK, axis=-1) * scale
