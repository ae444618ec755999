"""`solrl sample`: pictures from a model directory, as diffusers makes them, or from a run, as its evaluation makes them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
import jax
import numpy as np

from solrl_jax.cli.options import (
    PATH,
    bar,
    checkpoint_option,
    finish,
    finite,
    force_option,
    json_option,
)
from solrl_jax.config.presets import released_models, resolve
from solrl_jax.config.schema import Config, Precision
from solrl_jax.config.sizes import evaluation_size
from solrl_jax.config.values import MAX_SIDE, MAX_STEPS, MAX_TOKENS, brief_repr
from solrl_jax.data.prompts import check_text, load_instruction, load_prompts
from solrl_jax.diffusion.released import read_scheduler
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import normal
from solrl_jax.errors import InputError, RunError, first_line, in_one_line
from solrl_jax.models.backbone import DTYPES, load_backbone
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.formats import Format, resolve_format, scoring_dtypes
from solrl_jax.rl.experiment import local_device, prompt_seeds
from solrl_jax.rl.explore.quantized_layers import quantized_paths
from solrl_jax.rl.explore.sync import Quantizer, sync_policy
from solrl_jax.rl.generate import SeedBatch, generate, prepare
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.trainable import Trainable, attach
from solrl_jax.runs import image_files
from solrl_jax.runs.directory import find_checkpoint, is_run, load_ema, read_run
from solrl_jax.storage import files
from solrl_jax.storage.hub import CARRIED
from solrl_jax.storage.readers import is_number, parse_json, read_text


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `solrl sample`. None: as the run has it, or the model. `requested` makes and checks one."""

    prompts: str
    out: Path
    seed: int
    steps: int
    guidance: float
    size: tuple[int, int] | None = None
    latents: Path | None = None
    precision: str = "bf16"
    max_tokens: int | None = None
    lora: Path | None = None
    checkpoint: str = "latest"  # of a run; see `runs.directory.find_checkpoint`
    negative: str = ""
    true_cfg: float = 1.0
    instruction: str | None = None
    tile: int | None = None
    chunk: int = 16
    force: bool = False  # replace files that are there


def requested(target: str, **given: Any) -> Request:
    """The request of the options of `solrl sample`, by their names. What is not given or None is the run's, or the default.

    Raises InputError for a value that the command line does not accept either, and TypeError for a name that is none.
    """
    own: dict[str, Any] = {"seed": 0, "steps": 10, "guidance": 1.0, "true_cfg": 1.0}
    if is_run(target):
        config = read_run(target)
        own |= {
            "steps": config.eval.num_steps,
            "guidance": config.rollout.guidance_scale,
            "true_cfg": config.rollout.true_cfg_scale,
        }
    return Request(
        **own | {name: _checked(name, value) for name, value in given.items() if value is not None}
    )


def _checked(name: str, value: Any) -> Any:
    parameters = {x.name: x for x in command.params if x.name in Request.__dataclass_fields__}
    if name not in parameters:
        raise TypeError(
            f"sample: {name}={brief_repr(value)} is no option; accepted: {', '.join(map(str, parameters))}"
        )
    try:
        accepted = parameters[name].process_value(click.Context(command), value)
    except (click.BadParameter, TypeError, OverflowError) as error:
        raise InputError(
            f"{name}={brief_repr(value)}: {getattr(error, 'message', error)}"
        ) from error
    if isinstance(value, float) and value != accepted:
        raise InputError(f"{name}={value}: accepted: a whole number")
    return accepted


