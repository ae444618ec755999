"""Rank correlations within prompts and overlaps at the ends, against SciPy and cases worked out by
hand.
"""

import inspect

import numpy as np
import pytest
from jaxtyping import TypeCheckError
from scipy import stats

from solrl_jax.rl.fidelity import mean_true_rank, overlap, rank_correlations, regret
from solrl_jax.rl.select import select

NAN = np.nan


def test_correlations_by_hand():
    """Four candidates, the two in the middle swapped: 5 of 6 pairs agree."""
    proxy = np.array([[1.0, 3.0, 2.0, 4.0]])
    true = np.array([[1.0, 2.0, 3.0, 4.0]])
    got = rank_correlations(proxy, true)
    assert got.spearman == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert got.kendall == pytest.approx((5 - 1) / 6)
    assert got.per_prompt == (pytest.approx((0.8, 2 / 3)),)


def test_the_same_order_is_one_and_the_reverse_minus_one():
    true = np.random.default_rng(0).standard_normal((3, 9))
    for proxy, sign in ((true, 1), (np.exp(5 * true), 1), (-true, -1)):  # only the order counts
        got = rank_correlations(proxy, true)
        assert (got.spearman, got.kendall) == pytest.approx((sign, sign))


def test_correlations_equal_scipy_and_are_means_over_prompts():
    rng = np.random.default_rng(1)
    true = rng.standard_normal((5, 12))
    proxy = np.round(true + rng.standard_normal((5, 12)), 1)  # with ties
    true[:, 3] = true[:, 4]
    got = rank_correlations(proxy, true)
    want = [
        (stats.spearmanr(p, t).statistic, stats.kendalltau(p, t, variant="b").statistic)
        for p, t in zip(proxy, true, strict=True)
    ]
    np.testing.assert_allclose(got.per_prompt, want, rtol=1e-12)
    assert (got.spearman, got.kendall) == pytest.approx(np.mean(want, 0))
    pooled = stats.spearmanr(proxy.ravel(), true.ravel()).statistic
    assert abs(got.spearman - pooled) > 1e-3  # within prompts, not over the pool
    assert np.abs(np.subtract(*np.transpose(want))).min() > 0.01


def test_a_prompts_own_level_does_not_count():
    rng = np.random.default_rng(2)
    true = rng.standard_normal((4, 8))
    proxy = true + rng.standard_normal((4, 8))
    level = np.array([[0], [100], [-50], [7]])
    assert rank_correlations(proxy + level, true - level) == rank_correlations(proxy, true)


def test_pairs_that_are_not_finite_are_left_out():
    proxy = np.array([[1.0, NAN, 3.0, 2.0, 4.0, -9.0], [1.0, 2.0, 3.0, 4.0, np.inf, 5.0]])
    true = np.array([[1.0, 99.0, 2.0, 3.0, 4.0, NAN], [1.0, 2.0, 3.0, -np.inf, 4.0, 5.0]])
    got = rank_correlations(proxy, true)
    assert got.per_prompt[0] == pytest.approx((0.8, 2 / 3))
    assert got.per_prompt[1] == pytest.approx((1, 1))
    assert got.spearman == pytest.approx(0.9)


@pytest.mark.filterwarnings("error")
def test_a_prompt_without_two_distinct_rewards_is_undefined_and_in_no_mean():
    proxy = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [NAN, NAN, 1.0], [1.0, 2.0, 3.0]])
    true = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    got = rank_correlations(proxy, true)
    assert (got.spearman, got.kendall) == pytest.approx((1, 1))
    assert np.isnan([got.per_prompt[i] for i in (0, 2, 3)]).all()
    none = rank_correlations(proxy[:1], true[:1])
    assert np.isnan(none.spearman)
    assert np.isnan(none.kendall)
    assert len(none.per_prompt) == 1


def test_prompts_must_correspond():
    for figure, counts in (
        (rank_correlations, ()),
        (mean_true_rank, (1,)),
        (overlap, (1, 1)),
        (regret, (1, 1)),
    ):
        with pytest.raises(
            TypeCheckError, match="parameter 'true'"
        ):  # by the annotations, which are checked in tests
            figure(np.zeros((2, 3)), np.zeros((3, 3)), *counts)
    with pytest.raises(ValueError, match="zip"):  # and without them
        inspect.unwrap(rank_correlations)(np.zeros((1, 3)), np.zeros((3, 3)))


