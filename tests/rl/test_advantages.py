"""Advantages against plain loops in NumPy: both kinds of spread, all modes, rewards that are not
finite, the clip.
"""

import math

import numpy as np
import pytest

from solrl_jax.rl.advantages import LEVELS, MODES, STD_FLOOR, advantages, optimality
from tests.cases import first_is_quick

TOLERANCE = 1e-5
CLIP = 5.0


def reference(rewards, clip, global_std, mode):
    """Spec, section 3, one reward at a time."""
    rewards = np.asarray(rewards, np.float64)
    pool = [r for row in rewards for r in row if math.isfinite(r)]

    def deviation(values):
        return math.sqrt(sum((v - sum(values) / len(values)) ** 2 for v in values) / len(values))

    out = np.zeros_like(rewards)
    for p, row in enumerate(rewards):
        kept = [r for r in row if math.isfinite(r)]
        for k, r in enumerate(row):
            if not math.isfinite(r):
                continue
            a = (r - sum(kept) / len(kept)) / (deviation(pool if global_std else kept) + 1e-4)
            a = min(max(a, -clip), clip)
            out[p, k] = {
                "all": a,
                "positive_only": max(a, 0),
                "negative_only": min(a, 0),
                "one_only": float(a > 0),
                "binary": float(a > 0) - float(a < 0),
            }[mode]
    return out


def ours(rewards, *, clip=CLIP, global_std=True, mode="all"):
    return np.asarray(
        advantages(np.asarray(rewards, np.float32), clip=clip, global_std=global_std, mode=mode)
    )


