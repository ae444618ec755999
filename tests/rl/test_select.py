"""Which candidates are kept: the right ends, stable, blind to order, never one without a reward;
and the paper's bound.
"""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from solrl_jax.rl.select import best_and_worst, rank_candidates, select

MODES = ("best_worst", "best", "random", "best_random")
N = 8
KEPT = 4
# few values, so that ties abound, and some that are no rewards
TIED = arrays(
    np.float32, (3, N), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0, np.nan, np.inf, -np.inf])
)
unhurried = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
DISTINCT = arrays(np.float32, (2, N), elements=st.integers(-1000, 1000).map(float), unique=True)


def by_hand(row, kept, mode):
    """Best first, equal rewards by index; then the two ends of that list."""
    order = sorted(
        (i for i in range(len(row)) if math.isfinite(row[i])), key=lambda i: (-row[i], i)
    )
    if len(order) < kept:
        return None
    return sorted(
        order[:kept] if mode == "best" else order[: kept // 2] + order[len(order) - kept // 2 :]
    )


def test_best_worst_keeps_both_ends_and_best_one():
    rewards = np.array([[3, 9, 1, 7, 5, 8, 2, 4], [0, 1, 2, 3, 4, 5, 6, 7]], np.float32)
    for kept, both, best in (
        (2, [[1, 2], [0, 7]], [[1, 5], [6, 7]]),
        (4, [[1, 2, 5, 6], [0, 1, 6, 7]], [[1, 3, 4, 5], [4, 5, 6, 7]]),
    ):
        chosen, usable = select(rewards, kept, "best_worst")
        assert chosen.tolist() == both
        assert usable.all()
        assert select(rewards, kept, "best")[0].tolist() == best


@pytest.mark.parametrize("mode", MODES)
def test_keeping_all_keeps_all(mode):
    chosen, usable = select(np.arange(16.0).reshape(2, 8)[:, ::-1], 8, mode)
    assert chosen.tolist() == [list(range(8))] * 2
    assert usable.all()


def test_unsigned_integers_are_rewards_too():
    np.testing.assert_array_equal(
        rank_candidates(np.array([[1, 2, 3, 0]], np.uint8)), [[2, 1, 0, 3]]
    )


def test_equal_rewards_are_ordered_by_index():
    rewards = np.zeros((1, 6), np.float32)
    assert rank_candidates(rewards).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert select(rewards, 2, "best")[0].tolist() == [[0, 1]]
    assert select(rewards, 2, "best_worst")[0].tolist() == [[0, 5]]
    assert rank_candidates(np.array([[1, 2, 1, 2, np.nan, 1]])).tolist() == [[2, 0, 3, 1, 5, 4]]


@pytest.mark.parametrize("mode", ["best_worst", "best"])
@unhurried
@given(TIED)
def test_selection_is_the_one_by_hand(mode, rewards):
    chosen, usable = select(rewards, KEPT, mode)
    assert chosen.shape == (3, KEPT)
    for row, indices, good in zip(rewards, chosen.tolist(), usable, strict=True):
        want = by_hand(row, KEPT, mode)
        assert good == (want is not None)
        assert indices == (
            want if good else list(range(KEPT))
        )  # a prompt that cannot be used has padding


@pytest.mark.parametrize("mode", MODES)
@unhurried
@given(TIED)
def test_a_reward_that_is_not_finite_is_never_selected(mode, rewards):
    chosen, usable = select(rewards, KEPT, mode)
    assert (usable == (np.isfinite(rewards).sum(1) >= KEPT)).all()
    assert np.isfinite(np.take_along_axis(rewards, chosen, 1)[usable]).all()
    assert (np.diff(chosen, axis=1) > 0).all()  # ascending, hence distinct


@unhurried
@given(TIED)
def test_pairs_are_the_ends_of_the_finite_rewards(rewards):
    best, worst = (x.reshape(3, N // 2) for x in best_and_worst(rewards))
    for number, row in enumerate(rewards):
        finite = [i for i in range(N) if math.isfinite(row[i])]
        order = sorted(finite, key=lambda i: (-row[i], i))
        pairs = len(order) // 2
        places = number * N + np.array(order, int)
        assert best[number, :pairs].tolist() == places[:pairs].tolist()
        assert worst[number, :pairs].tolist() == places[::-1][:pairs].tolist()
        assert (best[number, pairs:] == worst[number, pairs:]).all()  # these count for nothing


@unhurried
@given(TIED)
def test_ranks_are_a_permutation_with_the_non_finite_last(rewards):
    places = rank_candidates(rewards)
    assert (np.sort(places, 1) == np.arange(N)).all()
    for row, place in zip(rewards, places, strict=True):
        finite = np.isfinite(row)
        assert (place[finite] < finite.sum()).all()
        ordered = row[np.argsort(place)][: finite.sum()]
        assert (np.diff(ordered) <= 0).all()


@pytest.mark.parametrize("mode", ["best_worst", "best"])
@unhurried
@given(DISTINCT, st.permutations(range(N)))
def test_without_ties_the_order_of_candidates_does_not_matter(mode, rewards, permutation):
    permutation = np.array(permutation)
    chosen = select(rewards, KEPT, mode)[0]
    permuted = select(rewards[:, permutation], KEPT, mode)[0]
    assert (np.sort(permutation[permuted], 1) == chosen).all()


@unhurried
@given(DISTINCT)
def test_prompts_do_not_concern_each_other(rewards):
    alone = [select(row[None], KEPT, "best_worst")[0][0].tolist() for row in rewards]
    assert select(rewards, KEPT, "best_worst")[0].tolist() == alone


def test_a_prompt_with_too_few_rewards_is_flagged_and_harms_no_other():
    rewards = np.tile(np.arange(6.0), (3, 1))
    rewards[1, :3] = np.nan
    rewards[2, :2] = np.inf
    for mode in MODES:
        chosen, usable = select(rewards, 4, mode, seed=(1,))
        assert usable.tolist() == [True, False, True]
        assert chosen[1].tolist() == [0, 1, 2, 3]
        assert chosen[2].tolist() == [2, 3, 4, 5]
        assert (
            chosen[0].tolist() == select(rewards[:1], 4, mode, seed=(1,))[0][0].tolist()
            or "random" in mode
        )


def test_random_is_a_uniform_draw_from_the_seed():
    rewards = np.tile(np.arange(8.0), (500, 1))
    rewards[:, 5] = np.nan
    chosen, usable = select(rewards, 3, "random", seed=(0, 1))
    assert usable.all()
    np.testing.assert_array_equal(select(rewards, 3, "random", seed=(0, 1))[0], chosen)
    np.testing.assert_array_equal(
        select(-rewards, 3, "random", seed=(0, 1))[0], chosen
    )  # rewards have no say
    assert (select(rewards, 3, "random", seed=(0, 2))[0] != chosen).mean() > 0.3
    counts = np.bincount(chosen.ravel(), minlength=8)
    assert counts[5] == 0
    assert np.delete(counts, 5) == pytest.approx(
        np.full(7, 1500 / 7), abs=50
    )  # 4.5 standard deviations


def test_best_random_keeps_the_best_and_draws_the_rest():
    rewards = np.tile(np.arange(8.0), (700, 1))
    rewards[:, 2] = np.nan
    chosen, usable = select(rewards, 4, "best_random", seed=(0, 1))
    assert usable.all()
    assert (chosen[:, 2:] == [6, 7]).all()
    counts = np.bincount(chosen[:, :2].ravel(), minlength=8)
    assert counts[2] == 0
    assert counts[[0, 1, 3, 4, 5]] == pytest.approx(
        np.full(5, 1400 / 5), abs=60
    )  # 4.6 standard deviations


def test_best_random_keeps_an_odd_number():
    rewards = np.tile(np.arange(8.0), (20, 1))
    chosen, usable = select(rewards, 5, "best_random", seed=(0, 1))
    assert usable.all()
    assert chosen.shape == (20, 5)
    assert (chosen[:, 3:] == [6, 7]).all()
    with pytest.raises(ValueError, match="even for two halves"):
        select(rewards, 5, "best_worst")


def test_an_unknown_mode_is_refused():
    with pytest.raises(
        ValueError,
        match=r"rollout\.selection='worst': must be one of 'best_worst', 'best', 'random', "
        r"'best_random'",
    ):
        select(np.zeros((1, 4)), 2, "worst")


def spread(x):
    return int(x.max() - x.min())


@unhurried
@given(
    arrays(np.int64, N, elements=st.integers(-100, 100)),
    arrays(np.int64, N, elements=st.integers(-10, 10)),
    st.sampled_from([2, 4, 6]),
)
def test_the_selected_extremes_span_the_pool_but_for_four_times_the_proxys_error(true, error, kept):
    """Spec, section 2; in whole numbers, so that the comparison is exact."""
    chosen, _ = select((true + error)[None].astype(np.float64), kept, "best_worst")
    assert spread(true[chosen[0]]) >= spread(true) - 4 * np.abs(error).max()


def test_the_bound_is_reached():
    delta = 5
    true = np.array([90, 100, 10, 0])
    proxy = true + delta * np.array(
        [1, -1, -1, 1]
    )  # 95 95 5 5: ties go to the lower index at the top, the higher below
    proxy[2] -= 1  # one beyond the tie
    chosen, _ = select(proxy[None].astype(np.float64), 2, "best_worst")
    assert chosen.tolist() == [[0, 2]]
    assert spread(true) - spread(true[chosen[0]]) == 4 * delta
