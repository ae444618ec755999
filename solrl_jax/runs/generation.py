"""Generates images or clips from text prompts, with a diffusers model directory or with a run's
policy.

A model directory samples as its diffusers pipeline does, with the directory's own scheduler. A run
samples as its evaluation does, with its EMA policy. `api.generate` is the function for
users; `generate_images` is what it calls.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import pydantic
from jaxtyping import Float
from pydantic import AfterValidator, ConfigDict, Field

from solrl_jax.config.presets import released_models, resolve
from solrl_jax.config.schema import Config, Precision, Quantization
from solrl_jax.config.sizes import complete_size, evaluation_size
from solrl_jax.config.validation import describe_error, suggest
from solrl_jax.config.values import (
    MAX_NUMBER,
    MAX_SIDE,
    MAX_TOKENS,
    NonNegative,
    NumSteps,
    PositiveInt,
    Seed,
    Size,
    Text,
    brief_repr,
)
from solrl_jax.data.prompts import Prompt, check_text, load_instruction
from solrl_jax.diffusion.released import read_scheduler
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import normal, prompt_seeds
from solrl_jax.errors import InputError, RunError, as_input_error, first_line
from solrl_jax.models.backbone import DTYPES, Backbone, load_backbone
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.formats import resolve_format, scoring_dtypes
from solrl_jax.rl.experiment import first_device_info
from solrl_jax.rl.explore.quantized_layers import quantized_paths
from solrl_jax.rl.explore.sync import Quantizer, sync_policy
from solrl_jax.rl.generate import SeedBatch, generate, prepare
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs.directory import find_checkpoint, is_run, load_ema, read_run
from solrl_jax.storage.hub import CARRIED
from solrl_jax.storage.readers import parse_json, read_text
from solrl_jax.storage.stores import expand_home, run_path

DEFAULT_NUM_STEPS = 10  # for a model directory, which does not say how many steps it needs

_SequenceLength = Annotated[PositiveInt, Field(le=MAX_TOKENS)]
_Scale = Annotated[NonNegative, Field(le=MAX_NUMBER)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `api.generate`, each checked by itself. `Request.check` builds one.

    Rules below that depend on the model or on other arguments are checked by `generate_images`.

    Attributes:
        model: The run directory, a model directory, "embedded:NAME", or OWNER/NAME of a repository
            of the hub. Not empty.
        prompts: One prompt per image, at least one. Each has at most 20,000 characters and no
            control characters; it may be empty.
        num_steps: The number of solver steps, 1 to 1000. None: that of the run's evaluation, or
            `DEFAULT_NUM_STEPS` (10) for a model.
        guidance_scale: The guidance scale, at least 0. FLUX.1-dev takes it as an input of the
            network; FLUX.1-schnell and distilled FLUX.2-klein take none, so that it is at most 1.
            For all others it is the scale of classifier-free guidance, which is off at 1 or less.
            None: the run's, or 1.
        true_cfg_scale: The scale of classifier-free guidance for FLUX.1 and distilled FLUX.2-klein,
            at least 0; others accept only 1. None: the run's, or 1.
        negative_prompt: The negative prompt of classifier-free guidance, one for all images, of at
            most 20,000 characters. Unless it is "", the scale of this guidance must be above 1.
        seed: The seed of the initial noise, 0 to 2**31 - 1.
        size: Height and width in pixels, each 1 to 16,384; for video models, the number of
            frames may follow. None: that of `latents`, or of the run's evaluation, or the model's
            default, which also gives a number of frames that is missing.
        latents: The initial noise of the N prompts, float32 [N, C, h, w], or [N, C, t, h, w] for
            clips (an array of NumPy, JAX or PyTorch on the CPU). None: drawn from `seed`.
        lora: A LoRA file, or a directory of PEFT (with `adapter_config.json`); only for a model.
            `~` is expanded. None: no LoRA.
        precision: The number format of all steps, also those of a run: "bf16" (the default) or
            "fp32"; "int8", "fp8" or "nvfp4", which quantize linear layers; or "auto", the fastest
            that the device runs natively.
        max_sequence_length: The number of tokens that prompts are padded or cut to, 1 to 2048.
            None: the run's, or the model's default.
        instruction: The text before every prompt, for SANA, of at most 20,000 characters. None: the
            run's, or none.
        vae_tile_size: The side in pixels of the tiles that the autoencoder decodes, a multiple of
            the pixels per latent pixel (`Pipeline.compression`). None: the run's, or whole images.
        batch_size: The largest number of images that a device generates at once, at least 1.
        checkpoint: The checkpoint of a run: "latest", "best" (of the highest held-out reward) or
            the number of an iteration. A model accepts "latest" alone.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Text
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    num_steps: NumSteps | None = None
    guidance_scale: _Scale | None = None
    true_cfg_scale: _Scale | None = None
    negative_prompt: str = ""
    seed: Seed = 0
    size: Size | None = None
    latents: Any = None
    lora: Annotated[Path, AfterValidator(lambda path: Path(expand_home(str(path))))] | None = None
    precision: Precision = "bf16"
    max_sequence_length: _SequenceLength | None = None
    instruction: str | None = None
    vae_tile_size: PositiveInt | None = None
    batch_size: PositiveInt = 16
    checkpoint: str = "latest"

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> "Request":
        """Checks the arguments of `api.generate`, and builds a request from them.

        Whether the model supports them is not checked. Reads no file.

        Args:
            arguments: The arguments by name. "model" and "prompts" are required. NumPy's scalars
                are accepted for numbers, also in `size`. `latents` is not checked here.

        Returns:
            The request, with lists turned into tuples and absent arguments at their defaults.

        Raises:
            InputError: If a name is unknown or missing, a value is not accepted, or a text is
                longer than 20,000 characters or has control characters. The message lists all wrong
                names and values, or else the first wrong text.
        """
        values = {name: _plain_number(value) for name, value in arguments.items()}
        if isinstance(values.get("size"), tuple | list):
            values["size"] = tuple(map(_plain_number, values["size"]))
        try:
            request = _REQUEST.validate_python(values)
        except pydantic.ValidationError as errors:
            messages = (
                describe_error(error, "arguments", _unknown_argument) for error in errors.errors()
            )
            raise InputError("; ".join(filter(None, messages))) from None
        for prompt in request.prompts:
            check_text(prompt, "prompts")
        for name in ("negative_prompt", "instruction"):
            check_text(getattr(request, name) or "", name)
        return request


_REQUEST = pydantic.TypeAdapter(Request)


def _plain_number(value: Any) -> Any:
    """Returns the Python number of a scalar of NumPy, and any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _unknown_argument(name: str) -> str:
    """Returns the message for an argument of another name than the fields of `Request`.

    Args:
        name: The name. The message suggests the most similar field, or lists all if none is
            similar.
    """
    accepted = [field.name for field in dataclasses.fields(Request)]
    return f"unknown argument {name!r}: {suggest(name, accepted)}"


