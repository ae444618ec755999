"""`solrl linears`."""

import dataclasses

import click

from solrl_jax.backbone.backbone import DTYPES, load_backbone
from solrl_jax.backbone.locate import open_model
from solrl_jax.commands.options import finish, json_option, overrides_argument
from solrl_jax.explore import linears
from solrl_jax.numerics.formats import resolve
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.run.directory import configuration, load_policy
from solrl_jax.storage.errors import in_one_line
from solrl_jax.training.experiment import device_facts


@click.command("linears")
@click.argument("target", metavar="RUN_OR_PRESET")
@overrides_argument
@click.option("--errors", is_flag=True, help="Load the weights, merge a run's averaged policy, and measure errors.")
@json_option
def command(target: str, overrides: tuple[str, ...], errors: bool, as_json: bool) -> None:
    """List the linears of a model: which are quantised, why others are not, and their bytes. Loads no weights.

    \b
    solrl linears tiny rollout.explore.precision=fp8 --errors
    """
    config, run = configuration(target, overrides, None, trust=True)
    device = device_facts()
    form = resolve(config.rollout.explore.precision, device)
    pipeline = open_model(config.model.path)
    shapes = pipeline.transformer.shapes(DTYPES[config.rollout.precision])
    with in_one_line():
        rows = linears.report(shapes, config.model.quantize, form, config.rollout.explore)
    if errors:
        backbone = load_backbone(pipeline, config.rollout.precision, make_mesh(-1, 1))
        adapters, _ = load_policy(run, config, backbone)
        rows = linears.with_errors(rows, backbone.transformer, adapters, config.lora.alpha / config.lora.rank, form)
    summary = {"exploration": form.describe(device), **linears.totals(rows)}
    summary["per_linear"] = list(map(dataclasses.asdict, rows))
    finish(summary, as_json, linears.table(rows, form))
