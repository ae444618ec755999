"""The step `parity`: compares rewards and an iteration of each embedded pipeline with the CPU.

The seeds are the same on both. The CPU's figures come from other processes (the step `rewards`),
one per pipeline with JAX_PLATFORMS=cpu. `schedule.run` starts them before the first step.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.gpu import schedule
from bench.gpu.programs import sampling
from bench.gpu.record import RUNNING, Record, Task
from solrl_jax.config.presets import resolve
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import count_library_kernels, kernels
from solrl_jax.rl.experiment import Experiment, build, fresh_state
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.sampler import Sampler

SETTINGS = (
    "train.num_prompts=4",
    "rollout.candidates=12",
    "rollout.kept=4",
    "rollout.per_device_batch_size=24",
    "optimizer.per_device_batch_size=24",
    "mesh.data=1",
)
POLL = 0.2  # seconds between two reads of the other process's record
Figures = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def rewards(task: Task) -> Figures:
    """The step `rewards`, which also runs on the CPU.

    Yields the rewards of whole pools, generated with all steps in the training precision and
    explored in each format, and then the first iteration.
    """
    preset, *chosen = schedule.PRESETS[task.model.removesuffix(schedule.CPU)]
    experiment = build(resolve(preset, (*chosen, *SETTINGS)))
    adapters = fresh_state(experiment).old
    rollout = experiment.config.rollout
    explorer = experiment.explorer
    yield (
        "regenerate",
        lambda: pool(experiment, experiment.sampler("regenerate", adapters, rollout.num_steps)),
    )
    for name in task.formats:

        def explored(name=name):
            return explorer.sampler(adapters, ExplorationSetting(name, rollout.explore.num_steps))

        yield name, lambda explored=explored: pool(experiment, explored())
    yield "iteration", partial(iteration, experiment)


def pool(experiment: Experiment, sampler: Sampler) -> dict[str, Any]:
    """Generates a pool. Returns its rewards [prompts, candidates] and the native kernels."""
    prompts = experiment.train_prompts[: experiment.config.train.num_prompts]
    seeds = experiment.seeds("candidate", prompts, experiment.config.rollout.candidates)
    candidate_rewards = generate(
        experiment.backbone,
        sampler,
        experiment.encode_prompts(prompts, experiment.reward),
        SeedBatch.from_seeds(seeds),
        experiment.reward,
    ).reward
    program = sampling(experiment, sampler, 1)
    with jax.set_mesh(program.mesh):
        text = program.function.lower(*program.arguments).compile().as_text()
    return {
        "rewards": candidate_rewards.reshape(seeds.shape[:2]).tolist(),
        "native": count_library_kernels(kernels(parse(text))),
    }


def iteration(experiment: Experiment) -> dict[str, Any]:
    """Runs the first iteration. Returns its rewards, its selection and its metrics."""
    _, outcome = iterate(experiment, fresh_state(experiment), 1)
    results = {
        name: outcome.metrics[name] for name in ("loss", "grad_norm", "seconds", "seconds/compile")
    }
    return results | {
        "rewards": [outcome.ledger["proxy_reward"].tolist()],
        "kept": outcome.ledger["kept"].tolist(),
    }


def parity(task: Task) -> Figures:
    """The step `parity`: yields the comparison of each figure of `rewards` with that of the CPU."""
    for embedded_task in schedule.embedded(task):
        model = embedded_task.model.removesuffix(schedule.CPU)
        try:
            for name, find in rewards(dataclasses.replace(embedded_task, model=model)):
                other = partial(wait_for, embedded_task, name)
                yield f"{model} {name}", lambda find=find, other=other: compared(find(), other())
        except Exception as error:  # the next pipeline is compared regardless
            yield model, partial(_raise, error)


def _raise(error: Exception) -> dict[str, Any]:
    raise error


def wait_for(there: Task, name: str) -> dict[str, Any]:
    """Waits for a figure of the CPU's process.

    Raises:
        RuntimeError: If that process fails or ends without the figure.
    """
    while True:
        record = Record.read(there.path) or Record(there.name)
        if "error" not in record.result.get(name, {"error": ""}):
            return record.result[name]
        if name in record.result or record.state != RUNNING:
            raise RuntimeError(f"on the CPU: {record.reason or 'no such figure'}")
        time.sleep(POLL)


def compared(here: dict[str, Any], cpu: dict[str, Any]) -> dict[str, Any]:
    """Compares the rewards of this device with those of the CPU.

    Returns:
        The largest difference, the mean rank correlation within prompts, and the mean range of a
        prompt's rewards on the CPU.
    """
    one = np.array(here.pop("rewards"))
    other = np.array(cpu.pop("rewards"))
    spearman = rank_correlations(one, other).spearman
    figures = {
        "largest_difference": float(np.abs(one - other).max()),
        "spearman": spearman if math.isfinite(spearman) else None,
        "range": float(np.ptp(other, axis=1).mean()),
    }
    if "kept" in here:
        figures["kept_alike"] = float(
            np.mean(np.array(here.pop("kept")) == np.array(cpu.pop("kept")))
        )
    return figures | {"here": here, "cpu": cpu}
