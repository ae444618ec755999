"""SANA's linear attention in one pass over memory: weights `relu(q) . relu(k)` instead of a softmax (arXiv 2410.10629, eq. 1).

XLA writes each head of queries, keys and values apart, some in float32, and reads them again. Here one kernel (Pallas, in
Triton) makes a head of a picture: the sums over its keys, and what its queries read of them. A second one is its gradient.
Elsewhere the twin is plain JAX.

MHLA (arXiv 2601.07832, eq. 4) has such sums for each block of the image, and a block's queries read a mixture of all blocks'.
It is the same kernel: SANA's has one block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import ColumnView, LazyActivation
from solrl_jax.quant.sharded_kernel import (
    power_of_two,
    shard_map_kernel,
    silence_triton_deprecation,
)

# tokens that a group of threads holds at a time; of 128, SANA's gradient spills registers
FEWEST = 16
MOST = 64
HEADS = (16, 32, 64)  # features of a head that fit
# numbers of a head's sums: in the registers of a warp, least warps, that fit
IN_A_WARP = 2048
WARPS = 4
LARGEST = 2**14


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Equal blocks of an image's tokens, which come in raster order, and how their sums are read.

    layout: blocks down and across; grid: rows and columns of tokens; eps: what is added to the ReLU of queries and keys; least:
    what is added to the denominator; released: the variant of MHLA's released code.
    """

    layout: tuple[int, int]
    grid: tuple[int, int]
    eps: float = 0.0
    least: float = 1e-15
    released: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.layout)

    @property
    def size(self) -> tuple[int, int]:
        """SeedBatch and columns of a block."""
        return self.grid[0] // self.layout[0], self.grid[1] // self.layout[1]

    def feature(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Of queries or keys, in their dtype."""
        return jax.nn.relu(x) + jnp.asarray(self.eps, x.dtype)


def linear_attention(
    q: LazyActivation,
    k: LazyActivation,
    v: LazyActivation,
    heads: int,
    blocks: Blocks | None = None,
    mix: Float[Array, "m m"] | None = None,
) -> Float[Array, "b n d"]:
    """Linear attention of features f(x) = relu(x) + eps; float32 inside. q, k, v: [b, n, d], heads side by side.

    Without blocks, for each head: `f(q) S / (f(q) . z + least)` with `S = sum f(k) v^T` and `z = sum f(k)`, and eps is 0. With
    them, block b has sums S_b and z_b of its own, and a query of block i reads `S = sum_b m_ib S_b` and `z = sum_b m_ib z_b`.
    The released variant: the denominator of position p of block i is `sum_b m_ib f(q_bp) . z_b + least`.
    """
    inputs = (q, k, v)
    dtype = q.dtype
    width = max(x.shape[2] for x in v.parts[0].arrays)
    plain = (
        twin
        if blocks is None or mix is None
        else functools.partial(mixed_twin, blocks=blocks, mix=mix)
    )
    if blocks is None or mix is None:
        blocks = Blocks((1, 1), (1, q.num_rows))
        mix = jnp.ones((1, 1))
    whole = (
        all(len(x.parts) == 1 and x.parts[0].stop is None for x in inputs) and not blocks.released
    )
    fits = width // heads in HEADS and power_of_two(blocks.count) * (width // heads) ** 2 <= LARGEST
    if compile_target.platform() != "gpu" or dtype != jnp.bfloat16 or not whole or not fits:
        return plain(q.value, k.value, v.value, heads)
    functions = [x.parts[0].function for x in inputs]
    given = [x.parts[0].arrays for x in inputs]
    places = [[a.start if isinstance(a, ColumnView) else 0 for a in arrays] for arrays in given]
    run = functools.partial(in_one_pass, functions, places, (width // heads, width), blocks)
    arrays = [a.array if isinstance(a, ColumnView) else a for arrays in given for a in arrays]
    mix = jnp.pad(mix.astype(jnp.float32), (0, power_of_two(blocks.count) - blocks.count))
    return with_gradient(run, functions, [len(arrays) for arrays in given])(mix[None], *arrays)


def twin(
    q: Float[Array, "b n d"], k: Float[Array, "b n d"], v: Float[Array, "b n d"], heads: int
) -> Float[Array, "b n d"]:
    """What the kernel computes for one block, in plain JAX."""

    def by_head(x):
        return x.reshape(*x.shape[:2], heads, -1)

    wide = jnp.float32
    relu_q = by_head(jax.nn.relu(q)).astype(wide)
    (relu_k, v) = exact_in_float32(by_head(jax.nn.relu(k)), by_head(v))
    state = jnp.einsum("bnhk,bnhv->bhkv", relu_k, v, preferred_element_type=wide)
    numerator = jnp.einsum("bnhk,bhkv->bnhv", relu_q, state)
    denominator = jnp.einsum("bnhk,bhk->bnh", relu_q, relu_k.sum(1, dtype=wide))
    return (numerator / (denominator[..., None] + Blocks.least)).reshape(q.shape).astype(q.dtype)


def mixed_twin(
    q: Float[Array, "b n d"], k: Float[Array, "b n d"], v: Float[Array, "b n d"],
    heads: int, *, blocks: Blocks, mix: Float[Array, "m m"],
) -> Float[Array, "b n d"]:  # fmt: skip
    """What the kernel computes for several blocks, and the released variant, in plain JAX."""
    batch = len(q)
    wide = jnp.float32
    m = blocks.count
    ways = [n for pair in zip(blocks.layout, blocks.size, strict=True) for n in pair]

    def of(t):
        return t.reshape(batch, *ways, heads, -1)

    features = (blocks.feature(t) for t in (q, k))
    q32 = of(next(features)).astype(wide)
    (keys, values) = exact_in_float32(of(next(features)), of(v))
    # One m for each image: a product of batches, for which XLA moves no axis of the sums, which are as large as the values.
    # It would join two such products, and copy both. So the small sums are mixed without one.
    mix = mix.astype(wide)

    def flat(t):
        return t.reshape(batch, m, -1)

    def product(t):
        return jnp.einsum("bij,bjf->bif", jnp.broadcast_to(mix, (batch, m, m)), flat(t)).reshape(
            t.shape
        )

    def mixed(t):
        return (mix[..., None] * flat(t)[:, None]).sum(2).reshape(t.shape)

    # y and x: the block's place; r and c: the token's in it
    states = jnp.einsum("byrxchk,byrxchv->byxhkv", keys, values, preferred_element_type=wide)
    numerator = jnp.einsum("byrxchk,byxhkv->byrxchv", q32, product(states))
    sums = keys.sum((2, 4), dtype=wide)
    dots = functools.partial(jnp.einsum, "byrxchk,byxhk->byxrch", q32)
    denominator = mixed(dots(sums)) if blocks.released else dots(mixed(sums))
    denominator = denominator.transpose(0, 1, 3, 2, 4, 5)[..., None]
    return (numerator / (denominator + blocks.least)).reshape(v.shape).astype(v.dtype)


def exact_in_float32(*factors: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """The factors of products that are added up in float32: as they are, but in float32 on a CPU, which has no such product.

    Elsewhere they are not written in float32 before: products of numbers in BF16 are exact in it.
    """
    return (
        tuple(x.astype(jnp.float32) for x in factors)
        if compile_target.platform() == "cpu"
        else factors
    )


def with_gradient(
    run: Callable[..., Any], functions: Sequence[Callable[..., Array]], counts: Sequence[int]
) -> Callable[..., Array]:
    """What `run` makes of m [1, m, m] and of `functions` of arrays, `counts` of them; its gradient is the second kernel."""
    forward = shard_map_kernel(functools.partial(run, False))
    backward = shard_map_kernel(functools.partial(run, True))

    def pulled(arrays: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        of_mix, *of_inputs = backward(*arrays, g)
        left = iter(arrays[1:])
        made = [of_mix.sum((0, 1))[None]]
        for f, count, of_f in zip(functions, counts, of_inputs, strict=True):
            own = [next(left) for _ in range(count)]
            made += jax.vjp(lambda *own, f=f: f(*own).astype(g.dtype), *own)[1](of_f)
        return tuple(made)

    f = jax.custom_vjp(lambda *arrays: forward(*arrays))
    f.defvjp(lambda *arrays: (forward(*arrays), arrays), pulled)
    return f


def in_one_pass(
    functions: Sequence[Callable[..., Array]], places: Sequence[Sequence[int]], widths: tuple[int, int], blocks: Blocks,
    backward: bool, *arrays: Array, interpret: bool = False,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """The kernels. backward: the last array is the result's gradient; those of m [b, heads, m, m], q, k and v are made.

    arrays: m [b or 1, m, m] in float32, filled up with zeros to a power of two, and what `functions` make q, k and v of.
    places: the column at which each of these begins. widths: of a head, and of all heads.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton as plgpu

    silence_triton_deprecation()
    (head, width), batch, m = widths, max(len(a) for a in arrays), power_of_two(blocks.count)

    def spec(a):
        return pl.BlockSpec(
            (None, *a.shape[1:]), lambda b, c: (b if len(a) > 1 else 0, *(0,) * (a.ndim - 1))
        )

    made = [jax.ShapeDtypeStruct((batch, math.prod(blocks.grid), width), jnp.bfloat16)] * (
        3 if backward else 1
    )
    if backward:
        made.insert(0, jax.ShapeDtypeStruct((batch, width // head, m, m), jnp.float32))

    def body(*refs):
        return (_backward if backward else _forward)(
            _Head(pl, plgpu, functions, places, head, blocks), *refs
        )

    threads = plgpu.CompilerParams(num_warps=max(WARPS, m * head**2 // IN_A_WARP), num_stages=2)
    out = pl.pallas_call(
        body, grid=(batch, width // head), in_specs=[*map(spec, arrays)], out_specs=[*map(spec, made)], out_shape=made,
        compiler_params=threads, interpret=interpret, name="linear_attention",
    )(*arrays)  # fmt: skip
    return tuple(out) if backward else out[0]


class _Head:
    """Within a kernel: reads and writes tokens of one head, and mixes its sums.

    A block of an image is read in groups of tokens. Of these, `each` gives the numbers in raster order and which there are.
    Sums [m, head, head] and [m, head] are filled up with zeros to a power of two.
    """

    def __init__(self, pl: Any, plgpu: Any, functions: Any, places: Any, head: int, blocks: Blocks):
        self.plgpu = plgpu
        self.functions = functions
        self.places = places
        self.head = head
        self.blocks = blocks
        self.program = pl.program_id(1)
        self.columns = (self.program * head + jnp.arange(head))[None]
        self.number = jnp.arange(power_of_two(blocks.count))
        self.group = min(power_of_two(math.prod(blocks.size), FEWEST), MOST)

    def groups(self, refs: Sequence[Any]) -> list[Callable[[Any], Array]]:
        """Functions of a group's tokens to q, k and v [tokens, head]: BF16; zeros for those that there are not."""
        left = iter(refs)
        groups = [[(next(left), place) for place in of_f] for of_f in self.places]

        def rows(tokens: Any, f: Any, group: Any) -> Array:
            value = f(*(self.load(ref, tokens, place) for ref, place in group)).astype(jnp.bfloat16)
            return jnp.where(tokens[1], value, 0.0).astype(jnp.bfloat16)

        return [
            functools.partial(rows, f=f, group=group)
            for f, group in zip(self.functions, groups, strict=True)
        ]

    def feature(self, x: Array, tokens: Any) -> Array:
        """Of queries or keys; zeros for tokens that there are not."""
        return jnp.where(tokens[1], self.blocks.feature(x), 0.0).astype(x.dtype)

    def load(self, ref: Any, tokens: Any, place: int = 0) -> Array:
        """Of an array [tokens or 1, width or 1], in float32."""
        (numbers, inside), zero = tokens, jnp.zeros((1, 1), jnp.int32)
        n, width = ref.shape
        at = numbers if n > 1 else zero, place + self.columns if width > 1 else zero
        masked = {"mask": inside, "other": 0} if n > 1 else {}
        return self.plgpu.load(ref.at[at], **masked).astype(jnp.float32)

    def store(self, ref: Any, tokens: Any, value: Array) -> None:
        mask = jnp.broadcast_to(tokens[1], value.shape)
        self.plgpu.store(ref.at[tokens[0], self.columns], value.astype(ref.dtype), mask=mask)

    def each(self, block: Any, step: Callable[..., Any], start: Any) -> Any:
        """`step` of each group of a block's tokens."""
        (rows, columns), (_, across), (_, wide) = (
            self.blocks.size,
            self.blocks.layout,
            self.blocks.grid,
        )
        down = jax.lax.div(block, jnp.int32(across))
        first = down * rows * wide + (block - down * across) * columns

        def one(i: Any, before: Any) -> Any:
            place = (i * self.group + jnp.arange(self.group))[:, None]
            row = jax.lax.div(place, jnp.full_like(place, columns))
            return step(
                (first + row * wide + place - row * columns, place < rows * columns), before
            )

        return jax.lax.fori_loop(0, -(-rows * columns // self.group), one, start)

    def nothing(self, *of: int) -> tuple[Array, Array]:
        """Sums of one block, or of `of` blocks."""
        return jnp.zeros((*of, self.head, self.head), jnp.float32), jnp.zeros(
            (*of, self.head), jnp.float32
        )

    def sums(self, k: Any, v: Any) -> tuple[Array, ...]:
        """S [m, head, head] and z [m, head]."""

        def add(tokens: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
            keys = self.feature(k(tokens), tokens)
            return before[0] + _over_rows(keys, v(tokens)), before[1] + keys.astype(
                jnp.float32
            ).sum(0)

        def put(block: Any, before: tuple[Array, ...]) -> tuple[Array, ...]:
            made = self.each(block, add, self.nothing())
            return tuple(
                jnp.where(self.at(block, x), new, x) for new, x in zip(made, before, strict=True)
            )

        return jax.lax.fori_loop(0, self.blocks.count, put, self.nothing(len(self.number)))

    def at(self, block: Any, x: Array) -> Array:
        """Where the sums of a block are in those of all."""
        return _first_axis(self.number == block, x)


def _forward(head: _Head, *refs: Any) -> None:
    mix, *inputs, out = refs
    q, k, v = head.groups(inputs)
    sums = head.sums(k, v)

    def read(block: Any, _: Any) -> None:
        state, total = _mixed(mix[block], sums)

        def write(tokens: Any, _: Any) -> None:
            queries = head.feature(q(tokens), tokens)
            denominator = (queries.astype(jnp.float32) * total).sum(1, keepdims=True)
            head.store(out, tokens, _wide_dot(queries, state) / (denominator + head.blocks.least))

        head.each(block, write, None)

    jax.lax.fori_loop(0, head.blocks.count, read, None)


def _backward(head: _Head, *refs: Any) -> None:
    mix, *inputs, gradient, of_mix, of_q, of_k, of_v = refs
    q, k, v = head.groups(inputs)
    sums = head.sums(k, v)

    def queries(block: Any, before: tuple[Array, ...]) -> tuple[Array, ...]:
        state, total = _mixed(mix[block], sums)

        def step(tokens: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
            signed = q(tokens)
            g = head.load(gradient, tokens)
            x = head.feature(signed, tokens)
            narrow = g.astype(jnp.bfloat16)
            x32 = x.astype(jnp.float32)
            by = 1 / ((x32 * total).sum(1, keepdims=True) + head.blocks.least)
            of_denominator = -(g * _wide_dot(x, state)).sum(1, keepdims=True) * by * by
            made = _wide_dot(narrow, state.T) * by + of_denominator * total
            head.store(of_q, tokens, jnp.where(signed > 0, made, 0.0))
            of_state = sum(_over_rows(part, narrow) for part in _parts(x32 * by))
            return before[0] + of_state, before[1] + (x32 * of_denominator).sum(0)

        made = head.each(block, step, head.nothing())
        of_mix[head.program, block] = (made[0] * sums[0]).sum(2).sum(1) + (made[1] * sums[1]).sum(1)
        return tuple(
            x + _first_axis(mix[block], x) * new for x, new in zip(before, made, strict=True)
        )

    of_sums = jax.lax.fori_loop(0, head.blocks.count, queries, head.nothing(len(head.number)))

    def keys(block: Any, _: Any) -> None:
        of_state, of_total = (jnp.where(head.at(block, x), x, 0.0).sum(0) for x in of_sums)

        def write(tokens: Any, _: Any) -> None:
            signed = k(tokens)
            values = v(tokens)
            head.store(
                of_k, tokens, jnp.where(signed > 0, _wide_dot(values, of_state.T) + of_total, 0.0)
            )
            head.store(of_v, tokens, _wide_dot(head.feature(signed, tokens), of_state))

        head.each(block, write, None)

    jax.lax.fori_loop(0, head.blocks.count, keys, None)


def _first_axis(x: Array, like: Array) -> Array:
    return x.reshape(-1, *(1,) * (like.ndim - 1))


def _mixed(weights: Float[Array, " m"], sums: tuple[Array, ...]) -> list[Array]:
    """What the queries of a block read: S [head, head] and z [head]."""
    return [(_first_axis(weights, x) * x).sum(0) for x in sums]


def _over_rows(x: Float[Array, "n k"], y: Float[Array, "n v"]) -> Float[Array, "k v"]:
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _wide_dot(x: Float[Array, "n k"], y: Float[Array, "k v"]) -> Float[Array, "n v"]:
    """The product of BF16 and float32, summed in float32: three exact ones of BF16."""
    return sum(jnp.dot(x, part, preferred_element_type=jnp.float32) for part in _parts(y))  # type: ignore[return-value]


def _parts(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Three arrays in BF16 whose sum is `x` in float32."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