@dataclasses.dataclass(frozen=True)
class Generation:
    """Generated images, with what is needed to generate them again.

    Attributes:
        images: The images, float32 [N, height, width, 3], or the clips, [N, frames, height, width,
            3], with values in [0, 1]: one per prompt, in the order of the prompts.
        latents: The initial noise of each image, float32 [N, C, h, w] with the channels first, or
            of each clip, [N, C, t, h, w]: the argument `latents` of `api.generate` and of the
            pipelines of diffusers. (Those of FLUX and Qwen-Image take it packed, for example by
            `FluxPipeline._pack_latents`.)
        num_steps: The number of solver steps.
        precision: The number format and how the device computes it, as a phrase for people, e.g.
            "bf16 (no linear layer is quantized; native)".
        frames_per_second: The playback rate of clips. It has no meaning for images.
    """

    images: Float[np.ndarray, "n ... h w 3"]
    latents: Float[np.ndarray, "n c ... latent_h latent_w"]
    num_steps: int
    precision: str
    frames_per_second: int


def generate_images(
    request: Request, progress: Callable[[int], None] = lambda images: None
) -> Generation:
    """Generates one image per prompt.

    Loads the model on all devices, each of which generates a part of the images; the model is
    released when the function returns. A run generates with the EMA policy of `request.checkpoint`,
    and reads and extends its prompt cache, if it has one. For a hub repository, every call asks the
    hub for the newest revision and downloads the files that are needed, weights included, if the
    hub's cache lacks them; offline, the newest revision in the cache is used. Without
    `request.latents`, the noise of an image depends on `request.seed`, its prompt and how often
    this prompt came before, not on the other prompts. If there are several processes, each must
    call it with an equal request.

    Args:
        request: The checked arguments of `api.generate`.
        progress: Called with the number of images of each batch when it has been queued on the
            devices. The numbers add up to all.

    Returns:
        The images in the order of the prompts, with the noise that they started from; all of them
        in every process.

    Raises:
        InputError: If the model, the run, its checkpoint or the LoRA cannot be used, if the model
            does not support an argument, or if the images take more than the memory of this host.
            Nearly always before any weight is loaded.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, the checkpoint is damaged, or the prompt cache of the
            run cannot be written.
        ValueError: If a pattern in the run's `train.parameters` or `lora.target_modules` matches no
            parameter of the model.
        PermissionError: If a folder of the prompt cache of the run may not be searched.
    """
    model = request.model
    prompts = [Prompt(text) for text in request.prompts]
    config = read_run(model) if is_run(model) else None
    if config and request.lora is not None:
        raise InputError(
            f"lora={request.lora}: {model} is a run and has its own adapters; name a model "
            "directory"
        )
    checkpoint = find_checkpoint(model, request.checkpoint)
    if config:
        pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
    else:
        with as_input_error(lambda message: message.replace("model.path=", "model=", 1)):
            pipeline = open_model(model)
    latents = None
    if request.latents is not None:
        has_frames = pipeline.temporal_compression is not None
        latents = _channels_last(request.latents, len(prompts), has_frames)
    size = _image_size(request, config, pipeline, latents)
    _check_memory(len(prompts), size)
    schedule = build_schedule(request, config, pipeline, size)
    if request.instruction is not None and not pipeline.accepts_instruction:
        raise InputError(f"instruction: not supported by {pipeline.kind}; accepted: None")
    if request.vae_tile_size is not None and request.vae_tile_size % pipeline.compression:
        raise InputError(
            f"vae_tile_size={request.vae_tile_size}: must be a multiple of "
            f"{pipeline.compression}, the pixels per latent pixel"
        )
    if latents is not None and not np.isfinite(latents).all():
        raise InputError("latents: has values that are not finite")

    device = first_device_info()
    form = resolve_format(request.precision, device)
    computed = "fp32" if form.name == "fp32" else "bf16"
    quantized: tuple[str, ...] = ()
    if form.quantize is not None:
        rules = config.model.quantization if config else _released_rules(pipeline)
        with as_input_error():
            shapes = pipeline.transformer.abstract_params(DTYPES[computed])
            quantized = quantized_paths(shapes, rules, form)
    adapters: Trainable = {}
    scale = 1.0
    if request.lora is not None:
        with as_input_error(lambda message: f"lora: {message}"):
            table = parameter_table(pipeline.transformer.state)
            adapters, settings = import_lora(request.lora, table)
        scale = settings.scale
    backbone = _load_backbone(request, config, pipeline, computed)

    shape = pipeline.latent_shape(*size)
    seeds = _seeds(prompts, request.seed)
    if latents is None:
        latents = np.asarray(jax.jit(normal, static_argnums=(1, 2))(seeds, "initial", shape))
    max_tokens = request.max_sequence_length
    if max_tokens is None:
        max_tokens = config.model.max_sequence_length if config else pipeline.default_max_tokens
    prompt_batch = prepare(backbone, None, prompts, max_tokens, request.negative_prompt)
    backbone.text_encoders.release()  # there is nothing more to encode
    if config:
        adapters, _ = load_ema(run_path(model), config, backbone, checkpoint)
        scale = config.lora.alpha / config.lora.rank
    quantizer = None if form.quantize is None else Quantizer(form.quantize)
    policy = sync_policy(backbone, adapters, scale, quantized, quantizer)

    batch_size = min(request.batch_size, math.ceil(len(prompts) / backbone.mesh.size))
    sampler = Sampler("generate", (Segment(policy, schedule),), backbone.decoder, shape, batch_size)
    seed_batch = SeedBatch(np.arange(len(prompts)), seeds, latents)
    samples = generate(
        backbone, sampler, prompt_batch, seed_batch, keep_images=True, progress=progress
    )
    assert samples.images is not None
    finite = np.isfinite(samples.images).all(tuple(range(1, samples.images.ndim)))
    if not finite.all():
        first = brief_repr(str(prompts[int(np.argmin(finite))]))
        raise RunError(
            f"{model}: {np.sum(~finite)} of {len(prompts)} images are not finite, first that of "
            f"{first}; the weights or adapters are not finite, or the guidance is too strong"
        )
    return Generation(
        images=np.asarray(samples.images, np.float32),
        latents=np.ascontiguousarray(np.moveaxis(latents, -1, 1)),
        num_steps=schedule.steps,
        precision=form.describe(device),
        frames_per_second=pipeline.frames_per_second,
    )


