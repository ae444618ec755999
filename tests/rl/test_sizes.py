"""Pictures of several sizes: which an iteration has, that each compiles once, and that nothing else
depends on it.
"""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from solrl_jax.config.sizes import training_sizes
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.rewards.protocol import score_images
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.sync import quantize_policy
from solrl_jax.rl.generate import decode_chunk, draw_noise, sample_chunk
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.update import update
from solrl_jax.runs.evaluate import describe_evaluation, evaluate, pool_images, sample_grid
from tests.toys import toy_experiment

PROGRAMS = (sample_chunk, decode_chunk, score_images, draw_noise, update, quantize_policy)
SIZES = ((32, 32), (16, 48), (24, 16))
SEVERAL = "rollout.size=[[32,32],[16,48],[24,16]]"


@pytest.fixture(scope="module")
def toy():
    return toy_experiment(SEVERAL)


def another(toy, *overrides):
    """With other settings and the same network, whose programs are compiled."""
    config = toy_experiment(*overrides).config
    return dataclasses.replace(toy, config=config, size=training_sizes(config)[0])


def sizes_of(toy, count):
    return [toy.for_iteration(iteration).size for iteration in range(1, count + 1)]


def test_every_cycle_goes_through_all_sizes_in_an_order_of_its_own(toy):
    drawn = sizes_of(toy, 30)
    cycles = [tuple(drawn[i : i + 3]) for i in range(0, 30, 3)]
    assert all(sorted(cycle) == sorted(SIZES) for cycle in cycles)
    assert len(set(cycles)) > 2
    assert sizes_of(toy_experiment(SEVERAL), 30) == drawn  # as a run that is resumed has it
    assert sizes_of(toy_experiment(SEVERAL, "seed=1"), 30) != drawn
    twice = toy_experiment("rollout.size=[[32,32],[16,48],[32,32]]")
    assert Counter(sizes_of(twice, 30)) == {(32, 32): 20, (16, 48): 10}
    assert sizes_of(toy_experiment("rollout.size=[16,48]"), 3) == [(16, 48)] * 3
    assert sizes_of(toy_experiment(), 3) == [(32, 32)] * 3


@pytest.mark.exhaustive
def test_each_size_is_traced_once(toy):
    state = fresh_state(toy)
    counts = []
    for iteration in range(1, 7):
        before = [program._cache_size() for program in PROGRAMS]
        state, outcome = iterate(toy, state, iteration)
        counts.append(
            [program._cache_size() - b for program, b in zip(PROGRAMS, before, strict=True)]
        )
        assert (outcome.metrics["size/height"], outcome.metrics["size/width"]) == toy.for_iteration(
            iteration
        ).size
        assert (outcome.metrics["seconds/compile"] > 0) == (iteration <= 3)
    explored_and_regenerated = 2
    others = [1, 1, 1, 1]
    synced = 1
    assert counts[0] == [explored_and_regenerated, *others, synced]
    assert (
        counts[1:3] == [[explored_and_regenerated, *others, 0]] * 2
    )  # the quantized copy has no size
    assert not np.any(counts[3:])


@pytest.mark.exhaustive
def test_an_iteration_is_that_of_a_run_of_its_size_alone(toy):
    """Bit for bit: the noise of a candidate depends on its address and the size, and on no other
    size of the run.
    """
    iteration = next(i for i in range(1, 4) if toy.for_iteration(i).size == (16, 48))
    alone = another(toy, "rollout.size=[16,48]")
    (state, outcome), (other, expected) = (
        iterate(t, fresh_state(t), iteration) for t in (toy, alone)
    )
    for name, column in expected.ledger.items():
        np.testing.assert_array_equal(
            np.ma.filled(outcome.ledger[name], 0), np.ma.filled(column, 0), err_msg=name
        )
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.exhaustive
def test_an_evaluation_does_not_depend_on_what_is_trained_on(toy):
    """Its size is the model's, or `eval.size`; pictures of a pool are those of the iteration."""
    adapters = fresh_state(toy).ema
    plain = another(toy)
    other = another(toy, SEVERAL, "eval.size=[40,24]")
    scores = [evaluate(t, adapters).scores["reward"] for t in (toy, plain, other)]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert np.abs(scores[2] - scores[1]).max() > 1e-4
    assert [
        describe_evaluation(t).split("; ")[0].rpartition("of ")[2] for t in (toy, plain, other)
    ] == [
        "32 x 32",
        "32 x 32",
        "24 x 40",
    ]
    assert sample_grid(other, adapters).images.shape[2:4] == (
        10,
        6,
    )  # the toy's pictures are a quarter as large
    assert sample_grid(toy, adapters).images.shape[2:4] == (8, 8)
    state, outcome = iterate(toy, fresh_state(toy), 2)
    pool = pool_images(toy, state.old, toy.explorer.settings[0], outcome.ledger, 2)
    height, width = toy.for_iteration(2).size
    assert {grid.images.shape[2:4] for grid in pool.phases.values()} == {(height // 4, width // 4)}


def test_a_schedule_by_resolution_is_that_of_the_size():
    toy = toy_experiment(SEVERAL, "rollout.schedule=flux")
    for height, width in SIZES:
        variant = toy.with_size((height, width))
        expected = make_sigmas("flux", 3, 1.0, height * width // 64)[:-1].astype(np.float32)
        np.testing.assert_array_equal(variant.schedule(3).sigmas, expected)
        explored = (
            variant.explorer.sampler(fresh_state(toy).old, toy.explorer.settings[0])
            .segments[0]
            .schedule
        )
        np.testing.assert_array_equal(
            explored.sigmas,
            make_sigmas("flux", 2, 1.0, height * width // 64)[:-1].astype(np.float32),
        )
        assert (
            variant.explorer is toy.with_size((height, width)).explorer
        )  # what is measured on a size is measured once
    assert (
        np.abs(
            toy.with_size(SIZES[0]).schedule(3).sigmas - toy.with_size(SIZES[2]).schedule(3).sigmas
        ).max()
        > 1e-4
    )
