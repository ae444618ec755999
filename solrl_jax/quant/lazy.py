"""`LazyActivation`: an activation that is computed by the kernel that reads it.

A quantized matmul reads codes and scales. Without help, XLA writes the input of the matmul in BF16,
reads it to find the largest magnitude of each row, and reads it again to compute the codes. Here
one kernel (written in Pallas, for Triton on GPUs and for Mosaic on TPUs) computes a row of the
input, for example a modulated norm or a GELU, keeps it on the chip, and writes only codes and
scales. On other platforms `reference` computes the same in plain JAX.

Only `quant` and `models.layers` use this module. Networks call layers, and a layer passes a lazy
activation to the next layer.
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
from solrl_jax.quant.sharded_kernel import (
    power_of_two,
    shard_map_kernel,
    silence_triton_deprecation,
)

# An encoder of rows. It takes float32 arrays [..., n], which lie side by side along the last axis
# (one array per `LazyPart`). It returns a tuple of outputs, for example (codes, scales). Each
# output is again a list of arrays that lie side by side.
Encode = Callable[[Sequence[Float[Array, "..."]]], tuple[list[Array], ...]]

FLOAT32_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 number without its sign
MIN_ROW_WIDTH = 64  # the kernel pads a row to at least this many values
VALUES_PER_WARP = 1024  # values of a row that the registers of one warp hold
MIN_WARPS = 4
MAX_WARPS = 16
LANES = 128  # the columns of a TPU's vector registers; blocks of columns start at multiples of it
TPU_ROWS = 128  # rows that one step of the TPU kernel computes
TPU_VMEM = 48 * 2**20  # bytes of on-chip memory that the TPU kernel may use


@dataclasses.dataclass(frozen=True)
class ColumnView:
    """Some columns of an array [b, s, n] that kernels read in place, without a copy.

    Attributes:
        array: The whole array [b, s, n].
        start: The index of the first column of the view.
        stop: The index of the column after the last one of the view.
    """

    array: Array
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [b, s, stop - start] of the view."""
        return (*self.array.shape[:2], self.stop - self.start)

    @property
    def value(self) -> Float[Array, "b s columns"]:
        """The columns as an array of their own, [b, s, stop - start]."""
        return self.array[..., self.start : self.stop]

    def slice(self, start: int, stop: int) -> "ColumnView":
        """Narrows the view.

        Args:
            start: The first column of the new view, counted from the first column of this one.
            stop: The column after the last one of the new view, counted from the first column of
                this one too.

        Returns:
            A view of `array`. That it lies within this view is not checked.
        """
        return ColumnView(self.array, self.start + start, self.start + stop)


@dataclasses.dataclass(frozen=True)
class LazyPart:
    """Some columns of a lazy activation: `function(*arrays)`, evaluated where the columns are read.

    Attributes:
        function: Computes the columns [b, s, n] from `arrays`. Row i of the result depends only on
            row i of each array. It must work along the last axis for any number of leading axes: a
            Triton kernel calls it on single float32 rows [n] (scalars for arrays of width 1),
            padded with zeros to a power of two, which must not change the columns before the
            padding; a TPU kernel calls it on blocks of rows [rows, n].
        arrays: At least one array [b, s, n], or a `ColumnView` of such an array. The sizes b, s and
            n may also be 1 (broadcast), and each array may have a width n of its own.
        exact: Whether `LazyActivation.value` computes the part in the dtypes of its arrays, as in
            the released networks, and not in float32. False for parts that contain a quantized
            matmul, unless the leaf of that matmul has no `lazy_matmul` of its own, such as
            `Corrected`.
        start: With `stop`, the rows `start` to `stop` of the first array that the part uses; row
            `start` meets row 0 of the other arrays, which have `stop - start` rows or one. Ignored
            if `stop` is None.
        stop: The row of the first array after the last one that is used. None uses all rows.
    """

    function: Callable[..., Array]
    arrays: tuple[Array | ColumnView, ...]
    exact: bool = True
    start: int = 0
    stop: int | None = None

    def compute(self, dtype: Any = None) -> Array:
        """Evaluates the part with plain JAX operations.

        Args:
            dtype: The dtype that the arrays are cast to first. None leaves them as they are.

        Returns:
            The columns [b, s, n], in the dtype that `function` gives. s is `stop - start` if the
            part uses only some rows.
        """
        arrays = [x.value if isinstance(x, ColumnView) else x for x in self.arrays]
        if dtype is not None:
            arrays = [x.astype(dtype) for x in arrays]
        first, *others = arrays
        if self.stop is not None:
            first = first[:, self.start : self.stop]
        return self.function(first, *others)


