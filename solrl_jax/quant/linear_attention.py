"""SANA's linear attention in one pass over memory (arXiv 2410.10629, equation 1).

Its weights are `relu(q) . relu(k)` instead of a softmax. XLA would write the queries, keys and
values of each head separately, some of them in float32, and read them again. Here a Triton kernel
(written in Pallas) handles one head of one image: it computes the sums over the keys, and then the
result of each query from these sums. A second kernel computes the gradient. On other platforms
`plain_reference` computes the same in plain JAX.

MHLA (arXiv 2601.07832, equation 4) has such sums for each block of the image, and the queries of a
block read a mixture of the sums of all blocks. The same kernels compute it, because SANA's
attention is the case of one block.
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
from solrl_jax.quant.sequence_parallel import gather_tokens, tokens_are_sharded
from solrl_jax.quant.sharded_kernel import (
    power_of_two,
    shard_map_kernel,
    silence_triton_deprecation,
)

# The smallest and the largest number of tokens that a program loads at a time. With 128, the
# gradient of SANA's attention would spill registers.
MIN_GROUP = 16
MAX_GROUP = 64
# The numbers of features per head that the kernels take.
HEAD_DIMS = (16, 32, 64)
# The sums over keys of one head are held in registers: values per warp, the smallest number of
# warps, and the largest number of values.
VALUES_PER_WARP = 2048
MIN_WARPS = 4
MAX_VALUES = 2**14


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of an image in multi-head linear attention (MHLA, arXiv 2601.07832): the keys of
    each block are summed separately, and each block's queries read a mixture of the sums.

    Attributes:
        layout: The number of blocks from top to bottom, and from left to right. They must divide
            the numbers of rows and columns in `grid`, which is not checked.
        grid: The number of rows and of columns of tokens of the image, which are in raster order.
        eps: Added to the ReLU of queries and keys. The default adds nothing.
        denominator_eps: Added to the denominator of the attention, so that it is not 0. The default
            is 1e-15.
        released: Which denominator a query q of block i has (before `denominator_eps` is added),
            with f(x) = relu(x) + eps, the mixing weights m_ij, and the sum z_j of f(k) over the
            keys of block j. False, as in the paper: `f(q) . sum_j m_ij z_j`. True, as in MHLA's
            released code: `sum_j m_ij f(q_j) . z_j`, where q_j is the query at the same place
            within block j.
    """

    layout: tuple[int, int]
    grid: tuple[int, int]
    eps: float = 0.0
    denominator_eps: float = 1e-15
    released: bool = False

    @property
    def count(self) -> int:
        """The number of blocks of an image, m."""
        return math.prod(self.layout)

    @property
    def size(self) -> tuple[int, int]:
        """The number of rows and of columns of tokens in a block."""
        return self.grid[0] // self.layout[0], self.grid[1] // self.layout[1]

    def feature(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes `relu(x) + eps` for queries or keys.

        Args:
            x: Queries or keys, of any shape.

        Returns:
            An array of the shape and dtype of `x`. `eps` is rounded to that dtype first.
        """
        return jax.nn.relu(x) + jnp.asarray(self.eps, x.dtype)


def linear_attention(
    q: LazyActivation,
    k: LazyActivation,
    v: LazyActivation,
    heads: int,
    blocks: Blocks | None = None,
    mix: Float[Array, "m m"] | None = None,
) -> Float[Array, "b n d"]:
    """Computes linear attention with the feature map `f(x) = relu(x) + eps`, summed in float32.

    For each head, a query q becomes

        f(q) S / (f(q) . z + denominator_eps)         S = sum f(k) v^T, z = sum f(k), over all keys

    with eps 0 and denominator_eps 1e-15. With blocks, each block j of the image has its own sums
    S_j and z_j over its keys, and a query of block i becomes, with the mixing matrix m,

        f(q) (sum_j m_ij S_j) / (f(q) . (sum_j m_ij z_j) + denominator_eps)

    In the variant of MHLA's released code (`blocks.released`), the denominator is `sum_j m_ij
    f(q_j) . z_j + denominator_eps`, where q_j is the query at the same place within block j.

    Under sequence parallelism, the queries of each device read the sums over the keys of all
    devices. One Triton kernel computes the attention if all of these conditions hold:

    * The program is for a GPU and the queries are in BF16.
    * Each input is a single lazy part of all its rows.
    * A head has 16, 32 or 64 columns, and the sums S_j of all blocks of one head have at most 2^14
      values together, with the number of blocks rounded up to a power of two.
    * Neither the released variant nor sequence parallelism is used.

    Otherwise plain JAX computes the same. Both have gradients with respect to q, k, v and m.

    Args:
        q: Queries [b, n, d] before f, heads side by side in d. The n rows are all tokens of the
            image in raster order (under sequence parallelism, those of this device). Each column of
            q, k and v must depend only on the same column of the arrays that they are computed from
            (or on arrays of width 1), as after a matmul and a bias. This is not checked.
        k: Keys [b, n, d] before f, as `q`.
        v: Values [b, n, d], heads side by side.
        heads: The number of heads, which divides d.
        blocks: The blocks of the image, with eps, denominator_eps and the variant (`released`). It
            must be None under sequence parallelism. None: no blocks, whatever `mix` is.
        mix: The mixing matrix m [blocks, blocks]; row i belongs to the queries of block i. None: no
            blocks and eps 0, whatever `blocks` is.

    Returns:
        The attended values [b, n, d]: without blocks in the dtype of `q`, with blocks in that of
        `v` (BF16 by the kernel).
    """
    inputs = (q, k, v)
    width = max(x.shape[2] for x in v.parts[0].arrays)
    head_dim = width // heads
    if blocks is None or mix is None:
        plain = plain_reference
        blocks = Blocks((1, 1), (1, q.num_rows))
        mix = jnp.ones((1, 1))
    else:
        plain = functools.partial(mixed_reference, blocks=blocks, mix=mix)
    padded_count = power_of_two(blocks.count)
    fits = (
        compile_target.platform() == "gpu"
        and q.dtype == jnp.bfloat16
        and not blocks.released
        and not tokens_are_sharded()
        and all(len(x.parts) == 1 and x.parts[0].stop is None for x in inputs)
        and head_dim in HEAD_DIMS
        and padded_count * head_dim**2 <= MAX_VALUES
    )
    if not fits:
        keys = k.value
        values = v.value
        if tokens_are_sharded():
            # In float32, so that gradients are rounded once, after they are added.
            keys, values = (gather_tokens(x.astype(jnp.float32)) for x in (keys, values))
        return plain(q.value, keys, values, heads)
    functions = [x.parts[0].function for x in inputs]
    part_arrays = [x.parts[0].arrays for x in inputs]
    first_columns = [
        [a.start if isinstance(a, ColumnView) else 0 for a in arrays] for arrays in part_arrays
    ]
    kernel = functools.partial(run_kernel, functions, first_columns, (head_dim, width), blocks)
    arrays = [a.array if isinstance(a, ColumnView) else a for part in part_arrays for a in part]
    mix = jnp.pad(mix.astype(jnp.float32), (0, padded_count - blocks.count))
    attend = with_gradient(kernel, functions, [len(arrays) for arrays in part_arrays])
    return attend(mix[None], *arrays)


def plain_reference(
    q: Float[Array, "b n d"], k: Float[Array, "b m d"], v: Float[Array, "b m d"], heads: int
) -> Float[Array, "b n d"]:
    """Computes SANA's linear attention in plain JAX, without blocks: for each head, a query q
    becomes `relu(q) S / (relu(q) . z + 1e-15)`, where `S = sum relu(k) v^T` and `z = sum relu(k)`
    over all keys.

    Sums are in float32.

    Args:
        q: Queries [b, n, d] before the ReLU, heads side by side.
        k: Keys [b, m, d] before the ReLU, heads side by side. m differs from n under sequence
            parallelism, where the caller has gathered the keys and values of all devices.
        v: Values [b, m, d], heads side by side.
        heads: The number of heads, which divides d.

    Returns:
        The attended values [b, n, d] in the dtype of `q`. They are 0 for a query whose products
        with all keys are 0 after the ReLU.
    """

    def split_heads(x: Array) -> Array:
        return x.reshape(*x.shape[:2], heads, -1)

    queries = split_heads(jax.nn.relu(q)).astype(jnp.float32)
    keys, values = exact_in_float32(split_heads(jax.nn.relu(k)), split_heads(v))
    state = jnp.einsum("bnhk,bnhv->bhkv", keys, values, preferred_element_type=jnp.float32)
    numerator = jnp.einsum("bnhk,bhkv->bnhv", queries, state)
    denominator = jnp.einsum("bnhk,bhk->bnh", queries, keys.sum(1, dtype=jnp.float32))
    attended = numerator / (denominator[..., None] + Blocks.denominator_eps)
    return attended.reshape(q.shape).astype(q.dtype)


def mixed_reference(
    q: Float[Array, "b n d"],
    k: Float[Array, "b n d"],
    v: Float[Array, "b n d"],
    heads: int,
    *,
    blocks: Blocks,
    mix: Float[Array, "m m"],
) -> Float[Array, "b n d"]:
    """Computes MHLA's attention (arXiv 2601.07832) in plain JAX, with sums in float32:
    `linear_attention` with blocks.

    With f(x) = relu(x) + eps, S_j the sum of f(k) v^T and z_j that of f(k) over the keys of block
    j, a query of block i becomes, for each head,

        f(q) (sum_j m_ij S_j) / (f(q) . sum_j m_ij z_j + denominator_eps)

    In the variant of the released code (`blocks.released`), the denominator is `sum_j m_ij f(q_j) .
    z_j + denominator_eps`, where q_j is the query at the same place within block j.

    Args:
        q: Queries [b, n, d] before f, heads side by side. n is the product of `blocks.grid` (the
            rows and columns of tokens), and tokens are in raster order.
        k: Keys [b, n, d] before f, heads side by side.
        v: Values [b, n, d], heads side by side.
        heads: The number of heads, which divides d.
        blocks: How the tokens are divided into blocks; also eps, denominator_eps, and whether the
            variant is the released one.
        mix: The matrix m of the formula, [blocks.count, blocks.count], of any floating-point dtype;
            cast to float32. Row i belongs to the queries of block i.

    Returns:
        The attended values [b, n, d], in the dtype of `v`.
    """
    batch = len(q)
    m = blocks.count
    # The axes of an image: blocks down, rows in a block, blocks across, columns in a block.
    image_shape = [n for pair in zip(blocks.layout, blocks.size, strict=True) for n in pair]
    mix = mix.astype(jnp.float32)

    def split_blocks(x: Array) -> Array:
        return x.reshape(batch, *image_shape, heads, -1)

    def flatten_blocks(x: Array) -> Array:
        return x.reshape(batch, m, -1)

    # The matrix is repeated for each image. XLA then sees a batched matmul and does not transpose
    # the sums, which are as large as the values. Two such matmuls would be joined by XLA, and both
    # copied. The sums of the denominator are small, so they are mixed without a matmul.
    def mix_by_matmul(x: Array) -> Array:
        repeated = jnp.broadcast_to(mix, (batch, m, m))
        return jnp.einsum("bij,bjf->bif", repeated, flatten_blocks(x)).reshape(x.shape)

    def mix_by_sum(x: Array) -> Array:
        return (mix[..., None] * flatten_blocks(x)[:, None]).sum(2).reshape(x.shape)

    # In the subscripts, y and x are the place of the block; r and c that of the token in it.
    queries = split_blocks(blocks.feature(q)).astype(jnp.float32)
    keys, values = exact_in_float32(split_blocks(blocks.feature(k)), split_blocks(v))
    states = jnp.einsum("byrxchk,byrxchv->byxhkv", keys, values, preferred_element_type=jnp.float32)
    numerator = jnp.einsum("byrxchk,byxhkv->byrxchv", queries, mix_by_matmul(states))
    sums = keys.sum((2, 4), dtype=jnp.float32)

    def dot_queries(x: Array) -> Array:
        return jnp.einsum("byrxchk,byxhk->byxrch", queries, x)

    if blocks.released:
        denominator = mix_by_sum(dot_queries(sums))
    else:
        denominator = dot_queries(mix_by_sum(sums))
    denominator = denominator.transpose(0, 1, 3, 2, 4, 5)[..., None]
    return (numerator / (denominator + blocks.denominator_eps)).reshape(v.shape).astype(v.dtype)


def exact_in_float32(*factors: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """Prepares the factors of a matmul that accumulates in float32.

    CPUs have no such matmul for BF16, so the factors are cast to float32 if the program is traced
    for a CPU (`compile_target.platform`). For GPUs and TPUs no float32 copy is written: products of
    BF16 numbers are exact in float32.

    Args:
        *factors: Arrays of any shape, in BF16 or float32.

    Returns:
        One array per factor, in their order: in float32 for a CPU, otherwise the factors
        themselves.
    """
    if compile_target.platform() == "cpu":
        return tuple(x.astype(jnp.float32) for x in factors)
    return factors


def with_gradient(
    kernel: Callable[..., Any], functions: Sequence[Callable[..., Array]], counts: Sequence[int]
) -> Callable[..., Array]:
    """Combines the kernels of the attention and of its gradient into one differentiable function.

    The forward pass keeps only its arguments; the backward pass computes the sums again. Each
    device runs the kernels on its own images.

    Args:
        kernel: `run_kernel` with its first four arguments given. Called as `kernel(False, mix,
            *arrays)`, it returns the attended values; as `kernel(True, mix, *arrays, g)`, with
            their gradient g, the gradients of mix for each image and head [b, heads, m, m] (which
            are added here), and of q, k and v (from which the gradients of the arrays are computed
            here, by the VJPs of `functions`).
        functions: The three functions that compute q, k and v [b, n, d], each from its own arrays
            [b or 1, n or 1, columns or 1].
        counts: How many arrays each of these functions takes, in the order of `functions`.

    Returns:
        A function `(mix, *arrays) -> attended values [b, n, d]`. `mix` is the mixing matrix [1, m,
        m], float32, padded with zeros to a power of two m, and the arrays are those of q, then of
        k, then of v. The function has gradients with respect to all of them; in the padding of
        `mix` they are arbitrary.
    """
    forward = shard_map_kernel(functools.partial(kernel, False))
    backward = shard_map_kernel(functools.partial(kernel, True))

    def pull_back(arrays: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        mix_gradient, *input_gradients = backward(*arrays, g)
        remaining = iter(arrays[1:])
        gradients = [mix_gradient.sum((0, 1))[None]]
        for function, count, input_gradient in zip(functions, counts, input_gradients, strict=True):
            inputs = [next(remaining) for _ in range(count)]

            def compute(*inputs: Array, function: Callable[..., Array] = function) -> Array:
                return function(*inputs).astype(g.dtype)

            gradients += jax.vjp(compute, *inputs)[1](input_gradient)
        return tuple(gradients)

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays))
    attend.defvjp(lambda *arrays: (forward(*arrays), arrays), pull_back)
    return attend


def run_kernel(
    functions: Sequence[Callable[..., Array]],
    first_columns: Sequence[Sequence[int]],
    widths: tuple[int, int],
    blocks: Blocks,
    backward: bool,
    *arrays: Array,
    interpret: bool = False,
) -> Array | tuple[Array, ...]:
    """Runs the kernel of the attention or of its gradient. One Triton program handles one head of
    one image.

    Also silences JAX's deprecation warning of Pallas for Triton in this process.

    Args:
        functions: The three functions that compute q, k and v, each from its own arrays, row by row
            and column by column. The kernel calls them on float32 blocks of these arrays [tokens or
            1, head or 1]: some tokens of the image, and the columns of one head. They return
            [tokens, head].
        first_columns: For each array of each function, the column of the array at which the first
            head begins; any number for an array of one column.
        widths: The number of features of one head (one of `HEAD_DIMS`: 16, 32 or 64), and of all
            heads together.
        blocks: The blocks of the image, with eps and denominator_eps. `released` is ignored: the
            denominator is always the paper's.
        backward: Whether to compute the gradient instead of the attended values.
        *arrays: The mixing matrix [b or 1, m, m] in float32, padded with zeros, where m is the
            number of blocks rounded up to a power of two; the arrays [b or 1, n or 1, columns or 1]
            of all functions in order; and, if `backward`, the gradient [b, n, d] of the result,
            where d is the width of all heads. An axis of size 1 is broadcast. At least one array
            has b images.
        interpret: Whether to run the kernel in Pallas' interpreter, which needs no GPU.

    Returns:
        The attended values [b, n, d] in BF16. If `backward`, a tuple: the gradients of the mixing
        matrix for each head [b, heads, m, m] in float32, whose padding is arbitrary, and of q, k
        and v [b, n, d] in BF16.
    """
    from jax.experimental import pallas as pl  # imported here because the import takes a second
    from jax.experimental.pallas import triton as plgpu

    silence_triton_deprecation()
    head_dim, width = widths
    heads = width // head_dim
    batch = max(len(x) for x in arrays)
    m = power_of_two(blocks.count)

    def spec(x: Any) -> Any:
        """Gives each program the whole array of its image."""

        def index_map(image: Any, head: Any) -> tuple[Any, ...]:
            return (image if len(x) > 1 else 0, *(0,) * (x.ndim - 1))

        return pl.BlockSpec((None, *x.shape[1:]), index_map)

    tokens = jax.ShapeDtypeStruct((batch, math.prod(blocks.grid), width), jnp.bfloat16)
    mixes = jax.ShapeDtypeStruct((batch, heads, m, m), jnp.float32)
    out_shape = [mixes, tokens, tokens, tokens] if backward else [tokens]

    def body(*refs: Any) -> None:
        head = _Head(pl, plgpu, functions, first_columns, head_dim, blocks)
        if backward:
            _backward(head, *refs)
        else:
            _forward(head, *refs)

    out = pl.pallas_call(
        body,
        grid=(batch, heads),
        in_specs=[*map(spec, arrays)],
        out_specs=[*map(spec, out_shape)],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=max(MIN_WARPS, m * head_dim**2 // VALUES_PER_WARP), num_stages=2
        ),
        interpret=interpret,
        name="linear_attention",
    )(*arrays)
    return tuple(out) if backward else out[0]


class _Head:
    """One head of one image inside a kernel: loads and stores tokens, and computes sums over keys.

    The tokens of a block of the image are processed in groups of 16 to 64. A group is a pair of
    arrays [tokens, 1]: the indices of its tokens in the image, and whether each exists (the last
    group of a block may be incomplete). An axis of blocks has size m, the number of blocks rounded
    up to a power of two. In shapes, head is the number of features of a head. A `_Head` can be
    created only inside a Pallas kernel with the grid (images, heads).

    Args:
        pl: The module `jax.experimental.pallas`.
        plgpu: The module `jax.experimental.pallas.triton`.
        functions: The three functions that compute q, k and v. Each is called with one float32
            array [tokens or 1, head or 1] for each array that it reads, and returns [tokens, head].
        first_columns: For each array of each function, the column at which the first head begins.
        head_dim: The number of features of the head, a power of two: 16, 32 or 64.
        blocks: How the tokens of the image are divided into blocks, each of which has its own sums;
            one block for SANA's attention. `released` is not read.

    Attributes:
        index: The index of the head, from the program's place in the grid.
        columns: The indices of this head's columns [1, head_dim] in arrays that hold all heads.
        block_index: The numbers from 0 to m - 1, an array [m].
        group_size: The number of tokens of a group: a block's tokens, rounded up to a power of two,
            within 16 to 64.
    """

    def __init__(
        self,
        pl: Any,
        plgpu: Any,
        functions: Sequence[Callable[..., Array]],
        first_columns: Sequence[Sequence[int]],
        head_dim: int,
        blocks: Blocks,
    ):
        """Reads the index of the head from the program's place in the kernel's grid. The class
        describes the arguments.
        """
        self.plgpu = plgpu
        self.functions = functions
        self.first_columns = first_columns
        self.head_dim = head_dim
        self.blocks = blocks
        self.index = pl.program_id(1)
        self.columns = (self.index * head_dim + jnp.arange(head_dim))[None]
        self.block_index = jnp.arange(power_of_two(blocks.count))
        self.group_size = min(power_of_two(math.prod(blocks.size), MIN_GROUP), MAX_GROUP)

    def loaders(self, refs: Sequence[Any]) -> list[Callable[[Any], Array]]:
        """Returns functions that compute q, k (both before their ReLU) and v of a group of tokens.

        Args:
            refs: References to the arrays in memory that q is computed from, then to those of k,
                then to those of v. Each reference has one entry in `first_columns`.

        Returns:
            Three functions, for q, k and v, from a group (a pair of token indices and whether they
            exist) to [tokens, head] in BF16. Each loads its arrays anew in every call. Tokens that
            do not exist are 0.
        """
        remaining = iter(refs)
        inputs = [
            [(next(remaining), column) for column in columns] for columns in self.first_columns
        ]

        def compute(tokens: Any, function: Any, arrays: Any) -> Array:
            loaded = (self.load(ref, tokens, column) for ref, column in arrays)
            value = function(*loaded).astype(jnp.bfloat16)
            return jnp.where(tokens[1], value, 0.0).astype(jnp.bfloat16)

        return [
            functools.partial(compute, function=function, arrays=arrays)
            for function, arrays in zip(self.functions, inputs, strict=True)
        ]

    def feature(self, x: Array, tokens: Any) -> Array:
        """Computes the features `relu(x) + eps` of queries or keys.

        Args:
            x: Queries or keys of a group [tokens, head].
            tokens: The group of tokens: their indices in the image [tokens, 1], and whether each
                exists [tokens, 1]. Tokens that do not exist have features 0.

        Returns:
            The features [tokens, head] in the dtype of `x`.
        """
        return jnp.where(tokens[1], self.blocks.feature(x), 0.0).astype(x.dtype)

    def load(self, ref: Any, tokens: Any, first_column: int = 0) -> Array:
        """Loads the columns of this head for a group of tokens.

        Args:
            ref: A reference to an array [n or 1, columns or 1]; axes of size 1 are broadcast.
            tokens: The group of tokens: their indices in the image [tokens, 1], and whether each
                exists [tokens, 1].
            first_column: The column of the array at which the first head begins. Not read if the
                array has one column.

        Returns:
            Float32 values [tokens or 1, head or 1]. Tokens that do not exist are 0, unless the
            array has one row for all tokens.
        """
        indices, exists = tokens
        zero = jnp.zeros((1, 1), jnp.int32)
        n, width = ref.shape
        rows = indices if n > 1 else zero
        columns = first_column + self.columns if width > 1 else zero
        masked = {"mask": exists, "other": 0} if n > 1 else {}
        return self.plgpu.load(ref.at[rows, columns], **masked).astype(jnp.float32)

    def store(self, ref: Any, tokens: Any, value: Array) -> None:
        """Stores values to the columns of this head, for tokens that exist.

        Args:
            ref: A reference to an array [n, width of all heads]. The values are cast to its dtype.
            tokens: The group of tokens: their indices in the image [tokens, 1], and whether each
                exists [tokens, 1].
            value: The values of this head [tokens, head].
        """
        mask = jnp.broadcast_to(tokens[1], value.shape)
        self.plgpu.store(ref.at[tokens[0], self.columns], value.astype(ref.dtype), mask=mask)

    def scan_block(self, block: Any, step: Callable[..., Any], start: Any) -> Any:
        """Calls a function for each group of tokens of a block, in the block's raster order.

        Args:
            block: The index of the block, in raster order of blocks; int32, may be traced.
            step: Called as `step(group, carry)`, where a group is the indices of its tokens
                [tokens, 1] and whether each exists [tokens, 1]. Returns the next carry, whose
                shapes and dtypes are those of `carry`.
            start: The carry of the first call: any tree of arrays, or None.

        Returns:
            The carry that the last call returned.
        """
        rows, columns = self.blocks.size
        blocks_across = self.blocks.layout[1]
        image_columns = self.blocks.grid[1]
        block_row = jax.lax.div(block, jnp.int32(blocks_across))
        first_row = block_row * rows
        first = first_row * image_columns + (block - block_row * blocks_across) * columns

        def one_group(i: Any, carry: Any) -> Any:
            place = (i * self.group_size + jnp.arange(self.group_size))[:, None]
            row = jax.lax.div(place, jnp.full_like(place, columns))
            indices = first + row * image_columns + place - row * columns
            return step((indices, place < rows * columns), carry)

        num_groups = -(-rows * columns // self.group_size)
        return jax.lax.fori_loop(0, num_groups, one_group, start)

    def zeros(self, *num_blocks: int) -> tuple[Array, Array]:
        """Returns zeros in the shapes of the sums S and z over the keys, in float32.

        Args:
            *num_blocks: Nothing for the sums of one block. One number, m, for those of m blocks.

        Returns:
            S [head, head] and z [head], where head is the number of features of a head; with m, S
            [m, head, head] and z [m, head].
        """
        state = jnp.zeros((*num_blocks, self.head_dim, self.head_dim), jnp.float32)
        return state, jnp.zeros((*num_blocks, self.head_dim), jnp.float32)

    def sums(self, k: Any, v: Any) -> tuple[Array, ...]:
        """Computes the sums S = sum f(k) v^T and z = sum f(k), where f(k) = relu(k) + eps, over the
        tokens of each block.

        Args:
            k: The function from `loaders` that computes the keys [tokens, head] of a group of
                tokens before their ReLU.
            v: The function from `loaders` that computes the values [tokens, head] of a group.

        Returns:
            S [m, head, head] (keys first) and z [m, head] of all blocks, float32. m is the number
            of blocks rounded up to a power of two; blocks that are padding have zeros.
        """

        def add_group(tokens: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            state, total = carry
            keys = self.feature(k(tokens), tokens)
            return state + _sum_over_tokens(keys, v(tokens)), total + keys.astype(jnp.float32).sum(
                0
            )

        def add_block(block: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            block_sums = self.scan_block(block, add_group, self.zeros())
            return tuple(
                jnp.where(self.is_block(block, x), new, x)
                for new, x in zip(block_sums, carry, strict=True)
            )

        start = self.zeros(len(self.block_index))
        return jax.lax.fori_loop(0, self.blocks.count, add_block, start)

    def is_block(self, block: Any, x: Array) -> Array:
        """Marks one block of the image along the first axis of sums of all blocks.

        Args:
            block: The index of the block, in raster order of blocks; may be traced.
            x: Sums of all blocks [m, ...]. Only their number of axes matters.

        Returns:
            Booleans [m, 1, ...] with as many axes as `x`, True at `block` alone.
        """
        return _along_first_axis(self.block_index == block, x)


def _forward(head: _Head, *refs: Any) -> None:
    """Computes the attention of one head of one image, inside the kernel.

    Args:
        head: The head of the image that this program of the kernel computes.
        *refs: References to the mixing matrix [m, m], where m is the number of blocks rounded up to
            a power of two; to the arrays of q, k and v in order; and last to the attended values
            [n, width], whose columns of this head are written.
    """
    mix, *inputs, out = refs
    q, k, v = head.loaders(inputs)
    sums = head.sums(k, v)

    def attend_block(block: Any, _: Any) -> None:
        state, total = _mix_sums(mix[block], sums)

        def attend_group(tokens: Any, _: Any) -> None:
            queries = head.feature(q(tokens), tokens)
            denominator = (queries.astype(jnp.float32) * total).sum(1, keepdims=True)
            head.store(
                out, tokens, _wide_dot(queries, state) / (denominator + head.blocks.denominator_eps)
            )

        head.scan_block(block, attend_group, None)

    jax.lax.fori_loop(0, head.blocks.count, attend_block, None)


def _backward(head: _Head, *refs: Any) -> None:
    """Computes the gradient of one head of one image, inside the kernel. The sums over keys are
    computed again.

    The gradient of a query or key is 0 where its value is not above 0 (ReLU).

    Args:
        head: The head of the image that this program of the kernel computes.
        *refs: References to the mixing matrix [m, m], where m is the number of blocks rounded up to
            a power of two; to the arrays that `head.functions` compute q, k and v from, in order,
            as many as `head.first_columns` lists for each; to the gradient of the attended values
            [n, width]; and to the outputs: the gradient of the mixing matrix for each head [heads,
            m, m], and the gradients [n, width] of q, k and v themselves, not of the arrays that
            they are computed from. This head's part of the outputs is written, except for the rows
            of the mixing gradient that are padding, which stay uninitialized.
    """
    mix, *inputs, gradient, mix_gradient, q_gradient, k_gradient, v_gradient = refs
    q, k, v = head.loaders(inputs)
    sums = head.sums(k, v)

    def queries_of_block(block: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Stores the gradient of the queries, and adds that of the sums which they read."""
        state, total = _mix_sums(mix[block], sums)

        def one_group(tokens: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            signed = q(tokens)
            g = head.load(gradient, tokens)
            x = head.feature(signed, tokens)
            g_bf16 = g.astype(jnp.bfloat16)
            x32 = x.astype(jnp.float32)
            inverse = 1 / ((x32 * total).sum(1, keepdims=True) + head.blocks.denominator_eps)
            g_denominator = -(g * _wide_dot(x, state)).sum(1, keepdims=True) * inverse * inverse
            g_queries = _wide_dot(g_bf16, state.T) * inverse + g_denominator * total
            head.store(q_gradient, tokens, jnp.where(signed > 0, g_queries, 0.0))
            g_state = sum(_sum_over_tokens(part, g_bf16) for part in _split_bf16(x32 * inverse))
            return carry[0] + g_state, carry[1] + (x32 * g_denominator).sum(0)

        g_state, g_total = head.scan_block(block, one_group, head.zeros())
        mix_gradient[head.index, block] = (g_state * sums[0]).sum(2).sum(1) + (
            g_total * sums[1]
        ).sum(1)
        return tuple(
            x + _along_first_axis(mix[block], x) * new
            for new, x in zip((g_state, g_total), carry, strict=True)
        )

    start = head.zeros(len(head.block_index))
    g_sums = jax.lax.fori_loop(0, head.blocks.count, queries_of_block, start)

    def keys_of_block(block: Any, _: Any) -> None:
        """Stores the gradients of the keys and values."""
        g_state, g_total = (jnp.where(head.is_block(block, x), x, 0.0).sum(0) for x in g_sums)

        def one_group(tokens: Any, _: Any) -> None:
            signed = k(tokens)
            values = v(tokens)
            g_keys = jnp.where(signed > 0, _wide_dot(values, g_state.T) + g_total, 0.0)
            head.store(k_gradient, tokens, g_keys)
            head.store(v_gradient, tokens, _wide_dot(head.feature(signed, tokens), g_state))

        head.scan_block(block, one_group, None)

    jax.lax.fori_loop(0, head.blocks.count, keys_of_block, None)


def _along_first_axis(values: Array, like: Array) -> Array:
    """Reshapes one value per block so that it broadcasts against sums of all blocks.

    Args:
        values: One value per block [m].
        like: Sums of all blocks [m, ...]. Only their number of axes matters.

    Returns:
        The values [m, 1, ..., 1] with as many axes as `like`.
    """
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _mix_sums(weights: Float[Array, " m"], sums: tuple[Array, ...]) -> list[Array]:
    """Mixes the sums over keys of all blocks, with the weights of one block's queries.

    Args:
        weights: The row of the mixing matrix [m] that belongs to the block of the queries.
        sums: S [m, head, head] and z [m, head] of all blocks.

    Returns:
        A list [S, z], [head, head] and [head]: the weighted sums over the blocks.
    """
    return [(_along_first_axis(weights, x) * x).sum(0) for x in sums]


def _sum_over_tokens(x: Float[Array, "n k"], y: Float[Array, "n v"]) -> Float[Array, "k v"]:
    """Computes `x.T @ y`: the sum over tokens of the outer products of their features.

    Args:
        x: Features of n tokens [n, k], BF16.
        y: Further features of these n tokens [n, v], BF16.

    Returns:
        The sums [k, v], accumulated and returned in float32.
    """
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _wide_dot(x: Float[Array, "n k"], y: Float[Array, "k v"]) -> Float[Array, "n v"]:
    """Computes `x @ y` of BF16 `x` and float32 `y`, nearly as exactly as in float32.

    `y` is split into three BF16 arrays (`_split_bf16`), and three matmuls, whose products are exact
    in float32, are added.

    Args:
        x: A BF16 matrix [n, k].
        y: A float32 matrix [k, v].

    Returns:
        The product [n, v], float32.
    """
    products: Any = (
        jnp.dot(x, part, preferred_element_type=jnp.float32) for part in _split_bf16(y)
    )
    return sum(products)


def _split_bf16(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Splits a float32 array into three BF16 arrays.

    Args:
        x: A float32 array of any shape.

    Returns:
        Three arrays of the shape of `x`, the largest magnitudes first. Their sum is exactly `x`, as
        long as no part is so small that it underflows. For a value that is infinite in BF16, the
        sum is NaN.
    """
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts
