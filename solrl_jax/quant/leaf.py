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

MATMUL = "matmul"  # the checkpoint name of every matmul with a weight (`models.layers.stack.REMAT`)
Matrix: TypeAlias = Float[Array | np.ndarray, "... n_in n_out"]


class Leaf(abc.ABC):
    """A weight matrix [in, out] in some representation.

    The arrays of a leaf may have leading axes, for example one for stacked layers. `matmul` and
    `lazy_matmul` accept a single matrix.

    Attributes:
        output_axes: For each array field whose outputs can be sharded: the axis of the outputs,
            counted from the end. Arrays of fields that are not listed are replicated.
    """

    output_axes: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` in the dtype of `x`. On a mesh with an axis `tensor`, the outputs may be sharded
        over it.
        """

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` for a lazy activation. By default, both the input and the output are
        materialized.
        """
        value = x.value
        y = self.matmul(value.reshape(-1, value.shape[-1]))
        y = checkpoint_name(tensor_parallel.gather_axis(y), MATMUL)
        return LazyActivation.from_array(y.reshape(*value.shape[:2], -1))

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """The matrix that the leaf represents, in float32."""

    def partition_specs(self, shards: int) -> Any:
        """The sharding of the leaf over the mesh axis `tensor`.

        Args:
            shards: The number of shards along the axis.

        Returns:
            The leaf with a `PartitionSpec` in place of each array. Outputs are sharded where their
            number is a multiple of `shards`.
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
        """The number of bytes of the leaf's arrays."""
        return nbytes(self)


class Quantized(Leaf):
    """A leaf whose matmul runs in a low-precision format, so that it only approximates that of the
    original matrix.
    """


class QuantizedWithInput(Quantized):
    """A quantized leaf whose matmul quantizes its input, too, by `LazyActivation.encode`."""

    @abc.abstractmethod
    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` on the encoded rows of `x`. See `Leaf.lazy_matmul`."""

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` by `lazy_matmul`. See `Leaf.matmul`."""
        return self.lazy_matmul(LazyActivation.from_array(x[:, None])).value[:, 0]


def scale_lazily(
    y: Float[Array, "b s padded"], *scales: Float[Array, "..."], width: int
) -> LazyActivation:
    """Multiplies the matmul of two code arrays by the scales of its operands.

    Args:
        y: The matmul of the codes. Columns from `width` on are padding, which is never read.
        *scales: Float32 scales, [b, s, 1] for rows or [1, 1, width] for columns.
        width: The number of columns of the result.

    Returns:
        A lazy activation [b, s, width] in the dtype of `y`. The multiplication happens in float32,
        in the kernel that reads it.
    """
    y = tensor_parallel.gather_axis(y)
    columns = y if width == y.shape[-1] else ColumnView(y, 0, width)
    arrays = (columns, *map(tensor_parallel.gather_axis, scales))
    return LazyActivation((LazyPart(_multiply, arrays, exact=False),), y.dtype)


def _multiply(*factors: Array) -> Array:
    """The elementwise product of all factors, which broadcast against each other."""
    return functools.reduce(operator.mul, factors)


def nbytes(tree: Any) -> int:
    """The number of bytes of all arrays of a tree. The arrays may be abstract
    (`jax.ShapeDtypeStruct`).
    """
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
