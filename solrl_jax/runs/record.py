"""What a run records about itself: `run.json`, the first terminal lines, images of its pools."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from solrl_jax.config.batch import describe_batch
from solrl_jax.parallel import hosts
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.options.registry import active_options
from solrl_jax.rl.explore.quantized_layers import report as report_linears
from solrl_jax.rl.explore.quantized_layers import totals
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs import image_files
from solrl_jax.runs.evaluate import describe_evaluation, pool_images
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage.files import atomic_write
from solrl_jax.storage.stores import RunPath

# The distributions whose versions `run.json` and `solrl doctor` list.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


def write_and_print(
    experiment: Experiment, folder: RunPath, done: int, progress: TerminalProgress
) -> dict[str, Any]:
    """Writes `run.json`, and prints three lines about the model, devices and batch of a run.

    Every process calls this; the first one writes and prints.

    Args:
        experiment: The loaded experiment.
        folder: The run directory, in which `run.json` is written.
        done: The number of iterations that are complete at this start.
        progress: The output in the terminal, which prints the lines: preset, model and rewards;
            devices, mesh and the precision and options of exploration; batch.

    Returns:
        The content of `run.json`, JSON values by name: "solrl_jax", "python", "packages",
        "devices", "hosts", "mesh", "exploration", "evaluation", "gradient_checkpointing",
        "parameters", "adapted", "trained_in_full", "quantized", "linears" and
        "started_after_iteration" (described in `_facts`).

    Raises:
        RunError: If the disk refuses.
    """
    config = experiment.config
    facts = _facts(experiment, done)
    write(folder, facts)
    rewards = "+".join(config.reward.weights)
    progress.line(f"{config.preset}: {config.model.name}, {config.family}, {rewards} -> {folder}")
    exploration = facts["exploration"]
    means = exploration["means"]
    if exploration["options"]:
        means += f", with {', '.join(exploration['options'])}"
    progress.line(f"devices: {facts['devices']}, mesh {facts['mesh']}; exploration in {means}")
    progress.line(describe_batch(config, row_groups(experiment.backbone.mesh)))
    return facts


def write(folder: RunPath, facts: Mapping[str, Any]) -> None:
    """Writes `run.json`. Every process calls this; the first one writes.

    Args:
        folder: The run directory, in which `run.json` is replaced.
        facts: The whole content of the file, as JSON values by name.

    Raises:
        RunError: In all processes, if the disk refuses.
    """
    hosts.run_on_first(
        lambda: atomic_write(folder / "run.json", json.dumps(facts, indent=2) + "\n")
    )


def _facts(experiment: Experiment, done: int) -> dict[str, Any]:
    """Collects the content of `run.json`.

    Args:
        experiment: The experiment of the run.
        done: The number of iterations that were done before this start.

    Returns:
        JSON values by name:
          * "solrl_jax", "python" and "packages": versions, the last a dict by name (`PACKAGES`);
          * "devices" (e.g. "8 x NVIDIA H100"), "hosts" (their number), "mesh" (sizes by axis);
          * "exploration": a dict with "precision" (as configured), "format" (the format that this
            resolves to on these devices), "native" (whether the devices have matmul units for it),
            "options" (class names of the active exploration options, e.g. "Preview") and "means"
            (`Format.describe`, e.g. "fp8 (DESCRIPTION; native)");
          * "evaluation": one line with prompts, images, solver, guidance, precision and seed;
          * "gradient_checkpointing": what the gradient recomputes: "none", "matmuls" (all except
            matmuls and attention kernels) or "blocks" (all inside a block);
          * "parameters": their number by component, e.g. "transformer" or "vae";
          * "adapted", "trained_in_full" and "quantized" (by exploration): lists of parameter paths,
            e.g. "blocks/attn/to_q/kernel";
          * "linears": a dict of sums over all linear layers (`quantized_layers.totals`): the number
            of layers (again "linears"), the number of quantized ones ("quantized"), the bytes of
            all before and after quantization ("bytes_before", "bytes_after"), and those of the
            quantized ones ("quantized_bytes_before", "quantized_bytes_after");
          * "started_after_iteration": `done`.
    """
    config = experiment.config
    backbone = experiment.backbone
    explorer = experiment.explorer
    mesh = backbone.mesh
    pipeline = backbone.pipeline
    linear_layers = report_linears(
        backbone.transformer, config.model.quantization, explorer.format, explorer.explore
    )
    parameters = {"transformer": pipeline.transformer.num_parameters}
    for name, encoder in pipeline.text_encoders.items():
        parameters[name] = encoder.num_parameters
    parameters["vae"] = pipeline.vae.num_parameters
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
        "evaluation": describe_evaluation(experiment),
        "gradient_checkpointing": pipeline.gradient_checkpointing,
        "parameters": parameters,
        "adapted": list(experiment.trained_paths.adapted),
        "trained_in_full": list(experiment.trained_paths.whole),
        "quantized": [linear.path for linear in linear_layers if not linear.reason_kept],
        "linears": totals(linear_layers),
        "started_after_iteration": done,
    }


def draw_pools(
    experiment: Experiment,
    folder: RunPath,
    old_policy: Trainable,
    exploration_level: int,
    ledger: Mapping[str, Any],
    iteration: int,
) -> None:
    """Writes `pictures/pool-NNNNNN.png`: the best and the worst kept candidates of an iteration.

    The grid has one row per prompt and phase ("explored" and, if the kept candidates are
    regenerated, "regenerated"). The caption of an image is its phase and reward; the file also
    stores its "prompt", "candidate", "phase" and "right" (whether the first of its scores named
    ".../strict" is above 0.5; None if it has none). The images are generated again from the seeds
    of the candidates, and scored without judges. Clips are also written as a moving grid, with the
    ending ".webp". Every process calls this; the first one writes.

    Args:
        experiment: The experiment of the run. `eval.num_grid_images` is the largest number of
            candidates of all prompts together, at least 1. There are at most four per prompt, from
            as many of the first prompts as this number allows; half of the candidates of a prompt,
            rounded down, are the worst. For a prompt without kept candidates, its best
            `rollout.kept` by rank count as kept.
        folder: The run directory, in which the image is written to `pictures/`.
        old_policy: The trainable parameters by path that the iteration generated with, from before
            its update.
        exploration_level: The index, in `experiment.explorer.settings`, of the precision and number
            of steps that the iteration explored with.
        ledger: The columns of the iteration's candidates by name, prompt by prompt: "rank" and
            "kept" choose the candidates, and "proxy_reward" (for "explored") and
            "regenerated_reward" are the captions.
        iteration: The number of the iteration, from 1.

    Raises:
        RunError: If the disk refuses, or if a reward outside JAX that has a score ".../strict" (no
            other is called) fails while `reward.on_failure` is "stop", or 32 times in a row.
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
    """
    exploration = experiment.explorer.settings[exploration_level]
    pools = pool_images(experiment, old_policy, exploration, ledger, iteration)
    candidates_per_prompt = experiment.config.rollout.candidates
    columns = pools.candidates.shape[1]
    images = []
    captions = []
    facts = []
    for row, prompt in enumerate(pools.prompts):
        for phase, grid in pools.phases.items():
            reward_column = "proxy_reward" if phase == "explored" else "regenerated_reward"
            rewards = np.ma.filled(ledger[reward_column], np.nan)
            for column, candidate in enumerate(pools.candidates[row].tolist()):
                reward = rewards[row * candidates_per_prompt + candidate]
                images.append(grid.images[row, column])
                captions.append(f"{phase} {reward:.3f}")
                facts.append(
                    {
                        "prompt": prompt,
                        "candidate": candidate,
                        "phase": phase,
                        "right": grid.marks[row * columns + column],
                    }
                )
    path = folder / "pictures" / f"pool-{iteration:06d}.png"
    frames_per_second = experiment.backbone.pipeline.frames_per_second
    hosts.run_on_first(
        lambda: image_files.save_grid(
            path, np.stack(images), columns, captions, facts, frames_per_second=frames_per_second
        )
    )