def sample(
    target: str, request: Request, progress: Callable[[int], None] = lambda rows: None
) -> dict[str, Any]:
    """Writes one PNG an image, `grid.png`, `images.npy` [N, H, W, 3] in [0, 1] and `latents.npy` [N, C, h, w] to `request.out`.

    Raises InputError in one line; if possible before anything is loaded or written.
    """
    prompts = load_prompts(request.prompts, "--prompts", distinct=False)
    check_text(request.negative, "--negative")
    noise = None if request.latents is None else _open_latents(request.latents, len(prompts))
    config = read_run(target) if is_run(target) else None
    if config and request.lora is not None:
        raise InputError(
            f"--lora {request.lora}: {target} is a run and has its own adapters; name a model directory"
        )
    chosen = find_checkpoint(target, request.checkpoint)
    mine = _model_options(request, config)
    made = [*(f"{i:05d}.png" for i in range(len(prompts))), "grid.png", "images.npy", "latents.npy"]
    files.refuse_existing("--out", (request.out / name for name in made), request.force)
    files.writable_directory(request.out, "--out")
    pipeline = (
        open_model(config.model.path, mhla=mhla_override(config.model))
        if config
        else open_model(target)
    )
    grid, size = _grid(request, config, pipeline, noise)
    if (takes := 3 * 4 * math.prod(size) * len(prompts)) > (
        memory := hosts.memory()
    ):  # all pictures, in float32
        takes_and_has = f"take {takes / 1e9:.3g} GB, and this host has {memory / 1e9:.3g} GB"
        raise InputError(
            f"--prompts {request.prompts}: {len(prompts)} pictures of {size[0]} x {size[1]} {takes_and_has}"
        )
    if noise is not None:
        noise = _finite(noise, request.latents)
    device = local_device()
    form = resolve_format(request.precision, device)
    computed = "fp32" if form.name == "fp32" else "bf16"
    quantized = _quantized(config, pipeline, form, computed)
    adapters, scale = _lora(request.lora, pipeline)
    backbone = load_backbone(pipeline, computed, make_mesh(-1, 1), **mine)
    seeds = _seeds(prompts, request.seed)
    shape = pipeline.latent_shape(*size)
    if noise is None:
        noise = np.asarray(jax.jit(normal, static_argnums=(1, 2))(seeds, "initial", shape))
    max_tokens = request.max_tokens or (
        config.model.max_sequence_length if config else pipeline.default_max_tokens
    )
    prompted = prepare(backbone, None, prompts, max_tokens, request.negative)
    backbone.text_encoders.release()  # there is nothing more to encode
    if config:
        adapters, _ = load_ema(Path(target), config, backbone, chosen)
        scale = config.lora.alpha / config.lora.rank
    policy = attach(backbone.transformer, adapters, scale)
    if form.quantize is not None:
        policy = sync_policy(backbone, adapters, scale, quantized, Quantizer(form.quantize))
    chunk = min(request.chunk, math.ceil(len(prompts) / backbone.mesh.size))
    stage = Sampler("sample", (Segment(policy, grid),), backbone.decoder, shape, chunk)
    rows = SeedBatch(np.arange(len(prompts)), seeds, noise)
    samples = generate(backbone, stage, prompted, rows, keep_images=True, progress=progress)
    assert samples.images is not None
    if endless := [
        prompt
        for prompt, image in zip(prompts, samples.images, strict=True)
        if not np.isfinite(image).all()
    ]:
        what = f"{len(endless)} of {len(prompts)} pictures are not finite, first that of {brief_repr(str(endless[0]))}"
        raise RunError(
            f"{target}: {what}; its weights or adapters are not, or the guidance is too strong: nothing is written"
        )
    _write(request.out, samples.images, noise, prompts)
    told = {
        "out": str(request.out),
        "images": len(prompts),
        "height": size[0],
        "width": size[1],
        "steps": request.steps,
    }
    return told | {"precision": form.describe(device)}


def _model_options(request: Request, config: Config | None) -> dict[str, Any]:
    """Keyword arguments of `load_backbone`: the request's, else the run's."""
    path = request.instruction
    field = "--instruction"
    if path is None and config:
        path = config.model.instruction
        field = "model.instruction"
    return {
        "cache": config.model.prompt_cache_dir if config else None,
        "instruction": None if path is None else load_instruction(path, field),
        "tile": request.tile or (config.model.vae_tile_size if config else None),
        "decoding": scoring_dtypes(
            config.rollout.scoring_precision, config.rollout.precision, local_device()
        )[0]
        if config
        else None,
    }