@dataclasses.dataclass(frozen=True, eq=False)
class LazyActivation:
    """An activation [b, s, n] that need not exist in memory: the kernel that reads it computes it.

    Its value and its encodings (for example as codes and scales, see `encode`) are computed when
    they are first read, and then kept. Two activations are equal only if they are the same object.

    Attributes:
        parts: The columns of the activation, from the first on, in one or more parts. Each is a
            function with the arrays that it is computed from. Usually there is one.
        dtype: The dtype of the activation once it is materialized.
        grid: The number of rows and of columns of pixels if the s rows are the pixels of an image,
            row by row, and a convolution follows; otherwise None. It does not change values. With
            it, a matmul in INT8 on a TPU writes images. The results of INT8 matmuls, `map` and
            `split_columns` keep the grid; those of other matmuls, `combine` and `concat` do not.
    """

    parts: tuple[LazyPart, ...]
    dtype: Any
    grid: tuple[int, int] | None = None

    @classmethod
    def from_array(
        cls,
        x: Float[Array, "b s n"],
        rows: tuple[int, int] | None = None,
        dtype: Any = None,
        *,
        exact: bool = True,
    ) -> "LazyActivation":
        """Wraps an array that exists in memory.

        Args:
            x: The array [b, s, n].
            rows: The range of rows (along s) that the activation consists of: the first one, and
                the one after the last. None takes all rows.
            dtype: The dtype of the activation. None: the dtype of `x`.
            exact: Whether `x` was computed without a quantized matmul. If False, `value` evaluates
                functions of the activation (`map`) in float32 and not in the dtypes of their
                arrays.

        Returns:
            The lazy activation, whose value is the rows of `x`, cast to `dtype`. It has no `grid`.
        """
        return cls((LazyPart(_identity, (x,), exact, *(rows or ())),), dtype or x.dtype)

    def map(self, f: Callable[..., Array], *more: Array) -> "LazyActivation":
        """Applies a function of rows. Nothing is computed yet.

        Args:
            f: Called as `f(activation, *more)`. It works along the last axis, for any number of
                leading axes. Row i of its result may depend only on row i of its arguments. A
                kernel on a GPU calls it on single float32 rows (scalars for arrays of width 1),
                padded with zeros to a power of two, which must not change the columns before the
                padding.
            *more: Further arrays [b, s, n], any of whose axes may have size 1. Their row 0 meets
                the first row of the activation, even if that row is not row 0 of its array.

        Returns:
            The lazy result, with the dtype and the `grid` (the size of the image, or None) of this
            activation. It is exact (without a quantized matmul) if this activation is.

        Raises:
            ValueError: If the activation has several parts, as after `concat`.
        """
        (part,) = self.parts
        count = len(part.arrays)

        def function(*arrays: Array) -> Array:
            return f(part.function(*arrays[:count]), *arrays[count:])

        mapped = dataclasses.replace(part, function=function, arrays=(*part.arrays, *more))
        return dataclasses.replace(self, parts=(mapped,))

    def combine(
        self, f: Callable[[Array, Array], Array], other: "LazyActivation"
    ) -> "LazyActivation":
        """Applies a function of rows to two activations. Nothing is computed yet.

        Args:
            f: Called as `f(this, other)`. It works along the last axis, for any number of leading
                axes. Row i of its result may depend only on row i of its arguments. A kernel on a
                GPU calls it on single float32 rows, padded with zeros to a power of two, which must
                not change the columns before the padding.
            other: An activation [b, s, n] with the shape of this one. Neither activation may read a
                range of rows of a larger array (`from_array(rows=...)`): the range would be ignored
                without an error.

        Returns:
            The lazy result, with the dtype of this activation and without a `grid`. It is exact
            (without a quantized matmul) if both are.

        Raises:
            ValueError: If either activation has several parts, as after `concat`.
        """
        (part,) = self.parts
        (other_part,) = other.parts
        count = len(part.arrays)

        def function(*arrays: Array) -> Array:
            return f(part.function(*arrays[:count]), other_part.function(*arrays[count:]))

        exact = part.exact and other_part.exact
        combined = LazyPart(function, (*part.arrays, *other_part.arrays), exact)
        return LazyActivation((combined,), self.dtype)

    def concat(self, other: "LazyActivation") -> "LazyActivation":
        """Appends another activation along the last axis. Nothing is computed yet.

        Args:
            other: A lazy activation [b, s, m], with the b and s of this one. Its columns follow.

        Returns:
            The lazy activation [b, s, n + m], with the parts of both, the dtype of this activation
            (whatever that of `other` is), and no `grid`.
        """
        return LazyActivation((*self.parts, *other.parts), self.dtype)

    def split_columns(self, *widths: int) -> list["LazyActivation"]:
        """Splits the activation along its last axis. Nothing is computed or copied.

        Args:
            *widths: The number of columns of each result, from the first column on. Column j of the
                activation must depend only on column j of its arrays (or on arrays of width 1), as
                it does after a matmul and a bias. Columns after the sum of all widths belong to no
                result.

        Returns:
            One lazy activation [b, s, width] per width, in their order, with the dtype and the
            `grid` (the size of the image, or None) of this one, and exact (without a quantized
            matmul) if this one is. That the widths add up to at most n is not checked.

        Raises:
            ValueError: If the activation has several parts, as after `concat`.
        """
        (part,) = self.parts

        def columns(x: Array | ColumnView, start: int, stop: int) -> Array | ColumnView:
            if x.shape[2] == 1:
                return x
            view = x if isinstance(x, ColumnView) else ColumnView(x, 0, x.shape[2])
            return view.slice(start, stop)

        activations = []
        stop = 0
        for width in widths:
            start = stop
            stop = start + width
            arrays = tuple(columns(x, start, stop) for x in part.arrays)
            parts = (dataclasses.replace(part, arrays=arrays),)
            activations.append(dataclasses.replace(self, parts=parts))
        return activations

    @property
    def num_rows(self) -> int:
        """The number of rows s of the activation [b, s, n].

        It is read from the first part: the length of its range of rows, or else the largest number
        of rows of its arrays.
        """
        part = self.parts[0]
        if part.stop is None:
            return max(x.shape[1] for x in part.arrays)
        return part.stop - part.start

    @property
    def exact(self) -> bool:
        """Whether all parts of the activation are marked as free of quantized matmuls
        (`LazyPart.exact`).
        """
        return all(part.exact for part in self.parts)

    @cached_property
    def value(self) -> Float[Array, "b s n"]:
        """The activation as an array [b, s, n] in memory, in `dtype`. Computed once and kept.

        Plain JAX operations compute exact parts (marked as free of quantized matmuls) in the dtypes
        of their arrays, and other parts in float32; both are then cast to `dtype`.
        """
        values = [
            part.compute(None if part.exact else jnp.float32).astype(self.dtype)
            for part in self.parts
        ]
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)

    @cached_property
    def _encodings(self) -> dict[Encode, tuple[Array, ...]]:
        """The outputs of the encoders that have run on this activation, filled by `encode`: by the
        encoder function, the tuple of arrays [b, s, m]. Empty at first.
        """
        return {}

    def encode(self, encode: Encode) -> tuple[Array, ...]:
        """Encodes the rows of the activation, for example as codes and scales, in one pass over
        memory.

        The rows are computed in float32. The encoding is not differentiable, which is not
        checked.

        Args:
            encode: The encoder, such as `solrl_jax.quant.nvfp4.encode`: from the columns of rows
                (one float32 array [..., n_i] per part of the activation, the first columns first)
                to a tuple of outputs (such as codes and scales). Each output is a list with one
                array per part, or with a single one. A kernel on a GPU calls it on single rows
                [n_i], padded with zeros to a power of two, which must not change the outputs for
                the columns before the padding.

        Returns:
            The outputs of the encoder, each one array [b, s, m]. They are computed once per encoder
            (by the identity of the function) and kept, however many matmuls read them.
        """
        if encode not in self._encodings:
            if compile_target.platform() == "tpu" and fits_tpu_kernel(encode, self):
                outputs = _encode_on_tpu(encode, self)
            else:
                outputs = encode_in_one_pass(encode, [self])
            self._encodings[encode] = outputs
        return self._encodings[encode]


