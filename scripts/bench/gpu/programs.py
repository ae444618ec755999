"""Builds the programs of an iteration with concrete arguments, as training does."""

import dataclasses
from typing import Any

import jax
import numpy as np

from bench.gpu.record import Task
from bench.gpu.schedule import PRESETS
from bench.random_weights import fill
from solrl_jax.config.batch import effective_batch
from solrl_jax.config.presets import override, resolve
from solrl_jax.config.schema import Config
from solrl_jax.parallel import hosts, sharding
from solrl_jax.planning.phases import Phases, Program
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.sync import quantize_policy
from solrl_jax.rl.generate import SeedBatch, draw_noise, sample_chunk
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.state import TrainState
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.rl.update import update


def config_of(task: Task) -> Config:
    """Returns the configuration of a task's model.

    It explores in a quantizing format, so the experiment knows which layers are quantized.
    """
    preset, *chosen = PRESETS[task.model]
    return resolve(preset, (*chosen, *task.overrides, "rollout.explore.precision=nvfp4"))


def sampling(experiment: Experiment, sampler: Sampler, calls: int) -> Program:
    """Returns the program that generates one batch of candidates of the first prompt.

    Args:
        experiment: The experiment.
        sampler: The sampler.
        calls: The number of such batches in an iteration.
    """
    mesh = experiment.backbone.mesh
    config = experiment.config
    count = sampler.samples_per_device * sharding.row_groups(mesh)
    prompts = experiment.train_prompts[: config.train.num_prompts]
    (seeds,) = experiment.seeds("candidate", prompts[:1], count)
    prompt, seeds = hosts.put((np.zeros(count, np.int32), seeds), sharding.rows(mesh))
    with jax.set_mesh(mesh):
        rows = SeedBatch(prompt, seeds, draw_noise(seeds, sampler.shape))
    segments = tuple(
        dataclasses.replace(
            segment, schedule=hosts.put(segment.schedule, sharding.replicated(mesh))
        )
        for segment in sampler.segments
    )
    arguments = (experiment.backbone, segments, experiment.encode_prompts(prompts).conditions, rows)
    return Program(mesh, sample_chunk, arguments, calls)


def syncing(experiment: Experiment, adapters: Trainable, form: str) -> Program:
    """Returns the program that merges adapters into the base and quantizes the result."""
    explorer = experiment.explorer
    backbone = experiment.backbone
    arguments = (
        backbone.mesh,
        backbone.transformer,
        adapters,
        experiment.scale,
        explorer.quantized,
        explorer.quantizer(form),
    )
    return Program(backbone.mesh, quantize_policy, arguments, 1)


def scoring(shapes: Experiment) -> list[Program]:
    """Returns the programs that decode and score one batch, with random weights.

    Args:
        shapes: The experiment with abstract arrays.
    """
    return _filled(Phases(shapes), "score")


def reward_gradients(shapes: Experiment) -> list[Program]:
    """Returns the program of the gradient of the reward for one batch, with random weights.

    Args:
        shapes: The experiment with abstract arrays.

    Returns:
        One program. None if the objective does not train on the gradient of the reward.
    """
    phases = Phases(shapes)
    return _filled(phases, "targets") if phases.has("targets") else []


def _filled(phases: Phases, phase: str) -> list[Program]:
    """Returns the programs of a phase with random arrays as their arguments."""
    return [
        dataclasses.replace(program, arguments=fill(program.arguments), other_arrays=())
        for program in phases.programs(phase, {})
    ]


def shortened(config: Config, groups: int) -> tuple[Config, int, int]:
    """Shortens the update to two or three micro-batches per group of devices.

    Args:
        config: The configuration.
        groups: The number of groups of devices that divide the samples.

    Returns:
        The short configuration, its number of micro-batches, and that of a whole iteration.
    """
    whole = effective_batch(config, groups)
    least = 2 * config.optimizer.per_device_batch_size * groups
    kept = -(-least // config.num_train_sigmas)
    kept += kept % 2
    settings = (
        f"rollout.kept={kept}",
        f"rollout.candidates={max(kept, config.rollout.candidates)}",
    )
    short = override(config, ("train.num_prompts=1", "optimizer.steps_per_iteration=1", *settings))
    return (
        short,
        effective_batch(short, groups)["accumulation"],
        whole["accumulation"] * whole["optimizer_steps"],
    )


def updating(experiment: Experiment, shapes: Experiment, state: TrainState) -> Program:
    """Returns the update on random samples with random weights.

    Args:
        experiment: The experiment.
        shapes: The same experiment with abstract arrays.
        state: The state of the training. It is donated.
    """
    mesh = experiment.backbone.mesh
    backbone = experiment.backbone
    config = experiment.config
    (program,) = Phases(shapes).programs("update", {})
    batch = fill(program.arguments[4])

    def place(x):
        return hosts.put(x, sharding.replicated(mesh))

    ones = np.ones(len(batch.weight), np.float32)
    batch = dataclasses.replace(batch, weight=place(ones), optimality=place(0.5 * ones))
    grid: Any = place(experiment.schedule(config.rollout.num_steps))
    return Program(mesh, update, (backbone, config, state, backbone.transformer, batch, grid), 1)
