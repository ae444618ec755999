"""The programs of an iteration with arrays for arguments, made from an experiment as training makes them."""

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
from solrl_jax.planning.stages import Program, Stages
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.sync import quantize_policy
from solrl_jax.rl.generate import SeedBatch, draw_noise, sample_chunk
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.state import TrainState
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.rl.update import update


def config_of(task: Task) -> Config:
    """The configuration of a task's model. Its format quantises, so that it is known which linears are quantised."""
    preset, *chosen = PRESETS[task.model]
    return resolve(preset, (*chosen, *task.overrides, "rollout.explore.precision=nvfp4"))


def sampling(experiment: Experiment, stage: Sampler, calls: int) -> Program:
    """A chunk of a stage: candidates of the first prompt."""
    mesh = experiment.backbone.mesh
    config = experiment.config
    count = stage.chunk * sharding.row_groups(mesh)
    prompts = experiment.train_prompts[: config.train.num_prompts]
    (seeds,) = experiment.seeds("candidate", prompts[:1], count)
    prompt, seeds = hosts.put((np.zeros(count, np.int32), seeds), sharding.rows(mesh))
    with jax.set_mesh(mesh):
        rows = SeedBatch(prompt, seeds, draw_noise(seeds, stage.shape))
    segments = tuple(
        dataclasses.replace(
            segment, schedule=hosts.put(segment.schedule, sharding.replicated(mesh))
        )
        for segment in stage.segments
    )
    arguments = (experiment.backbone, segments, experiment.encode_prompts(prompts).conditions, rows)
    return Program(mesh, sample_chunk, arguments, calls)


def syncing(experiment: Experiment, adapters: Trainable, form: str) -> Program:
    """Merging `adapters` into the base and quantising it, as `Explorer.policy` does for a format that quantises."""
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
    """Decoding a chunk, and scoring it if that is done inside JAX, with random weights. shapes: an experiment of shapes."""
    programs = Stages(shapes).programs("score", {})
    return [dataclasses.replace(p, arguments=fill(p.arguments), meanwhile=()) for p in programs]


def shortened(config: Config, groups: int) -> tuple[Config, int, int]:
    """A configuration whose update has two or three micro-batches on each of `groups`; how many; how many the whole has."""
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
    """The update on random samples, all of which count. shapes: an experiment of shapes of the same configuration."""
    mesh = experiment.backbone.mesh
    backbone = experiment.backbone
    config = experiment.config
    (program,) = Stages(shapes).programs("update", {})
    batch = fill(program.arguments[4])

    def place(x):
        return hosts.put(x, sharding.replicated(mesh))

    ones = np.ones(len(batch.weight), np.float32)
    batch = dataclasses.replace(batch, weight=place(ones), optimality=place(0.5 * ones))
    grid: Any = place(experiment.schedule(config.rollout.num_steps))
    return Program(mesh, update, (backbone, config, state, backbone.transformer, batch, grid), 1)