def _identity(x: Array) -> Array:
    """Returns `x` itself: the function of a `LazyPart` that is an array already."""
    return x


def materialize_heads(
    pieces: Sequence[LazyActivation], head_dim: int, dtype: Any = None
) -> Float[Array, "b s n head"]:
    """Writes activations to memory as one sequence of attention heads.

    If no activation contains a quantized matmul, plain JAX operations compute each in the dtypes of
    its arrays. Otherwise all are computed in float32, on CUDA by one kernel. Programs for TPUs
    always use the dtypes of the arrays: there, float32 would be written to memory between norm and
    rotation, and the rotation is a matmul (`models.layers.rotary`), which takes six passes in
    float32.

    Args:
        pieces: At least one activation [b, s_i, n * head_dim]. They follow each other along the
            sequence axis.
        head_dim: The number of features of one head. Heads lie side by side in the last axis.
        dtype: The dtype of the result. None: the dtype of the first activation. Casts to FP8
            saturate.

    Returns:
        The array [b, sum of s_i, n, head_dim] in `dtype`.
    """

    def split_heads(x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, head_dim)

    def in_own_dtypes(x: LazyActivation) -> Array:
        if x.exact:
            return x.value
        return jnp.concatenate([part.compute(None) for part in x.parts], axis=-1)

    dtype = dtype or pieces[0].dtype
    if all(x.exact for x in pieces) or compile_target.platform() == "tpu":
        values = [cast_saturating(in_own_dtypes(x), dtype) for x in pieces]
        return split_heads(values[0] if len(values) == 1 else jnp.concatenate(values, axis=1))
    return split_heads(encode_in_one_pass(partial(cast_rows, dtype), pieces)[0])


