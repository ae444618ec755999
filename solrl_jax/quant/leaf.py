"""`Leaf`: a weight matrix that defines its own matmul.

Precision is a property of the leaves of the parameter tree. The BF16 policy, the policy with LoRA
adapters and its quantized copies are one network with different leaves: plain arrays, `LowRank`, or
one of the quantized kinds that `formats.FORMATS` lists.

To add a kind of leaf, derive a frozen dataclass from `Leaf` or `Quantized` and register it with
JAX. No other code needs to know its name.
"""

import abc
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.lazy import ColumnView, LazyActivation, LazyPart

# the checkpoint name of every matmul with a weight (`models.layers.stack.CHECKPOINT_POLICIES`)
MATMUL = "matmul"
Matrix: TypeAlias = Float[Array | np.ndarray, "... n_in n_out"]


class Leaf(abc.ABC):
    """A weight matrix [in, out] in some representation.

    The arrays of a leaf may have leading axes, for example one for stacked layers. `matmul` and
    `lazy_matmul` accept a single matrix. Subclasses are frozen dataclasses that are registered as
    JAX pytrees and define `matmul` and `dequantize`.

    Attributes:
        output_axes: A class attribute. A mapping from the name of each array field whose outputs
            can be sharded to the axis of the outputs, counted from the end (negative). Arrays of
            fields that are not listed are replicated.
    """

    output_axes: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Computes `x @ w` for a single matrix.

        Args:
            x: Activations [rows, n_in] of a floating-point dtype.

        Returns:
            The result [rows, n_out] in the dtype of `x`, unless the class says otherwise
            (`HalfPrecisionWeight`). On a mesh with an axis `tensor`, the outputs may be sharded
            over it.
        """

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """Computes `x @ w` for a lazy activation and a single matrix.

        This default writes both the input and the output to memory. Gradient checkpointing knows
        the output by the name "matmul".

        Args:
            x: The input [b, s, n_in], which need not be in memory. Its `value` is computed and
                kept in it.

        Returns:
            The lazy result [b, s, n_out], in the dtype of `matmul`'s result, complete on every
            device of the mesh axis `tensor`. It is marked as exact (`LazyPart.exact`), even if `x`
            contains a quantized matmul or the leaf is quantized: plain JAX operations then compute
            functions of it in the dtypes of their arrays, and not in float32.
        """
        value = x.value
        y = self.matmul(value.reshape(-1, value.shape[-1]))
        y = checkpoint_name(tensor_parallel.gather_axis(y), MATMUL)
        return LazyActivation.from_array(y.reshape(*value.shape[:2], -1))

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the matrix that the leaf represents, [..., n_in, n_out] in float32."""

    def partition_specs(self, shards: int) -> Any:
        """Returns the sharding of the leaf over the mesh axis `tensor`.

        Args:
            shards: The number of shards along the axis. 1 replicates everything.

        Returns:
            The leaf with a `PartitionSpec` in place of each array. The axis that `output_axes`
            names is sharded if its size is a multiple of `shards`; everything else is replicated.
            For a leaf inside this one, the inner leaf's `output_axes` apply.
        """

        def spec(path: tuple[Any, ...], x: Any) -> Any:
            if isinstance(x, Leaf):
                return x.partition_specs(shards)
            return tensor_parallel.partition_spec(
                x.shape, self.output_axes.get(path[0].name), shards
            )

        return jax.tree_util.tree_map_with_path(
            spec, self, is_leaf=lambda x: isinstance(x, Leaf) and x is not self
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of the leaf's arrays, which may be abstract, all shards together."""
        return nbytes(self)


class Quantized(Leaf):
    """A leaf whose matmul runs in a low-precision format.

    The result only approximates that of the original matrix, and is not differentiable with respect
    to the input or the weight. The class adds nothing to `Leaf`; it marks quantized leaves for
    `isinstance`.
    """


class QuantizedWithInput(Quantized):
    """A quantized leaf whose matmul runs in the low-precision format for both operands: it
    quantizes the rows of its input, too (`LazyActivation.encode`).

    Subclasses define `lazy_matmul`, and `matmul` follows from it.
    """

    @abc.abstractmethod
    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """Computes `x @ w` for a single matrix, with the rows of `x` quantized by `x.encode`.

        Args:
            x: The input [b, s, n_in], which need not be in memory. Only its codes and scales are
                written to memory.

        Returns:
            The lazy result [b, s, n_out] in the dtype of `x`, complete on every device of the mesh
            axis `tensor`.
        """

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Computes `x @ w` for a single matrix by `lazy_matmul` of `x` as [rows, 1, n_in], and
        writes the result to memory.

        Args:
            x: Activations [rows, n_in] of a floating-point dtype.

        Returns:
            The result [rows, n_out] in the dtype of `x`, complete on every device of the mesh axis
            `tensor`.
        """
        return self.lazy_matmul(LazyActivation.from_array(x[:, None])).value[:, 0]


def scale_lazily(
    y: Float[Array, "b s padded"], *scales: Float[Array, "..."], width: int
) -> LazyActivation:
    """Multiplies the matmul of the codes (quantized values) of two operands by their scales, in the
    kernel that reads the result.

    Args:
        y: The matmul of the codes [b, s, padded], which may be sharded over the mesh axis `tensor`
            and is gathered. Columns from `width` on are padding, which is never read.
        *scales: Float32 scales that broadcast against [b, s, width]: [b, s, 1] for rows, [1, 1,
            width] for columns, [1, 1, 1] for a matrix.
        width: The number of columns of the result.

    Returns:
        A lazy activation [b, s, width] in the dtype of `y`, which computes the product in float32
        and is marked as containing a quantized matmul. It is complete on every device of the mesh
        axis `tensor`.
    """
    y = tensor_parallel.gather_axis(y)
    columns = y if width == y.shape[-1] else ColumnView(y, 0, width)
    arrays = (columns, *map(tensor_parallel.gather_axis, scales))
    return LazyActivation((LazyPart(_multiply, arrays, exact=False),), y.dtype)


def _multiply(*factors: Array) -> Array:
    """Returns the elementwise product of all factors, at least one, with broadcasting."""
    return functools.reduce(operator.mul, factors)


def nbytes(tree: Any) -> int:
    """Returns the number of bytes of all arrays of a tree, all shards together; 0 without arrays.

    Args:
        tree: A tree of arrays of JAX or NumPy, which may be abstract (`jax.ShapeDtypeStruct`).

    Returns:
        The number of bytes. A dtype of less than 8 bits counts as a whole byte per value.
    """
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
