"""`solrl eval`."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from solrl_jax.cli.options import (
    PATH,
    bar,
    checkpoint_option,
    finish,
    force_option,
    json_option,
    overrides_argument,
    trust_option,
)
from solrl_jax.config.presets import preset_names
from solrl_jax.config.schema import Config
from solrl_jax.errors import InputError
from solrl_jax.rl.experiment import Experiment, build
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs.directory import configuration, find_checkpoint, is_run, load_policy
from solrl_jax.runs.evaluate import (
    Evaluation,
    ImageGrid,
    LargestDifferences,
    evaluate,
    paired_difference,
    setting,
)
from solrl_jax.runs.image_files import save_before_after
from solrl_jax.storage.files import refuse_existing, writable_directory

SHOWN = (8, 4)  # prompts of a gallery, pictures of each


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL [OTHER]")
@overrides_argument
@click.option(
    "--paired",
    is_flag=True,
    help="Compare with the policy of OTHER, another run or model, picture by picture.",
)
@click.option(
    "--rewards",
    metavar="R,R,...",
    help="Score these beside what is trained on (default: what is watched).",
)
@click.option(
    "--gallery", type=PATH, help="With --paired: a PNG file for where the two differ most."
)
@click.option(
    "--preset", help="Prompts, reward and sampler for a bare model directory.  [default: tiny]"
)
@checkpoint_option
@trust_option
@force_option
@json_option
def command(
    target: str,
    overrides: tuple[str, ...],
    paired: bool,
    checkpoint: str,
    as_json: bool,
    **others: Any,
) -> None:
    """Score a run's averaged policy, or a model directory, on the test prompts.

    \b
    solrl eval runs/demo --rewards shapes,tiny-clip
    solrl eval runs/a runs/b --paired --gallery differ.png
    solrl eval runs/demo embedded:tiny-sana --paired      # what the run has gained
    """
    other, overrides = (overrides[0], overrides[1:]) if paired and overrides else (None, overrides)
    if paired and (other is None or "=" in other):
        raise InputError(
            "--paired: expected two runs or models, e.g. solrl eval runs/a runs/b --paired"
        )
    gallery = others["gallery"]
    preset = others["preset"] or "tiny"
    if others["preset"] is not None and (is_run(target) or target in preset_names()):
        raise InputError(
            f"--preset {preset}: {target} is a run or a preset and has its own settings; leave it out"
        )
    if gallery is not None:
        if not paired:
            raise InputError(f"--gallery {gallery}: shows two policies; it needs --paired")
        refuse_existing("--gallery", [gallery], others["force"])
        writable_directory(gallery.absolute().parent, "--gallery")
    config, run = configuration(target, overrides, preset, trust=others["trust_run"])
    config = _scored(config, others["rewards"])
    chosen = find_checkpoint(target, checkpoint)
    if other is not None:
        find_checkpoint(other, "latest")  # raises before weights are loaded
    # of the other one only the policy is used, by the settings and the rewards of the first
    compared = None if other is None else configuration(other, (), preset, trust=True)
    if compared is not None and (path := compared[0].model.path) != config.model.path:
        raise InputError(f"{other}: is of {path}, not of {config.model.path}; their noise differs")
    experiment = build(config)
    adapters, iteration = load_policy(run, config, experiment.backbone, chosen)
    result = _evaluate(experiment, adapters)
    said = setting(experiment)
    lines = [
        said,
        *(f"{name}: {mean:.4f} ± {result.errors[name]:.4f}" for name, mean in result.means.items()),
    ]
    summary = {
        "target": target,
        "iteration": iteration,
        "images": result.scores["reward"].size,
        "setting": said,
    }
    if compared is not None and other is not None:
        beside, second = _of_another(experiment, *compared)
        differences = paired_difference(result, theirs := _evaluate(beside, second))
        lines += [
            f"{name}: {gain:+.4f} ± {half:.4f} (95 %) over {other}"
            for name, (gain, half) in differences.items()
        ]
        summary |= {"other": other, "differences": differences}
        if gallery is not None:
            differing = LargestDifferences.find(result, theirs, *SHOWN)
            _draw(
                gallery,
                differing,
                (target, other),
                differing.draw(experiment, adapters),
                differing.draw(beside, second),
            )
    finish(
        summary | {"means": result.means, "standard_errors": result.errors},
        as_json,
        "\n".join(lines),
    )


def _scored(config: Config, names: str | None) -> Config:
    """The configuration with other watched rewards. names: separated by commas; what is trained on is scored anyway."""
    if names is None:
        return config
    watched = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    if not all(watched):
        raise InputError(
            f"--rewards {names!r}: expected names separated by commas, e.g. shapes,tiny-clip"
        )
    watched = tuple(name for name in watched if name not in config.reward.weights)
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, eval_only=watched))


def _evaluate(experiment: Experiment, adapters: Trainable) -> Evaluation:
    config = experiment.config.eval
    with bar(config.num_prompts * config.num_images_per_prompt, "evaluate") as shown:
        return evaluate(experiment, adapters, shown.update)


def _of_another(
    experiment: Experiment, config: Config, run: Path | None
) -> tuple[Experiment, Trainable]:
    """The newest policy of another run or model, on the prompts and noise and by the settings of `experiment`."""
    adapters, _ = load_policy(run, config, experiment.backbone)
    return dataclasses.replace(
        experiment, config=dataclasses.replace(experiment.config, lora=config.lora)
    ), adapters


def _draw(
    path: Path,
    differing: LargestDifferences,
    names: tuple[str, str],
    first: ImageGrid,
    second: ImageGrid,
) -> None:
    """The two policies side by side; above each prompt, by how much the first one's reward is higher in its pictures."""
    gains = [", ".join(f"{gain:+.2f}" for gain in row) for row in differing.gains]
    prompts = [f"{prompt} ({of})" for prompt, of in zip(first.prompts, gains, strict=True)]
    save_before_after(path, first.images, second.images, prompts, first.right, second.right, names)
