"""`LazyActivation`: an activation that is not in memory yet, so that a quantised product computes, scales and rounds it in one pass.

What a quantised product reads are codes and scales. XLA alone writes its input in BF16, reads that for the largest value of
each row, and reads it again for the codes. Here one kernel (Pallas, in Triton) makes a row of the input, such as a modulated
norm or a GELU, keeps it in registers, and writes codes and scales. Where there is no CUDA, its twin does so in plain JAX.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant import compile_target
from solrl_jax.quant.sharded_kernel import power_of_two, shard_map_kernel

# Of rows [..., n], one array for each part, to outputs. Each output is a list of arrays that lie side by side, a part each.
Encode = Callable[[Sequence[Float[Array, "..."]]], tuple[list[Array], ...]]
SMALLEST = 64  # a row in the kernel is filled up to it at least
# values of a row in the registers of a warp, and warps for a row
IN_A_WARP = 1024
FEWEST = 4
MOST = 16


@dataclasses.dataclass(frozen=True)
class ColumnView:
    """ColumnView `start` to `stop` of an array [b, s, n], read where they lie."""

    array: Array
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[:2], self.stop - self.start)

    @property
    def value(self) -> Float[Array, "b s columns"]:
        return self.array[..., self.start : self.stop]

    def cut(self, start: int, stop: int) -> "ColumnView":
        return ColumnView(self.array, self.start + start, self.start + stop)


@dataclasses.dataclass(frozen=True)
class LazyPart:
    """Some columns of an activation: `function(*arrays)`, where each row depends on its own row of the arrays alone.

    arrays: [b, s, n], or with 1 for b, s or n, or a width of their own; or `ColumnView` of such an array.
    exact: in memory it is computed in the dtypes of its arrays, as the released networks do, and not in float32.
    start, stop: which rows of the first array are read.
    """

    function: Callable[..., Array]
    arrays: tuple[Array | ColumnView, ...]
    exact: bool = True
    start: int = 0
    stop: int | None = None

    def value(self, dtype: Any = None) -> Array:
        """dtype: what is computed in; None: that of the arrays."""
        arrays = [x.value if isinstance(x, ColumnView) else x for x in self.arrays]
        first, *others = arrays if dtype is None else (x.astype(dtype) for x in arrays)
        return self.function(
            first if self.stop is None else first[:, self.start : self.stop], *others
        )


@dataclasses.dataclass(frozen=True, eq=False)
class LazyActivation:
    """An activation [b, s, n] in parts that lie side by side along n. dtype: that it has in memory."""

    parts: tuple[LazyPart, ...]
    dtype: Any

    @classmethod
    def of(
        cls, x: Float[Array, "b s n"], rows: tuple[int, int] | None = None, dtype: Any = None
    ) -> "LazyActivation":
        """`x`; rows: the first and the end of those that are read. dtype: in place of that of `x`."""
        return cls((LazyPart(lambda x: x, (x,), True, *(rows or ())),), dtype or x.dtype)

    def map(self, f: Callable[..., Array], *more: Array) -> "LazyActivation":
        """`f(this, *more)`, which reads nothing but its own row."""
        (part,) = self.parts
        count = len(part.arrays)

        def function(*arrays):
            return f(part.function(*arrays[:count]), *arrays[count:])

        return LazyActivation(
            (dataclasses.replace(part, function=function, arrays=(*part.arrays, *more)),),
            self.dtype,
        )

    def join(self, f: Callable[[Array, Array], Array], other: "LazyActivation") -> "LazyActivation":
        """`f(this, other)`, where neither is some rows of a larger array."""
        (part,), (more,) = self.parts, other.parts
        count = len(part.arrays)

        def function(*arrays):
            return f(part.function(*arrays[:count]), more.function(*arrays[count:]))

        return LazyActivation(
            (LazyPart(function, (*part.arrays, *more.arrays), part.exact and more.exact),),
            self.dtype,
        )

    def beside(self, other: "LazyActivation") -> "LazyActivation":
        """This and then `other`, along the last axis."""
        return LazyActivation((*self.parts, *other.parts), self.dtype)

    def columns(self, *widths: int) -> list["LazyActivation"]:
        """The columns of a product in runs of these widths. Each must depend on its own columns of the arrays alone."""
        (part,) = self.parts

        def whole(x):
            return x if isinstance(x, ColumnView) else ColumnView(x, 0, x.shape[2])

        def cut(x, start, stop):
            return x if x.shape[2] == 1 else whole(x).cut(start, stop)

        ends = list(itertools.accumulate(widths))
        runs = [
            tuple(cut(x, end - n, end) for x in part.arrays)
            for n, end in zip(widths, ends, strict=True)
        ]
        return [
            dataclasses.replace(self, parts=(dataclasses.replace(part, arrays=arrays),))
            for arrays in runs
        ]

    @property
    def rows(self) -> int:
        """How many there are: s."""
        part = self.parts[0]
        return max(x.shape[1] for x in part.arrays) if part.stop is None else part.stop - part.start

    @property
    def exact(self) -> bool:
        """Whether no quantised product is in it."""
        return all(part.exact for part in self.parts)

    @cached_property
    def value(self) -> Float[Array, "b s n"]:
        """The activation in memory."""
        values = [
            part.value(None if part.exact else jnp.float32).astype(self.dtype)
            for part in self.parts
        ]
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)

    @cached_property
    def _codes(self) -> dict[Encode, tuple[Array, ...]]:
        return {}

    def encoded(self, encode: Encode) -> tuple[Array, ...]:
        """The outputs of `encode` [b, s, m]: made once, however many products read them."""
        if encode not in self._codes:
            self._codes[encode] = one_pass(encode, [self])
        return self._codes[encode]


def written(
    stretches: Sequence[LazyActivation], head: int, dtype: Any = None
) -> Float[Array, "b s n head"]:
    """Activations one after another along s, in memory: where quantised products are in them, in one pass.

    head: features of a head; heads lie side by side. dtype: in place of that of the activations.
    """

    def by_head(x):
        return x.reshape(*x.shape[:2], -1, head)

    dtype = dtype or stretches[0].dtype
    if all(x.exact for x in stretches):
        values = [by_head(rounded(x.value, dtype)) for x in stretches]
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=1)
    return by_head(one_pass(partial(_rounded, dtype), stretches)[0])


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """`x` in `dtype`. In eight bits it saturates: E4M3 has no infinity, and above 464 it would be NaN."""
    if jnp.dtype(dtype).itemsize == 1:
        x = jnp.clip(x, -float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).max))
    return x.astype(dtype)


def _rounded(dtype: Any, parts: Sequence[Array]) -> tuple[list[Array]]:
    return ([rounded(x, dtype) for x in parts],)


def one_pass(encode: Encode, stretches: Sequence[LazyActivation]) -> tuple[Array, ...]:
    """`encode` of activations one after another along s."""
    parts = [x.parts for x in stretches]

    def run(make):
        return lambda *arrays: make(encode, _with(parts, iter(arrays)))

    if not compile_target.converts_fp8():
        return run(twin)(*_arrays(parts))
    return jax.lax.platform_dependent(
        *_arrays(parts), cuda=shard_map_kernel(run(kernel)), default=run(twin)
    )


def _arrays(stretches: Sequence[Sequence[LazyPart]]) -> list[Array]:
    arrays = [x for parts in stretches for part in parts for x in part.arrays]
    return [x.array if isinstance(x, ColumnView) else x for x in arrays]


def _with(stretches: Sequence[Sequence[LazyPart]], arrays: Iterator[Array]) -> list[list[LazyPart]]:
    """The parts with other arrays, in the order of `_arrays`."""

    def new(old):
        return (
            dataclasses.replace(old, array=next(arrays))
            if isinstance(old, ColumnView)
            else next(arrays)
        )

    def take(part):
        return dataclasses.replace(part, arrays=tuple(map(new, part.arrays)))

    return [[take(part) for part in parts] for parts in stretches]


def layer_norm(
    x: Float[Array, "... n"], eps: float, width: int | None = None
) -> Float[Array, "... n"]:
    """Layer normalisation (arXiv 1607.06450) without weights, float32 inside. width: that of `x` before zeros filled it up."""
    x32 = x.astype(jnp.float32)
    n = x.shape[-1] if width is None else width
    from_mean = x32 - x32.sum(-1, keepdims=True) / n
    if n < x.shape[-1]:
        from_mean = jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < n, from_mean, 0.0
        )
    return (from_mean * jax.lax.rsqrt((from_mean**2).sum(-1, keepdims=True) / n + eps)).astype(
        x.dtype
    )


def largest(parts: Sequence[Float[Array, "..."]]) -> Float[Array, "..."]:
    """The largest magnitude of each row, in all parts: [..., 1]."""
    of_parts = [jnp.max(jnp.abs(x), axis=-1, keepdims=True) for x in parts]
    return functools.reduce(jnp.maximum, of_parts)


def twin(encode: Encode, stretches: Sequence[Sequence[LazyPart]]) -> tuple[Array, ...]:
    """What `kernel` computes, in plain JAX."""
    outputs = [encode([part.value(jnp.float32) for part in parts]) for parts in stretches]
    return tuple(
        jnp.concatenate([jnp.concatenate(made, axis=-1) for made in of_stretches], axis=1)
        for of_stretches in zip(*outputs, strict=True)
    )


def kernel(
    encode: Encode, stretches: Sequence[Sequence[LazyPart]], *, interpret: bool = False
) -> tuple[Array, ...]:
    """One pass over memory: each row is made and encoded by one block of threads, in float32."""
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton as plgpu

    outs = jax.eval_shape(
        lambda arrays: twin(encode, _with(stretches, iter(arrays))), _arrays(stretches)
    )

    def values(arrays):
        return [[part.value() for part in parts] for parts in _with(stretches, iter(arrays))]

    shapes = jax.eval_shape(values, _arrays(stretches))
    ends = list(itertools.accumulate(of_stretch[0].shape[1] for of_stretch in shapes))

    def body(*refs: Any) -> None:
        left = iter(refs)
        inputs = [[[next(left) for _ in part.arrays] for part in parts] for parts in stretches]
        results = [*left]
        row = pl.program_id(1)
        for parts, of_stretch, given, start, end in zip(
            stretches, shapes, inputs, [0, *ends], ends, strict=False
        ):
            write = partial(_row, encode, parts, [x.shape[-1] for x in of_stretch], given, results)
            if len(ends) == 1:
                write()
            else:
                pl.when((row >= start) & (row < end))(write)

    def spec(x: Any, start: int, count: int, skipped: int) -> Any:
        def at(s):
            return skipped + jnp.clip(s - start, 0, count - 1) if x.shape[1] > 1 else 0

        return pl.BlockSpec(
            (None, None, x.shape[2]), lambda b, s: (b if x.shape[0] > 1 else 0, at(s), 0)
        )

    ins = [
        spec(x, start, end - start, part.start if i == 0 else 0)
        for parts, start, end in zip(stretches, [0, *ends], ends, strict=False)
        for part in parts for i, x in enumerate(_arrays([[part]]))
    ]  # fmt: skip
    largest_row = max(
        sum(power_of_two(x.shape[-1], SMALLEST) for x in of_stretch) for of_stretch in shapes
    )
    threads = plgpu.CompilerParams(
        num_warps=min(max(largest_row // IN_A_WARP, FEWEST), MOST), num_stages=1
    )
    call = pl.pallas_call(
        body, grid=(outs[0].shape[0], ends[-1]), in_specs=ins, out_specs=[spec(x, 0, ends[-1], 0) for x in outs],
        out_shape=list(outs), compiler_params=threads, interpret=interpret, name="one_pass")  # fmt: skip
    return tuple(call(*_arrays(stretches)))


def _row(
    encode: Encode,
    parts: Sequence[LazyPart],
    widths: Sequence[int],
    inputs: Sequence[Sequence[Any]],
    results: Sequence[Any],
) -> None:
    """Within the kernel: makes a row of the parts from references to its inputs, and writes it."""
    from jax.experimental.pallas import triton as plgpu

    ends = (*widths[:-1], widths[-1] + -sum(widths) % SMALLEST)  # formats fill up whole rows
    sizes = [power_of_two(width, SMALLEST) for width in ends]

    def load(ref: Any, array: Any, width: int, size: int) -> Array:
        start, stop = (
            (array.start, array.stop) if isinstance(array, ColumnView) else (0, ref.shape[0])
        )
        if (n := stop - start) == 1:
            return ref[start].astype(jnp.float32)
        at = jnp.arange(size if n == width else power_of_two(n))
        return plgpu.load(ref.at[start + at], mask=at < n, other=0.0).astype(jnp.float32)

    values = []
    for part, width, size, refs in zip(parts, widths, sizes, inputs, strict=True):
        value = part.function(
            *(load(ref, x, width, size) for ref, x in zip(refs, part.arrays, strict=True))
        )
        values.append(jnp.where(jnp.arange(size) < width, value, 0.0))
    for made, ref in zip(encode(values), results, strict=True):
        start = 0
        for piece, width, size in zip(made, widths, sizes, strict=False):
            at = start + jnp.arange(piece.shape[-1])
            end = ref.shape[0] if piece is made[-1] else start + width * piece.shape[-1] // size
            plgpu.store(ref.at[at], piece, mask=at < end)
            start = end
