"""Straighter paths: which couples, at which noise levels, points on the line between their ends, one round after another."""

import importlib
import shutil
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.models.pipeline import open_pipeline
from solrl_jax.policy.lora import flatten

PIPELINES = Path(__file__).parents[2] / "solrl_jax" / "assets" / "pipelines"
SCRIPTS = Path(__file__).parents[2] / "scripts"


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


def test_each_round_goes_on_from_the_mean_that_the_last_one_wrote(straight, monkeypatch, tmp_path):
    """With a training that adds 1 to every weight: half of it, then a quarter. The embedded pipelines have so many rounds."""
    assert {name: len(rounds) for name, rounds in straight.ROUNDS.items()} == {"tiny-sana": 1, "tiny-flux": 1, "tiny-sd3": 2}
    args = Namespace(work=tmp_path / "work", out=tmp_path / "out", seed=0, batch=4)
    shutil.copytree(PIPELINES / "tiny-sana", straight.curved(args, "tiny-sana"))
    rounds = [straight.Round(stream=0, couples=8, wrong=1.0, steps=3, weight=weight) for weight in (0.5, 0.25)]
    monkeypatch.setattr(straight, "ROUNDS", {"tiny-sana": rounds})
    drawn, trained = [], []

    def draw_couples(args, name, label, round_, source, captions):
        drawn.append((round_, source))
        return {"right": np.ones(8, bool)}, None

    def train(label, params, loss, batches, steps, rate, work):
        trained.append((label, steps))
        return jax.tree.map(lambda x: x + 1, params)

    monkeypatch.setattr(straight, "draw_couples", draw_couples)
    monkeypatch.setattr(straight, "train", train)
    straight.straighten(args, "tiny-sana", [])

    load = lambda folder: flatten(open_pipeline(folder).transformer.load(jnp.float32))
    before, between, after = map(load, (straight.curved(args, "tiny-sana"), drawn[1][1], args.out / "tiny-sana"))
    assert drawn == [(rounds[0], straight.curved(args, "tiny-sana")), (rounds[1], args.work / "tiny-sana-straight-1")]
    assert trained == [("tiny-sana-straight-1", 3), ("tiny-sana-straight-2", 3)]
    for path, weights in before.items():
        np.testing.assert_allclose(between[path], weights + 0.5, rtol=2**-8, atol=2**-9)  # files are in BF16
        np.testing.assert_allclose(after[path], weights + 0.75, rtol=2**-7, atol=2**-8)