def _channels_last(latents: Any, count: int, has_frames: bool) -> Float[np.ndarray, "n ... h w c"]:
    """Returns the initial noise [N, C, h, w] as a view [N, h, w, C], or that of clips, [N, C, t, h,
    w], as a view [N, t, h, w, C].

    No value is read, so the array may be a memory-mapped file.

    Args:
        latents: The noise, as an array of NumPy or JAX, or of PyTorch on the CPU, with the channels
            first.
        count: The number of prompts, which N must be.
        has_frames: Whether the model makes clips.

    Returns:
        The view of a NumPy array, which is not contiguous. Arrays of JAX are copied to the host
        first if they are on another device.

    Raises:
        InputError: If `latents` is not a float32 array with four axes (five for clips), if N is not
            `count`, or if NumPy cannot convert it (e.g. a tensor on a GPU).
    """
    axes = "N, C, t, h, w" if has_frames else "N, C, h, w"
    expected = f"expected float32 [{axes}] with N = {count}, the number of prompts"
    try:
        array = np.asarray(latents)
    except Exception as error:  # of another library's array, e.g. a tensor on a GPU
        raise InputError(f"latents: {first_line(error)}; {expected}") from error
    ndim = 5 if has_frames else 4
    if array.ndim != ndim or array.dtype != np.float32 or len(array) != count:
        raise InputError(f"latents: {array.dtype} {list(array.shape)}; {expected}")
    return np.moveaxis(array, 1, -1)


