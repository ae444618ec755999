"""The step `parity`: an iteration of a trained pipeline that is embedded, here and on the CPU, and rewards of the same seeds.

The CPU's figures are those of a second process, JAX_PLATFORMS=cpu, which runs at the same time (the step `rewards`).
"""

import dataclasses
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.gpu import schedule
from bench.gpu.measure import formats
from bench.gpu.programs import sampling
from bench.gpu.record import Record, Task
from solrl_jax.config.presets import resolve
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import kernels, native
from solrl_jax.rl.experiment import Experiment, build, fresh_state
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.sampler import Sampler

SETTINGS = (
    "train.num_prompts=4", "rollout.candidates=12", "rollout.kept=4", "rollout.per_device_batch_size=24", "optimizer.per_device_batch_size=24", "mesh.data=1",
)  # fmt: skip
POLL = 0.2  # seconds between looks at the other process's record
Figures = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def rewards(task: Task) -> Figures:
    """Of whole pools, with all steps in the training precision and explored in each format; then the first iteration."""
    experiment = build(resolve("tiny", SETTINGS))
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


def pool(experiment: Experiment, stage: Sampler) -> dict[str, Any]:
    """Rewards [prompts, candidates], and the libraries' kernels in the program that sampled."""
    prompts = experiment.train_prompts[: experiment.config.train.num_prompts]
    seeds = experiment.seeds("candidate", prompts, experiment.config.rollout.candidates)
    found = generate(
        experiment.backbone,
        stage,
        experiment.encode_prompts(prompts, experiment.reward),
        SeedBatch.from_seeds(seeds),
        experiment.reward,
    ).reward
    program = sampling(experiment, stage, 1)
    with jax.set_mesh(program.mesh):
        text = program.function.lower(*program.arguments).compile().as_text()
    return {
        "rewards": found.reshape(seeds.shape[:2]).tolist(),
        "native": native(kernels(parse(text))),
    }


def iteration(experiment: Experiment) -> dict[str, Any]:
    """What the first one explored, kept and trained."""
    _, outcome = iterate(experiment, fresh_state(experiment), 1)
    own = {
        name: outcome.metrics[name] for name in ("loss", "grad_norm", "seconds", "seconds/compile")
    }
    return own | {
        "rewards": [outcome.ledger["proxy_reward"].tolist()],
        "kept": outcome.ledger["kept"].tolist(),
    }


def parity(task: Task) -> Figures:
    """How far this device's rewards are from the CPU's, and how alike both rank."""
    named = tuple(dict.fromkeys(("nvfp4", *formats(task))))
    there = dataclasses.replace(task, step="rewards", model="cpu", formats=named)
    there.path.unlink(missing_ok=True)
    with schedule.started(there, JAX_PLATFORMS="cpu") as process:
        for name, find in rewards(dataclasses.replace(task, formats=named)):
            yield (
                name,
                lambda find=find, name=name: compared(find(), wait_for(process, there, name)),
            )


def wait_for(process: "subprocess.Popen[bytes]", task: Task, name: str) -> dict[str, Any]:
    """A figure of the other process, when it has it."""
    while (
        process.poll() is None and name not in (Record.read(task.path) or Record(task.name)).result
    ):
        time.sleep(POLL)
    record = Record.read(task.path)
    if record is None or "error" in record.result.get(name, {"error": ""}):
        raise RuntimeError(f"on the CPU: {record.reason if record else 'no record'}")
    return record.result[name]


def compared(here: dict[str, Any], cpu: dict[str, Any]) -> dict[str, Any]:
    """Of the rewards: the largest difference, the mean rank correlation within prompts, the CPU's mean range of a prompt."""
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
