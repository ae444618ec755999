"""SANA's linear attention in one pass over memory: weights `relu(q) . relu(k)` instead of a softmax (arXiv 2410.10629, eq. 1).

XLA writes each head of queries, keys and values apart, some in float32, and reads them again. Here one kernel (Pallas, in
Triton) makes a head of a picture: the sums over its keys, and what its queries read of them. A second one is its gradient.
Elsewhere the twin is plain JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics import target
from solrl_jax.numerics.pending import Columns, Pending
from solrl_jax.numerics.rows import on_rows

EPS = 1e-15  # of the denominator
TOKENS = 128  # that a block of threads holds at a time
HEADS = (16, 32, 64)  # features of a head that fit


def linear_attention(q: Pending, k: Pending, v: Pending, heads: int) -> Float[Array, "b n d"]:
    """`relu(q) S / (relu(q) . z + EPS)` with `S = sum relu(k) v^T` and `z = sum relu(k)` of each head; float32 inside.

    q, k, v: [b, n, d], heads side by side.
    """
    inputs, dtype, width = (q, k, v), q.dtype, max(x.shape[2] for x in v.parts[0].arrays)
    whole = all(len(x.parts) == 1 and x.parts[0].stop is None for x in inputs)
    if target.platform() != "gpu" or dtype != jnp.bfloat16 or not whole or width // heads not in HEADS:
        return twin(q.value, k.value, v.value, heads)
    functions, given = [x.parts[0].function for x in inputs], [x.parts[0].arrays for x in inputs]
    places = [[a.start if isinstance(a, Columns) else 0 for a in arrays] for arrays in given]
    run = functools.partial(in_one_pass, functions, places, (width // heads, width))
    arrays = [a.array if isinstance(a, Columns) else a for arrays in given for a in arrays]
    return with_gradient(run, functions, [len(arrays) for arrays in given])(*arrays)


def twin(q: Float[Array, "b n d"], k: Float[Array, "b n d"], v: Float[Array, "b n d"], heads: int) -> Float[Array, "b n d"]:
    """What the kernel computes, in plain JAX."""
    by_head, wide = lambda x: x.reshape(*x.shape[:2], heads, -1), jnp.float32
    relu_q, (relu_k, v) = by_head(jax.nn.relu(q)).astype(wide), exact_in_float32(by_head(jax.nn.relu(k)), by_head(v))
    state = jnp.einsum("bnhk,bnhv->bhkv", relu_k, v, preferred_element_type=wide)
    numerator = jnp.einsum("bnhk,bhkv->bnhv", relu_q, state)
    denominator = jnp.einsum("bnhk,bhk->bnh", relu_q, relu_k.sum(1, dtype=wide))
    return (numerator / (denominator[..., None] + EPS)).reshape(q.shape).astype(q.dtype)


def exact_in_float32(*factors: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """The factors of products that are added up in float32: as they are, but in float32 on a CPU, which has no such product.

    Elsewhere they are not written in float32 before: products of numbers in BF16 are exact in it.
    """
    return tuple(x.astype(jnp.float32) for x in factors) if target.platform() == "cpu" else factors


def with_gradient(
    run: Callable[..., Any], functions: Sequence[Callable[..., Array]], counts: Sequence[int]
) -> Callable[..., Array]:
    """What `run` makes of `functions` of arrays, `counts` of them each, with its gradient by the second kernel."""
    forward, backward = on_rows(functools.partial(run, False)), on_rows(functools.partial(run, True))

    def pulled(arrays: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        left, made = iter(arrays), []
        for f, count, of_f in zip(functions, counts, backward(*arrays, g), strict=True):
            own = [next(left) for _ in range(count)]
            made += jax.vjp(lambda *own, f=f: f(*own).astype(g.dtype), *own)[1](of_f)
        return tuple(made)

    f = jax.custom_vjp(lambda *arrays: forward(*arrays))
    f.defvjp(lambda *arrays: (forward(*arrays), arrays), pulled)
    return f


def in_one_pass(
    functions: Sequence[Callable[..., Array]], places: Sequence[Sequence[int]], widths: tuple[int, int], backward: bool,
    *arrays: Array, interpret: bool = False,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """The kernels. backward: the last array is the gradient of the result; the gradients of q, k and v are made.

    functions, places: what makes q, k and v of their arrays, and the column at which each array begins.
    widths: of a head, and of all heads.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton as plgpu

    (head, width), batch, tokens = widths, max(len(a) for a in arrays), max(a.shape[1] for a in arrays)
    spec = lambda a: pl.BlockSpec((None, *a.shape[1:]), lambda b, c: (b if len(a) > 1 else 0, 0, 0))
    made = [jax.ShapeDtypeStruct((batch, tokens, width), jnp.bfloat16)] * (3 if backward else 1)
    body = lambda *refs: (_backward if backward else _forward)(_Head(pl, plgpu, functions, places, head, tokens), *refs)
    out = pl.pallas_call(
        body, grid=(batch, width // head), in_specs=[*map(spec, arrays)], out_specs=[*map(spec, made)], out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2), interpret=interpret, name="linear_attention",
    )(*arrays)  # fmt: skip
    return tuple(out) if backward else out[0]


class _Head:
    """Within a kernel: reads and writes `TOKENS` rows of one head."""

    def __init__(self, pl: Any, plgpu: Any, functions: Any, places: Any, head: int, tokens: int):
        self.pl, self.plgpu, self.functions, self.places = pl, plgpu, functions, places
        self.head, self.tokens, self.start = head, tokens, pl.program_id(1) * head

    def groups(self, refs: Sequence[Any]) -> list[Callable[[Any], Array]]:
        """Functions of a block's number to q, k and v [TOKENS, head]: BF16; rows after the last are zeros."""
        left = iter(refs)
        groups = [[(next(left), place) for place in of_f] for of_f in self.places]

        def rows(block: Any, f: Any, group: Any) -> Array:
            value = f(*(self.load(ref, block, place) for ref, place in group)).astype(jnp.bfloat16)
            return jnp.where(self.inside(block), value, 0.0).astype(jnp.bfloat16)

        return [functools.partial(rows, f=f, group=group) for f, group in zip(self.functions, groups, strict=True)]

    def inside(self, block: Any) -> Array:
        return (block * TOKENS + jnp.arange(TOKENS) < self.tokens)[:, None]

    def load(self, ref: Any, block: Any, place: int = 0) -> Array:
        """Of an array [tokens or 1, width or 1], in float32."""
        (n, width), pl = ref.shape, self.pl
        if n == width == 1:
            return ref[0, 0].astype(jnp.float32)
        zero = jnp.int32(0)
        at = (
            pl.ds(block * TOKENS, TOKENS) if n > 1 else zero,
            pl.ds(place + self.start, self.head) if width > 1 else zero,
        )
        mask = None if n == 1 else self.inside(block) if width > 1 else self.inside(block)[:, 0]
        values = self.plgpu.load(ref.at[at], mask=mask, other=None if n == 1 else 0).astype(jnp.float32)
        return values if n > 1 and width > 1 else values[:, None] if n > 1 else values[None]

    def store(self, ref: Any, block: Any, value: Array) -> None:
        at = (self.pl.ds(block * TOKENS, TOKENS), self.pl.ds(self.start, self.head))
        mask = jnp.broadcast_to(self.inside(block), value.shape)
        self.plgpu.store(ref.at[at], value.astype(ref.dtype), mask=mask)

    def each(self, step: Callable[..., Any], start: Any) -> Any:
        """`step` of each block of rows."""
        return jax.lax.fori_loop(0, -(-self.tokens // TOKENS), step, start)

    def sums(self, k: Any, v: Any) -> tuple[Array, Array]:
        """S [head, head] and z [head]."""

        def add(block: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
            keys = jax.nn.relu(k(block))
            return before[0] + _over_rows(keys, v(block)), before[1] + keys.astype(jnp.float32).sum(0)

        return self.each(add, (jnp.zeros((self.head, self.head), jnp.float32), jnp.zeros(self.head, jnp.float32)))


def _forward(head: _Head, *refs: Any) -> None:
    *inputs, out = refs
    q, k, v = head.groups(inputs)
    state, total = head.sums(k, v)

    def write(block: Any, _: Any) -> None:
        queries = jax.nn.relu(q(block))
        denominator = (queries.astype(jnp.float32) * total).sum(1, keepdims=True)
        head.store(out, block, _wide_dot(queries, state) / (denominator + EPS))

    head.each(write, None)


def _backward(head: _Head, *refs: Any) -> None:
    *inputs, gradient, of_q, of_k, of_v = refs
    q, k, v = head.groups(inputs)
    state, total = head.sums(k, v)

    def queries(block: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
        signed, g = q(block), head.load(gradient, block)
        x, narrow = jax.nn.relu(signed), g.astype(jnp.bfloat16)
        x32 = x.astype(jnp.float32)
        by = 1 / ((x32 * total).sum(1, keepdims=True) + EPS)
        of_denominator = -(g * _wide_dot(x, state)).sum(1, keepdims=True) * by * by
        made = _wide_dot(narrow, state.T) * by + of_denominator * total
        head.store(of_q, block, jnp.where(signed > 0, made, 0.0))
        of_state = sum(_over_rows(part, narrow) for part in _parts(x32 * by))
        return before[0] + of_state, before[1] + (x32 * of_denominator).sum(0)

    nothing = jnp.zeros_like(state), jnp.zeros_like(total)
    of_state, of_total = head.each(queries, nothing)

    def keys(block: Any, _: Any) -> None:
        signed, values = k(block), v(block)
        head.store(of_k, block, jnp.where(signed > 0, _wide_dot(values, of_state.T) + of_total, 0.0))
        head.store(of_v, block, _wide_dot(jax.nn.relu(signed), of_state))

    head.each(keys, None)


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
