"""Pictures of given prompts from a model directory, as diffusers would make them, or from a run, as its evaluation does."""

import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from solrl_jax.backbone.backbone import DTYPES, Backbone, Params, Pipeline, load_backbone, open_model
from solrl_jax.conditioning.prompts import load_instruction, load_prompts
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.explore.linears import quantized_paths
from solrl_jax.flow.released import read_scheduler
from solrl_jax.numerics.formats import Format
from solrl_jax.numerics.formats import resolve as resolve_format
from solrl_jax.numerics.randomness import candidate_seeds, initial_noise, prompt_uid
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.policy.lora import Adapters, attach
from solrl_jax.policy.lora_files import import_lora
from solrl_jax.rollout.generate import Grid, generate, prepare
from solrl_jax.run import pictures
from solrl_jax.run.directory import find_checkpoint, is_run, load_ema, output_directory, read_run
from solrl_jax.storage import files
from solrl_jax.storage.errors import InputError, first_line
from solrl_jax.training.experiment import device_facts, quantize_policy

# the preset that says which linears of a bare model directory are quantised, by pipeline
RECIPES = {
    "SanaPipeline": "sana_sol_rl_pickscore",
    "FluxPipeline": "flux1_sol_rl_pickscore",
    "StableDiffusion3Pipeline": "sd3_sol_rl_pickscore",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `solrl sample`; None takes what the run or the model has."""

    prompts: str
    out: Path
    steps: int
    guidance: float
    seed: int
    size: tuple[int, int] | None = None
    latents: Path | None = None
    precision: str = "bf16"
    max_tokens: int | None = None
    lora: Path | None = None
    checkpoint: str = "latest"  # of a run, see `runs.find_checkpoint`
    negative: str = ""
    true_cfg: float = 1.0
    instruction: str | None = None
    tile: int | None = None
    chunk: int = 16


def sample(target: str, request: Request, progress: Callable[[int], None] = lambda rows: None) -> dict[str, Any]:
    """Writes one PNG an image, `grid.png`, `images.npy` [N, H, W, 3] in [0, 1] and `latents.npy` [N, C, h, w] to `request.out`.

    Raises InputError in one line before anything is loaded or written, where that can be known so early.
    """
    prompts = load_prompts(request.prompts, "--prompts", distinct=False)
    noise = None if request.latents is None else _read_latents(request.latents, len(prompts))
    config = read_run(target) if is_run(target) else None
    if config and request.lora is not None:
        raise InputError(f"--lora {request.lora}: {target} is a run and has its own adapters; name a model directory")
    chosen = find_checkpoint(target, request.checkpoint)
    mine = _model_options(request, config)
    output_directory(request.out)
    pipeline = open_model(config.model.path if config else target)
    grid, size = _grid(request, config, pipeline, noise)
    device = device_facts()
    form = resolve_format(request.precision, device)
    computed = "fp32" if form.name == "fp32" else "bf16"
    quantized = _quantized(config, pipeline, form, computed)
    backbone = load_backbone(pipeline, computed, make_mesh(-1, 1), **mine)
    seeds = _seeds(prompts, request.seed)
    if noise is None:
        noise = np.asarray(jax.jit(initial_noise, static_argnums=1)(seeds, pipeline.latent_shape(*size)))
    max_tokens = request.max_tokens or (config.model.max_tokens if config else pipeline.default_max_tokens)
    prompted = prepare(backbone, None, prompts, max_tokens, request.negative)
    backbone.text_encoders.release()  # there is nothing more to encode
    policy = _policy(target, chosen, request, config, backbone, form, quantized)
    samples = generate(
        backbone, policy, grid, prompted, np.arange(len(prompts)), seeds, size,
        min(request.chunk, math.ceil(len(prompts) / backbone.mesh.size)), None,
        noise=noise, keep_images=True, progress=progress,
    )  # fmt: skip
    assert samples.images is not None
    _write(request.out, samples.images, noise, prompts)
    made = {"out": str(request.out), "images": len(prompts), "height": size[0], "width": size[1], "steps": request.steps}
    return made | {"precision": form.describe(device)}


def _model_options(request: Request, config: Config | None) -> dict[str, Any]:
    """What `load_backbone` is asked for beside the model: the request's, else the run's."""
    path, field = request.instruction, "--instruction"
    if path is None and config:
        path, field = config.model.instruction, "model.instruction"
    return {
        "cache": config.model.cache if config else None,
        "instruction": None if path is None else load_instruction(path, field),
        "tile": request.tile or (config.model.tile if config else None),
    }


def _grid(
    request: Request, config: Config | None, pipeline: Pipeline, noise: np.ndarray | None
) -> tuple[Grid, tuple[int, int]]:
    """The steps to take, and height and width. Raises InputError for options that this model cannot follow."""
    embedded = pipeline.embedded_guidance
    if request.instruction is not None and pipeline.instruct is None:
        raise InputError(f"--instruction {request.instruction}: a {pipeline.kind} takes none")
    if request.tile and request.tile % pipeline.compression:
        raise InputError(f"--tile {request.tile}: must be a multiple of {pipeline.compression}, the pixels of a latent")
    if request.true_cfg != 1 and not embedded:
        raise InputError(f"--true-cfg {request.true_cfg}: a {pipeline.kind} takes --guidance, which is classifier-free")
    scale, option = (request.true_cfg, "--true-cfg") if embedded else (request.guidance, "--guidance")
    if request.negative and scale <= 1:
        raise InputError(f"--negative {request.negative!r}: is not seen without {option} above 1, which is {scale}")
    try:
        size = _size(request, config, pipeline, noise)
        tokens = pipeline.image_tokens(*size)
        if config:
            rollout = dataclasses.replace(config.rollout, guidance=request.guidance, true_guidance=request.true_cfg)
            return Grid.of(rollout, request.steps, tokens, embedded), size
        sigmas, times, table = read_scheduler(pipeline.scheduler, request.steps, tokens, pipeline.own_sigmas)
        return Grid.from_sigmas(sigmas, table, request.guidance, scale > 1, times, scale), size
    except ValueError as error:
        raise InputError(str(error)) from error


def _quantized(config: Config | None, pipeline: Pipeline, form: Format, precision: str) -> tuple[str, ...]:
    """The linears that `form` takes, by the rules of the run, or of the preset for such a pipeline; none if it takes none."""
    if form.quantize is None:
        return ()
    rules = (config or resolve(RECIPES[pipeline.kind])).model.quantize
    try:
        return quantized_paths(pipeline.transformer.shapes(DTYPES[precision]), rules, form)
    except ValueError as error:
        raise InputError(str(error)) from error


def _policy(
    target: str, chosen: Path | None, request: Request, config: Config | None, backbone: Backbone, form: Format,
    quantized: tuple[str, ...],
) -> Params:  # fmt: skip
    """The base, with the adapters of the run or the file if there is one, and leaves of `form` where it quantises.

    Without a correction and exact steps (`rollout.explore`), also of a run that explores with them.
    """
    base, scale = backbone.transformer, 1.0
    adapters: Adapters = {}
    if config:
        adapters, _ = load_ema(Path(target), config, backbone, chosen)
        scale = config.lora.alpha / config.lora.rank
    elif request.lora is not None:
        try:
            adapters, settings = import_lora(request.lora, backbone.parameter_table())
        except InputError as error:
            raise InputError(f"--lora: {error}") from error
        scale = settings.scale
    if form.quantize is None:
        return attach(base, adapters, scale)
    return attach(base, adapters, scale, quantize_policy(backbone.mesh, base, adapters, scale, quantized, form.quantize))


def _seeds(prompts: Sequence[str], seed: int) -> np.ndarray:
    """A seed a line of the file; a prompt that comes twice gets its second candidate the second time."""
    times: Counter[str] = Counter()
    rows = []
    for prompt in prompts:
        uid = np.array([prompt_uid(prompt)], np.uint32)
        rows.append(np.asarray(candidate_seeds(np.int32(seed), np.int32(0), uid, np.array([times[prompt]])))[0, 0])
        times[prompt] += 1
    return np.stack(rows)


def _size(request: Request, config: Config | None, pipeline: Pipeline, noise: np.ndarray | None) -> tuple[int, int]:
    """Height and width: given, or the latents', or the run's, or the model's own."""
    default = (config.model.height, config.model.width) if config else pipeline.default_size
    size = request.size or default
    if noise is not None:
        of_noise = (noise.shape[1] * pipeline.compression, noise.shape[2] * pipeline.compression)
        if request.size not in (None, of_noise):
            raise ValueError(f"--size {size[0]}x{size[1]}: the given latents are of {of_noise[0]}x{of_noise[1]}")
        size = of_noise
    shape = pipeline.latent_shape(*size)
    if noise is not None and noise.shape[1:] != shape:
        raise ValueError(f"--latents: have {noise.shape[3]} channels; this model's have {shape[2]}")
    return size


def _read_latents(path: Path, count: int) -> np.ndarray:
    """Initial noise [N, C, h, w] from a file, as [N, h, w, C]."""
    try:
        with path.open("rb") as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--latents {path}: not a readable .npy file ({first_line(error)})") from error
    if array.ndim != 4 or array.dtype != np.float32 or len(array) != count:
        wanted = f"float32 [N, C, h, w] with N = {count}, one a prompt"
        raise InputError(f"--latents {path}: {array.dtype} {list(array.shape)}; expected {wanted}")
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def _write(out: Path, images: np.ndarray, noise: np.ndarray, prompts: Sequence[str]) -> None:
    for name, array in (("images", images.astype(np.float32)), ("latents", noise.transpose(0, 3, 1, 2))):
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(array))
        files.atomic_write(out / f"{name}.npy", buffer.getvalue())
    for i, image in enumerate(images):
        pictures.save_png(out / f"{i:05d}.png", image)
    pictures.save_grid(out / "grid.png", images, min(len(images), 8), prompts)
    with files.writing(out):
        for path in out.iterdir():
            if _number(path.name) >= len(images) and path.is_file():  # of an earlier call with more prompts
                path.unlink()


def _number(name: str) -> int:
    """Which image's PNG a file name is, counted from 0; -1 if it is none's."""
    digits = re.fullmatch(r"([0-9]{5,})\.png", name)
    return int(digits[1]) if digits and name == f"{int(digits[1]):05d}.png" else -1
