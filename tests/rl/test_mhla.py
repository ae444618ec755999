"""An iteration of a SANA with MHLA: explored in four bits, regenerated, trained.

What it adds learns and stays in bounds.
"""

import jax
import numpy as np
import pytest

from solrl_jax.quant.matmul import Quantized
from solrl_jax.rl.experiment import build, fresh_state
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import flatten
from tests.small import small_config


@pytest.mark.exhaustive
def test_an_iteration_trains_what_it_adds_within_its_bounds():
    """At a rate of 0.2, Adam's first step takes every entry of m far enough for some to meet a
    bound.
    """
    experiment = build(
        small_config(
            "unused",
            "model.attention=mhla",
            "optimizer.learning_rate=0.2",
            "eval.num_grid_images=0",
        )
    )
    mix, lepe = (f"transformer_blocks/attn1/{name}" for name in ("mix", "lepe/kernel"))
    assert experiment.trained_paths.whole == (lepe, mix)
    state = fresh_state(experiment)
    exploring = flatten(
        experiment.explorer.sampler(state.old, experiment.explorer.settings[0]).segments[0].policy
    )
    assert any(isinstance(leaf, Quantized) for leaf in exploring.values())
    assert not any(isinstance(exploring[path], Quantized) for path in (mix, lepe))
    start = jax.device_get(state.adapters)
    state, outcome = iterate(experiment, state, 1)
    trained = jax.device_get(state.adapters)
    assert np.isfinite(outcome.metrics["loss"])
    moved = np.abs(trained[mix] - start[mix])
    assert (moved > 0.01).mean() > 0.5
    assert trained[mix].min() == 0
    assert trained[mix].max() <= 1
    assert np.abs(trained[lepe] - start[lepe]).max() > 0.1  # has no bounds
    assert trained[lepe].min() < -0.1