def _image_size(
    request: Request,
    config: Config | None,
    pipeline: Pipeline,
    latents: Float[np.ndarray, "n ... h w c"] | None,
) -> Size:
    """Determines the height and width of the images in pixels, and the number of frames of clips.

    Args:
        request: The arguments of the user, of which only `size` is read; `size` may be None.
        config: The configuration of the run. None: `pipeline` is a model directory.
        pipeline: The model, which has a default size and says which sizes it supports.
        latents: The initial noise that the user gave, or None. A latent pixel stands for
            `pipeline.compression` pixels in each direction, and a latent frame after the first for
            `pipeline.temporal_compression` frames.

    Returns:
        (height, width), or (height, width, frames) of clips: that of `latents` if they are given,
        else `request.size`, else that of the run's evaluation, or without a run the model's
        default. If `request.size` lacks the number of frames, that is also from the evaluation or
        the default.

    Raises:
        InputError: If the model does not support the size, if a side is above `MAX_SIDE` (16,384)
            pixels, if the request has another size than `latents`, or if `latents` have another
            number of channels than the model's.
    """
    default = evaluation_size(config) if config else pipeline.default_size
    size = complete_size(request.size or default, default)
    if latents is not None:
        given = tuple(side * pipeline.compression for side in latents.shape[-3:-1])
        if pipeline.temporal_compression is not None:
            given = (*given, 1 + (latents.shape[1] - 1) * pipeline.temporal_compression)
        if request.size is not None and given[: len(request.size)] != request.size:
            raise InputError(
                f"size={_format_size(request.size)}: the given latents are those of "
                f"{_format_size(given)}"
            )
        size = given
    with as_input_error():
        shape = pipeline.latent_shape(*size)
    if max(size[:2]) > MAX_SIDE:
        raise InputError(
            f"size={_format_size(size)}: must be at most {MAX_SIDE} pixels in either direction"
        )
    if latents is not None and latents.shape[1:] != shape:
        raise InputError(
            f"latents: have {latents.shape[-1]} channels; this model's have {shape[-1]}"
        )
    return size


