"""`solrl rank`."""

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from solrl_jax.cli.options import (
    PATH,
    bar,
    finish,
    force_option,
    json_option,
    overrides_argument,
    trust_option,
)
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl import rank
from solrl_jax.rl.experiment import build, load_prompt_sets
from solrl_jax.runs.directory import configuration, find_checkpoint, load_policy
from solrl_jax.storage.files import atomic_write, refuse_existing, writable_directory
from solrl_jax.storage.readers import parse_json, read_bytes, strict


@click.command("rank")
@click.argument("target", metavar="RUN_OR_PRESET")
@overrides_argument
@click.option(
    "--prompts",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of test prompts.",
)
@click.option(
    "--explore", metavar="paper,best", help="Recipes of configs/explore/ (default: the run's own)."
)
@click.option("--formats", metavar="F,F,...", help="Formats to explore in (default: the recipe's).")
@click.option(
    "--steps", metavar="S,S,...", help="Numbers of steps to explore with (default: the recipe's)."
)
@click.option("--out", type=PATH, help="Folder for rank.json (default: the run or runs/rank).")
@trust_option
@force_option
@json_option
def command(
    target: str,
    overrides: tuple[str, ...],
    prompts: int,
    out: Path | None,
    as_json: bool,
    force: bool,
    **others: Any,
) -> None:
    """Measure how well exploration ranks candidates: whole pools, explored and regenerated in full.

    \b
    solrl rank tiny prompts.test=embedded:shapes-train --prompts 64 --explore paper,best --formats nvfp4,fp8,bf16
    """
    config, run = configuration(target, overrides, None, trust=others.pop("trust_run"))
    settings = rank.sweep(config, prefix="--", **others)
    if prompts > (there := len(load_prompt_sets(config)[1])):
        raise InputError(f"--prompts {prompts}: there are {there} test prompts")
    folder = out or run or Path("runs/rank")
    if out is not None or not _written(folder / "rank.json"):
        refuse_existing("--out", [folder / "rank.json"], force)
    writable_directory(folder, "--out")
    find_checkpoint(target, "latest")  # raises before weights are loaded
    experiment = build(config)
    adapters, _ = load_policy(run, config, experiment.backbone)
    total = (1 + len(settings)) * prompts * config.rollout.candidates
    with bar(total, "rank") as shown:

        def show(stage, rows, done):
            return shown.update(done)

        pools = rank.explore_and_regenerate(experiment, adapters, prompts, settings, show)
    results = [rank.summarise(pools, setting, config.rollout.kept) for setting in settings]
    atomic_write(folder / "rank.json", json.dumps(strict(results), indent=2) + "\n")
    formats = {s.precision: FORMATS[s.precision].describe(experiment.device) for s in settings}
    text = "\n".join(
        [rank.table(results, settings), *(f"{name}: {how}" for name, how in formats.items())]
    )
    means = [
        {name: value for name, value in result.items() if name != "per_prompt"}
        for result in results
    ]
    finish({"out": str(folder), "formats": formats, "settings": means}, as_json, text)


def _written(path: Path) -> bool:
    """Whether this command wrote the file, so that it may be written over."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return all("per_prompt" in row for row in parse_json(read_bytes(path)))
    return False
