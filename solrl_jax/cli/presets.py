"""`solrl presets`: the presets, and the settings and prompts of one of them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import click
import yaml

from solrl_jax.cli.options import finish, json_option, overrides_argument
from solrl_jax.config.inert import inert_fields
from solrl_jax.config.presets import preset_rows, resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import to_tree
from solrl_jax.config.validation import section_names
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.errors import InputError
from solrl_jax.rl.experiment import fit_prompt_counts, load_prompt_sets


@click.command("presets")
@click.option(
    "--show",
    metavar="PRESET",
    help="Show the settings of PRESET, its prompt sets and the prompts of its first iteration.",
)
@click.option(
    "--all", "show_all", is_flag=True, help="With --show: also settings without effect in this run."
)
@overrides_argument
@json_option
def command(show: str | None, show_all: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the presets: MODEL_FAMILY_REWARD, and the embedded `tiny`.

    \b
    solrl presets --show flux1_sol_rl_pickscore prompts.train=my-prompts.txt

    \f
    Args:
        show: The name of the preset to show. Its prompt sets are read, and downloaded if they are
            on the hub and not in its cache. None: all presets are listed.
        show_all: Whether settings without effect are shown too. Only with `show`.
        overrides: Settings that differ, as `key=value`. Only with `show`.
        as_json: Whether to print one line of JSON in place of text: "presets" (the rows of the
            table, `preset_rows`); with `show` "preset", "settings" (`shown_settings`) and the
            result of `describe_prompts`.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If an option needs `show`, or if a prompt file cannot be read. In the latter
            case the settings have been printed, unless `as_json`.
    """
    if show is None:
        if overrides:
            raise InputError(f"{overrides[0]}: overrides need --show PRESET before them")
        if show_all:
            raise InputError("--all: needs --show PRESET")
        rows = preset_rows()
        return finish({"presets": rows}, as_json, format_table(rows))
    config = resolve(show, overrides)
    settings = shown_settings(config, show_all)
    if not as_json:  # before the prompts, whose files may not exist yet
        click.echo(yaml.safe_dump(settings, sort_keys=False, width=100))
    prompts = describe_prompts(config)
    summary = {"preset": show, "settings": settings, **prompts}
    finish(summary, as_json, format_prompts(show, prompts))


def format_table(rows: list[dict[str, str]]) -> str:
    """Formats a table with aligned columns.

    Args:
        rows: At least one row. Each maps the names of the columns to texts, all in the same order.

    Returns:
        A line with the names of the columns, and one line per row.
    """
    names = list(rows[0])
    lines = [dict(zip(names, names, strict=True)), *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in names}
    texts = ["  ".join(line[name].ljust(widths[name]) for name in names) for line in lines]
    return "\n".join(text.rstrip() for text in texts)


def shown_settings(config: Config, show_all: bool) -> dict[str, Any]:
    """Returns the settings of a configuration, as `solrl presets --show` prints them.

    Args:
        config: The configuration.
        show_all: Whether fields that have no effect in a run with this configuration
            (`inert_fields`) are included.

    Returns:
        Nested dicts by section and field, e.g. {"rollout": {"kept": 24, ...}, ...}.
    """
    tree = to_tree(config)
    return tree if show_all else _without(tree, inert_fields(config), "")


def _without(tree: Mapping[str, Any], hidden: set[str], prefix: str) -> dict[str, Any]:
    """Returns a copy of the settings of a section, without some fields. A section that has no field
    left stays as an empty dict.

    Args:
        tree: Nested dicts by section and field.
        hidden: The dotted names of the fields and sections to leave out, e.g. "model.path".
        prefix: The dotted name of the section that `tree` is, with a dot at its end, e.g. "model.";
            "" for the whole configuration.
    """
    kept = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in hidden:
            continue
        kept[key] = _without(value, hidden, f"{name}.") if name in section_names() else value
    return kept


def describe_prompts(config: Config) -> dict[str, Any]:
    """Describes the prompt sets of a configuration. A set of the hub is downloaded unless the cache
    has it.

    Args:
        config: The configuration. Its section `prompts` names the sets.

    Returns:
        A dict:

        * "files": a dict with the files or names of the sets, "train" and "test".
        * "train" and "test": the number of distinct prompts in each set.
        * "shared": the number of prompts that are in both sets.
        * "first": the prompts of the first training iteration, in order, each a dict with "prompt"
          (text) and "metadata" (a dict).

    Raises:
        InputError: If a prompt set cannot be read.
        ConfigError: If no number of prompts up to that of the training set makes the configuration
            valid.
    """
    train, test = load_prompt_sets(config)
    config, _ = fit_prompt_counts(config, len(train), len(test))
    first = draw_prompts(train, config.seed, 0, config.train.num_prompts)
    return {
        "files": dataclasses.asdict(config.prompts),
        "train": len(train),
        "test": len(test),
        "shared": len(set(train) & set(test)),
        "first": [{"prompt": str(p), "metadata": dict(p.metadata)} for p in first],
    }


def format_prompts(preset: str, prompts: Mapping[str, Any]) -> str:
    """Formats the description of a preset's prompts for a terminal.

    Args:
        preset: The name of the preset.
        prompts: The result of `describe_prompts`: a dict with "files", "train", "test", "shared"
            and "first".

    Returns:
        A line on the sets, and one line per prompt of the first training iteration, with its
        metadata as JSON if it has any.
    """
    files = prompts["files"]
    sizes = ", ".join(
        f"{prompts[name]} {name} prompts ({files[name]})" for name in ("train", "test")
    )
    lines = [f"{preset}: {sizes}, {prompts['shared']} in both; the first iteration draws"]
    for row in prompts["first"]:
        metadata = f"  {json.dumps(row['metadata'])}" if row["metadata"] else ""
        lines.append(f"  {row['prompt']}{metadata}")
    return "\n".join(lines)
