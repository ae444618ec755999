"""What paths are straightened on: which couples, at which noise levels, and points on the line between their ends."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def straight(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("pretrain.straight")


def test_all_that_is_right_is_learned_and_a_share_of_the_rest(straight):
    right = np.arange(10_000) % 4 == 0
    learned = straight.learned_rows(right, 0.3, seed=0)
    assert len(np.unique(learned)) == len(learned)
    assert right[learned].sum() == right.sum()
    assert abs((~right[learned]).sum() / (~right).sum() - 0.3) < 0.02


def test_points_lie_on_the_line_from_the_picture_to_its_noise(straight):
    x0, noise = np.random.default_rng(0).standard_normal((2, 5, 2, 2, 3)).astype(np.float32)
    sigma = np.float32([0, 0.25, 0.5, 0.75, 1])
    points = np.asarray(straight.between(x0, noise, sigma))
    np.testing.assert_array_equal(points[[0, -1]], [x0[0], noise[-1]])
    for point, picture, its_noise, level in zip(points, x0, noise, sigma, strict=True):
        np.testing.assert_allclose(point, picture + level * (its_noise - picture), atol=1e-6)


def test_noise_levels_begin_at_pure_noise(straight):
    levels = np.asarray(straight.sigmas(jax.random.key(0), 20_000))
    assert abs((levels == 1).mean() - straight.AT_NOISE) < 0.01
    below = levels[levels < 1]
    np.testing.assert_allclose(np.quantile(below, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.02)
