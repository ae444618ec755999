"""The smallest settings of `tiny` that still go through every stage, for tests of the loop."""

from pathlib import Path

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config

SMALL = (
    "train.prompts=2", "rollout.candidates=8", "rollout.kept=4", "rollout.chunk=2", "rollout.steps=3",
    "rollout.explore.steps=2", "optimizer.micro_batch=2", "algorithm.timestep_fraction=0.7", "train.iterations=3",
    "eval.prompts=2", "eval.images_per_prompt=2", "eval.grid=4", "eval.steps=3", "eval.every=0", "mesh.data=1",
    "run.checkpoint_every=1", "run.tensorboard=false",
)  # fmt: skip


def small_config(run_dir: Path | str = "unused", *overrides: str, preset: str = "tiny") -> Config:
    return resolve(preset, (*SMALL, f"run.dir={run_dir}", *overrides))