def _format_size(size: Size) -> str:
    """Returns a size as the command line takes it: "HEIGHTxWIDTH" or "HEIGHTxWIDTHxFRAMES".

    Args:
        size: (height, width) or (height, width, frames).
    """
    return "x".join(map(str, size))


def _check_memory(count: int, size: Size) -> None:
    """Checks that this host can hold the images, which are all returned at once in float32.

    Args:
        count: The number of images that the call returns together.
        size: Height and width of an image in pixels, and the number of frames of clips.

    Raises:
        InputError: If the images alone take more bytes than the host has physical memory.
    """
    needed = 3 * 4 * math.prod(size) * count  # three channels in float32
    available = hosts.host_memory()
    if needed > available:
        raise InputError(
            f"prompts: {count} images of {' x '.join(map(str, size))} take {needed / 1e9:.3g} GB, "
            f"and this host has {available / 1e9:.3g} GB"
        )


def build_schedule(
    request: Request, config: Config | None, pipeline: Pipeline, size: Size
) -> Schedule:
    """Builds the sampling schedule of a run's policy or of a model directory.

    A run has the schedule of its evaluation, without noise in the solver. A model directory has
    that of its own scheduler.

    Args:
        request: The arguments of the user, of which the number of steps, the guidance scales and
            the negative prompt are used. None stands for the run's setting or, for a model
            directory, for 10 steps and scales of 1.
        config: The configuration of the run. None: `pipeline` is a model directory.
        pipeline: The model. It says whether guidance is embedded, and has the scheduler of a model
            directory.
        size: Height and width of the images in pixels and the number of frames of clips, on which
            some schedules depend.

    Returns:
        The schedule: the sigmas, the solver and the guidance scales.

    Raises:
        InputError: If the scheduler or the number of steps is not supported, if a scale of guidance
            has no effect on the model (`Pipeline.check_guidance`), or if there is a negative prompt
            that has no effect because classifier-free guidance is off.
    """
    num_steps = request.num_steps
    guidance_scale = request.guidance_scale
    true_cfg_scale = request.true_cfg_scale
    if num_steps is None:
        num_steps = config.eval.num_steps if config else DEFAULT_NUM_STEPS
    if guidance_scale is None:
        guidance_scale = config.rollout.guidance_scale if config else 1.0
    if true_cfg_scale is None:
        true_cfg_scale = config.rollout.true_cfg_scale if config else 1.0
    embedded = pipeline.embedded_guidance
    pipeline.check_guidance(guidance_scale, true_cfg_scale)
    tokens = pipeline.image_tokens(*size)
    with as_input_error():
        if config:
            rollout = dataclasses.replace(
                config.rollout, guidance_scale=guidance_scale, true_cfg_scale=true_cfg_scale
            )
            schedule = Schedule.from_config(
                rollout,
                num_steps,
                tokens,
                embedded,
                None,
                pipeline.shift_formula,
                pipeline.shift_terminal,
            )
        else:
            sigmas, timesteps, table = read_scheduler(
                pipeline.scheduler,
                num_steps,
                tokens,
                pipeline.pipeline_sigmas,
                pipeline.shift_formula,
            )
            schedule = Schedule.from_sigmas(
                sigmas,
                table,
                timesteps,
                embedded_guidance=guidance_scale,
                guidance_scale=true_cfg_scale if embedded else guidance_scale,
            )
    if request.negative_prompt and not schedule.guided:
        name = "true_cfg_scale" if embedded else "guidance_scale"
        scale = true_cfg_scale if embedded else guidance_scale
        raise InputError(
            f"negative_prompt={request.negative_prompt!r}: has no effect without {name} above 1; "
            f"it is {scale}"
        )
    return schedule