def test_overlap_by_hand():
    true = np.array([[10.0, 9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    proxy = np.array([[5.0, 1.0, 9.0, 8.0, 7.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    # first prompt: truly best 0 and 1; the proxy's best three are 2, 3, 4, its best four 2, 3, 4, 0
    assert overlap(proxy, true, 2, 2).tolist() == [0, 1]
    assert overlap(proxy, true, 2, 4).tolist() == [0.5, 1]
    assert overlap(proxy, true, 2, 5).tolist() == [1, 1]
    # truly worst 5 and 4; the proxy's worst two are 5 and 1
    assert overlap(proxy, true, 2, 2, best=False).tolist() == [0.5, 1]
    assert overlap(-proxy, -true, 2, 2).tolist() == [0.5, 1]


def test_overlap_orders_equal_rewards_by_index_as_selection_does():
    assert overlap(np.zeros((1, 4)), np.array([[4.0, 3.0, 2.0, 1.0]]), 2, 2).tolist() == [1]
    assert overlap(np.zeros((1, 4)), np.array([[1.0, 2.0, 3.0, 4.0]]), 2, 2).tolist() == [0]


def test_the_worst_of_equal_rewards_are_those_that_selection_keeps():
    proxy = np.array([[9.0, 5.0, 5.0, 5.0, 0.0]])
    true = np.array([[9.0, 8.0, 7.0, 6.0, 5.0]])
    index, _ = select(proxy, 4, "best_worst")
    assert index.tolist() == [[0, 1, 3, 4]]
    assert overlap(proxy, true, 2, 2, best=False).tolist() == [1]
    assert mean_true_rank(proxy, true, 2, best=False).tolist() == [4.5]
    assert mean_true_rank(proxy, true, 2).tolist() == [1.5]


def test_overlap_counts_a_reward_that_is_not_finite_to_neither_end():
    true = np.array([[5.0, 4.0, 3.0, 2.0, 1.0]])
    proxy = np.array([[NAN, 4.0, 3.0, 2.0, np.inf]])
    assert overlap(proxy, true, 1, 3).tolist() == [0]  # the best was lost
    assert overlap(proxy, true, 2, 3).tolist() == [0.5]
    assert overlap(proxy, true, 1, 3, best=False).tolist() == [0]
    assert overlap(true, proxy, 1, 2).tolist() == [1]
    assert overlap(true, proxy, 1, 2, best=False).tolist() == [1]


def test_overlap_where_fewer_rewards_are_finite_than_are_asked_for():
    """Values that are not finite fill no place: none of them is found or to be found."""
    true = np.array([[5.0, 4.0, 3.0, 2.0, 1.0]])
    few = np.array([[NAN, np.inf, 3.0, -np.inf, NAN]])
    for best in (True, False):
        assert overlap(few, true, 2, 4, best=best).tolist() == [
            0
        ]  # was 0.5 or 1: indices of what is not finite, in order
        assert overlap(few, true, 3, 4, best=best).tolist() == [1 / 3]
        assert overlap(true, few, 2, 3, best=best).tolist() == [
            1
        ]  # the one there is, third from either end
        assert overlap(true, few, 2, 2, best=best).tolist() == [0]
        assert overlap(few, few, 4, 4, best=best).tolist() == [1]
        assert overlap(np.full((1, 5), NAN), true, 2, 5, best=best).tolist() == [0]
        assert np.isnan(overlap(true, np.full((1, 5), NAN), 2, 5, best=best)).tolist() == [True]


def test_chance_overlap_is_the_share_that_is_kept():
    rng = np.random.default_rng(3)
    got = overlap(rng.standard_normal((400, 24)), rng.standard_normal((400, 24)), 4, 6)
    assert got.mean() == pytest.approx(6 / 24, abs=0.05)
    assert overlap(*np.tile(rng.standard_normal((400, 24)), (2, 1, 1)), 4, 6).mean() == 1


def test_regret_by_hand():
    true = np.array([[10.0, 9.0, 8.0, 7.0, 6.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    proxy = np.array([[5.0, 1.0, 9.0, 8.0, 7.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    # first prompt: the proxy's best two are 2 and 3, whose true rewards are 8 and 7 instead of 10
    # and 9; the range is 10
    assert regret(proxy, true, 2, 2).tolist() == pytest.approx([0.2, 0])
    assert regret(proxy, true, 1, 2).tolist() == pytest.approx([0.2, 0])
    assert regret(proxy, true, 2, 4).tolist() == pytest.approx(
        [0.05, 0]
    )  # 10 is kept, and 8 in place of 9
    assert regret(proxy, true, 2, 5).tolist() == [0, 0]
    assert regret(-true, true, 2, 2).tolist() == pytest.approx([0.65, 0.8])


def test_regret_is_little_where_others_are_as_good_and_the_overlap_is_not():
    true = np.array([[1.0, 0.999, 0.998, 0.997, 0.2, 0.0]])
    proxy = true[:, [3, 2, 1, 0, 4, 5]]
    assert overlap(proxy, true, 2, 2).tolist() == [0]
    assert regret(proxy, true, 2, 2).tolist() == pytest.approx([0.002])
    assert regret(np.zeros((1, 3)), np.full((1, 3), 7.0), 2, 2).tolist() == [0]  # nothing to lose


def test_regret_does_not_depend_on_the_scale_of_rewards():
    rng = np.random.default_rng(4)
    true, proxy = rng.standard_normal((2, 50, 24))
    got = regret(proxy, true, 4, 6)
    assert got.min() >= 0
    assert got.max() < 1
    assert 0.1 < got.mean() < 0.4  # by chance
    np.testing.assert_allclose(regret(3 * proxy - 1, 100 * true + 5, 4, 6), got, rtol=1e-12)


def test_regret_of_rewards_that_are_not_finite():
    true = np.array([[5.0, 4.0, NAN, 1.0, np.inf]])
    assert regret(np.array([[NAN, 4.0, 9.0, 1.0, 8.0]]), true, 1, 3).tolist() == pytest.approx(
        [1 / 4]
    )  # 4 instead of 5
    assert regret(np.array([[NAN, NAN, NAN, 1.0, NAN]]), true, 2, 3).tolist() == pytest.approx(
        [3.5 / 4]
    )  # 1 and 1
    assert regret(np.full((1, 5), NAN), true, 2, 3).tolist() == pytest.approx([3.5 / 4])
    assert regret(true, true, 4, 4).tolist() == [0]  # the three there are
    assert np.isnan(regret(true, np.full((1, 5), NAN), 1, 2)).tolist() == [True]


def test_mean_true_rank_by_hand():
    true = np.array([[10.0, 9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    proxy = np.array([[5.0, 1.0, 9.0, 8.0, 7.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    # first prompt: the proxy's best two are 2 and 3, truly third and fourth; its worst two are 5
    # and 1, truly last and second
    assert mean_true_rank(proxy, true, 2).tolist() == [3.5, 1.5]
    assert mean_true_rank(proxy, true, 2, best=False).tolist() == [4.0, 5.5]
    assert mean_true_rank(proxy, true, 3).tolist() == [4.0, 2.0]
    assert (
        mean_true_rank(proxy, true, 6).tolist()
        == mean_true_rank(proxy, true, 6, best=False).tolist()
        == [3.5, 3.5]
    )
    assert mean_true_rank(-true, true, 2).tolist() == [5.5, 5.5]  # the reverse order


@pytest.mark.parametrize("levels", [1, 3, 96])
def test_the_mean_true_rank_of_a_perfect_proxy(levels):
    """Also with equal rewards. A random proxy gives the middle."""
    rng = np.random.default_rng(6)
    true = rng.integers(levels, size=(200, 24)).astype(float)
    for within in (1, 6, 12):
        assert (mean_true_rank(3 * true - 1, true, within) == (within + 1) / 2).all()
        assert (
            mean_true_rank(3 * true - 1, true, within, best=False) == 24 - (within - 1) / 2
        ).all()
    chance = rng.standard_normal((200, 24))
    for best in (True, False):
        assert mean_true_rank(chance, true, 6, best=best).mean() == pytest.approx(12.5, abs=0.6)


def test_equal_true_rewards_are_ranked_by_index():
    true = np.array([[1.0, 1.0, 1.0, 1.0]])
    proxy = np.array([[1.0, 2.0, 3.0, 4.0]])
    assert mean_true_rank(proxy, true, 1).tolist() == [4]
    assert mean_true_rank(proxy, true, 1, best=False).tolist() == [1]
    assert mean_true_rank(true, proxy, 2).tolist() == [3.5]  # 0 and 1, truly the worst


def test_the_mean_true_rank_of_rewards_that_are_not_finite():
    true = np.array([[5.0, 4.0, NAN, 2.0, 1.0]])  # ranks 1, 2, none, 3, 4
    proxy = np.array([[NAN, 4.0, 3.0, 2.0, np.inf]])  # best to worst: 1, 2, 3
    assert mean_true_rank(proxy, true, 1).tolist() == [2]
    assert mean_true_rank(proxy, true, 2).tolist() == [2]  # candidate 2 has no rank
    assert mean_true_rank(proxy, true, 3).tolist() == [2.5]
    assert mean_true_rank(proxy, true, 1, best=False).tolist() == [3]
    assert mean_true_rank(true, true, 4, best=False).tolist() == [2.5]  # the four there are
    assert np.isnan(mean_true_rank(np.array([[0.0, 0.0, 9.0, 0.0, 0.0]]), true, 1)).tolist() == [
        True
    ]
    assert np.isnan(mean_true_rank(np.full((1, 5), NAN), true, 2)).tolist() == [True]
