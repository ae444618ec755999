"""Sums whose value does not depend on the order of their terms, and so not on the number of devices.

The part that rounding loses in an addition is itself a float (Knuth, The Art of Computer Programming, volume 2, section 4.2.2,
theorem B). These parts are added up beside the sum (Neumaier 1974, "Rundungsfehleranalyse einiger Verfahren zur Summation
endlicher Summen"). Both together have about twice the digits, and are rounded once, at the end. Another order of the terms
gives another float only if the sum is almost exactly half-way between two floats, about once in millions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """Two trees of floats of the same shapes: the rounded sum, and the sum of the parts that rounding lost."""

    rounded: Any
    lost: Any

    @property
    def value(self) -> Any:
        return jax.tree.map(jnp.add, self.rounded, self.lost)


def zero(tree: Any) -> Sum:
    """The empty sum of trees like `tree`."""
    zeros = jax.tree.map(jnp.zeros_like, tree)
    return Sum(zeros, zeros)


def add(total: Sum, tree: Any) -> Sum:
    """`total` plus one more term."""
    rounded = jax.tree.map(jnp.add, total.rounded, tree)
    lost = jax.tree.map(_lost, total.rounded, tree, rounded)
    return Sum(rounded, jax.tree.map(jnp.add, total.lost, lost))


def add_each(total: Sum, trees: Any, count: int) -> Sum:
    """`total` plus `count` more terms, which lie along the leading axis."""
    return jax.lax.scan(lambda total, tree: (add(total, tree), None), total, trees, length=count)[0]


def join(parts: Sum) -> Sum:
    """The sum of the sums along the leading axis."""
    if not jax.tree.leaves(parts):  # a tree without arrays
        return parts

    def one(total: Sum, part: Sum) -> tuple[Sum, None]:
        total = add(total, part.rounded)
        return Sum(total.rounded, jax.tree.map(jnp.add, total.lost, part.lost)), None

    return jax.lax.scan(one, zero(jax.tree.map(lambda x: x[0], parts.rounded)), parts)[0]


def _lost(a: jax.Array, b: jax.Array, rounded: jax.Array) -> jax.Array:
    """`a + b - rounded`, exactly, where rounded is `a + b` rounded."""
    of_b = rounded - a
    return (a - (rounded - of_b)) + (b - of_b)