def _released_rules(pipeline: Pipeline) -> Quantization:
    """Returns which linear layers of a model directory are quantized.

    The rules are those of the preset for the first released model of the same kind.

    Args:
        pipeline: The model. Its kind is the class name in `model_index.json`, e.g. "FluxPipeline".

    Returns:
        The section `model.quantization` of the preset, which excludes layers by parts of their
        paths and by their width relative to the narrowest layer.

    Raises:
        AssertionError: If there is no such preset, which is a fault of the package.
    """
    for name in released_models():
        preset = resolve(f"{name}_sol_rl_pickscore")
        index = parse_json(read_text(CARRIED / preset.model.path / "model_index.json"))
        if index["_class_name"] == pipeline.kind:
            return preset.model.quantization
    raise AssertionError(f"no preset for a {pipeline.kind}")


def _load_backbone(
    request: Request, config: Config | None, pipeline: Pipeline, precision: str
) -> Backbone:
    """Loads the networks of the model, with a copy of the weights on every device.

    Args:
        request: The arguments of the user, of which `instruction` and `vae_tile_size` are used. If
            one is None, the run's setting is used; for a model directory, there is then no
            instruction, and images are decoded whole.
        config: The configuration of the run, whose prompt cache and precision of the decoder are
            used. None: a model directory, which has no prompt cache and whose autoencoder computes
            in its required dtype (`Pipeline.vae_dtype`) or, if that is None, in `precision`.
        pipeline: The opened model, whose weights are loaded. The text encoders are loaded later,
            when a prompt that is not in the cache is encoded.
        precision: The dtype of the transformer and the text encoders: "bf16" (also if the caller
            quantizes the transformer afterwards) or "fp32".

    Returns:
        The networks with their parameters, and the mesh of all devices.

    Raises:
        InputError: If a file of the model, or the file of the run's instruction, cannot be read.
    """
    instruction = request.instruction
    tile = request.vae_tile_size
    if config is None:
        return load_backbone(
            pipeline, precision, make_mesh(-1, 1), instruction=instruction, tile=tile
        )
    if instruction is None and config.model.instruction is not None:
        instruction = load_instruction(config.model.instruction, "model.instruction")
    rollout = config.rollout
    decoding, _ = scoring_dtypes(rollout.scoring_precision, rollout.precision, first_device_info())
    return load_backbone(
        pipeline,
        precision,
        make_mesh(-1, 1),
        cache=config.model.prompt_cache_dir,
        instruction=instruction,
        tile=tile or config.model.vae_tile_size,
        decoding=decoding,
    )


def _seeds(prompts: Sequence[str], seed: int) -> np.ndarray:
    """Returns the seed of each prompt's noise, uint32 [prompts, 2].

    The k-th occurrence of a prompt gets its k-th seed, so that the images of a repeated prompt
    differ and do not depend on the other prompts.

    Args:
        prompts: The prompts, at least one, of which some may be equal.
        seed: The root seed, 0 to 2**31 - 1.
    """
    candidates = {}
    for prompt, count in Counter(prompts).items():
        (prompt_candidates,) = prompt_seeds(seed, "candidate", (prompt,), count)
        candidates[prompt] = iter(prompt_candidates)
    return np.stack([next(candidates[prompt]) for prompt in prompts])
