"""`solrl export`: writes a run's EMA policy for diffusers or PEFT, or publishes it."""

from pathlib import Path
from typing import Literal

import click

from solrl_jax import api
from solrl_jax.cli.options import PATH, TARGET, checkpoint_option, finish, force_option, json_option


@click.command("export")
@click.argument("run", metavar="RUN", type=TARGET)
@click.option(
    "--out", type=PATH, help="Output: a .safetensors file; else a directory. [--hub: RUN/hub]"
)
@click.option(
    "--hub",
    metavar="OWNER/NAME",
    help="Upload to this repository of the Hugging Face Hub, with a model card.",
)
@click.option("--private", is_flag=True, help="--hub: a new repository is private.")
@click.option("--dry-run", is_flag=True, help="--hub: write the folder, and upload nothing.")
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
    out: Path | None,
    hub: str | None,
    private: bool,
    dry_run: bool,
    form: Literal["diffusers", "peft"],
    dtype: Literal["fp32", "bf16"],
    fold_alpha: bool,
    checkpoint: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write a run's EMA policy as a LoRA that diffusers or PEFT loads.

    A run that trains parameters in full becomes the directory of a whole transformer, with a LoRA
    in it if there are adapters too.

    \b
    solrl export runs/demo --out lora.safetensors
    solrl export runs/demo --hub me/my-lora --dry-run     # writes runs/demo/hub with a model card
    solrl export runs/demo --hub me/my-lora --force       # and uploads it

    \f
    Args:
        run: The directory of the run to export, without `hub` also in an object store. The weights
            of its base model are loaded, and downloaded if necessary.
        out: The path to write: a .safetensors file, or a directory for PEFT, for a transformer that
            was trained in full, and with `hub`. A directory may contain nothing but an earlier
            export. None is accepted with `hub`: the folder `hub` in the run directory.
        hub: The repository of the Hugging Face Hub to upload to, OWNER/NAME, which is created if
            necessary. Only with `form` "diffusers". None: nothing is uploaded.
        private: Whether the repository becomes private if it does not exist yet. Only with `hub`.
        dry_run: Whether the folder is written and not uploaded. Only with `hub`.
        form: The layout of the LoRA: "diffusers" or "peft".
        dtype: The number format of the tensors, "fp32" or "bf16".
        fold_alpha: Whether the LoRA's scale alpha / rank is multiplied into its matrices B, for
            programs that ignore alpha. Only for diffusers, and if nothing was trained in full.
        checkpoint: The checkpoint of a run: "best", "latest" or the number of an iteration.
        force: Whether existing files are replaced.
        as_json: Whether to print one line of JSON in place of text: "out" (`out` as given; with
            `hub`, the absolute path of the folder), "format", "dtype" and the result of
            `api.export`.

    Raises:
        ConfigError: If the configuration of the run is invalid.
        InputError: If `run` is no run directory or has no such checkpoint, `out` cannot be written
            or exists without `force`, an option does not suit the run or the other options, the
            parameters are not finite or change nothing, or the user is not logged in to the hub.
        RunError: If the checkpoint is damaged, the disk cannot be written to, or the upload fails.
    """
    summary = api.export(
        run,
        out,
        form=form,
        dtype=dtype,
        fold_alpha=fold_alpha,
        checkpoint=checkpoint,
        force=force,
        hub=hub,
        private=private,
        dry_run=dry_run,
    )
    if "trained_in_full" in summary:
        contents = f"{summary['trained_in_full']} parameter(s) in full"
    else:
        contents = f"rank {summary['rank']}, alpha {summary['alpha']:g}"
    place = summary.get("folder", str(out))
    text = f"the averaged policy after iteration {summary['iteration']}, {contents}: {place}"
    if "url" in summary:
        text += f"\nuploaded to {summary['url']}"
    finish({"out": place, "format": form, "dtype": dtype} | summary, as_json, text)