def _grid(
    request: Request, config: Config | None, pipeline: Pipeline, noise: np.ndarray | None
) -> tuple[Schedule, tuple[int, int]]:
    """The grid, and height and width. Raises InputError for options that this model does not support."""
    embedded = pipeline.embedded_guidance
    if request.instruction is not None and not pipeline.accepts_instruction:
        raise InputError(f"--instruction {request.instruction}: a {pipeline.kind} takes none")
    if request.tile and request.tile % pipeline.compression:
        raise InputError(
            f"--tile {request.tile}: must be a multiple of {pipeline.compression}, the pixels of a latent"
        )
    if request.true_cfg != 1 and not embedded:
        raise InputError(
            f"--true-cfg {request.true_cfg}: a {pipeline.kind} takes --guidance, which is classifier-free"
        )
    scale, option = (
        (request.true_cfg, "--true-cfg") if embedded else (request.guidance, "--guidance")
    )
    if request.negative and scale <= 1:
        raise InputError(
            f"--negative {request.negative!r}: is not seen without {option} above 1, which is {scale}"
        )
    with in_one_line():
        size = _size(request, config, pipeline, noise)
        tokens = pipeline.image_tokens(*size)
        if config:
            rollout = dataclasses.replace(
                config.rollout, guidance_scale=request.guidance, true_cfg_scale=request.true_cfg
            )
            return Schedule.from_config(
                rollout, request.steps, tokens, embedded, None, pipeline.mu
            ), size
        sigmas, times, table = read_scheduler(
            pipeline.scheduler, request.steps, tokens, pipeline.linear_sigmas, pipeline.mu
        )
        grid = Schedule.from_sigmas(
            sigmas,
            table,
            embedded_guidance=request.guidance,
            guidance_scale=scale,
            guided=scale > 1,
            timesteps=times,
        )
        return grid, size


def _quantized(
    config: Config | None, pipeline: Pipeline, form: Format, precision: str
) -> tuple[str, ...]:
    """Paths of the linears that `form` quantises, by the rules of the run, or of the presets of a model of this kind."""
    if form.quantize is None:
        return ()
    presets = (resolve(f"{name}_sol_rl_pickscore") for name in released_models())

    def kind(preset):
        return parse_json(read_text(CARRIED / preset.model.path / "model_index.json"))[
            "_class_name"
        ]

    rules = (
        config or next(preset for preset in presets if kind(preset) == pipeline.kind)
    ).model.quantization
    with in_one_line():
        return quantized_paths(pipeline.transformer.abstract_params(DTYPES[precision]), rules, form)


def _lora(path: Path | None, pipeline: Pipeline) -> tuple[Trainable, float]:
    """The adapters of a LoRA file and their scale alpha / rank; none without a file."""
    if path is None:
        return {}, 1.0
    with in_one_line(lambda said: f"--lora: {said}"):
        adapters, settings = import_lora(path, parameter_table(pipeline.transformer.state))
    return adapters, settings.scale


def _seeds(prompts: Sequence[str], seed: int) -> np.ndarray:
    """A seed for each line of the file. A repeated prompt gets the seed of its next candidate."""
    candidates = {
        prompt: iter(prompt_seeds(seed, "candidate", [prompt], n)[0])
        for prompt, n in Counter(prompts).items()
    }
    return np.stack([next(candidates[prompt]) for prompt in prompts])


def _size(
    request: Request, config: Config | None, pipeline: Pipeline, noise: np.ndarray | None
) -> tuple[int, int]:
    """Height and width: of the request, of the latents, of the run, or the model's default."""
    default = evaluation_size(config) if config else pipeline.default_size
    size = request.size or default
    if noise is not None:
        of_noise = (noise.shape[1] * pipeline.compression, noise.shape[2] * pipeline.compression)
        if request.size not in (None, of_noise):
            raise ValueError(
                f"--size {size[0]}x{size[1]}: the given latents are of {of_noise[0]}x{of_noise[1]}"
            )
        size = of_noise
    shape = pipeline.latent_shape(*size)
    if max(size) > MAX_SIDE:
        raise ValueError(
            f"size {size[0]}x{size[1]}: accepted: up to {MAX_SIDE} pixels in either direction"
        )
    if noise is not None and noise.shape[1:] != shape:
        raise ValueError(f"--latents: have {noise.shape[3]} channels; this model's have {shape[2]}")
    return size


def _open_latents(path: Path, count: int) -> np.ndarray:
    """Initial noise [N, C, h, w] in a file, seen as [N, h, w, C]. No value is read."""
    try:
        if not path.is_file():
            raise OSError("no such regular file")
        with np.errstate(over="raise"):
            array = np.lib.format.open_memmap(
                path, mode="r"
            )  # nothing is allocated for what its header claims
    except (OSError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"--latents {path}: not a readable .npy file ({first_line(error)})"
        ) from error
    if array.ndim != 4 or array.dtype != np.float32 or len(array) != count:
        wanted = f"float32 [N, C, h, w] with N = {count}, one a prompt"
        raise InputError(f"--latents {path}: {array.dtype} {list(array.shape)}; expected {wanted}")
    return array.transpose(0, 2, 3, 1)


