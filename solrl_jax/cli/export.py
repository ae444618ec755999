"""`solrl export`."""

from pathlib import Path
from typing import Any, Literal

import click

from solrl_jax.cli.options import PATH, checkpoint_option, finish, force_option, json_option
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.backbone import DTYPES, load_backbone
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.rl.trainable import lora_files, transformer_files
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import find_targets
from solrl_jax.runs.directory import find_checkpoint, load_ema, read_run
from solrl_jax.storage import files


@click.command("export")
@click.argument("run", metavar="RUN")
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
    dtype: str,
    fold_alpha: bool,
    as_json: bool,
    **which: Any,
) -> None:
    """Write a run's averaged policy as a LoRA that diffusers or PEFT loads.

    Of a run that trains parameters in full: the directory of the whole transformer, and the LoRA in it if there are adapters.
    """
    config = read_run(run)
    if fold_alpha and form == "peft":
        raise InputError("--fold-alpha: only with --format diffusers; PEFT always reads alpha")
    pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
    with in_one_line():
        whole = find_targets(pipeline.transformer, config).whole
    if whole and (form == "peft" or fold_alpha):
        option = "--format peft" if form == "peft" else "--fold-alpha"
        raise InputError(
            f"{option}: {run} trains {len(whole)} parameter(s) in full, which a LoRA does not hold; leave it out"
        )
    if whole:
        transformer_files.check_directory(out)
    else:
        lora_files.check_target(out, form)
    files.refuse_existing(
        "--out", list(out.iterdir()) if out.is_dir() else [out], which["force"], folders=True
    )
    if out.is_symlink() and out.is_dir():
        raise InputError(f"--out {out}: is a link; name the directory itself")
    chosen = find_checkpoint(run, which["checkpoint"])
    files.writable_directory(out.parent, "--out")
    backbone = load_backbone(
        pipeline, config.rollout.precision, make_mesh(-1, 1)
    )  # names and places what is trained
    adapters, iteration = load_ema(Path(run), config, backbone, chosen)
    rank = config.lora.rank
    alpha = config.lora.alpha
    settings = LoraSettings(rank, alpha)
    table = backbone.parameter_table()
    if whole:
        transformer_files.export_transformer(out, backbone, adapters, settings, dtype=DTYPES[dtype])
    elif form == "peft":
        lora_files.export_peft(out, adapters, settings, table, dtype=DTYPES[dtype])
    else:
        lora_files.export_diffusers(
            out, adapters, settings, table, dtype=DTYPES[dtype], fold=fold_alpha
        )
    told = {
        "iteration": iteration,
        "rank": rank,
        "alpha": float(rank) if fold_alpha else alpha,
    }  # as in the file
    what = f"rank {rank}, alpha {told['alpha']:g}"
    if whole:
        told = told | {"trained_in_full": len(whole)}
        what = f"{len(whole)} parameter(s) in full"
    text = f"the averaged policy after iteration {iteration}, {what}: {out}"
    finish({"out": str(out), "format": form, "dtype": dtype} | told, as_json, text)
