"""The public assertions: they hold where they must, fail by a hair, agree with SciPy, and work
under jit with chexify.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.quant.matmul import dequantize
from solrl_jax.quant.nvfp4 import quantize
from solrl_jax.rl.fidelity import overlap, rank_correlations, regret
from solrl_jax.rl.select import select
from solrl_jax.testing import (
    NVFP4_BLOCK_ERROR,
    assert_block_error,
    assert_ranking_preserved,
    assert_selection_range,
    assert_top_k_regret,
)

HAIR = 1e-4


@pytest.fixture
def pools():
    """A proxy that is good but not perfect, with ties and with rewards that are not finite."""
    rng = np.random.default_rng(0)
    true = np.round(rng.standard_normal((6, 24)), 1).astype(np.float32)
    proxy = np.round(true + 0.4 * rng.standard_normal((6, 24)), 1).astype(np.float32)
    proxy[0, 3] = np.nan
    proxy[1, 5] = np.inf
    true[2, 7] = -np.inf
    return proxy, true


def figures(proxy, true):
    got = rank_correlations(proxy, true)
    match, loss = (float(np.nanmean(figure(proxy, true, 4, 6))) for figure in (overlap, regret))
    return {"spearman": got.spearman, "kendall": got.kendall, "match": match, "regret": loss}


def test_the_figures_are_scipys_to_a_hair(pools):
    want = figures(*pools)
    assert 0.5 < want["kendall"] < want["spearman"] < 0.97
    assert 0.5 < want["match"] < 1
    for name in ("spearman", "kendall"):
        assert_ranking_preserved(*pools, **{name: want[name] - HAIR})
        with pytest.raises(AssertionError, match=f"{name.title()} 0.* is below"):
            assert_ranking_preserved(*pools, **{name: want[name] + HAIR})
    assert_ranking_preserved(*pools, top_k=4, within=6, match=want["match"] - HAIR)
    with pytest.raises(AssertionError, match=r"Top-k match 0.* is below"):
        assert_ranking_preserved(*pools, top_k=4, within=6, match=want["match"] + HAIR)
    assert 10 * HAIR < want["regret"] < 0.1
    assert_top_k_regret(*pools, top_k=4, within=6, bound=want["regret"] + HAIR)
    with pytest.raises(AssertionError, match=r"Top-k regret 0.* is above"):
        assert_top_k_regret(*pools, top_k=4, within=6, bound=want["regret"] - HAIR)
    with pytest.raises(AssertionError, match=r"Top-k match 0.* is below 1"):
        assert_ranking_preserved(*pools, top_k=4, within=6)


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_the_regret_of_few_finite_rewards_is_that_of_numpy(count):
    rng = np.random.default_rng(5)
    proxy, true = np.round(rng.standard_normal((2, 4, 8)), 1).astype(np.float32)
    proxy[1, count:] = np.nan
    true[2, count:] = -np.inf
    true[3] = 2.0  # nothing to lose
    want = float(np.nanmean(regret(proxy, true, 4, 5)))
    assert want > 10 * HAIR
    assert_top_k_regret(proxy, true, top_k=4, within=5, bound=want + HAIR)
    with pytest.raises(AssertionError, match=r"Top-k regret"):
        assert_top_k_regret(proxy, true, top_k=4, within=5, bound=want - HAIR)


def test_a_shuffled_proxy_fails_and_a_monotone_one_passes():
    true = np.random.default_rng(1).standard_normal((4, 16))
    assert_ranking_preserved(np.exp(true), true, spearman=1 - 1e-6, kendall=1 - 1e-6, top_k=4)
    with pytest.raises(AssertionError, match="Spearman"):
        assert_ranking_preserved(true[:, ::-1], true, spearman=0.9)


def test_rewards_that_do_not_differ_pass_for_no_ranking():
    with pytest.raises(AssertionError, match="Spearman"):
        assert_ranking_preserved(np.zeros((2, 8)), np.arange(16.0).reshape(2, 8), spearman=0.0)


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_reward_error_maps_to_rank_correlation(noise):
    """Noise of `noise` standard deviations leaves Pearson's r = 1 / sqrt(1 + noise^2), and rho = 6
    / pi asin(r / 2) of it.
    """
    rng = np.random.default_rng(2)
    true = rng.standard_normal((64, 96))
    proxy = true + noise * rng.standard_normal(true.shape)
    expected = 6 / np.pi * np.arcsin(1 / np.sqrt(1 + noise**2) / 2)
    assert_ranking_preserved(proxy, true, spearman=expected - 0.02)
    with pytest.raises(AssertionError):
        assert_ranking_preserved(proxy, true, spearman=expected + 0.02)


@pytest.mark.slow
def test_selection_range(pools):
    true = np.random.default_rng(3).standard_normal((8, 24)).astype(np.float32)
    proxy = true + np.random.default_rng(4).uniform(-0.3, 0.3, true.shape).astype(np.float32)
    delta = float(np.abs(proxy - true).max())
    assert_selection_range(proxy, true, kept=2, delta=delta)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_selection_range(proxy, true, kept=2, delta=delta - HAIR)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_selection_range(
            *pools, kept=2, delta=10.0
        )  # a reward that is not finite counts as a large difference


def test_selection_range_is_of_what_is_selected():
    """It selects as the loop does. The bound by hand, where the extremes by proxy are not the true
    ones.
    """
    true = np.array([[0.0, 1.0, 2.0, 3.0]])
    proxy = np.array([[0.9, 0.0, 3.1, 3.0]])
    index, _ = select(proxy, 2, "best_worst")
    assert index.tolist() == [[1, 2]]  # they span 1 of 3
    assert_selection_range(proxy, true, kept=2, delta=1.1 + 1e-6)
    with pytest.raises(AssertionError, match="difference"):
        assert_selection_range(proxy, true, kept=2, delta=1.0)


@pytest.mark.slow
def test_block_error_of_nvfp4_and_of_something_worse():
    w = jax.random.normal(jax.random.key(0), (200, 48)) * jnp.exp(
        2 * jax.random.normal(jax.random.key(1), (200, 1))
    )
    back = dequantize(quantize(w))
    assert_block_error(w, back, axis=0)
    with pytest.raises(AssertionError, match=r"A block errs by 0\.\d+ of its largest"):
        assert_block_error(w, back, axis=0, bound=NVFP4_BLOCK_ERROR / 2)
    with pytest.raises(AssertionError, match="A block errs"):
        assert_block_error(w, back.at[7, 3].add(0.5 * jnp.abs(w[:16, 3]).max()), axis=0)
    with pytest.raises(AssertionError, match="A block errs by inf"):
        assert_block_error(jnp.zeros((2, 16)), jnp.zeros((2, 16)).at[1, 1].set(1e-9))


@pytest.mark.slow
def test_they_work_under_jit_with_chexify(pools):
    want = figures(*pools)

    @functools.partial(chex.chexify, async_check=False)
    @jax.jit
    def checked(proxy, true, floor):
        assert_ranking_preserved(proxy, true, spearman=floor, top_k=4, within=12, match=0.5)
        assert_top_k_regret(proxy, true, top_k=4, within=12, bound=0.5)
        return proxy.sum()

    checked(*pools, want["spearman"] - HAIR)
    with pytest.raises(AssertionError, match="Spearman"):
        checked(*pools, want["spearman"] + HAIR)

    @functools.partial(chex.chexify, async_check=False)
    @jax.jit
    def quantized(w, bound):
        back = dequantize(quantize(w))
        assert_block_error(w, back, axis=0, bound=bound)
        assert_selection_range(back[:2], w[:2], kept=4, delta=bound * 10)
        return back

    w = jax.random.normal(jax.random.key(2), (64, 16))
    quantized(w, NVFP4_BLOCK_ERROR)
    with pytest.raises(AssertionError, match="block"):
        quantized(w, 0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_holds_of_what_is_not_finite(value):
    fine = np.ones((1, 32))
    broken = np.where(np.arange(32) == 20, value, 1.0)[None]
    for x, y in ((fine, broken), (broken, fine), (broken, broken)):
        with pytest.raises(AssertionError, match="block"):
            assert_block_error(x, y)
        with pytest.raises(AssertionError, match="largest difference"):
            assert_selection_range(x, y, kept=2, delta=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assert_ranking_preserved(np.zeros((2, 3)), np.zeros((2, 3))), "nothing is asked"),
        (
            lambda: assert_ranking_preserved(np.zeros((2, 3)), np.zeros((3, 2)), spearman=0.5),
            "accepted: both",
        ),
        (lambda: assert_ranking_preserved(np.zeros((2, 3)), np.zeros((2, 3)), top_k=4), "top_k=4"),
        (
            lambda: assert_ranking_preserved(
                np.zeros((2, 3)), np.zeros((2, 3)), spearman=0.5, match=0.1
            ),
            "without top_k",
        ),
        (
            lambda: assert_top_k_regret(
                np.zeros((2, 3)), np.zeros((2, 3)), top_k=1, within=4, bound=0.1
            ),
            "within=4",
        ),
        (
            lambda: assert_selection_range(np.zeros((2, 3)), np.zeros((2, 3)), kept=3, delta=1.0),
            "kept=3",
        ),
        (
            lambda: assert_ranking_preserved(np.zeros((0, 3)), np.zeros((0, 3)), spearman=0.5),
            "at least one",
        ),
        (
            lambda: assert_selection_range(np.zeros((0, 3)), np.zeros((0, 3)), kept=2, delta=1.0),
            "at least one",
        ),
        (lambda: assert_block_error(np.zeros((2, 3)), np.zeros((3, 2))), "shapes"),
        (lambda: assert_block_error(np.zeros((0, 3)), np.zeros((0, 3))), "not empty"),
        (lambda: assert_block_error(np.zeros((2, 3)), np.zeros((2, 3)), block=0), "block=0"),
    ],
)
def test_calls_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