def _finite(noise: np.ndarray, path: Path | None) -> np.ndarray:
    """The noise, read. Raises InputError for values that are not finite."""
    if not all(np.isfinite(of_one).all() for of_one in noise):
        raise InputError(f"--latents {path}: has values that are not finite")
    return np.ascontiguousarray(noise)


def _height_width(
    _context: click.Context, _parameter: click.Parameter, value: Any
) -> tuple[int, int] | None:
    """A click callback: height and width of "HxW", or of a pair of integers, in pixels."""
    if value is None:
        return None
    parts = [*map(str, value)] if isinstance(value, list | tuple) else str(value).lower().split("x")
    if len(parts) != 2 or not all(is_number(p) and 0 < int(p) <= MAX_SIDE for p in parts):
        raise InputError(
            f"--size {value!r}: expected HEIGHTxWIDTH in pixels up to {MAX_SIDE}, e.g. 512x768"
        )
    return int(parts[0]), int(parts[1])


def _write(out: Path, images: np.ndarray, noise: np.ndarray, prompts: Sequence[str]) -> None:
    for name, array in (
        ("images", images.astype(np.float32)),
        ("latents", noise.transpose(0, 3, 1, 2)),
    ):
        with files.atomic(out / f"{name}.npy") as partial:
            np.save(partial, np.ascontiguousarray(array))
    for i, image in enumerate(images):
        image_files.save_png(out / f"{i:05d}.png", image)
    image_files.save_grid(out / "grid.png", images, min(len(images), 8), prompts)


@click.command("sample")
@click.argument("target", metavar="RUN_OR_MODEL_DIR")
@click.option(
    "--prompts",
    required=True,
    help="Text file with one prompt per line, a .json, .jsonl, .csv, .tsv or .parquet file, or "
    "embedded:NAME.",
)
@click.option("--out", required=True, type=PATH, help="Directory for the PNGs and arrays.")
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_STEPS),
    help="(default: the run's, of its evaluation, or 10)",
)
@click.option(
    "--guidance",
    type=click.FloatRange(0.0),
    callback=finite,
    help="1: no guidance (default: the run's, or 1).",
)
@click.option(
    "--true-cfg", type=click.FloatRange(0.0), callback=finite,
    help="FLUX.1, whose guidance is embedded: classifier-free guidance as well (default: the run's, or 1).",
)  # fmt: skip
@click.option("--negative", default="", help="Negative prompt (default: empty).")
@click.option(
    "--instruction",
    metavar="FILE",
    help="SANA: text file with the instruction that precedes every prompt.",
)
@click.option(
    "--tile",
    metavar="PIXELS",
    type=click.IntRange(1),
    help="Decode in tiles of this side, which takes less memory.",
)
@click.option(
    "--chunk",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    help="Pictures that a device makes at once.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1))
@click.option(
    "--size", metavar="HxW", type=click.UNPROCESSED, callback=_height_width,
    help="Pixels, e.g. 1024x1024 (default: eval.size of the run, or the model's).",
)  # fmt: skip
@click.option("--latents", type=PATH, help="Initial noise: .npy, float32 [N, C, h, w].")
@click.option(
    "--precision", default="bf16", show_default=True, type=click.Choice(get_args(Precision)),
    help="Format of all steps, without the levers of a run's exploration.",
)  # fmt: skip
@click.option("--lora", type=PATH, help="For a model directory: a LoRA of diffusers or PEFT.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    help="Longest prompt (default: the run's or the model's).",
)
@checkpoint_option
@force_option
@json_option
def command(target: str, as_json: bool, **options: Any) -> None:
    """Make pictures of prompts with a run's averaged policy, or with a diffusers model directory."""
    with bar(None, "sample") as done:
        summary = sample(target, requested(target, **options), done.update)
    finish(
        summary, as_json, f"{summary['images']} images in {summary['out']}, {summary['precision']}"
    )
