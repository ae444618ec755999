"""Sums whose value does not depend on the order of their terms, so neither on how many devices they are divided over.

What rounding loses of each addition is an exact float itself (Knuth, The Art of Computer Programming, volume 2, section 4.2.2,
theorem B) and is added up beside the sum (Neumaier 1974, "Rundungsfehleranalyse einiger Verfahren zur Summation endlicher
Summen"). The two together carry about twice the digits, which are rounded once, at the end: another order of the terms comes to
another float only where the sum lies next to the middle between two, about once in millions.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["rounded", "lost"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Sum:
    """Two trees of floats of the same shapes: what was added up, and what rounding took of it."""

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
    """`total` and one term more."""
    rounded = jax.tree.map(jnp.add, total.rounded, tree)
    lost = jax.tree.map(_lost, total.rounded, tree, rounded)
    return Sum(rounded, jax.tree.map(jnp.add, total.lost, lost))


def join(parts: Sum) -> Sum:
    """The sum of sums that lie side by side along the leading axis."""

    def one(total: Sum, part: Sum) -> tuple[Sum, None]:
        total = add(total, part.rounded)
        return Sum(total.rounded, jax.tree.map(jnp.add, total.lost, part.lost)), None

    return jax.lax.scan(one, zero(jax.tree.map(lambda x: x[0], parts.rounded)), parts)[0]


def _lost(a: jax.Array, b: jax.Array, rounded: jax.Array) -> jax.Array:
    """`a + b - rounded`, exactly, where rounded is `a + b` rounded."""
    of_b = rounded - a
    return (a - (rounded - of_b)) + (b - of_b)
