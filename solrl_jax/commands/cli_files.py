"""The commands about files and names: what a run exports, what is converted, which presets there are."""

import json
from pathlib import Path
from typing import Any, Literal

import click

from solrl_jax.commands.options import checkpoint_option, finish, json_option, overrides_argument
from solrl_jax.storage.errors import InputError


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .safetensors file; a directory for peft.")
@click.option("--format", "form", default="diffusers", show_default=True, type=click.Choice(["diffusers", "peft"]))
@click.option("--dtype", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16"]))
@click.option("--fold-alpha", is_flag=True, help="diffusers: alpha / rank goes into B, for readers that know no alpha.")
@checkpoint_option
@json_option
def export(
    run: str, out: Path, form: Literal["diffusers", "peft"], dtype: str, fold_alpha: bool, checkpoint: str, as_json: bool
) -> None:
    """Write a run's averaged policy as a LoRA that diffusers or PEFT loads."""
    from solrl_jax.backbone.backbone import DTYPES, load_backbone
    from solrl_jax.parallel.sharding import make_mesh
    from solrl_jax.policy import lora_files
    from solrl_jax.run.directory import find_checkpoint, load_ema, output_directory, read_run

    config = read_run(run)
    if fold_alpha and form == "peft":
        raise InputError("--fold-alpha: only with --format diffusers; PEFT always reads alpha")
    lora_files.check_target(out, form)
    chosen = find_checkpoint(run, checkpoint)
    output_directory(out.parent)
    backbone = load_backbone(config.model.path, "bf16", make_mesh(-1, 1))  # for its names, and where the adapters lie
    adapters, iteration = load_ema(Path(run), config, backbone, chosen)
    rank, alpha = config.lora.rank, config.lora.alpha
    settings, table = lora_files.LoraSettings(rank, alpha), backbone.parameter_table()
    if form == "peft":
        lora_files.export_peft(out, adapters, settings, table, dtype=DTYPES[dtype])
    else:
        lora_files.export_diffusers(out, adapters, settings, table, dtype=DTYPES[dtype], fold=fold_alpha)
    told = {"iteration": iteration, "rank": rank, "alpha": float(rank) if fold_alpha else alpha}  # as the file says it
    text = f"the averaged policy after iteration {iteration}, rank {rank}, alpha {told['alpha']:g}: {out}"
    finish({"out": str(out), "format": form, "dtype": dtype} | told, as_json, text)


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .safetensors file; for SANA, a directory.")
@click.option("--base", type=click.Path(path_type=Path), help="SANA: a pipeline's directory, whose other parts are added.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@json_option
def convert(file: Path, out: Path, base: Path | None, force: bool, as_json: bool) -> None:
    """Turn a torch pickle (.pth, .pt, .bin, .ckpt) into safetensors, once; a native SANA checkpoint into a transformer.

    \b
    solrl convert HPS_v2.1_compressed.pt --out HPS_v2.1.safetensors
    solrl convert SANA_LinearFFN.pth --out sana-linear --base Sana_1600M_1024px_BF16_diffusers
    """
    from solrl_jax.commands import convert as conversion

    summary = conversion.convert(file, out, base, force=force)
    finish(summary, as_json, conversion.describe(summary))


@click.command()
@click.option("--show", metavar="PRESET", help="Its prompt sets, and those prompts that its first iteration draws.")
@overrides_argument
@json_option
def presets(show: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the presets: MODEL_FAMILY_REWARD, and the embedded `tiny`.

    \b
    solrl presets --show flux1_sol_rl_hpsv2 prompts.train=my-prompts.txt
    """
    from solrl_jax.config.presets import describe, resolve

    if show is not None:
        from solrl_jax.training.experiment import describe_prompts

        summary = describe_prompts(resolve(show, overrides))
        return finish({"preset": show} | summary, as_json, prompts_text(show, summary))
    if overrides:
        raise InputError(f"{overrides[0]}: settings are for one preset; expected --show PRESET before them")
    rows = describe()
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = ["  ".join(name.ljust(width) for name, width in widths.items())]
    lines += ["  ".join(row[name].ljust(width) for name, width in widths.items()) for row in rows]
    finish({"presets": rows}, as_json, "\n".join(line.rstrip() for line in lines))


def prompts_text(preset: str, summary: dict[str, Any]) -> str:
    """`experiment.describe_prompts` for a terminal."""
    sets = [f"{summary[name]} prompts to {name} on ({summary['files'][name]})" for name in ("train", "test")]
    lines = [f"{preset}: {sets[0]}, {sets[1]}, {summary['shared']} in both; the first iteration draws"]
    lines += [
        "  " + row["prompt"] + (f"  {json.dumps(row['metadata'])}" if row["metadata"] else "") for row in summary["first"]
    ]
    return "\n".join(lines)
