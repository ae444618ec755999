"""`solrl eval`: scores a policy on the held-out prompts, or compares two."""

import dataclasses
import json
from pathlib import Path

import click

from solrl_jax import api
from solrl_jax.cli.options import (
    PATH,
    TARGET,
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
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs.directory import find_checkpoint, is_run, load_policy, read_target
from solrl_jax.runs.evaluate import (
    Evaluation,
    ImageGrid,
    LargestDifferences,
    describe_evaluation,
    evaluate,
    paired_difference,
)
from solrl_jax.runs.image_files import save_before_after
from solrl_jax.storage.files import refuse_existing, writable_directory
from solrl_jax.storage.stores import StoreError, expand_home

SHOWN = (8, 4)  # prompts of a gallery, images of each


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL [OTHER]", type=TARGET)
@overrides_argument
@click.option(
    "--paired",
    is_flag=True,
    help="Compare with the policy of OTHER, another run or model, image by image.",
)
@click.option(
    "--rewards",
    metavar="R,R,...",
    help="Additional rewards to report (default: reward.eval_only).",
)
@click.option(
    "--gallery", type=PATH, help="With --paired: write a PNG of the images that differ most."
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
    rewards: str | None,
    gallery: Path | None,
    preset: str | None,
    checkpoint: str,
    trust: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Score a run's EMA policy, or a model, on the held-out prompts (prompts.test).

    \b
    solrl eval runs/demo --rewards shapes,tiny-clip
    solrl eval runs/a runs/b --paired --gallery differ.png
    solrl eval runs/demo embedded:tiny-sana --paired      # what the run has gained

    \f
    Each policy generates `eval.num_images_per_prompt` images for each of the first
    `eval.num_prompts` test prompts.

    Args:
        target: A run directory, the name of a preset, or a model (a directory in the layout of
            diffusers, or "embedded:NAME"). The policy of a preset or a model is the one that
            training starts from.
        overrides: Settings `key=value` that differ from those of the target. With `paired`, the
            first one is not a setting, but the run, preset or model to compare with.
        paired: Whether a second policy is evaluated with the same settings and noise, and compared
            with the first image by image. For a run it is the EMA policy of the newest checkpoint;
            for a preset or a model, the untrained base model with the settings of `target`, without
            the LoRA that `lora.path` names.
        rewards: Names of rewards to compute beside the trained ones, separated by commas, with or
            without spaces around them. None: those of the field `reward.eval_only`.
        gallery: A PNG file to write, with the 8 prompts and 4 images each on which the rewards of
            the two policies differ most. Only with `paired`. None: no file.
        preset: The preset whose settings a bare model is evaluated with; None: "tiny". Must be None
            for a run or a preset, which has its own settings.
        checkpoint: The checkpoint of `target` if that is a run: "best", "latest" or the number of
            an iteration.
        trust: Whether to use rewards and objectives outside the package that a run directory names.
        force: Whether an existing `gallery` is replaced.
        as_json: Whether to print one line of JSON in place of text: "target", "iteration", "images"
            (their number per policy), "setting" (the sampling in one line), "means" and
            "standard_errors" (over images, by score); with `paired` also "other" and "differences"
            (by score, a pair: the mean difference, `target` minus "other", and half of its 95 %
            interval).

    Raises:
        ConfigError: If the configuration or an override is invalid.
        InputError: If an argument cannot be used, or both policies are for different models.
        RunError: If a checkpoint is damaged, a reward fails, or the disk cannot be written to.
    """
    other = None
    if paired:
        if not overrides or ("=" in overrides[0] and not _is_policy(overrides[0])):
            raise InputError(
                "--paired: expected two runs or models, e.g. solrl eval runs/a runs/b --paired"
            )
        other = TARGET.convert(overrides[0], None, None)
        overrides = overrides[1:]
    if preset is not None and (is_run(target) or target in preset_names()):
        raise InputError(
            f"preset={preset}: {target} is a run or a preset and has its own settings; leave it out"
        )
    preset = preset or "tiny"
    if gallery is not None:
        if not paired:
            raise InputError(f"gallery={gallery}: shows two policies; it needs --paired")
        refuse_existing("gallery", [gallery], force)
        writable_directory(gallery.absolute().parent, "--gallery")
    # `open_policy` checks `trust`, with the rewards that take the place of the run's
    config, _ = read_target(target, overrides, preset, trust=True)
    overrides += _eval_only_override(config, rewards)
    if other is not None:
        # Only the policy of the other one is used, with the settings and rewards of the first.
        find_checkpoint(other, "latest")  # raises before weights are loaded
        other_config, other_run = read_target(other, (), preset, trust=True)
        if other_config.model.path != config.model.path:
            raise InputError(
                f"{other}: is a policy for {other_config.model.path}, not for "
                f"{config.model.path}, so their noise differs"
            )
        if other_run is None:
            # It has no adapters: neither those that the first policy starts from, nor those of its
            # own preset, which may be on parameters of another model.
            other_config = dataclasses.replace(
                config, lora=dataclasses.replace(config.lora, path=None)
            )

    experiment, adapters, iteration = api.open_policy(
        target, *overrides, preset=preset, checkpoint=checkpoint, trust=trust
    )
    result = _evaluate(experiment, adapters)
    description = describe_evaluation(experiment)
    lines = [description]
    for name, mean in result.means.items():
        lines.append(f"{name}: {mean:.4f} ± {result.errors[name]:.4f}")
    summary = {
        "target": target,
        "iteration": iteration,
        "images": result.scores["reward"].size,
        "setting": description,
    }
    if other is not None:
        # The scale of the adapters is that of the other configuration.
        other_experiment = dataclasses.replace(
            experiment, config=dataclasses.replace(experiment.config, lora=other_config.lora)
        )
        other_adapters, _ = load_policy(other_run, other_config, experiment.backbone)
        other_result = _evaluate(other_experiment, other_adapters)
        differences = paired_difference(result, other_result)
        for name, (gain, half) in differences.items():
            lines.append(f"{name}: {gain:+.4f} ± {half:.4f} (95 %) over {other}")
        summary |= {"other": other, "differences": differences}
        if gallery is not None:
            differing = LargestDifferences.find(result, other_result, *SHOWN)
            _save_comparison(
                gallery,
                differing,
                (target, other),
                differing.generate_images(experiment, adapters),
                differing.generate_images(other_experiment, other_adapters),
            )
    finish(
        summary | {"means": result.means, "standard_errors": result.errors},
        as_json,
        "\n".join(lines),
    )


def _is_policy(text: str) -> bool:
    """Whether an argument names an existing run (a directory with `config.yaml`) or another
    directory that exists, although it has a "=" as settings do.

    Args:
        text: The argument, a path in which `~` is expanded, or the URL of a run.

    Raises:
        StoreError: If the object store of a URL refuses or cannot be reached.
        InputError: If a URL has no bucket, or the package that reads its store is not installed.
        ValueError: If `text` begins with the `~USER` of a user that does not exist.
    """
    try:
        path = expand_home(text)
        return is_run(path) or Path(path).is_dir()
    except StoreError:
        raise
    except (OSError, ValueError):  # a name that no file can have, or the home of no user
        return False


def _eval_only_override(config: Config, names: str | None) -> tuple[str, ...]:
    """Returns the override for the option `--rewards`, the rewards to compute beside the trained
    ones.

    Args:
        config: The configuration. The rewards in its `reward.weights` are computed in any case.
        names: The text of the option: names of rewards, separated by commas, with or without spaces
            around them. Repetitions and trained rewards are dropped. None: the option was not
            given.

    Returns:
        A tuple of one override, e.g. ('reward.eval_only=["shapes"]',), whose list is empty if all
        names are dropped. An empty tuple for None, which keeps the setting of the configuration.

    Raises:
        InputError: If a name is empty.
    """
    if names is None:
        return ()
    watched = list(dict.fromkeys(name.strip() for name in names.split(",")))
    if not all(watched):
        raise InputError(
            f"rewards={names!r}: expected names separated by commas, e.g. shapes,tiny-clip"
        )
    watched = [name for name in watched if name not in config.reward.weights]
    return (f"reward.eval_only={json.dumps(watched)}",)


def _evaluate(experiment: Experiment, adapters: Trainable) -> Evaluation:
    """Generates images of the held-out prompts with a policy, and scores them.

    Also shows a progress bar. Prompts that the cache of prompts lacks are encoded and added to it.

    Args:
        experiment: The model, prompts and rewards. The section `eval` of its configuration gives
            the number and the size of the images.
        adapters: The trained parameters of the policy by path. An empty dict evaluates the base
            model.

    Returns:
        The scores of all images, and the mean and standard error of each score. The images are not
        kept.

    Raises:
        InputError: If the prompts cannot be encoded, or a user's reward inside JAX fails.
        RunError: If a reward outside of JAX fails and `reward.on_failure` is "stop" (with "skip",
            only if 32 calls in a row fail), or if the cache of prompts cannot be written.
    """
    config = experiment.config.eval
    with bar(config.num_prompts * config.num_images_per_prompt, "evaluate") as progress:
        return evaluate(experiment, adapters, progress.update)


def _save_comparison(
    path: Path,
    differing: LargestDifferences,
    names: tuple[str, str],
    first: ImageGrid,
    second: ImageGrid,
) -> None:
    """Writes a PNG that shows the images of two policies for the same prompts and noise side by
    side.

    Each prompt is followed in parentheses by the differences of the reward, first policy less
    second, one per image.

    Args:
        path: The file to write. An existing one is replaced.
        differing: The images that are compared. Only `gains` is read: the differences of their
            rewards, one row per prompt.
        names: The names of the first and the second policy, as headings.
        first: The images of the first policy, for the left side, with their prompts and, if there
            is a verifier, whether it accepts each image (`accepted`), which is drawn as a mark.
        second: The images of the second policy for the same prompts, for the right side.

    Raises:
        RunError: If the file cannot be written to the disk.
    """
    gains = [", ".join(f"{gain:+.2f}" for gain in row) for row in differing.gains]
    captions = [
        f"{prompt} ({prompt_gains})"
        for prompt, prompt_gains in zip(first.prompts, gains, strict=True)
    ]
    save_before_after(
        path, first.images, second.images, captions, first.accepted, second.accepted, names
    )
