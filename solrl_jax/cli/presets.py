"""`solrl presets`."""

import dataclasses
import json
from typing import Any

import click

from solrl_jax.cli.options import finish, json_option, overrides_argument
from solrl_jax.config.presets import describe, resolve
from solrl_jax.config.schema import Config
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.errors import InputError
from solrl_jax.rl.experiment import load_prompt_sets


@click.command("presets")
@click.option(
    "--show",
    metavar="PRESET",
    help="Show the prompt sets of PRESET and the prompts of its first iteration.",
)
@overrides_argument
@json_option
def command(show: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the presets: MODEL_FAMILY_REWARD, and the embedded `tiny`.

    \b
    solrl presets --show flux1_sol_rl_hpsv2 prompts.train=my-prompts.txt
    """
    if show is not None:
        summary = describe_prompts(resolve(show, overrides))
        return finish({"preset": show} | summary, as_json, prompts_text(show, summary))
    if overrides:
        raise InputError(
            f"{overrides[0]}: settings are for one preset; expected --show PRESET before them"
        )
    rows = describe()
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = ["  ".join(name.ljust(width) for name, width in widths.items())]
    lines += ["  ".join(row[name].ljust(width) for name, width in widths.items()) for row in rows]
    finish({"presets": rows}, as_json, "\n".join(line.rstrip() for line in lines))


def describe_prompts(config: Config) -> dict[str, Any]:
    """The numbers of distinct prompts to train and to test on, their files, and the prompts of the first iteration."""
    train, test = load_prompt_sets(config)
    first = draw_prompts(train, config.seed, 0, min(config.train.num_prompts, len(train)))
    return {
        "files": dataclasses.asdict(config.prompts),
        "train": len(train),
        "test": len(test),
        "shared": len(set(train) & set(test)),
        "first": [{"prompt": str(p), "metadata": dict(p.metadata)} for p in first],
    }


def prompts_text(preset: str, summary: dict[str, Any]) -> str:
    """`describe_prompts` for a terminal."""
    sets = [
        f"{summary[name]} prompts to {name} on ({summary['files'][name]})"
        for name in ("train", "test")
    ]
    lines = [
        f"{preset}: {sets[0]}, {sets[1]}, {summary['shared']} in both; the first iteration draws"
    ]
    for row in summary["first"]:
        lines.append(
            "  " + row["prompt"] + (f"  {json.dumps(row['metadata'])}" if row["metadata"] else "")
        )
    return "\n".join(lines)
