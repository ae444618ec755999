"""`Leaf`: a weight matrix that knows how it multiplies.

Precision is a kind of leaf. The BF16 policy, its LoRA-adapted form and its quantised copies are one network with other leaves
in its tree of parameters: plain arrays, `LowRank`, or one of the quantised kinds (`formats.FORMATS` names them).

A new kind of leaf is a frozen dataclass, registered with JAX, that derives from `Leaf` or `Quantized`. Nothing else needs to
know its name.
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

MATMUL = "matmul"  # what `jax.checkpoint` knows the results of products with weights by (`models.layers.stack.REMAT`)
Matrix: TypeAlias = Float[Array | np.ndarray, "... n_in n_out"]


class Leaf(abc.ABC):
    """A weight matrix [in, out] in a form of its own. Leading axes (stacked layers) are free, except for `matmul`."""

    # by field: the axis of its array that holds the outputs, counted from the end; an array without one is not listed
    output_axes: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """`x @ w` in the dtype of `x`. On a mesh with an axis `tensor` the outputs may stay divided (`split`)."""

    def lazy_matmul(self, x: LazyActivation) -> LazyActivation:
        """`x @ w` of an activation that need not be in memory, to one that need not be."""
        value = x.value
        y = checkpoint_name(
            tensor_parallel.join(self.matmul(value.reshape(-1, value.shape[-1]))), MATMUL
        )
        return LazyActivation.of(y.reshape(*value.shape[:2], -1))

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """The float32 matrix that the leaf stands for."""

    def output_specs(self, ways: int) -> Any:
        """The leaf with a `PartitionSpec` for each array: outputs divided `ways` ways over the mesh axis `tensor`."""

        def spec(path: tuple[Any, ...], x: Any) -> Any:
            if isinstance(x, Leaf):
                return x.output_specs(ways)
            return tensor_parallel.spec_of(x.shape, self.output_axes.get(path[0].name), ways)

        return jax.tree_util.tree_map_with_path(
            spec, self, is_leaf=lambda x: isinstance(x, Leaf) and x is not self
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays hold."""
        return nbytes(self)


class Quantized(Leaf):
    """A leaf that multiplies in a format of its own: its product is near that of the matrix, and not equal."""


class Coded(Quantized):
    """A quantised leaf that multiplies the codes of its input, which `LazyActivation.encoded` makes."""

    @abc.abstractmethod
    def lazy_matmul(self, x: LazyActivation) -> LazyActivation: ...

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        return self.lazy_matmul(LazyActivation.of(x[:, None])).value[:, 0]


def scaled(
    y: Float[Array, "b s filled"], *scales: Float[Array, "..."], width: int
) -> LazyActivation:
    """A product of codes and the scales [b, s, 1] or [1, 1, n] that are missing in it: applied where it is read, in float32.

    width: n, how many of the columns are results; the others are never read.
    """

    def times(*factors):
        return functools.reduce(operator.mul, factors)

    whole = tensor_parallel.join(y)
    results = whole if width == y.shape[-1] else ColumnView(whole, 0, width)
    return LazyActivation(
        (LazyPart(times, (results, *map(tensor_parallel.join, scales)), exact=False),), y.dtype
    )


def nbytes(tree: Any) -> int:
    """Bytes that the arrays of a tree hold, or would hold if they are abstract."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
