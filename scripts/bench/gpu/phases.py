"""The steps `steps`, `rollout` and `update`: the programs of an iteration at full size.

The weights are random.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.gpu.measure import Gauge, formats, over
from bench.gpu.programs import (
    config_of,
    reward_gradients,
    sampling,
    scoring,
    shortened,
    syncing,
    updating,
)
from bench.gpu.record import Record, Skipped, Task
from bench.random_weights import shapes_of_experiment, with_weights
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning.phases import Phases, Program
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.experiment import Experiment, fresh_state
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable

Figures = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def steps(task: Task) -> Figures:
    """Yields the figures of a batch that is regenerated, and explored in each format."""
    shapes = shapes_of_experiment(config_of(task))
    gauge = Gauge.here(task.repeat)
    experiment = with_weights(shapes)
    rollout = shapes.config.rollout
    adapters = fresh_state(experiment).old
    drafts, redone = Phases(shapes).num_batches(row_groups(experiment.backbone.mesh))

    def exact():
        return experiment.sampler("regenerate", adapters, rollout.num_steps)

    yield "regenerate", lambda: sampled(gauge, experiment, exact(), redone)
    for name in formats(task):
        yield (
            name,
            partial(
                explored,
                gauge,
                experiment,
                adapters,
                ExplorationSetting(name, rollout.explore.num_steps),
                drafts,
            ),
        )


def sampled(gauge: Gauge, experiment: Experiment, sampler: Sampler, calls: int) -> dict[str, Any]:
    """Measures the generation of one batch.

    Args:
        gauge: The gauge.
        experiment: The experiment.
        sampler: The sampler.
        calls: The number of such batches in an iteration.
    """
    count = sum(segment.schedule.steps for segment in sampler.segments)
    figures = gauge.measure(sampling(experiment, sampler, calls))
    plan = figures["plan"]
    per_step = {
        "step_seconds": figures["seconds"] / count,
        "step_plan": plan and plan["seconds"] / count,
    }
    return {"rows": sampler.samples_per_device, "steps": count} | per_step | figures


def explored(
    gauge: Gauge, experiment: Experiment, adapters: Trainable, level: ExplorationSetting, calls: int
) -> dict[str, Any]:
    """Measures `sync` and the exploration of one batch in one setting."""
    sync = gauge.measure(syncing(experiment, adapters, level.precision))
    sampler = experiment.explorer.sampler(adapters, level)
    means = FORMATS[level.precision].describe(experiment.device)
    return {"means": means, "sync": sync} | sampled(gauge, experiment, sampler, calls)


def rollout(task: Task) -> Figures:
    """Yields the figures of decoding and scoring a batch, and then those of the rollout phase.

    If the objective trains on the gradient of the reward, the figures of that gradient come between
    them. The phase is computed for `naive_scaling` (all candidates in the training precision with
    all steps) and for each format that `steps` has measured. It includes the gradients.
    """
    shapes = shapes_of_experiment(config_of(task))
    gauge = Gauge.here(task.repeat)
    measured = dict[str, dict[str, Any]]()

    def measure(program: Program) -> dict[str, Any]:
        measured[program.name] = gauge.measure(program)
        return measured[program.name]

    scored = scoring(shapes)
    gradients = reward_gradients(shapes)
    for program in (*scored, *gradients):
        yield program.name, partial(measure, program)
    record = Record.read(Task("steps", task.model, folder=task.folder).path)
    chunks = record.figures() if record else {}
    if "regenerate" not in chunks:
        raise Skipped(f"no chunk of {task.model} was regenerated in the step before")
    if len(measured) < len(scored) + len(gradients):
        raise Skipped("without decoding and scoring there is no phase to add up")
    phases = Phases(shapes)
    drafts, _ = phases.num_batches(row_groups(phases.mesh))
    most, _ = phases.num_batches(phases.mesh.size)
    learning = [(measured[program.name], program.calls) for program in gradients]
    naive = phase(
        [
            (chunks["regenerate"], drafts),
            *((measured[program.name], most) for program in scored),
            *learning,
        ]
    )
    yield "naive_scaling", lambda: naive
    for name in [name for name in chunks if name != "regenerate"]:
        parts = [
            (chunks[name]["sync"], 1),
            *((chunks[part], chunks[part]["calls"]) for part in (name, "regenerate")),
            *((measured[program.name], program.calls) for program in scored),
        ]
        found = phase([*parts, *learning])
        yield (
            f"sol_rl {name}",
            lambda found=found: found | {"times": round(naive["seconds"] / found["seconds"], 3)},
        )


def phase(parts: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Adds up the measured and the planned seconds of programs.

    Args:
        parts: The figures of each program, and the number of its calls.
    """
    seconds = sum(calls * figures["seconds"] for figures, calls in parts)
    known = all(figures["plan"] for figures, _ in parts)
    plan = sum(calls * figures["plan"]["seconds"] for figures, calls in parts) if known else None
    return {"seconds": seconds, "plan_seconds": plan, "ratio": over(seconds, plan)}


def update(task: Task) -> Figures:
    """Yields the figures of a few micro-batches, from which the update of an iteration follows."""
    config = config_of(task)
    groups = row_groups(shapes_of_experiment(config).backbone.mesh)
    short, micro, whole = shortened(config, groups)
    shapes = shapes_of_experiment(short)
    experiment = with_weights(shapes)
    gauge = Gauge.here(task.repeat)
    yield "update", partial(updated, gauge, experiment, shapes, micro, whole)


def updated(
    gauge: Gauge, experiment: Experiment, shapes: Experiment, micro: int, whole: int
) -> dict[str, Any]:
    """Measures the update.

    The optimizer step of a call is counted as part of its micro-batches.

    Args:
        gauge: The gauge.
        experiment: The experiment.
        shapes: The same experiment with abstract arrays.
        micro: The number of micro-batches per call.
        whole: The number of micro-batches in an iteration.
    """
    program = updating(experiment, shapes, fresh_state(experiment))
    backbone, config, state, *others = program.arguments

    def run() -> Any:  # the state is donated, so each call needs the new one
        nonlocal state
        state, metrics = program.function(backbone, config, state, *others)
        return metrics

    figures = gauge.measure(program, run)
    plan = figures["plan"]
    each = {
        "micro_batch_seconds": figures["seconds"] / micro,
        "iteration_seconds": figures["seconds"] / micro * whole,
    }
    planned = {"iteration_plan": plan and plan["seconds"] / micro * whole}
    return {"micro_batches": micro, "micro_batches_of_iteration": whole} | each | planned | figures
