"""Trainable beside a frozen base: which leaves they are on, what they start as, and how they are
attached.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.quant.matmul import LowRank, matmul
from solrl_jax.rl.trainable.trainable import attach, flatten, init_adapters, match_kernels, replace

RANK = 4
SCALE = 2.0
Q = "blocks/attn/to_q/kernel"
K = "blocks/attn/to_k/kernel"
OUT = "out/0/kernel"


def whole(*shape, seed, low=-8, high=9):
    """Small whole numbers: sums of their products are exact in float32, and they are exact in
    bfloat16.
    """
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def base(dtype=jnp.bfloat16):
    """Two layers of attention stacked, a convolution, a bias, and a key that is no string."""

    def array(*shape, seed):
        return jnp.asarray(whole(*shape, seed=seed), dtype)

    return {
        "blocks": {
            "attn": {
                "to_q": {"kernel": array(2, 32, 24, seed=1), "bias": array(2, 24, seed=2)},
                "to_k": {"kernel": array(2, 32, 24, seed=3)},
            },
            "conv": {"kernel": array(2, 3, 3, 8, seed=4)},
        },
        "out": {0: {"kernel": array(24, 8, seed=5)}},
    }


def adapters(seed=6):
    return {
        Q: {
            "a": jnp.asarray(whole(2, 32, RANK, seed=seed, low=-2, high=3)),
            "b": jnp.asarray(whole(2, RANK, 24, seed=seed + 1)),
        },
        OUT: {
            "a": jnp.asarray(whole(24, RANK, seed=seed + 2, low=-2, high=3)),
            "b": jnp.asarray(whole(RANK, 8, seed=seed + 3)),
        },
    }


def test_flatten_names_every_leaf_and_replace_puts_it_back():
    params = base()
    flat = flatten(params)
    assert set(flat) == {Q, K, OUT, "blocks/attn/to_q/bias", "blocks/conv/kernel"}
    assert flat[OUT] is params["out"][0]["kernel"]
    changed = replace(params, {Q: "new", OUT: "newer"})
    assert flatten(changed) == flat | {Q: "new", OUT: "newer"}
    assert list(changed["out"]) == [0]
    assert flatten(params)[Q] is flat[Q]  # a copy


def test_matching_is_of_whole_paths_sorted_each_once():
    params = base()
    assert match_kernels(params, ["blocks/attn/to_[qk]/kernel"], "f") == [K, Q]
    assert match_kernels(params, [OUT, "blocks/attn/to_q/kernel", ".*/to_q/kernel"], "f") == [
        Q,
        OUT,
    ]
    assert match_kernels(params, [], "f") == []


@pytest.mark.parametrize(
    "pattern", ["attn", "to_q/kernel", "blocks/attn/to_q", "blocks/attn/to_v/kernel", "BLOCKS/.*"]
)
def test_a_pattern_that_matches_nothing_is_named_with_what_there_is(pattern):
    with pytest.raises(
        ValueError,
        match=re.escape(f"lora.target_modules: {pattern!r} matches no parameter; there are "),
    ) as error:
        match_kernels(base(), [Q, pattern], "lora.target_modules")
    assert all(path in str(error.value) for path in (Q, K, OUT))
    assert "bias" not in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "path", "shape"),
    [
        ("blocks/attn/.*", "blocks/attn/to_q/bias", "(2, 24)"),
        ("blocks/.*/?kernel", "blocks/conv/kernel", "(2, 3, 3, 8)"),
    ],
)
def test_a_pattern_that_matches_what_is_no_matrix_is_named_with_it(pattern, path, shape):
    message = (
        f"lora.target_modules: {pattern!r} matches {path} of shape {shape}; "
        "must be the kernel of a linear layer"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        match_kernels(base(), [pattern], "lora.target_modules")


@pytest.mark.slow
def test_adapters_start_as_gaussian_times_zero():
    params = {
        "w": {"kernel": jnp.zeros((3, 64, 40), jnp.bfloat16)},
        "u": {"kernel": jnp.zeros((256, 16), jnp.bfloat16)},
    }
    rank = 32
    got = init_adapters(jax.random.key(0), params, ["u/kernel", "w/kernel"], rank)
    assert got["w/kernel"]["a"].shape == (3, 64, rank)
    assert got["w/kernel"]["b"].shape == (3, rank, 40)
    assert got["u/kernel"]["a"].shape == (256, rank)
    for ab in got.values():
        assert ab["a"].dtype == ab["b"].dtype == jnp.float32
        assert not ab["b"].any()
        a = np.asarray(ab["a"]).ravel() * rank  # at least 6144 standard normal numbers
        assert a.std() == pytest.approx(1, abs=0.03)
        assert a.mean() == pytest.approx(0, abs=0.04)
        assert (a**4).mean() == pytest.approx(3, abs=0.3)
    again = init_adapters(jax.random.key(0), params, ["u/kernel", "w/kernel"], rank)
    np.testing.assert_array_equal(again["u/kernel"]["a"], got["u/kernel"]["a"])
    u = got["u/kernel"]["a"].ravel()
    layers = got["w/kernel"]["a"].reshape(3, -1)
    rows = np.stack(
        [
            u[:2048],
            *layers,
            init_adapters(jax.random.key(1), params, ["u/kernel"], rank)["u/kernel"]["a"].ravel()[
                :2048
            ],
        ]
    )
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 0.1  # no two alike


def test_attach_puts_each_adapter_on_its_leaf_and_leaves_the_rest():
    params = base()
    ab = adapters()
    policy = attach(params, ab, SCALE)
    flat = flatten(policy)
    plain = flatten(params)
    for path in (Q, OUT):
        assert isinstance(flat[path], LowRank)
        assert flat[path].base is plain[path]
        assert flat[path].a is ab[path]["a"]
        assert flat[path].b is ab[path]["b"]
        assert flat[path].scale == SCALE
    assert all(flat[path] is plain[path] for path in set(plain) - {Q, OUT})
    assert isinstance(flatten(params)[Q], jax.Array)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_adapters_change_nothing(dtype):
    params = base(dtype)
    fresh = init_adapters(jax.random.key(3), params, [Q, OUT], RANK)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 24)), dtype)
    plain = flatten(params)[OUT]
    adapted = flatten(attach(params, fresh, SCALE))[OUT]
    np.testing.assert_array_equal(matmul(x, adapted), matmul(x, plain))
    trained = flatten(attach(params, adapters(), SCALE))[OUT]
    assert np.abs((matmul(x, trained) - matmul(x, plain)).astype(jnp.float32)).max() > 1


def test_the_adapted_and_the_merged_policy_are_one_function():
    """In float32 and before quantizing: x (W + s A B) either way."""
    params = base(jnp.float32)
    ab = adapters()
    leaf = flatten(attach(params, ab, SCALE))[OUT]
    merged = leaf.base + SCALE * leaf.a @ leaf.b
    x = jnp.asarray(whole(5, 24, seed=9))
    np.testing.assert_array_equal(matmul(x, leaf), x @ merged)  # whole numbers: exact
