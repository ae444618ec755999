"""The smallest settings of `tiny` that still go through every stage, for tests of the loop."""

from pathlib import Path

import jax

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.policy.state import TrainState, init_state
from solrl_jax.training.experiment import Experiment

SMALL = (
    "train.prompts=2", "rollout.candidates=8", "rollout.kept=4", "rollout.chunk=2", "rollout.steps=3",
    "rollout.explore.steps=2", "rollout.explore.sigmas=own", "rollout.explore.correction=0",
    "rollout.explore.exact_steps=1", "optimizer.micro_batch=2",
    "policy.timestep_fraction=0.7", "train.iterations=3",
    "eval.prompts=2", "eval.images_per_prompt=2", "eval.grid=4", "eval.steps=3", "eval.every=0", "mesh.data=1",
    "run.checkpoint_every=1", "run.tensorboard=false",
)  # fmt: skip


def small_config(run_dir: Path | str = "unused", *overrides: str, preset: str = "tiny") -> Config:
    return resolve(preset, (*SMALL, f"run.dir={run_dir}", *overrides))


def fresh_state(experiment: Experiment) -> TrainState:
    config, backbone = experiment.config, experiment.backbone
    return init_state(
        jax.random.key(config.seed),
        backbone.transformer,
        list(experiment.targets),
        config.lora,
        config.optimizer,
        backbone.mesh,
    )


def silent(stage: str, rows: int, done: int) -> None:
    """A progress callback that tells nobody."""
