"""`solrl export`: writes a run's averaged policy for diffusers or PEFT."""

from pathlib import Path
from typing import Literal

import click

from solrl_jax import api
from solrl_jax.cli.options import PATH, TARGET, checkpoint_option, finish, force_option, json_option


@click.command("export")
@click.argument("run", metavar="RUN", type=TARGET)
@click.option(
    "--out", required=True, type=PATH, help="Output: a .safetensors file; else a directory."
)
@click.option(
    "--format",
    "form",
    default="diffusers",
    show_default=True,
    type=click.Choice(["diffusers", "peft"]),
)
@click.option("--dtype", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16"]))
@click.option(
    "--fold-alpha",
    is_flag=True,
    help="diffusers: multiply B by alpha / rank, for programs that ignore alpha.",
)
@checkpoint_option
@force_option
@json_option
def command(
    run: str,
    out: Path,
    form: Literal["diffusers", "peft"],
    dtype: Literal["fp32", "bf16"],
    fold_alpha: bool,
    checkpoint: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write a run's averaged policy as a LoRA that diffusers or PEFT loads.

    A run that trains parameters in full becomes the directory of a whole transformer, with a LoRA
    in it if there are adapters too.

    \f
    Args:
        run: The run directory.
        out: The file, or for PEFT and whole transformers the directory, to write.
        form: "diffusers" or "peft".
        dtype: The number format of the tensors, "fp32" or "bf16".
        fold_alpha: Whether B is multiplied by alpha / rank.
        checkpoint: The checkpoint of a run: "best", "latest" or the number of an iteration.
        force: Whether existing files are replaced.
        as_json: Whether to print the result as one line of JSON in place of text.

    Raises:
        ConfigError: If the configuration of the run is invalid.
        InputError: If an argument cannot be used, see `api.export`.
        RunError: If the checkpoint is damaged, or the disk refuses.
    """
    summary = api.export(
        run,
        out,
        form=form,
        dtype=dtype,
        fold_alpha=fold_alpha,
        checkpoint=checkpoint,
        force=force,
    )
    if "trained_in_full" in summary:
        contents = f"{summary['trained_in_full']} parameter(s) in full"
    else:
        contents = f"rank {summary['rank']}, alpha {summary['alpha']:g}"
    text = f"the averaged policy after iteration {summary['iteration']}, {contents}: {out}"
    finish({"out": str(out), "format": form, "dtype": dtype} | summary, as_json, text)