def rewards(seed=0):
    """Prompts of different mean and spread."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((4, 6)) * [[0.1], [1], [3], [0.5]] + [[5], [0], [-2], [1]]).astype(
        np.float32
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("height", first_is_quick([0.0, 0.1, 1 / 3, 1000.1, -77.7, 1e17]))
def test_a_tie_is_no_advantage(height, global_std, mode):
    """Rewards that tie up to rounding, beside a prompt whose rewards do not."""
    tied = np.float32(height) * (1 + np.float32(1.2e-7) * np.arange(-3, 4))
    for row in (np.full(7, height), tied):
        got = ours([row, np.linspace(0, 1, 7)], global_std=global_std, mode=mode)
        assert not got[0].any()
        assert got[1].any() or (global_std and height == 1e17)
    apart = ours(
        [np.float32(abs(height) or 1.0) * (1 + 1e-4 * np.arange(7))],
        global_std=global_std,
        mode="binary",
    )
    np.testing.assert_array_equal(apart, [[-1, -1, -1, 0, 1, 1, 1]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("large", first_is_quick([3e38, -3e38, 1.1e18]))
def test_a_reward_whose_square_overflows_counts_as_not_finite(large, mode):
    r = rewards()
    without = rewards()
    r[1, 3] = large
    without[1, 3] = np.nan
    for global_std in (True, False):
        got = ours(r, global_std=global_std, mode=mode)
        np.testing.assert_array_equal(got, ours(without, global_std=global_std, mode=mode))
        assert np.isfinite(got).all()


def with_holes():
    r = rewards()
    r[0, 2] = np.nan
    r[1, 0] = np.inf
    r[1, 5] = -np.inf
    r[3, :5] = np.nan
    return r


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("case", ["finite", "holes"])
def test_advantages_equal_the_reference(case, global_std, mode):
    r = rewards() if case == "finite" else with_holes()
    want = reference(r, CLIP, global_std, mode)
    np.testing.assert_allclose(
        ours(r, global_std=global_std, mode=mode), want, atol=TOLERANCE, rtol=TOLERANCE
    )
    assert np.abs(want).max() > 0.2


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^advantage mode 'positive': must be one of all, positive_only, .*, binary$",
    ):
        ours(rewards(), mode="positive")


def test_the_cases_tell_the_options_apart():
    r = rewards()
    results = [
        reference(r, CLIP, g, m)
        for g in (True, False)
        for m in ("all", "positive_only", "negative_only")
    ]
    results += [reference(r, CLIP, True, m) for m in ("one_only", "binary")]
    for i, one in enumerate(results):
        assert all(np.abs(one - other).max() > 1e3 * TOLERANCE for other in results[:i])


@pytest.mark.parametrize("global_std", [True, False])
def test_a_reward_that_is_not_finite_takes_no_part(global_std):
    r = with_holes()
    got = ours(r, global_std=global_std)
    assert np.isfinite(got).all()
    assert not got[~np.isfinite(r)].any()
    other = np.where(
        np.isfinite(r), r, np.float32(np.nan)
    )  # which kind of non-finite is all the same
    np.testing.assert_array_equal(got, ours(other, global_std=global_std))
    # a prompt without any leaves the others as they would be alone
    missing = r.copy()
    missing[2] = np.nan
    got = ours(missing, global_std=global_std)
    assert not got[2].any()
    rest = [0, 1, 3]
    np.testing.assert_allclose(got[rest], ours(r[rest], global_std=global_std), atol=TOLERANCE)
    assert not ours(np.full((2, 3), np.nan), global_std=global_std).any()


@pytest.mark.parametrize("global_std", [True, False])
def test_equal_rewards_have_no_advantage(global_std):
    r = np.full((2, 4), 3.0, np.float32)
    assert not ours(r, global_std=global_std).any()
    assert not ours(r, global_std=global_std, mode="binary").any()
    assert not ours(r, global_std=global_std, mode="one_only").any()


def test_the_floor_under_the_deviation_damps_differences_that_mean_nothing():
    r = np.array([[1e-5, -1e-5]], np.float32)
    assert STD_FLOOR == 1e-4
    np.testing.assert_allclose(ours(r), [[1 / 11, -1 / 11]], rtol=TOLERANCE)


def test_the_deviation_is_that_of_the_population():
    np.testing.assert_allclose(ours([[1.0, -1.0]]), [[1 / 1.0001, -1 / 1.0001]], rtol=TOLERANCE)


def test_an_outlier_is_clipped():
    r = np.zeros((1, 40), np.float32)
    r[0, 7] = 1.0  # (n - 1) / sqrt(n - 1) = 6.2 deviations
    assert ours(r)[0, 7] == CLIP
    assert ours(-r)[0, 7] == -CLIP
    assert ours(r, clip=10.0)[0, 7] == pytest.approx(math.sqrt(39), rel=1e-3)
    assert ours(r, clip=2.0)[0, 7] == 2.0
    np.testing.assert_allclose(ours(r), reference(r, CLIP, True, "all"), atol=TOLERANCE)


def test_only_differences_within_a_prompt_count():
    r = rewards()
    shifted = r + np.array([[2], [-4], [8], [0]], np.float32)
    np.testing.assert_allclose(
        ours(shifted, global_std=False), ours(r, global_std=False), atol=10 * TOLERANCE
    )
    assert np.abs(ours(shifted) - ours(r)).max() > 0.1  # the spread over all prompts did change
    np.testing.assert_allclose(ours(8 * r), ours(r), atol=1e-2)  # scale-free but for the floor


def test_optimality_maps_the_clipped_range_to_zero_and_one():
    np.testing.assert_allclose(
        optimality(np.array([-5, -2.5, 0, 1, 2.5, 5]), CLIP),
        [0, 0.25, 0.5, 0.6, 0.75, 1],
        atol=0.5 / LEVELS,
    )
    np.testing.assert_array_equal(
        optimality(np.float32([1, 1 + 1e-6, 1 - 1e-6]), CLIP), [np.round(0.6 * LEVELS) / LEVELS] * 3
    )
    np.testing.assert_array_equal(optimality(np.array([-9.0, 9.0]), CLIP), [0, 1])
    np.testing.assert_allclose(optimality(np.array([1.0]), 2.0), [0.75])
    assert (optimality(ours(rewards(), mode="positive_only"), CLIP) >= 0.5).all()
