"""`solrl eval`."""

import dataclasses
from pathlib import Path

import click

from solrl_jax.commands.options import bar, checkpoint_option, finish, json_option, overrides_argument, trust_option
from solrl_jax.config.schema import Config
from solrl_jax.run.directory import configuration, find_checkpoint, load_policy
from solrl_jax.storage.errors import InputError
from solrl_jax.training.evaluate import Evaluation, evaluate, paired_difference
from solrl_jax.training.experiment import Experiment, build


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL [OTHER]")
@overrides_argument
@click.option("--paired", is_flag=True, help="Compare with the policy of OTHER, another run or model, picture by picture.")
@click.option("--preset", default="tiny", show_default=True, help="Prompts, reward and sampler for a bare model directory.")
@checkpoint_option
@trust_option
@json_option
def command(
    target: str, overrides: tuple[str, ...], paired: bool, preset: str, checkpoint: str, trust_run: bool, as_json: bool
) -> None:
    """Score a run's averaged policy, or a model directory, on the test prompts.

    \b
    solrl eval runs/demo
    solrl eval runs/a runs/b --paired
    solrl eval runs/demo embedded:tiny-sana --paired      # what the run has gained
    """
    other, overrides = (overrides[0], overrides[1:]) if paired and overrides else (None, overrides)
    if paired and (other is None or "=" in other):
        raise InputError("--paired: expected two runs or models, e.g. solrl eval runs/a runs/b --paired")
    config, run = configuration(target, overrides, preset, trust=trust_run)
    chosen = find_checkpoint(target, checkpoint)
    # of the other one only the policy is used, by the settings and the rewards of the first
    compared = None if other is None else configuration(other, (), preset, trust=True)
    if compared is not None and (theirs := compared[0].model.path) != config.model.path:
        raise InputError(f"{other}: is of {theirs}, not of {config.model.path}; their noise differs")
    experiment = build(config)
    adapters, iteration = load_policy(run, config, experiment.backbone, chosen)
    images = config.eval.prompts * config.eval.images_per_prompt
    with bar(images, "evaluate") as shown:
        result = evaluate(experiment, adapters, shown.update)
    lines = [f"{name}: {mean:.4f} ± {result.errors[name]:.4f}" for name, mean in result.means.items()]
    summary = {"target": target, "iteration": iteration, "images": images}
    if compared is not None:
        differences = paired_difference(result, _of_another(experiment, *compared))
        lines += [f"{name}: {gain:+.4f} ± {half:.4f} (95 %) over {other}" for name, (gain, half) in differences.items()]
        summary |= {"other": other, "differences": differences}
    finish(summary | {"means": result.means, "standard_errors": result.errors}, as_json, "\n".join(lines))


def _of_another(experiment: Experiment, config: Config, run: Path | None) -> Evaluation:
    """The newest policy of another run or model on the same prompts and noise, by the settings of `experiment`."""
    adapters, _ = load_policy(run, config, experiment.backbone)
    settings = dataclasses.replace(experiment.config, lora=config.lora)
    with bar(settings.eval.prompts * settings.eval.images_per_prompt, "evaluate") as shown:
        return evaluate(dataclasses.replace(experiment, config=settings), adapters, shown.update)
