"""`solrl rank`: measures how well exploration ranks candidates."""

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from solrl_jax import api
from solrl_jax.cli.options import (
    PATH,
    TARGET,
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
from solrl_jax.rl.experiment import load_prompt_sets
from solrl_jax.runs.directory import read_target
from solrl_jax.storage.files import atomic_write, refuse_existing, writable_directory
from solrl_jax.storage.readers import is_short_digits, parse_json, read_bytes, to_strict_json
from solrl_jax.storage.stores import RunPath


@click.command("rank")
@click.argument("target", metavar="RUN_OR_PRESET", type=TARGET)
@overrides_argument
@click.option(
    "--prompts",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of held-out prompts (prompts.test).",
)
@click.option(
    "--explore",
    metavar="paper,best",
    help="Exploration options of configs/explore/ (default: the run's own).",
)
@click.option(
    "--formats", metavar="F,F,...", help="Formats to explore in (default: that of the options)."
)
@click.option(
    "--steps",
    metavar="S,S,...",
    help="Numbers of steps to explore with (default: that of the options).",
)
@click.option("--out", type=PATH, help="Directory for rank.json (default: the run, or runs/rank).")
@trust_option
@force_option
@json_option
def command(
    target: str,
    overrides: tuple[str, ...],
    prompts: int,
    explore: str | None,
    formats: str | None,
    steps: str | None,
    out: Path | None,
    trust: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Measure how well exploration ranks candidates.

    All candidates of some held-out prompts are generated in full once, and explored once for each
    combination of exploration options, formats and steps. A run's policy is the EMA of its newest
    checkpoint; that of a preset is the one that training starts from.

    \b
    solrl rank tiny --explore paper,best
    solrl rank tiny prompts.test=embedded:shapes-train --prompts 64 --formats nvfp4,fp8,bf16

    \f
    Args:
        target: A run directory or the name of a preset.
        overrides: Settings that differ, as `key=value`.
        prompts: The number of held-out prompts, from the first one on.
        explore: Names of sets of exploration options, files in `configs/explore/`, separated by
            commas, e.g. "paper,best". None: the exploration options of the target.
        formats: Number formats to explore in, separated by commas, e.g. "nvfp4,fp8", where "auto"
            is the fastest native one; None: that of each set of options.
        steps: Numbers of solver steps to explore with, separated by commas, up to
            `rollout.num_steps`; None: that of each set of options.
        out: The directory in which `rank.json`, the results with the figures of each prompt, is
            written; None: the run directory, or `runs/rank` for a preset.
        trust: Whether to use rewards and objectives outside the package that a run directory names.
        force: Whether an existing `rank.json` is replaced. Without `out`, one that this command
            wrote is replaced in any case.
        as_json: Whether to print one line of JSON in place of text: "out" (the directory),
            "formats" (by the name of each format, a description that says whether the device
            computes it natively) and "settings" (the results without the figures of each prompt).

    Raises:
        ConfigError: If the configuration, an override or a set of options is invalid.
        InputError: If an argument cannot be used.
        RunError: If the checkpoint is damaged, a reward fails, or the disk cannot be written to.
    """
    option_sets = _split("explore", explore)
    format_names = _split("formats", formats)
    step_counts = _parse_numbers("steps", steps)
    config, run = read_target(target, overrides, None, trust=trust)
    # The lists and the number of prompts are checked before models are loaded.
    settings = rank.sweep(config, explore=option_sets, formats=format_names, steps=step_counts)
    available = len(load_prompt_sets(config)[1])
    if prompts > available:
        raise InputError(f"prompts={prompts}: there are {available} held-out prompts")
    folder = out or run or Path("runs/rank")
    if out is not None or not _is_rank_result(folder / "rank.json"):
        refuse_existing("out", [folder / "rank.json"], force)
    writable_directory(folder, "--out")

    experiment, adapters, _ = api.open_policy(target, *overrides, trust=trust)
    total = (1 + len(settings)) * prompts * config.rollout.candidates
    with bar(total, "rank") as progress:

        def show(phase: str, images: int, done: int) -> None:
            progress.update(done)

        results = api.rank(
            experiment,
            adapters,
            prompts,
            formats=format_names,
            explore=option_sets,
            steps=step_counts,
            progress=show,
        )
    atomic_write(folder / "rank.json", json.dumps(to_strict_json(results), indent=2) + "\n")
    computed = {s.precision: FORMATS[s.precision].describe(experiment.device) for s in settings}
    lines = [rank.format_table(results, settings)]
    lines += [f"{name}: {description}" for name, description in computed.items()]
    summary = {"out": str(folder), "formats": computed, "settings": [*map(_means, results)]}
    finish(summary, as_json, "\n".join(lines))


def _split(name: str, text: str | None) -> list[str]:
    """Splits the text of an option at its commas.

    Args:
        name: The name of the option, for the message.
        text: The text, e.g. "nvfp4,fp8"; None if the option was not given.

    Returns:
        The parts without surrounding spaces. An empty list for None.

    Raises:
        InputError: If a part is empty.
    """
    if text is None:
        return []
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise InputError(f"{name}={text}: expected a comma-separated list")
    return entries


def _parse_numbers(name: str, text: str | None) -> list[int]:
    """Parses an option that is a list of numbers.

    Args:
        name: The name of the option, for the message.
        text: The text, e.g. "4,6", with or without spaces around the entries; None if the option
            was not given.

    Returns:
        The numbers. An empty list for None.

    Raises:
        InputError: If an entry is empty or is anything but one to nine digits, e.g. has a sign.
    """
    entries = _split(name, text)
    for entry in entries:
        if not is_short_digits(entry):
            raise InputError(f"{name}={entry}: expected an integer of at most nine digits")
    return [int(entry) for entry in entries]


def _means(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result of `api.rank` without its list of figures per prompt ("per_prompt").

    Args:
        result: The figures by name.
    """
    return {name: value for name, value in result.items() if name != "per_prompt"}


def _is_rank_result(path: RunPath) -> bool:
    """Returns whether a file is a result of `solrl rank`, so that it may be replaced: a JSON list
    of dicts with "per_prompt", not empty.

    Args:
        path: The file. If it does not exist or cannot be read, the answer is False.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        rows = parse_json(read_bytes(path))
        return (
            isinstance(rows, list)
            and bool(rows)
            and all(isinstance(row, dict) and "per_prompt" in row for row in rows)
        )
    return False