def cast_saturating(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Casts an array. Values beyond the range of an 8-bit dtype become its largest finite value.

    E4M3 has no infinity: without the clipping, magnitudes above 464 would become NaN. NaN stays
    NaN. Casts to wider dtypes are plain.

    Args:
        x: The array, of any shape.
        dtype: The dtype of the result, a floating-point dtype.

    Returns:
        The array in `dtype`, of the shape of `x`.
    """
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        # Triton's clip turns NaN into a bound
        x = jnp.where(jnp.isnan(x), x, jnp.clip(x, -largest, largest))
    return x.astype(dtype)


def cast_rows(dtype: Any, parts: Sequence[Array]) -> tuple[list[Array]]:
    """Casts rows and does nothing else (with `dtype` bound, an encoder for `encode_in_one_pass`).

    Args:
        dtype: The dtype of the output. Casts to FP8 saturate.
        parts: The columns of the rows as float32 arrays [..., n_i], the first columns first.

    Returns:
        A tuple with its single output, a list: each part, cast to `dtype`.
    """
    return ([cast_saturating(x, dtype) for x in parts],)


def row_amax(parts: Sequence[Float[Array, "..."]]) -> Float[Array, "..."]:
    """Returns the largest magnitude of each row, over the arrays that hold its columns.

    Args:
        parts: The columns of the rows as one or more float32 arrays [..., n_i], n_i at least 1,
            with equal leading axes.

    Returns:
        The maxima [..., 1], float32, without a gradient. A row with a NaN gives NaN.
    """
    # Triton's maximum of floats ignores NaN. As integers, magnitudes have the same order, with NaN
    # above infinity.
    magnitudes = [jax.lax.bitcast_convert_type(x, jnp.int32) & FLOAT32_MAGNITUDE for x in parts]
    maxima = [jnp.max(x, axis=-1, keepdims=True) for x in magnitudes]
    return jax.lax.bitcast_convert_type(functools.reduce(jnp.maximum, maxima), jnp.float32)


def encode_in_one_pass(encode: Encode, pieces: Sequence[LazyActivation]) -> tuple[Array, ...]:
    """Encodes the rows of activations that follow each other along the sequence axis.

    CUDA programs use a Triton kernel, in which each device encodes its own rows of the batch. Other
    platforms use plain JAX. So do GPUs older than Ada if an output is in FP8, which Triton cannot
    write on them.

    Args:
        encode: The encoder: from the columns of rows (float32 arrays [..., n_i] whose widths add up
            to n, the first columns first) to a tuple of outputs, each again a list of arrays whose
            widths add up to the m of that output.
        pieces: At least one activation [b, s_i, n], all of one batch b and one width n.

    Returns:
        The outputs of the encoder, each one array [b, sum of s_i, m].
    """
    parts = [x.parts for x in pieces]

    def reference_on(*arrays: Array) -> tuple[Array, ...]:
        return reference(encode, _replace_arrays(parts, iter(arrays)))

    def kernel_on(*arrays: Array) -> tuple[Array, ...]:
        return triton_kernel(encode, _replace_arrays(parts, iter(arrays)))

    if not compile_target.local_triton_converts_fp8():
        outputs = jax.eval_shape(reference_on, *_arrays(parts))
        if any(x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) for x in outputs):
            return reference_on(*_arrays(parts))
    return jax.lax.platform_dependent(
        *_arrays(parts), cuda=shard_map_kernel(kernel_on), default=reference_on
    )


def _encode_on_tpu(encode: Encode, x: LazyActivation) -> tuple[Array, ...]:
    """Encodes the rows of an activation with `tpu_kernel`, each device its own rows of the batch.

    Args:
        encode: The encoder: from the columns of rows (float32 arrays [..., n_i] whose widths add up
            to n, the first columns first) to a tuple of outputs, each again a list of arrays whose
            widths add up to the m of that output.
        x: An activation for which `fits_tpu_kernel` is True.

    Returns:
        The outputs of the encoder, each one array [b, s, m].
    """

    def kernel_on(*arrays: Array) -> tuple[Array, ...]:
        (parts,) = _replace_arrays([x.parts], iter(arrays))
        return tpu_kernel(encode, parts)

    return shard_map_kernel(kernel_on)(*_arrays([x.parts]))


def _arrays(pieces: Sequence[Sequence[LazyPart]]) -> list[Array]:
    """Lists the arrays in memory that the parts of some activations are computed from.

    Args:
        pieces: For each of several activations, its parts.

    Returns:
        A flat list: activation by activation, part by part, array by array. A `ColumnView` gives
        the whole array that it views. Arrays that several parts read are repeated.
    """
    arrays = [x for parts in pieces for part in parts for x in part.arrays]
    return [x.array if isinstance(x, ColumnView) else x for x in arrays]


def _replace_arrays(
    pieces: Sequence[Sequence[LazyPart]], arrays: Iterator[Array]
) -> list[list[LazyPart]]:
    """Returns copies of parts that are computed from other arrays.

    Args:
        pieces: For each of several activations, its parts.
        arrays: The new arrays: activation by activation, part by part, array by array. As many as
            needed are taken from the iterator.

    Returns:
        The parts of each activation, with their functions and ranges of rows kept. A `ColumnView`
        views its old columns of its new array.
    """

    def replace(old: Array | ColumnView) -> Array | ColumnView:
        if isinstance(old, ColumnView):
            return dataclasses.replace(old, array=next(arrays))
        return next(arrays)

    def replace_part(part: LazyPart) -> LazyPart:
        return dataclasses.replace(part, arrays=tuple(map(replace, part.arrays)))

    return [[replace_part(part) for part in parts] for parts in pieces]


def reference(encode: Encode, pieces: Sequence[Sequence[LazyPart]]) -> tuple[Array, ...]:
    """Computes the rows of activations and encodes them, in plain JAX and in float32. The kernels
    compute the same.

    Args:
        encode: The encoder: from the columns of rows (float32 arrays [..., n_i] whose widths add up
            to n, the first columns first) to a tuple of outputs, each again a list of arrays whose
            widths add up to the m of that output.
        pieces: The parts of each activation, at least one. Activations follow each other along the
            sequence axis.

    Returns:
        The outputs of the encoder, each one array [b, s, m], where s is the number of rows of all
        activations together.
    """
    encoded = [encode([part.compute(jnp.float32) for part in parts]) for parts in pieces]
    outputs = []
    for columns_of_pieces in zip(*encoded, strict=True):
        rows = [jnp.concatenate(columns, axis=-1) for columns in columns_of_pieces]
        outputs.append(jnp.concatenate(rows, axis=1))
    return tuple(outputs)


def triton_kernel(
    encode: Encode, pieces: Sequence[Sequence[LazyPart]], *, interpret: bool = False
) -> tuple[Array, ...]:
    """Computes the rows of activations and encodes them, in one pass over memory on a GPU.

    One Triton program handles one row, in float32. Also silences JAX's deprecation warning of
    Pallas for Triton in this process.

    Args:
        encode: The encoder: from the columns of a row (float32 arrays, one per part, the first
            columns first) to a tuple of outputs. Each is a list with a single array, such as the
            scale of the row, or with one array per part. The width of such an array is proportional
            to that of its padded part, e.g. one scale per 16 columns, so that the kernel can cut
            off the padding. The columns of each part come padded with zeros to a power of two, at
            least `MIN_ROW_WIDTH` (64); the padding must not change the outputs for the columns of
            the row.
        pieces: The parts of each activation, at least one. Activations follow each other along the
            sequence axis, and all have one batch and one width.
        interpret: Whether to run the kernel in Pallas' interpreter, which needs no GPU.

    Returns:
        The outputs of the encoder, each one array [b, s, m], where s is the number of rows of all
        activations together, and m the width of the output for a row without padding.
    """
    from jax.experimental import pallas as pl  # imported here because the import takes a second
    from jax.experimental.pallas import triton as plgpu

    silence_triton_deprecation()

    def encode_reference(arrays: list[Array]) -> tuple[Array, ...]:
        return reference(encode, _replace_arrays(pieces, iter(arrays)))

    def compute_parts(arrays: list[Array]) -> list[list[Array]]:
        return [
            [part.compute() for part in parts] for parts in _replace_arrays(pieces, iter(arrays))
        ]

    outs = jax.eval_shape(encode_reference, _arrays(pieces))
    part_shapes = jax.eval_shape(compute_parts, _arrays(pieces))
    ends = list(itertools.accumulate(shapes[0].shape[1] for shapes in part_shapes))
    starts = [0, *ends[:-1]]

    def body(*refs: Any) -> None:
        remaining = iter(refs)
        inputs = [[[next(remaining) for _ in part.arrays] for part in parts] for parts in pieces]
        results = [*remaining]
        row = pl.program_id(1)
        for parts, shapes, piece_refs, start, end in zip(
            pieces, part_shapes, inputs, starts, ends, strict=True
        ):
            widths = [x.shape[-1] for x in shapes]
            write = partial(_encode_row, encode, parts, widths, piece_refs, results)
            if len(ends) == 1:
                write()
            else:
                pl.when((row >= start) & (row < end))(write)

    def row_spec(x: Any, start: int, count: int, skipped: int) -> Any:
        """One row of `x` per program: rows `skipped` to `skipped + count`, for the programs from
        `start` on.
        """

        def row_of(s: Any) -> Any:
            return skipped + jnp.clip(s - start, 0, count - 1) if x.shape[1] > 1 else 0

        return pl.BlockSpec(
            (None, None, x.shape[2]), lambda b, s: (b if x.shape[0] > 1 else 0, row_of(s), 0)
        )

    in_specs = []
    for parts, start, end in zip(pieces, starts, ends, strict=True):
        for part in parts:
            for i, x in enumerate(_arrays([[part]])):
                in_specs.append(row_spec(x, start, end - start, part.start if i == 0 else 0))
    widest_row = max(
        sum(power_of_two(x.shape[-1], MIN_ROW_WIDTH) for x in shapes) for shapes in part_shapes
    )
    num_warps = min(max(widest_row // VALUES_PER_WARP, MIN_WARPS), MAX_WARPS)
    call = pl.pallas_call(
        body,
        grid=(outs[0].shape[0], ends[-1]),
        in_specs=in_specs,
        out_specs=[row_spec(x, 0, ends[-1], 0) for x in outs],
        out_shape=list(outs),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="one_pass",
    )
    return tuple(call(*_arrays(pieces)))


def _encode_row(
    encode: Encode,
    parts: Sequence[LazyPart],
    widths: Sequence[int],
    inputs: Sequence[Sequence[Any]],
    results: Sequence[Any],
) -> None:
    """Runs inside the kernel: computes one row of an activation, encodes it, and stores it.

    Args:
        encode: The encoder: from the columns of the row (float32 arrays [n], padded with zeros to
            powers of two) to a tuple of outputs, each a list of arrays.
        parts: The parts of the activation, the first columns first.
        widths: The number of columns of each part.
        inputs: For each part, references [n] to one row of each of its arrays (for a `ColumnView`,
            of the whole array).
        results: References [m] to one row of each output of the encoder, which are written.
    """
    from jax.experimental.pallas import triton as plgpu

    # formats pad whole rows, so the padding is added to the last part
    padded = (*widths[:-1], widths[-1] + -sum(widths) % MIN_ROW_WIDTH)
    sizes = [power_of_two(width, MIN_ROW_WIDTH) for width in padded]

    def load(ref: Any, array: Any, width: int, size: int) -> Array:
        start = 0
        stop = ref.shape[0]
        if isinstance(array, ColumnView):
            start = array.start
            stop = array.stop
        n = stop - start
        if n == 1:
            return ref[start].astype(jnp.float32)
        column = jnp.arange(size if n == width else power_of_two(n))
        values = plgpu.load(ref.at[start + column], mask=column < n, other=0.0)
        return values.astype(jnp.float32)

    values = []
    for part, width, size, refs in zip(parts, widths, sizes, inputs, strict=True):
        arrays = [load(ref, x, width, size) for ref, x in zip(refs, part.arrays, strict=True)]
        value = part.function(*arrays)
        values.append(jnp.where(jnp.arange(size) < width, value, 0.0))
    for columns, ref in zip(encode(values), results, strict=True):
        start = 0
        for piece, width, size in zip(columns, widths, sizes, strict=False):
            column = start + jnp.arange(piece.shape[-1])
            end = start + width * piece.shape[-1] // size
            if piece is columns[-1]:
                end = ref.shape[0]
            plgpu.store(ref.at[column], piece, mask=column < end)
            start = end


def fits_tpu_kernel(encode: Encode, x: LazyActivation) -> bool:
    """Returns whether `tpu_kernel` can encode an activation, whatever platform is in use.

    Args:
        encode: The encoder that would run.
        x: The activation.

    Returns:
        True if the encoder's outputs are INT8, BF16 or float32 (not those of NVFP4 and FP8), and
        all parts of the activation but the last have a multiple of `LANES` (128) columns.
    """
    widths = [jax.eval_shape(part.compute).shape[-1] for part in x.parts]
    outputs = jax.eval_shape(lambda: reference(encode, [x.parts]))
    return all(width % LANES == 0 for width in widths[:-1]) and all(
        y.dtype in (jnp.int8, jnp.bfloat16, jnp.float32) for y in outputs
    )


def tpu_kernel(
    encode: Encode, parts: Sequence[LazyPart], *, interpret: bool = False
) -> tuple[Array, ...]:
    """Computes the rows of an activation and encodes them, in one pass over memory on a TPU.

    One step of the kernel handles up to `TPU_ROWS` (128) rows of one sample, in float32. If each
    sample has a single row, the rows of all samples are handled as those of one sample. Arrays that
    cannot be read in such blocks are copied first (`_in_whole_blocks`).

    Args:
        encode: The encoder: from the columns of a block of rows (float32 arrays [rows, n], one per
            part, the first columns first) to a tuple of outputs, each again a list of arrays, in
            INT8, BF16 or float32.
        parts: The parts of the activation. The widths of all but the last are multiples of `LANES`
            (128).
        interpret: Whether to run the kernel in Pallas' interpreter, which needs no TPU.

    Returns:
        The outputs of the encoder, each one array [b, s, m].
    """
    from jax.experimental import pallas as pl  # imported here because the import takes a second
    from jax.experimental.pallas import tpu as pltpu

    def encode_reference(arrays: list[Array]) -> tuple[Array, ...]:
        return reference(encode, _replace_arrays([parts], iter(arrays)))

    parts = [_in_whole_blocks(part) for part in parts]
    outs = jax.eval_shape(encode_reference, _arrays([parts]))
    batch, num_rows, _ = outs[0].shape
    if num_rows == 1 and batch > 1:  # computed as the rows of one sample
        swapped = (x.swapaxes(0, 1) for x in _arrays([parts]))
        (parts,) = _replace_arrays([parts], swapped)
        return tuple(y.swapaxes(0, 1) for y in tpu_kernel(encode, parts, interpret=interpret))
    block_rows = min(TPU_ROWS, num_rows)

    def body(*refs: Any) -> None:
        remaining = iter(refs)
        values = []
        for part in parts:
            blocks = [next(remaining)[...].astype(jnp.float32) for _ in part.arrays]
            values.append(part.function(*blocks))
        for columns, ref, out in zip(encode(values), remaining, outs, strict=True):
            if out.shape[2] == 1:
                ref[...] = columns[0].reshape(1, block_rows)
                continue
            start = 0
            for piece in columns:
                stop = start + piece.shape[-1]
                ref[:, start:stop] = piece
                start = stop

    def in_spec(x: Array | ColumnView, skipped: int) -> Any:
        """A block of the rows of `x`, after `skipped` blocks."""
        has_rows = x.shape[1] > 1
        column = _column_block(x) if isinstance(x, ColumnView) else 0

        def index(b: Any, s: Any) -> tuple[Any, Any, Any]:
            sample = b if x.shape[0] > 1 else 0
            row_block = s + skipped if has_rows else 0
            return sample, row_block, column

        return pl.BlockSpec((None, block_rows if has_rows else 1, x.shape[2]), index)

    def out_spec(x: jax.ShapeDtypeStruct) -> Any:
        if x.shape[2] == 1:
            return pl.BlockSpec((None, 1, block_rows), lambda b, s: (b, 0, s))
        return pl.BlockSpec((None, block_rows, x.shape[2]), lambda b, s: (b, s, 0))

    def out_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # One number per row lies along the lanes. As a column, it would fill one lane in 128.
        shape = (batch, 1, num_rows) if x.shape[2] == 1 else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    call = pl.pallas_call(
        body,
        grid=(batch, pl.cdiv(num_rows, block_rows)),
        in_specs=[
            in_spec(x, part.start // TPU_ROWS if i == 0 else 0)
            for part in parts
            for i, x in enumerate(part.arrays)
        ],
        out_specs=list(map(out_spec, outs)),
        out_shape=list(map(out_shape, outs)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=TPU_VMEM
        ),
        interpret=interpret,
        name="one_pass",
    )
    return tuple(
        y.swapaxes(1, 2) if x.shape[2] == 1 else y
        for x, y in zip(outs, call(*_arrays([parts])), strict=True)
    )


def _in_whole_blocks(part: LazyPart) -> LazyPart:
    """Copies those arrays of a part that `tpu_kernel` could not read in place.

    It reads blocks of `TPU_ROWS` (128) rows, and views whose columns are a block (`_column_block`).

    Args:
        part: A part of an activation that `tpu_kernel` is to read.

    Returns:
        A part with the same value. Other column views are copied to arrays; so is a range of rows
        that does not start at a multiple of 128, or has fewer than 128 rows.
    """
    first, *others = (
        x.value if isinstance(x, ColumnView) and _column_block(x) is None else x
        for x in part.arrays
    )
    if part.stop is None or (part.stop - part.start >= TPU_ROWS and part.start % TPU_ROWS == 0):
        return dataclasses.replace(part, arrays=(first, *others))
    rows = first.value if isinstance(first, ColumnView) else first
    rows = rows[:, part.start : part.stop]
    return dataclasses.replace(part, arrays=(rows, *others), start=0, stop=None)


def _column_block(view: ColumnView) -> int | None:
    """Returns the index of a view among blocks of its own width, for `tpu_kernel`.

    Args:
        view: The columns of an array that `tpu_kernel` is to read.

    Returns:
        Its first column divided by its width. None if that is not a whole number, or if the width
        is not a multiple of `LANES` (128).
    """
    width = view.stop - view.start
    return view.start // width if width % LANES == 0 and view.start % width == 0 else None
