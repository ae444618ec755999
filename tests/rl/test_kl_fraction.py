"""`algorithm.kl_fraction`: the reference policy on a random fraction of the terms, against a plain
loop over the terms; and that the draw is uniform.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.diffusion.seeds import normal
from solrl_jax.rl.update import reference_terms, update
from tests.rl.test_update import (
    CONFIG,
    ROWS,
    SLOTS,
    STEPS,
    TOLERANCE,
    batch_of,
    norm,
    run,
    state_of,
    term,
)
from tests.toys import toy_backbone, toy_grid

MICRO = 6
TERMS = ROWS * SLOTS


def config_of(fraction, kl_coef=CONFIG.algorithm.kl_coef):
    return dataclasses.replace(
        CONFIG,
        algorithm=dataclasses.replace(CONFIG.algorithm, kl_fraction=fraction, kl_coef=kl_coef),
        optimizer=dataclasses.replace(CONFIG.optimizer, per_device_batch_size=MICRO),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((1, 1), id="one device"),
        pytest.param((2, 1, 2), id="data=2 tensor=2"),
    ],
)
def test_the_update_is_the_loop_over_terms_with_the_drawn_ones_scaled_up(mesh):
    """A third of each micro-batch of six terms: two of them, with three times the weight."""
    backbone = toy_backbone(*mesh)
    batch = batch_of(backbone)
    _, metrics = run(backbone, batch, config_of(1 / 3))
    one = toy_backbone()
    state = state_of(one)
    losses = []
    gradients = []
    for start in range(0, TERMS, MICRO):
        numbers = start + np.arange(MICRO)
        draws = normal(
            batch.seeds[numbers % ROWS], "reference", (), numbers // ROWS * MICRO + np.arange(MICRO)
        )
        drawn = set(np.argsort(np.asarray(draws))[:2])
        for place, number in enumerate(numbers):
            weight = 3.0 if place in drawn else 0.0
            row = int(number) % ROWS
            slot = int(number) // ROWS
            loss, gradient = term(one, state, batch_of(one), row, slot, weight)
            losses.append(float(loss))
            gradients.append(gradient)
    gradient = jax.tree.map(
        lambda *g: sum(np.asarray(x, np.float64) for x in g) / TERMS, *gradients
    )
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=TOLERANCE)
    _, everywhere = run(backbone, batch, config_of(1.0))
    assert abs(everywhere["loss"] - metrics["loss"]) > 10 * TOLERANCE * abs(metrics["loss"])


@pytest.mark.slow
def test_every_term_is_drawn_equally_often_even_if_terms_share_a_seed():
    """Six terms of which the last three repeat the first one, as padding does: 4000 draws of two,
    within 4.5 standard errors.
    """
    draws = 4000
    seeds = np.random.default_rng(0).integers(0, 2**32, (draws, 3, 2), dtype=np.uint32)
    seeds = np.concatenate([seeds, np.repeat(seeds[:, :1], 3, axis=1)], axis=1)
    slot = jnp.zeros(6, jnp.int32)
    terms = np.asarray(jax.vmap(lambda s: reference_terms(s, slot, 0.3))(seeds))
    assert terms.shape == (draws, 2)  # 0.3 of six terms, rounded up
    counts = np.bincount(terms.reshape(-1), minlength=6)
    assert (terms[:, 0] != terms[:, 1]).all()
    assert abs(counts / draws - 1 / 3).max() < 4.5 * np.sqrt(1 / 3 * 2 / 3 / draws)


@pytest.mark.exhaustive
def test_the_reference_costs_its_fraction():
    """Operations by XLA's count, between those without a KL term and those with all of it.

    At the same inputs, all policies of the toy share the first linear layer, so XLA computes it
    once. The whole reference therefore costs one layer, and a third of it costs a third of two.
    """
    backbone = toy_backbone()

    def operations(config):
        with jax.set_mesh(backbone.mesh):
            lowered = update.lower(
                backbone,
                config,
                state_of(backbone),
                backbone.transformer,
                batch_of(backbone),
                toy_grid(STEPS),
            )
        return lowered.compile().cost_analysis()["flops"]

    none, third, whole = (
        operations(config_of(*setting)) for setting in ((1.0, 0.0), (1 / 3,), (1.0,))
    )
    assert (third - none) / (whole - none) == pytest.approx(2 / 3, abs=0.1)


@pytest.mark.parametrize("objective", ["dpo", "my_module:loss"])
def test_objectives_that_read_the_reference_of_every_term_are_refused(objective):
    with pytest.raises(
        ConfigError, match=r"algorithm.kl_fraction=0.5: must be 1 with .*" + objective
    ):
        resolve("tiny", [f"objective={objective}", "algorithm.kl_fraction=0.5"])
