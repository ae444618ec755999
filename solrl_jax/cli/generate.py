"""`solrl generate`: writes images or clips of the prompts in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from solrl_jax import api
from solrl_jax.cli.options import (
    PATH,
    TARGET,
    bar,
    checkpoint_option,
    finish,
    force_option,
    json_option,
)
from solrl_jax.config.schema import Precision
from solrl_jax.config.values import MAX_SIDE
from solrl_jax.data.prompts import load_instruction, load_prompts
from solrl_jax.errors import InputError, first_line
from solrl_jax.runs import image_files
from solrl_jax.runs.generation import DEFAULT_NUM_STEPS, Generation
from solrl_jax.storage import files
from solrl_jax.storage.readers import is_short_digits

# Names that options had in version 0.2, which still work.
RENAMED_OPTIONS = {
    "steps": "num-steps",
    "guidance": "guidance-scale",
    "true-cfg": "true-cfg-scale",
    "negative": "negative-prompt",
    "tile": "vae-tile-size",
    "chunk": "batch-size",
    "max-tokens": "max-sequence-length",
}


def _parse_size(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Parses the option `--size`, as a callback of click.

    Args:
        _context: The context of click. Not read.
        _parameter: The option. Not read.
        value: The text "HEIGHTxWIDTH" in pixels, e.g. "512x768", or "HEIGHTxWIDTHxFRAMES"; "X" is
            accepted for "x". None if the option was not given.

    Returns:
        (height, width) or (height, width, frames); None if the option was not given.

    Raises:
        InputError: If the text has another form (also with spaces), or a number is not from 1 to
            16,384.
    """
    if value is None:
        return None
    sides = value.lower().split("x")
    if len(sides) not in (2, 3) or not all(
        is_short_digits(s) and 0 < int(s) <= MAX_SIDE for s in sides
    ):
        raise InputError(
            f"size={value!r}: expected HEIGHTxWIDTH in pixels up to {MAX_SIDE}, e.g. 512x768, or "
            "HEIGHTxWIDTHxFRAMES for video models"
        )
    return tuple(map(int, sides))


def _open_latents(path: Path) -> np.ndarray:
    """Opens a .npy file without reading its values (`numpy.memmap`).

    Args:
        path: The .npy file, which must not change while the array is used.

    Returns:
        A read-only array, of the dtype and shape that the file has. Neither is checked.

    Raises:
        InputError: If there is no such file, or it is not a .npy file.
    """
    try:
        if not path.is_file():
            raise OSError("no such regular file")
        with np.errstate(over="raise"):
            return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"latents={path}: not a readable .npy file ({first_line(error)})"
        ) from error


def _write(out: Path, generation: Generation, prompts: Sequence[str]) -> None:
    """Writes images or clips to a directory: one file for each, and all of them in a grid.

    Images are written as `00000.png` and so on, with `grid.png`. Clips are written as animated
    WebP, `00000.webp` and so on, with `grid.webp`; their `grid.png` shows the first frames. Also
    writes the arrays of `generation`, float32: `images.npy`, [N, height, width, 3] or [N, frames,
    height, width, 3] with values in [0, 1], and `latents.npy`, the initial noise, [N, C, h, w] or
    [N, C, t, h, w]. Existing files are replaced.

    Args:
        out: The directory. It is created if necessary.
        generation: The images or clips and their initial noise.
        prompts: The prompt of each image, which the grid shows. The grid has up to 8 columns.

    Raises:
        RunError: If a file cannot be written to the disk.
    """
    for name, array in (("images", generation.images), ("latents", generation.latents)):
        with files.atomic(out / f"{name}.npy") as partial:
            np.save(partial, array)
    for number, image in enumerate(generation.images):
        if image.ndim == 4:
            path = out / f"{number:05d}.webp"
            image_files.save_clip(path, image, generation.frames_per_second)
        else:
            image_files.save_png(out / f"{number:05d}.png", image)
    columns = min(len(prompts), 8)
    image_files.save_grid(
        out / "grid.png",
        generation.images,
        columns,
        prompts,
        frames_per_second=generation.frames_per_second,
    )


