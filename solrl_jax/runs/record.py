"""What a run says of itself: `run.json`, the first lines in the terminal, pictures of pools."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from solrl_jax.config.batch import describe_batch
from solrl_jax.parallel import hosts
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.linears import report as report_linears
from solrl_jax.rl.explore.linears import totals
from solrl_jax.rl.explore.options.registry import active_options
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs import image_files
from solrl_jax.runs.evaluate import pool_pictures, setting
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage.files import atomic_write

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


def describe(
    experiment: Experiment, folder: Path, done: int, report: TerminalProgress
) -> dict[str, Any]:
    """Writes `run.json` and prints what runs where. Returns what it wrote."""
    config = experiment.config
    mesh = experiment.backbone.mesh
    facts = _facts(experiment, done)
    write(folder, facts)
    report.line(
        f"{config.preset}: {config.model.name}, {config.family}, {'+'.join(config.reward.weights)} -> {folder}"
    )
    exploration = facts["exploration"]
    options = f", with {', '.join(exploration['options'])}" if exploration["options"] else ""
    report.line(
        f"devices: {facts['devices']}, mesh {facts['mesh']}; exploration in {exploration['means']}{options}"
    )
    report.line(describe_batch(config, row_groups(mesh)))
    return facts


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `run.json`."""
    hosts.write(lambda: atomic_write(folder / "run.json", json.dumps(facts, indent=2) + "\n"))


def _facts(experiment: Experiment, done: int) -> dict[str, Any]:
    config = experiment.config
    backbone = experiment.backbone
    explorer = experiment.explorer
    mesh = backbone.mesh
    pipeline = backbone.pipeline
    rows = report_linears(
        backbone.transformer, config.model.quantization, explorer.format, explorer.explore
    )
    return {
        "solrl_jax": importlib.metadata.version("solrl_jax"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": f"{mesh.size} x {jax.devices()[0].device_kind}",
        "hosts": jax.process_count(),
        "mesh": dict(mesh.shape),
        "exploration": {
            "precision": explorer.explore.precision,
            "format": explorer.format.name,
            "native": explorer.format.is_native(experiment.device),
            "options": [type(option).__name__ for option in active_options(explorer.explore)],
            "means": explorer.format.describe(experiment.device),
        },
        "evaluation": setting(experiment),
        "remat": pipeline.remat,
        "parameters": {
            "transformer": pipeline.transformer.num_parameters,
            **{
                name: component.num_parameters for name, component in pipeline.text_encoders.items()
            },
            "vae": pipeline.vae.num_parameters,
        },
        "adapted": list(experiment.targets.adapted),
        "trained_in_full": list(experiment.targets.whole),
        "quantized": [row.path for row in rows if not row.kept],
        "linears": totals(rows),
        "started_after_iteration": done,
    }


def draw_pools(
    experiment: Experiment,
    folder: Path,
    old: Trainable,
    level: int,
    ledger: Mapping[str, Any],
    iteration: int,
) -> None:
    """`pictures/pool-ITERATION.png`: candidates of the iteration, a row a prompt and stage; as `pool_pictures` takes them."""
    made = pool_pictures(experiment, old, experiment.explorer.settings[level], ledger, iteration)
    width = experiment.config.rollout.candidates
    each = made.candidates.shape[1]
    images = []
    captions = []
    facts = []
    for row, prompt in enumerate(made.prompts):
        for stage, grid in made.stages.items():
            rewards = np.ma.filled(
                ledger["proxy_reward" if stage == "explored" else "regenerated_reward"], np.nan
            )
            for column, candidate in enumerate(made.candidates[row].tolist()):
                images.append(grid.images[row, column])
                captions.append(f"{stage} {rewards[row * width + candidate]:.3f}")
                right = grid.marks[row * each + column]
                facts.append(
                    {"prompt": prompt, "candidate": candidate, "stage": stage, "right": right}
                )
    path = folder / "pictures" / f"pool-{iteration:06d}.png"
    hosts.write(lambda: image_files.save_grid(path, np.stack(images), each, captions, facts))
