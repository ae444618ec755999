"""The smallest settings of `tiny` that still go through every phase, for tests of the loop."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config

SMALL = (
    "train.num_prompts=2",
    "rollout.candidates=8",
    "rollout.kept=4",
    "rollout.per_device_batch_size=2",
    "rollout.num_steps=3",
    "rollout.explore.num_steps=2",
    "optimizer.per_device_batch_size=2",
    "algorithm.timestep_fraction=0.7",
    "train.iterations=3",
    "eval.num_prompts=2",
    "eval.num_images_per_prompt=2",
    "eval.num_grid_images=4",
    "eval.num_steps=3",
    "eval.every=0",
    "mesh.data=1",
    "run.checkpoint_every=1",
    "run.tensorboard=false",
)


def small_config(run_dir: Path | str = "unused", *overrides: str, preset: str = "tiny") -> Config:
    return resolve(preset, (*SMALL, f"run.dir={run_dir}", *overrides))


@contextlib.contextmanager
def one_run_at_a_time(temporary: Path) -> Iterator[None]:
    """Lets one process of the tests train at a time, so that the next one finds the compiled
    programs in JAX's cache.

    Args:
        temporary: The base directory of this process's temporary files, which is one of the
            directories of all processes.
    """
    with (temporary.parent / "one-run-at-a-time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