@click.command(
    "generate",
    context_settings={"token_normalize_func": lambda name: RENAMED_OPTIONS.get(name, name)},
)
@click.argument("model", metavar="RUN_OR_MODEL", type=TARGET)
@click.option(
    "--prompts",
    required=True,
    type=TARGET,
    help="Text file with one prompt per line, a .json, .jsonl, .csv, .tsv or .parquet file, or "
    "embedded:NAME.",
)
@click.option("--out", required=True, type=PATH, help="Directory for the PNGs and arrays.")
@click.option(
    "--num-steps",
    type=int,
    help=f"Solver steps (default: those of the run's evaluation, or {DEFAULT_NUM_STEPS}).",
)
@click.option(
    "--guidance-scale",
    type=float,
    help="Up to 1: no guidance (default: the run's, or 1).",
)
@click.option(
    "--true-cfg-scale",
    type=float,
    help="FLUX.1, which embeds its guidance scale: classifier-free guidance beside it (default: "
    "the run's, or 1).",
)
@click.option("--negative-prompt", default="", help="Negative prompt (default: empty).")
@click.option(
    "--instruction",
    "instruction_file",
    metavar="FILE",
    type=TARGET,
    help="SANA: text file with the instruction that precedes every prompt.",
)
@click.option(
    "--vae-tile-size",
    metavar="PIXELS",
    type=int,
    help="Decode in tiles of this side, which takes less memory.",
)
@click.option(
    "--batch-size",
    default=16,
    show_default=True,
    type=int,
    help="Images that a device generates at once.",
)
@click.option("--seed", default=0, show_default=True, type=int)
@click.option(
    "--size",
    metavar="HxW[xFRAMES]",
    callback=_parse_size,
    help="Pixels, e.g. 1024x1024, and frames of clips, e.g. 480x832x81 (default: that of the run's "
    "evaluation, or the model's).",
)
@click.option(
    "--latents",
    "latents_file",
    type=PATH,
    help="Initial noise: a .npy file, float32 [N, C, h, w], or [N, C, t, h, w] for clips.",
)
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    type=click.Choice(get_args(Precision)),
    help="Number format of all steps, without the other options of a run's exploration.",
)
@click.option(
    "--lora",
    type=PATH,
    help="LoRA to apply to a model (diffusers, PEFT, kohya, ai-toolkit or ComfyUI). Not "
    "accepted with a run.",
)
@click.option(
    "--max-sequence-length",
    type=int,
    help="Tokens that prompts are padded or cut to (default: the run's or the model's).",
)
@checkpoint_option
@force_option
@json_option
def command(
    model: str,
    prompts: str,
    out: Path,
    instruction_file: str | None,
    latents_file: Path | None,
    force: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Generate images with a run's EMA policy, or with a model.

    A model is a diffusers directory, OWNER/NAME of a Hub repository, or embedded:NAME.

    \b
    solrl generate runs/demo --prompts prompts.txt --out images

    \f
    Args:
        model: A run directory, a model directory, "embedded:NAME", or OWNER/NAME of a repository of
            the Hub, which is downloaded unless it is in the Hub's cache.
        prompts: A file with prompts, "FILE:COLUMN", "embedded:NAME" or
            "hub:OWNER/DATASET[:SPLIT][:COLUMN]" (`data.prompts.load_prompts`). Repeated prompts
            each give an image.
        out: The directory for the PNGs (animated WebPs for clips), the grid and the arrays. It is
            created if necessary.
        instruction_file: A text file with the text that precedes every prompt, for SANA; None: that
            of the run, or none for a model.
        latents_file: A .npy file with the initial noise, float32 [N, C, h, w], or [N, C, t, h, w]
            for clips, with one entry per prompt; None: drawn from the seed.
        force: Whether files in `out` with the names of new ones may be replaced. Others there stay.
        as_json: Whether to print one line of JSON in place of text: "out", "images" (their number),
            "height", "width", "steps", "precision" (a description) and, for clips, "frames".
        **arguments: Keyword arguments of `api.generate` by their names: "num_steps",
            "guidance_scale", "true_cfg_scale", "negative_prompt", "vae_tile_size", "batch_size",
            "seed", "size", "precision", "lora", "max_sequence_length" and "checkpoint".

    Raises:
        ConfigError: If the configuration of the run is invalid.
        InputError: If an argument or a file cannot be used.
        RunError: If an image is not finite, the checkpoint is damaged, or the disk cannot be
            written to.
    """
    texts = load_prompts(prompts, "--prompts", distinct=False)
    instruction = None
    if instruction_file is not None:
        instruction = load_instruction(instruction_file, "--instruction")
    latents = None if latents_file is None else _open_latents(latents_file)
    names = [f"{number:05d}.{kind}" for number in range(len(texts)) for kind in ("png", "webp")]
    names += ["grid.png", "grid.webp", "images.npy", "latents.npy"]
    files.refuse_existing("out", (out / name for name in names), force)
    files.writable_directory(out, "--out")
    with bar(None, "generate") as progress:
        generation = api.generate_with_latents(
            model,
            texts,
            instruction=instruction,
            latents=latents,
            progress=progress.update,
            **arguments,
        )
    _write(out, generation, texts)
    summary = {
        "out": str(out),
        "images": len(texts),
        "height": generation.images.shape[-3],
        "width": generation.images.shape[-2],
        "steps": generation.num_steps,
        "precision": generation.precision,
    }
    kind = "images"
    if generation.images.ndim == 5:
        kind = "clips"
        summary["frames"] = generation.images.shape[1]
    finish(summary, as_json, f"{len(texts)} {kind} in {out}, {generation.precision}")
