"""`solrl layers`: lists the linear layers of a model, with their format and errors."""

import dataclasses

import click

from solrl_jax import api
from solrl_jax.cli.options import (
    TARGET,
    bar,
    finish,
    finite,
    json_option,
    overrides_argument,
    trust_option,
)
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.backbone import DTYPES, load_backbone
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.formats import resolve_format
from solrl_jax.rl.experiment import first_device_info, load_prompt_sets
from solrl_jax.rl.explore import quantized_layers
from solrl_jax.rl.sensitivity import format_table, measure, propose_unquantized
from solrl_jax.runs.directory import find_checkpoint, load_policy, read_target

DROP = 0.02  # by how much a proposed rule may lower the rank correlation (Spearman)


@click.command("layers")
@click.argument("target", metavar="RUN_OR_PRESET", type=TARGET)
@overrides_argument
@click.option(
    "--errors",
    is_flag=True,
    help="Load the weights, merge a run's EMA policy, and measure errors.",
)
@click.option(
    "--sensitivity",
    type=click.IntRange(1),
    metavar="PROMPTS",
    help="Measure how quantizing each group changes ranks.",
)
@click.option(
    "--drop",
    type=click.FloatRange(0, 2),
    callback=finite,
    help=f"Rank correlation (Spearman) that the proposed rule may cost.  [default: {DROP}]",
)
@trust_option
@json_option
def command(
    target: str,
    overrides: tuple[str, ...],
    errors: bool,
    sensitivity: int | None,
    drop: float | None,
    trust: bool,
    as_json: bool,
) -> None:
    """List the linear layers of a model: which are quantized, why others are not, and their sizes.

    No weights are loaded, except for --errors and --sensitivity. A model of the Hugging Face Hub is
    downloaded with its weights unless it is in the cache.

    \b
    solrl layers tiny rollout.explore.precision=fp8 --errors
    solrl layers tiny prompts.test=embedded:shapes-train --sensitivity 16

    \f
    Args:
        target: A run directory or the name of a preset. For a run, the weights are those of the EMA
            policy of its newest checkpoint. For a preset, they are those that training starts from.
        overrides: Settings that differ, as `key=value`.
        errors: Whether to load the weights, and measure the relative error (Frobenius norm) of each
            quantized weight in the format alone, without other exploration options. Not together
            with `sensitivity`.
        sensitivity: The number of held-out prompts, from the first one on, with which to measure
            how quantizing each group of layers changes the ranking of candidates. A group is one
            module of the blocks, in all blocks together. All candidates of these prompts are
            generated once in full, explored once without quantization, and explored once per group
            with only this group quantized. The result also proposes which groups to leave
            unquantized. None: not measured.
        drop: By how much the proposal may lower the rank correlation (Spearman) between the rewards
            of quantized exploration and of regeneration, 0 to 2; None: 0.02. Only with
            `sensitivity`.
        trust: Whether to use rewards and objectives outside the package that a run directory names.
            Only `sensitivity` uses any.
        as_json: Whether to print one line of JSON in place of text: "exploration" (the format), the
            entries of `quantized_layers.totals`, and "per_linear" (a list of `LinearLayer` as
            dicts). With `sensitivity` instead "exact" (the correlation without quantization),
            "groups" (a list of `Sensitivity` as dicts) and "skip" (the groups to leave
            unquantized).

    Raises:
        ConfigError: If the configuration or an override is invalid.
        InputError: If an argument cannot be used.
        RunError: If the checkpoint is damaged, or a reward fails.
    """
    if errors and sensitivity is not None:
        raise InputError("--errors: is another measurement than --sensitivity; ask for one of them")
    if drop is not None and sensitivity is None:
        raise InputError(f"drop={drop}: only with --sensitivity, whose proposal it limits")
    needs_rewards = sensitivity is not None
    config, run = read_target(target, overrides, None, trust=trust or not needs_rewards)
    device = first_device_info()
    form = resolve_format(config.rollout.explore.precision, device)
    if sensitivity is not None:
        available = len(load_prompt_sets(config)[1])
        if sensitivity > available:
            raise InputError(f"sensitivity={sensitivity}: there are {available} held-out prompts")
        if form.quantize is None:
            raise InputError(
                f"rollout.explore.precision={config.rollout.explore.precision}: quantizes nothing "
                "here; --sensitivity needs nvfp4, fp8 or int8"
            )
        experiment, adapters, _ = api.open_policy(target, *overrides, trust=trust)
        with bar(None, "sensitivity") as progress:

            def show(phase: str, images: int, done: int) -> None:
                progress.update(done)

            exact, groups = measure(experiment, adapters, sensitivity, show)
        skip = propose_unquantized(exact, groups, exact - (DROP if drop is None else drop))
        summary = {
            "exact": exact,
            "groups": [dataclasses.asdict(group) for group in groups],
            "skip": skip,
        }
        finish(summary, as_json, format_table(exact, groups, skip))
        return

    pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
    shapes = pipeline.transformer.abstract_params(DTYPES[config.rollout.precision])
    with as_input_error():
        rows = quantized_layers.report(
            shapes, config.model.quantization, form, config.rollout.explore
        )
    if errors:
        find_checkpoint(target, "latest")  # raises before weights are loaded
        backbone = load_backbone(pipeline, config.rollout.precision, make_mesh(-1, 1))
        adapters, _ = load_policy(run, config, backbone)
        scale = config.lora.alpha / config.lora.rank
        rows = quantized_layers.with_errors(rows, backbone.transformer, adapters, scale, form)
    summary = {
        "exploration": form.describe(device),
        **quantized_layers.totals(rows),
        "per_linear": [dataclasses.asdict(row) for row in rows],
    }
    finish(summary, as_json, quantized_layers.table(rows, form))
