"""Regeneration that continues from exploration computes what regeneration from noise does, to the
bit.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.rl import iteration as loop
from solrl_jax.rl import memory_check
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.continuation import continued_steps
from solrl_jax.rl.trainable.trainable import TrainedPaths
from solrl_jax.study.cost import Prices, count_network_evaluations
from tests.toys import toy_experiment

STEPS = ("rollout.num_steps=6", "rollout.explore.num_steps=4", "rollout.explore.sigmas=first")
MESHES = {"one": (1, 1), "data=2 fsdp=2": (2, 2), "data=2 tensor=2": (2, 1, 2)}


def iterated(monkeypatch, *overrides, mesh=(1, 1)):
    """The batch that an iteration trains on, its ledger, and the samplers of its two phases.

    The adapters are away from zero, so that quantized and exact steps differ.
    """
    experiment = toy_experiment(*STEPS, *overrides, mesh=mesh)
    state = fresh_state(experiment)
    state = dataclasses.replace(state, old=jax.tree.map(lambda x: x + 0.1, state.old))
    samplers = []
    batches = []
    generate = loop.generate

    def recorded(backbone, sampler, *args, **options):
        samplers.append(sampler)
        return generate(backbone, sampler, *args, **options)

    def not_updated(backbone, config, state, base, batch, schedule):
        batches.append(batch)
        return state, {}

    with monkeypatch.context() as patch:
        patch.setattr(loop, "generate", recorded)
        patch.setattr(loop, "update", not_updated)
        _, outcome = loop.iterate(experiment, state, 1)
    exploring = samplers[0]
    kept = exploring.segments[0].schedule.steps if exploring.keep_intermediate else 0
    assert outcome.metrics["continued_steps"] == kept
    return batches[0], outcome.ledger, samplers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "count", "objective", "mesh"),
    [
        ("dpm1", 2, "nft", "data=2 tensor=2"),
        ("dpm2", 1, "opsd", "one"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                *(("dpm1", 1, "nft", mesh) for mesh in MESHES),
                *(("dpm1", 2, "nft", mesh) for mesh in ("one", "data=2 fsdp=2")),
                *(("dpm2", 1, "nft", mesh) for mesh in MESHES),
                *(("dpm2", 1, "opsd", mesh) for mesh in ("data=2 tensor=2", "data=2 fsdp=2")),
            ]
        ),
    ],
)
def test_continued_samples_are_those_from_noise_to_the_bit(
    solver, count, objective, mesh, monkeypatch
):
    """With opsd, the state that is trained at and its targets, too."""
    options = (
        f"rollout.solver={solver}",
        f"rollout.explore.exact_steps={count}",
        f"objective={objective}",
    )
    batch, ledger, (exploring, regenerating) = iterated(monkeypatch, *options, mesh=MESHES[mesh])
    assert exploring.keep_intermediate
    assert [segment.schedule.steps for segment in exploring.segments] == [count, 4 - count]
    assert [segment.schedule.steps for segment in regenerating.segments] == [6 - count]
    monkeypatch.setattr(loop, "continued_steps", lambda *args: 0)
    from_noise, whole_ledger, (exploring, regenerating) = iterated(
        monkeypatch, *options, mesh=MESHES[mesh]
    )
    assert not exploring.keep_intermediate
    assert regenerating.segments[0].schedule.steps == 6
    assert ledger.keys() == whole_ledger.keys()
    for name, column in whole_ledger.items():
        np.testing.assert_array_equal(ledger[name], column, err_msg=name)
    assert np.ptp(ledger["regenerated_reward"].compressed()) > 1e-3
    for got, expected in zip(jax.tree.leaves(batch), jax.tree.leaves(from_noise), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler", "dpm1", "dpm2", "ddim"])
def test_continued_steps_are_the_first_ones_of_the_regeneration(solver):
    """Schedules are compared to the bit. No step after them reads predictions from before."""
    applied = []
    for sigmas, count, steps in itertools.product(("default", "first"), (1, 2, 3), (4, 6)):
        experiment = toy_experiment(
            "rollout.num_steps=6",
            f"rollout.solver={solver}",
            f"rollout.explore.num_steps={steps}",
            f"rollout.explore.sigmas={sigmas}",
            f"rollout.explore.exact_steps={count}",
        )
        rollout = experiment.config.rollout
        continued = continued_steps(rollout, "nvfp4", steps)
        full = experiment.schedule(6)
        explored = experiment.explorer.schedule(steps)
        same = all(
            np.array_equal(getattr(full, name)[:count], getattr(explored, name)[:count])
            for name in ("sigmas", "timesteps", "table")
        ) and (full.guided, full.embedded_guidance) == (explored.guided, explored.embedded_guidance)
        # The coefficients of earlier predictions: the last one and the one before it.
        reads_earlier = full.table[count, 2:4].any() or full.table[count + 1 :, 3].any()
        assert continued == (count if same and not reads_earlier else 0)
        applied.append(continued)
    # All steps: six cases. First sigmas: one and two of four steps. A second exact step of dpm2 is
    # always too many.
    assert np.count_nonzero(applied) == (3 if solver == "dpm2" else 8)


@pytest.mark.parametrize(
    ("overrides", "precision", "expected"),
    [
        ((), "nvfp4", 1),
        ((), "fp8", 1),
        ((), "bf16", 0),  # explores in one segment
        (("rollout.explore.exact_steps=0",), "nvfp4", 0),
        (("rollout.explore.sigmas=default",), "nvfp4", 0),
        (("rollout.explore.exact_steps=3",), "nvfp4", 0),  # two of four are the first sigmas
        (("rollout.solver=dpm2",), "nvfp4", 1),
        (("rollout.solver=dpm2", "rollout.explore.exact_steps=2"), "nvfp4", 0),
        (("rollout.explore.num_steps=6", "rollout.regenerate=false"), "nvfp4", 0),
        (
            (
                "rollout.explore.num_steps=6",
                "rollout.explore.sigmas=default",
                "rollout.solver=flow_sde",
                "rollout.noise_level=0.7",
            ),
            "nvfp4",
            0,
        ),
    ],
)
def test_regeneration_starts_from_noise_where_it_cannot_continue(overrides, precision, expected):
    rollout = resolve("tiny", [*STEPS, "rollout.explore.exact_steps=1", *overrides]).rollout
    steps = rollout.explore.num_steps
    exact = rollout.explore.exact_steps
    assert continued_steps(rollout, precision, steps) == expected
    assert continued_steps(rollout, precision, steps, range(exact, exact + 2)) == expected
    assert continued_steps(rollout, precision, steps, range(exact - 1, exact + 1)) == 0


@pytest.mark.parametrize(
    ("objective", "factor"),
    [
        ((), 2),
        (("objective=opsd", "algorithm.query_sigma=0.278"), 2),
        (("objective=opsd", "algorithm.query_sigma=1.0"), 1),  # trains at the noise
    ],
)
def test_the_host_must_hold_the_latents_between_both_phases(objective, factor):
    """Not where the objective needs a state before the exact steps end."""

    def candidate_bytes(*overrides):
        overrides += objective
        experiment = toy_experiment(*STEPS, *overrides, "rollout.explore.precision=nvfp4")
        pipeline = experiment.backbone.pipeline
        requests = memory_check._requests(
            experiment.config, pipeline, TrainedPaths(()), 1, {}, 10**9, 1e9
        )
        return requests[0].unit

    assert candidate_bytes("rollout.explore.exact_steps=1") == factor * candidate_bytes()


def test_steps_that_are_continued_from_cost_nothing_a_second_time():
    prices = Prices("toy", {"bf16": 1.0, "nvfp4": 0.5}, 0.0, 0.0, 0.0)
    config = resolve("tiny", [*STEPS, "rollout.explore.exact_steps=1", "rollout.precision=bf16"])
    prompts = config.train.num_prompts
    pool = prompts * config.rollout.candidates
    kept = prompts * config.rollout.kept
    assert prices.iteration_seconds(config, "nvfp4", 4) == pool * (3 * 0.5 + 1) + kept * 5
    assert count_network_evaluations(config, "nvfp4", 4) == pool * 4 + kept * 5
    assert prices.iteration_seconds(config, "bf16", 4) == pool * 4 + kept * 6
    assert count_network_evaluations(config, "bf16", 4) == pool * 4 + kept * 6
    # An iteration that recorded a state before that has regenerated all steps.
    assert prices.iteration_seconds(config, "nvfp4", 4, 0) == pool * (3 * 0.5 + 1) + kept * 6
    assert count_network_evaluations(config, "nvfp4", 4, 0) == pool * 4 + kept * 6
