"""Compensated sums, which almost never depend on the order of the terms or number of devices.

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
    """A sum of pytrees of floats that also keeps track of its rounding errors (a compensated sum).

    Attributes:
        rounded: The sum as the hardware rounds it after each addition, a pytree like each term.
        rounding_error: The sum of the rounding errors of these additions, a pytree like `rounded`.
    """

    rounded: Any
    rounding_error: Any

    @property
    def value(self) -> Any:
        """The sum, corrected by its rounding errors: `rounded + rounding_error`. NaN where
        `rounded` is infinite or NaN.
        """
        return jax.tree.map(jnp.add, self.rounded, self.rounding_error)


def zero(tree: Any) -> Sum:
    """Returns an empty sum, whose value is zero.

    Args:
        tree: A pytree of float arrays with the structure, shapes and dtypes of the terms. Its
            values do not matter.
    """
    zeros = jax.tree.map(jnp.zeros_like, tree)
    return Sum(zeros, zeros)


def add(total: Sum, tree: Any) -> Sum:
    """Adds one term to a sum.

    Args:
        total: The sum so far.
        tree: The term: a pytree with the structure, shapes and dtypes of `total.rounded`.

    Returns:
        The new sum.
    """
    rounded = jax.tree.map(jnp.add, total.rounded, tree)
    lost = jax.tree.map(_rounding_error, total.rounded, tree, rounded)
    return Sum(rounded, jax.tree.map(jnp.add, total.rounding_error, lost))


def add_each(total: Sum, trees: Any, count: int) -> Sum:
    """Adds several terms to a sum, one after the other.

    Args:
        total: The sum so far.
        trees: The terms, stacked: a pytree like `total.rounded`, whose arrays have a leading axis
            of `count` terms.
        count: The number of terms, a Python integer. With 0, the sum stays as it is.

    Returns:
        The new sum.
    """
    return jax.lax.scan(lambda total, tree: (add(total, tree), None), total, trees, length=count)[0]


def join(parts: Sum) -> Sum:
    """Adds several sums into one.

    Args:
        parts: The sums, stacked: a `Sum` whose arrays have a leading axis, one entry per sum (at
            least one).

    Returns:
        The total, a `Sum` whose arrays lack this axis.
    """
    if not jax.tree.leaves(parts):  # a tree without arrays
        return parts

    def one(total: Sum, part: Sum) -> tuple[Sum, None]:
        total = add(total, part.rounded)
        return Sum(
            total.rounded, jax.tree.map(jnp.add, total.rounding_error, part.rounding_error)
        ), None

    return jax.lax.scan(one, zero(jax.tree.map(lambda x: x[0], parts.rounded)), parts)[0]


def _rounding_error(a: jax.Array, b: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the rounding error of an addition exactly: `a + b - rounded`.

    Args:
        a: The first summand, an array of floats.
        b: The second summand, with the shape and dtype of `a`.
        rounded: `a + b` as the hardware rounds it.

    Returns:
        The error; NaN where `rounded` is not finite.
    """
    b_added = rounded - a
    return (a - (rounded - b_added)) + (b - b_added)
