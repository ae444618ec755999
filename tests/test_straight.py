"""Straightening: what a network is asked for, and that it leads noise to the picture that it is coupled with."""

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


def test_noise_levels_begin_at_pure_noise(straight):
    levels = np.asarray(straight.sigmas(jax.random.key(0), 20_000))
    assert abs((levels == 1).mean() - straight.AT_NOISE) < 0.01
    below = levels[levels < 1]
    np.testing.assert_allclose(np.quantile(below, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.02)
