"""Sums whose value does not depend on the order of their terms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_jax.parallel.sums import Sum, add, join, zero


@jax.jit
def in_turn(terms):
    """One after another, as a scan adds micro-batches."""
    return jax.lax.scan(lambda total, x: (add(total, x), None), zero(terms[0]), terms)[0]


@jax.jit
def in_groups(terms):
    """[groups, each, ...]: each group its own, then the groups."""
    return join(jax.vmap(in_turn)(terms)).value


def terms_of(seed):
    """Terms like gradients, each column of its own size; most cancel."""
    rng = np.random.default_rng(seed)
    large = rng.normal(size=(12, 50)) * 10.0 ** rng.uniform(-3, 1, 50)
    return np.concatenate([large, -large, rng.normal(size=(24, 50))]).astype(np.float32)


def test_what_rounding_loses_is_kept():
    terms = jnp.array([1e8, 1.0, -1e8, 1e-9], jnp.float32)
    assert terms.sum() != 1
    np.testing.assert_array_equal(in_turn(terms).value, np.float32(1 + 1e-9))


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 48]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_order_and_groups_do_not_matter(seed, groups):
    terms = terms_of(seed)
    exact = terms.astype(np.float64).sum(0).astype(np.float32)
    shuffled = np.random.default_rng(seed + 1).permutation(terms)
    np.testing.assert_array_equal(in_turn(shuffled).value, exact)
    np.testing.assert_array_equal(in_groups(shuffled.reshape(groups, -1, 50)), exact)


def test_a_plain_sum_would_not_do():
    terms = terms_of(0)
    one, other = (np.asarray(jnp.cumsum(x, 0)[-1]) for x in (terms, terms[::-1]))
    assert (one != other).mean() > 0.5


def test_trees_are_summed_leaf_by_leaf():
    tree = {"a": jnp.full(3, 0.1), "b": {"c": jnp.ones((2, 2))}}
    total = add(add(zero(tree), tree), tree)
    assert isinstance(total, Sum)
    chex.assert_trees_all_equal(total.value, jax.tree.map(lambda x: 2 * x, tree))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_pass_for_a_number(value):
    assert not np.isfinite(in_turn(jnp.array([1.0, value, 1.0], jnp.float32)).value)
