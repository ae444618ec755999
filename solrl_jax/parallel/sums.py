"""Compensated sums, whose value does not depend on the order of the terms or the number of devices.

The rounding error of an addition is itself a float (Knuth, The Art of Computer Programming, volume
2, section 4.2.2, theorem B). The errors are added up beside the sum (Neumaier 1974,
"Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen"). Both together have about
twice the digits, and are rounded once, at the end. Another order of the terms gives another float
only if the sum is almost exactly half-way between two floats, about once in millions of sums.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of trees of floats with its compensation. A pytree.

    Attributes:
        rounded: The tree of sums as rounded in each addition.
        lost: The tree of sums of the rounding errors, with arrays like those of `rounded`.
    """

    rounded: Any
    lost: Any

    @property
    def value(self) -> Any:
        """The tree of sums, each `rounded + lost`, rounded once. NaN where a sum is not finite."""
        return jax.tree.map(jnp.add, self.rounded, self.lost)


def zero(tree: Any) -> Sum:
    """Returns the sum of no terms, whose arrays are zeros.

    Args:
        tree: A tree of float arrays with the structure, shapes and dtypes of the terms. Its values
            are not read.
    """
    zeros = jax.tree.map(jnp.zeros_like, tree)
    return Sum(zeros, zeros)


def add(total: Sum, tree: Any) -> Sum:
    """Returns the sum with one more term. The errors of rounding are summed beside it.

    Args:
        total: The sum so far, which is not changed.
        tree: The term: a tree of arrays with the structure, shapes and dtypes of the sum.
    """
    rounded = jax.tree.map(jnp.add, total.rounded, tree)
    lost = jax.tree.map(_lost, total.rounded, tree, rounded)
    return Sum(rounded, jax.tree.map(jnp.add, total.lost, lost))


def add_each(total: Sum, trees: Any, count: int) -> Sum:
    """Adds several trees to a sum, one after the other (`jax.lax.scan`).

    Args:
        total: The sum so far, which is not changed.
        trees: A tree of arrays with the structure of the sum, whose leading axis has one entry per
            term. It may be a tree without arrays.
        count: The number of terms, equal to the length of each leading axis. 0 returns the sum as
            it is.

    Returns:
        The sum with these terms.
    """
    return jax.lax.scan(lambda total, tree: (add(total, tree), None), total, trees, length=count)[0]


def join(parts: Sum) -> Sum:
    """Adds up several sums.

    Args:
        parts: The sums as one `Sum`, stacked along the leading axis of each array, at least one.

    Returns:
        The sum of all, with the leading axis removed; `parts` itself if its trees have no arrays.
    """
    if not jax.tree.leaves(parts):  # a tree without arrays
        return parts

    def one(total: Sum, part: Sum) -> tuple[Sum, None]:
        total = add(total, part.rounded)
        return Sum(total.rounded, jax.tree.map(jnp.add, total.lost, part.lost)), None

    return jax.lax.scan(one, zero(jax.tree.map(lambda x: x[0], parts.rounded)), parts)[0]


def _lost(a: jax.Array, b: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the rounding error of an addition, `a + b - rounded`, exactly.

    Args:
        a: The first summand, an array of floats.
        b: The second summand, with the shape and dtype of `a`.
        rounded: `a + b` as the hardware rounds it. Where it is not finite, the result is NaN.
    """
    b_added = rounded - a
    return (a - (rounded - b_added)) + (b - b_added)
