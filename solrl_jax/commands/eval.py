"""`solrl eval`."""

import click

from solrl_jax.commands.options import bar, checkpoint_option, finish, json_option, overrides_argument, trust_option
from solrl_jax.run.directory import configuration, find_checkpoint, load_policy
from solrl_jax.training.evaluate import evaluate
from solrl_jax.training.experiment import build


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL")
@overrides_argument
@click.option("--preset", default="tiny", show_default=True, help="Prompts, reward and sampler for a bare model directory.")
@checkpoint_option
@trust_option
@json_option
def command(target: str, overrides: tuple[str, ...], preset: str, checkpoint: str, trust_run: bool, as_json: bool) -> None:
    """Score a run's averaged policy, or a model directory, on the test prompts."""
    config, run = configuration(target, overrides, preset, trust=trust_run)
    chosen = find_checkpoint(target, checkpoint)
    experiment = build(config)
    adapters, iteration = load_policy(run, config, experiment.backbone, chosen)
    images = config.eval.prompts * config.eval.images_per_prompt
    with bar(images, "evaluate") as shown:
        result = evaluate(experiment, adapters, shown.update)
    lines = [f"{name}: {mean:.4f} ± {result.errors[name]:.4f}" for name, mean in result.means.items()]
    summary = {"target": target, "iteration": iteration, "images": images}
    finish(summary | {"means": result.means, "standard_errors": result.errors}, as_json, "\n".join(lines))
