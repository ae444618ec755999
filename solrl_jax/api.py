"""The functions for Python users: lists in, arrays out. The commands of `solrl` call them.

`solrl_jax.__all__` lists them, together with the public names that other modules define.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Precision
from solrl_jax.config.values import brief_repr, expand_home
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.backbone import DTYPES, load_backbone
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.planning import recipes
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.leaf import Matrix, Quantized
from solrl_jax.rl import rank as ranking
from solrl_jax.rl.experiment import Experiment, build, local_device
from solrl_jax.rl.iteration import Progress, no_progress
from solrl_jax.rl.memory_check import device_memory
from solrl_jax.rl.trainable import lora_files, transformer_files
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import Trainable, find_targets
from solrl_jax.runs import trainer
from solrl_jax.runs.directory import (
    configuration,
    find_checkpoint,
    load_ema,
    load_policy,
    read_run,
)
from solrl_jax.runs.generation import Generation, Request, generate_images
from solrl_jax.runs.model_card import add_card, check_name, check_replaceable
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage import files
from solrl_jax.storage.hub import check_login, push


def load(preset: str, *overrides: str) -> Experiment:
    """Builds the experiment of a preset: the models, the prompts and the rewards of a run.

    Loads the weights onto the devices of the mesh, downloads a model or rewards that are named by
    their repository and not in the hub's cache, and starts the worker processes of rewards outside
    of JAX. Writes no run directory. A UserWarning names the settings that "mesh=auto" chose, and
    another one numbers of prompts that are reduced to those that there are.

    Args:
        preset: The name of a preset, e.g. "tiny". `preset_names()` lists all.
        *overrides: Settings that differ from the preset, as `key=value`, e.g. "seed=1". A later one
            takes precedence. "mesh=auto" stands for the mesh, the gradient checkpointing and the
            batch sizes that plans propose for the devices of this host; other overrides win over
            these.

    Returns:
        The experiment (`rl.experiment.Experiment`): the configuration, the models with their
        weights on the mesh, the rewards and the prompts. Its images have the first of the
        configured training sizes.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If a file, model or function that they name cannot be used here, the mesh asks
            for more devices than there are, or the sizes are estimated to need more memory than the
            devices have.
        RunError: If a reward outside of JAX fails on its trial image and the configuration says
            that the run stops then.
    """
    settings, note = _expand_mesh_auto(preset, overrides)
    if note is not None:
        warnings.warn(note, UserWarning, stacklevel=2)
    return build(resolve(preset, settings))


def _expand_mesh_auto(preset: str, overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Replaces the override `mesh=auto` by settings for the devices of this host.

    Also starts JAX's backend if `mesh=auto` is among the overrides.

    Args:
        preset: The name of a preset.
        overrides: Settings that differ from the preset, as `key=value`.

    Returns:
        The overrides, with `mesh=auto` replaced by the proposed settings, which come first; and one
        line about the settings. Without `mesh=auto` the overrides as they are, and None.

    Raises:
        ConfigError: If the preset or an override is invalid.
    """
    if recipes.MESH_AUTO not in overrides:
        return list(overrides), None
    return recipes.expand_mesh_auto(overrides, partial(resolve, preset), this_machine())


def this_machine() -> recipes.Machine:
    """Describes the devices of this host, for which `mesh=auto` chooses settings. Starts JAX's
    backend. With several processes, all must call it.

    Returns:
        The platform ("gpu", "tpu" or "cpu") and JAX's `device_kind` of the first device, the number
        of devices that this process drives, and the bytes of one of them that JAX may use.
    """
    device = local_device()
    return recipes.Machine(device.platform, device.kind, jax.local_device_count(), device_memory())


def open_policy(
    target: str | Path,
    *overrides: str,
    preset: str | None = None,
    checkpoint: str = "latest",
    trust: bool = False,
) -> tuple[Experiment, Trainable, int]:
    """Opens the policy of a run, of a preset or of a model, to be evaluated or ranked.

    Builds the experiment as `load` does, with its effects. A run gives its averaged policy (EMA); a
    preset or a model gives the policy that training would start from.

    Args:
        target: A run directory, the name of a preset, or a model (a directory in the layout of
            diffusers, or "embedded:NAME"). `~` is expanded.
        *overrides: Settings that differ, as `key=value`. For a run they cannot change which
            parameters are trained.
        preset: The preset that has the prompts, the reward and the sampler, if `target` is a model.
            None: models are not accepted.
        checkpoint: The checkpoint of a run: "latest", "best" (highest evaluation reward), or the
            number of an iteration as text. A preset or a model accepts only "latest".
        trust: Whether a run directory may name rewards and objectives that are not part of the
            package, which run code that whoever wrote the directory chose. Those that `overrides`
            name are accepted in any case.

    Returns:
        The experiment; the trainable parameters by path in float32, e.g.
        {"blocks/attn/to_q/kernel": {"a": ..., "b": ...}} with an array in place of the inner dict
        for a parameter trained in full, and an empty dict for a start without a LoRA; and the
        number of iterations that they were trained for, 0 without a run. `evaluate`, `rank` and
        `export_lora` take the first two.

    Raises:
        ConfigError: If the configuration or an override is invalid.
        InputError: If `target`, `checkpoint` or a file cannot be used, if a run needs `trust`, or
            if the sizes are estimated to need more memory than the devices have.
        RunError: If the checkpoint is damaged, or a reward outside of JAX fails on its trial image.
        ValueError: If `target` begins with the `~USER` of a user that does not exist.
    """
    config, run = configuration(expand_home(str(target)), overrides, preset, trust=trust)
    path = find_checkpoint(run or str(target), checkpoint)
    experiment = build(config)
    trainable, iteration = load_policy(run, config, experiment.backbone, path)
    return experiment, trainable, iteration


class TrainingInterrupted(KeyboardInterrupt):
    """Training stopped after Ctrl-C or SIGTERM. The last complete iteration, if any, was saved,
    unless the interruption was within an update.

    It is a KeyboardInterrupt, so `except Exception` does not catch it.

    Attributes:
        summary: What `train` would have returned, with "interrupted" True.
    """

    def __init__(self, summary: dict[str, Any]) -> None:
        """Creates the exception, with a message that names the run and the iteration.

        Args:
            summary: What `train` would have returned, with "interrupted" True.
        """
        super().__init__(
            f"{summary['run']}: saved after iteration {summary['iterations']}; the same call "
            "resumes"
        )
        self.summary = summary


def train(
    preset: str,
    *overrides: str,
    profile: Collection[int] = (),
    html_report: bool = False,
    force: bool = False,
    progress_bar: bool = False,
) -> dict[str, Any]:
    """Trains in the directory `run.dir`, or resumes the run that is there.

    Prints progress on standard error. While it runs in the main thread, the first Ctrl-C or SIGTERM
    stops it after the batch under way; a second one ends the process with code 130.

    Args:
        preset: The name of a preset, e.g. "tiny". `preset_names()` lists all.
        *overrides: Settings that differ from the preset, as `key=value`, e.g. "run.dir=runs/a".
            "mesh=auto" stands for the mesh, the gradient checkpointing and the batch sizes that
            plans propose for the devices of this host (`planning.recipes`); other overrides win.
        profile: Numbers of iterations to trace for TensorBoard, from 1. They must not be complete
            yet.
        html_report: Whether `report.html` in the run directory is kept up to date.
        force: Whether to go on where an InputError would be raised otherwise: input files have
            changed since the last checkpoint, the sizes are estimated to need more memory than the
            devices have, or solrl_jax did not write the `report.html` that the report would
            replace.
        progress_bar: Whether to show a progress bar if standard error is a terminal. Otherwise one
            line is printed per iteration.

    Returns:
        "run" (the directory), "iterations" (the number of complete ones), "interrupted" (False),
        "trained_in_full" (the number of arrays that are trained in full; if it is not 0, `export`
        writes a directory), and the first and the last recorded evaluation as "before" and "after",
        each a mapping from a metric's name, e.g. "eval/reward", to its value (None if it was not
        finite).

    Raises:
        TrainingInterrupted: If it was interrupted. This is a KeyboardInterrupt.
        ConfigError: If the preset or an override is invalid.
        InputError: If the run directory or an input file cannot be used, or holds another run.
        RunError: If the run fails for another reason, such as a full disk, a reward that fails or a
            divergence (`Diverged`).
    """
    settings, note = _expand_mesh_auto(preset, overrides)
    config = resolve(preset, settings)
    with TerminalProgress(bars=progress_bar) as progress:
        if note is not None:
            progress.line(note)
        summary = trainer.run(config, progress, profile, html_report, force=force)
    if summary["interrupted"]:
        raise TrainingInterrupted(summary)
    return summary


def rank(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int = 8,
    formats: Sequence[str] = (),
    explore: Sequence[str] = (),
    steps: Sequence[int] = (),
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Measures how well exploration ranks candidates (docs/method.md, section 2).

    All candidates of some test prompts are generated with full steps in the training precision, and
    once more in every combination of the given formats, recipes and numbers of steps. Repeated
    entries count once.

    Args:
        experiment: The experiment, whose test prompts, rewards and exploration are used.
            `rollout.candidates` is the number of candidates of a prompt, and `rollout.kept` how
            many of them count as kept.
        adapters: The trainable parameters of the policy by path, e.g. `state.ema` or those of
            `open_policy`.
        prompts: The number of test prompts, from the first one on.
        formats: Names of number formats to explore in, e.g. ["nvfp4", "fp8"]; "auto" is the fastest
            native one. Empty: the recipe's.
        explore: Names of recipes in `configs/explore/`, e.g. ["paper", "best"]. Empty: the
            experiment's own exploration.
        steps: Numbers of solver steps to explore with, each from 1 to `rollout.num_steps` (equal to
            it if the configuration does not regenerate) and above the recipe's `exact_steps`.
            Empty: the recipe's.
        progress: Called with the name of the running phase ("regenerate" or "explore"), its number
            of images, and the number of images in the batch that was queued on the devices; with 0
            when a pass over all candidates starts. The default reports nothing.

    Returns:
        One mapping per combination (recipes outermost, steps innermost), with its "explore" (the
        recipe), "precision" and "steps", the counts "candidates" (per prompt), "kept", "top_k" (4)
        and "prompts", and means over prompts: "spearman" and "kendall" (rank correlations of proxy
        and true rewards), "top_k_match" (the share of the truly best 4 among the kept / 2 best by
        proxy), "bottom_k_match" (the same at the other end), "top_k_regret" (the reward that the
        missed ones cost, as a share of the range of the true rewards), "true_rank_best" and
        "true_rank_worst" (the mean true rank of the kept / 2 best and worst by proxy; 1 is the
        best). "perfect_rank_best" and "perfect_rank_worst" are these ranks for a perfect proxy, and
        "per_prompt" is a list with the text ("prompt") and the figures of each prompt. A figure
        that is undefined for all prompts is NaN.

    Raises:
        InputError: If `prompts` is not from 1 to the number of test prompts, or an entry of a list
            cannot be used.
        ConfigError: If a recipe does not exist or cannot be combined with the configuration, or a
            run could not be configured with a number of steps.
        RunError: If a reward outside of JAX fails and the configuration says that the run stops
            then, or if the disk refuses the cache of prompts.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    available = len(experiment.test_prompts)
    if prompts not in range(1, available + 1):
        raise InputError(
            f"prompts={brief_repr(prompts)}: must be from 1 to {available}, the number of test "
            "prompts"
        )
    settings = ranking.sweep(
        experiment.config,
        explore=_comma_separated(explore),
        formats=_comma_separated(formats),
        steps=_comma_separated(steps),
    )
    pools = ranking.explore_and_regenerate(experiment, adapters, prompts, settings, progress)
    return [
        ranking.summarise(pools, setting, experiment.config.rollout.kept) for setting in settings
    ]


def _comma_separated(entries: Sequence[Any]) -> str | None:
    """Joins the entries of a list with commas, for `rl.rank.sweep`.

    Args:
        entries: The entries, e.g. ["nvfp4", "fp8"] or [4, 6]. A text is taken for a list that is
            joined already.

    Returns:
        The text, e.g. "nvfp4,fp8"; None for an empty list, which stands for the default.
    """
    if isinstance(entries, str):
        return entries
    return ",".join(map(str, entries)) or None


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    num_steps: int | None = None,
    guidance_scale: float | None = None,
    true_cfg_scale: float | None = None,
    negative_prompt: str = "",
    seed: int = 0,
    size: tuple[int, int] | None = None,
    latents: Float[np.ndarray, "n c latent_h latent_w"] | None = None,
    lora: str | Path | None = None,
    precision: Precision = "bf16",
    max_sequence_length: int | None = None,
    instruction: str | None = None,
    vae_tile_size: int | None = None,
    batch_size: int = 16,
    checkpoint: str = "latest",
) -> Float[np.ndarray, "n h w 3"]:
    """Generates one image per prompt, with a diffusers model directory or with a run's policy.

    A model directory samples as its diffusers pipeline does, with the directory's own scheduler. A
    run samples as its evaluation does, with its averaged policy (EMA). The model is loaded by every
    call and released at its end, so pass all prompts at once.

    An image depends on its prompt and the seed, not on the other prompts. If a prompt is repeated,
    each repetition starts from other noise.

    Args:
        model: A run directory, a directory in the layout of diffusers, "embedded:NAME", or
            OWNER/NAME of a repository of the hub, which is downloaded unless it is in the cache.
            `~` is expanded.
        prompts: The prompts, at least one, or a single one as text.
        num_steps: The number of solver steps, 1 to 1000. None: that of the run's evaluation, or 10.
        guidance_scale: The guidance scale of the model, at least 0. Models that embed it (FLUX.1)
            take it as an input. For all others it is the scale of classifier-free guidance, and
            values up to 1 mean no guidance, as in diffusers. None: the run's, or 1.
        true_cfg_scale: The scale of classifier-free guidance for models that embed
            `guidance_scale`; other models accept only 1. Values up to 1 mean none. None: the run's,
            or 1.
        negative_prompt: The negative prompt of classifier-free guidance, one text for all images.
            "" is the empty prompt. Any other text is refused if there is no such guidance.
        seed: The seed of the initial noise, 0 to 2**31 - 1.
        size: Height and width of the images in pixels, each at most 16,384 and a multiple of the
            number of pixels that the model requires. None: that of `latents`, or of the run's
            evaluation, or the model's default.
        latents: The initial noise to use in place of that of `seed`, float32 [N, C, h, w] with one
            entry per prompt. These are the axes that the pipelines of diffusers use, except that of
            FLUX.1, whose latents are packed. None: drawn from the seed.
        lora: A LoRA of diffusers, kohya, ai-toolkit or ComfyUI (a .safetensors file) or PEFT (a
            directory) to apply. A run has its own and accepts none. None: no LoRA.
        precision: The number format of all steps: "bf16", "fp32", "int8", "fp8", "nvfp4", or "auto"
            for the fastest one that the device runs natively. Formats that it does not run natively
            are emulated, which is slower.
        max_sequence_length: The number of tokens to which prompts are padded or cut, 1 to 2048.
            None: the run's, or the model's default.
        instruction: The text that precedes every prompt. SANA alone accepts one; it is refused for
            other models. None: the run's, or none.
        vae_tile_size: The side in pixels of the tiles in which images are decoded, which takes less
            memory. It must be a multiple of the pixels per latent pixel (8 for FLUX.1 and SD3, 32
            for SANA). None: the run's, or whole images.
        batch_size: The largest number of images that each device generates at once, at least 1.
        checkpoint: The checkpoint of a run: "latest", "best" (highest evaluation reward), or the
            number of an iteration as text. A model accepts only "latest".

    Returns:
        The images, float32 [N, height, width, 3], with values in [0, 1], in the order of the
        prompts. `generate_with_latents` also returns the initial noise.

    Raises:
        InputError: If an argument cannot be used. No weight of the model is loaded then, unless the
            tokenizer refuses `max_sequence_length` or the length of `instruction`.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, the checkpoint is damaged, or the disk refuses the
            prompt cache of the run.
        ValueError: If `model` begins with the `~USER` of a user that does not exist.
    """
    return generate_with_latents(
        model,
        prompts,
        num_steps=num_steps,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        negative_prompt=negative_prompt,
        seed=seed,
        size=size,
        latents=latents,
        lora=lora,
        precision=precision,
        max_sequence_length=max_sequence_length,
        instruction=instruction,
        vae_tile_size=vae_tile_size,
        batch_size=batch_size,
        checkpoint=checkpoint,
    ).images


def generate_with_latents(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    progress: Callable[[int], None] = lambda images: None,
    **options: Any,
) -> Generation:
    """Generates images as `generate` does, and also returns their initial noise.

    Args:
        model: A run directory, a directory in the layout of diffusers, "embedded:NAME", or
            OWNER/NAME of a repository of the hub. `~` is expanded.
        prompts: The prompts, at least one, or a single one as text.
        progress: Called with the number of images of each batch when the batch has been queued on
            the devices, so that one batch is still being computed.
        **options: The other keyword arguments of `generate`, by their names, e.g. `num_steps`,
            `guidance_scale`, `seed` and `size`.

    Returns:
        The images in `images`, the initial noise in `latents`, the number of steps in `num_steps`
        and a phrase about the number format in `precision`. The noise, float32 [N, C, h, w], can be
        given as `latents` to `generate` or to a pipeline of diffusers, except that of FLUX.1, which
        takes it packed.

    Raises:
        InputError: If an argument is unknown or cannot be used. No weight of the model is loaded
            then, unless the tokenizer refuses `max_sequence_length` or the length of `instruction`.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, the checkpoint is damaged, or the disk refuses the
            prompt cache of the run.
        ValueError: If `model` begins with the `~USER` of a user that does not exist.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    request = Request.check({"model": expand_home(str(model)), "prompts": texts, **options})
    return generate_images(request, progress)


def quantize(w: Matrix, precision: str = "nvfp4") -> Quantized:
    """Quantizes weight matrices, to be used by `matmul(x, leaf)`. `dequantize(leaf)` gives the
    rounded weights as a plain array.

    Args:
        w: Real matrices [..., in, out], not empty. Anything that `jnp.asarray` accepts. They should
            be finite, which is not checked.
        precision: A quantizing number format, "nvfp4", "fp8" or "int8".

    Returns:
        The quantized matrices, a leaf of a parameter tree. Its class depends on the format; sizes
        that the format needs padded are padded inside, and `matmul` and `dequantize` have the
        shapes of `w`.

    Raises:
        InputError: If the format does not exist or quantizes nothing, or if `w` is no such array.
        ValueError: If `precision` is "int8" and the matrices have more than 133,144 inputs.
    """
    names = [name for name, form in FORMATS.items() if form.quantize is not None]
    form = FORMATS.get(str(precision))
    if form is None or form.quantize is None:
        raise InputError(f"precision={precision!r}: accepted are {', '.join(names)}")
    accepted = "accepted: real matrices [..., in, out] that are not empty"
    try:
        w = jnp.asarray(w)
    except (TypeError, ValueError) as error:
        raise InputError(f"w: {brief_repr(w)}; {accepted}") from error
    if w.ndim < 2 or w.size == 0 or not jnp.isrealobj(w):
        raise InputError(f"w: is {w.dtype} {list(w.shape)}; {accepted}")
    return form.quantize(w)


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    form: Literal["diffusers", "peft"] = "diffusers",
    dtype: Literal["fp32", "bf16"] = "fp32",
    fold_alpha: bool = False,
    checkpoint: str = "latest",
    force: bool = False,
    hub: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Writes the averaged policy (EMA) of a run as files that diffusers or PEFT load.

    A run that trains adapters becomes a LoRA. One that trains parameters in full becomes a
    directory for `from_pretrained` of the transformer's class, with a LoRA in it if there are
    adapters too. Loads the weights of the base model.

    With `hub`, a folder with the weights, a model card and images before and after training is
    written and uploaded to the Hugging Face hub.

    Args:
        run: The run directory. `~` is expanded.
        out: The file to write, which ends in .safetensors, or for PEFT and for whole transformers a
            directory, which must hold nothing but an earlier export. With `hub`, the folder that is
            uploaded; None: `hub` in the run directory. Missing parent directories are created. `~`
            is expanded.
        form: "diffusers" or "peft". A run that trains parameters in full (any, also beside
            adapters) accepts only "diffusers".
        dtype: The number format of the written tensors, "fp32" or "bf16".
        fold_alpha: Whether B is multiplied by alpha / rank, for programs that ignore alpha. Only
            for a LoRA with `form` "diffusers".
        checkpoint: "latest", "best" (highest evaluation reward), or the number of an iteration as
            text.
        force: Whether existing files are replaced.
        hub: The repository on the hub to write to, OWNER/NAME, which is created if necessary. Only
            with `form` "diffusers". None: nothing is uploaded.
        private: Whether a new repository is private. Only with `hub`.
        dry_run: Whether the folder is only written, and not uploaded. Only with `hub`.

    Returns:
        "iteration" (of the checkpoint), and "rank" and "alpha" as in the file: with `fold_alpha`,
        "alpha" is the rank. For parameters trained in full also "trained_in_full", the number of
        these arrays; "rank" and "alpha" are then the settings `lora.rank` and `lora.alpha`, also if
        there are no adapters. With `hub` also "folder" (its absolute path as text), and "url" (the
        address of the repository) unless `dry_run`.

    Raises:
        InputError: If `run` is no run directory or has no such checkpoint, `out` cannot be written
            or exists without `force`, an option does not suit the run, the parameters are not
            finite in `dtype`, the adapters change nothing, or the hub does not know the user.
        ConfigError: If the configuration of the run is invalid.
        RunError: If the checkpoint is damaged, the disk refuses, or the upload fails. In the last
            case the folder is complete.
        ValueError: If a path begins with the `~USER` of a user that does not exist.
    """
    run = Path(expand_home(str(run)))
    for name, value, accepted in (
        ("form", form, ("diffusers", "peft")),
        ("dtype", dtype, ("fp32", "bf16")),
    ):
        if value not in accepted:
            raise InputError(f"{name}={brief_repr(value)}: accepted: {', '.join(accepted)}")
    if hub is None:
        if out is None:
            raise InputError("out=None: expected the file or directory to write, or hub=OWNER/NAME")
        for option, flag in (("private", private), ("dry_run", dry_run)):
            if flag:
                raise InputError(f"{option}=True: is for an upload; it needs hub=OWNER/NAME")
        out = Path(expand_home(str(out)))
        return _export_files(
            run, out, form=form, dtype=dtype, fold_alpha=fold_alpha, checkpoint=checkpoint,
            force=force,
        )  # fmt: skip
    check_name(hub)
    if form != "diffusers":
        raise InputError(f"form={brief_repr(form)}: a run is published as diffusers; leave it out")
    folder = run / "hub" if out is None else Path(expand_home(str(out)))
    config = read_run(run)
    files.refuse_existing("out", [folder], force, folders=True)
    check_replaceable(folder)
    if not dry_run:
        check_login(hub)
    folder = folder.absolute()
    with files.atomic_directory(folder) as filled:
        pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
        with in_one_line():
            whole = find_targets(pipeline.transformer, config).whole
        target = filled / ("transformer" if whole else lora_files.DIFFUSERS_FILE)
        summary = _export_files(
            run, target, form=form, dtype=dtype, fold_alpha=fold_alpha, checkpoint=checkpoint,
            force=False,
        )  # fmt: skip
        add_card(filled, run, config, hub, summary)
    summary |= {"folder": str(folder)}
    if not dry_run:
        message = f"solrl_jax: the policy after iteration {summary['iteration']}"
        summary["url"] = push(folder, hub, private=private, message=message)
    return summary


def _export_files(
    run: Path,
    out: Path,
    *,
    form: Literal["diffusers", "peft"],
    dtype: Literal["fp32", "bf16"],
    fold_alpha: bool,
    checkpoint: str,
    force: bool,
) -> dict[str, Any]:
    """Writes the files of `export`, without a model card. Loads the weights of the base model.

    Args:
        run: The run directory, whose base model and checkpoint are loaded.
        out: The .safetensors file to write, or for PEFT and for parameters trained in full a
            directory, which must hold nothing but an earlier export and be no link. Missing parent
            directories are created.
        form: "diffusers" or "peft". A run that trains any parameter in full accepts only
            "diffusers".
        dtype: The number format of the written tensors, "fp32" or "bf16".
        fold_alpha: Whether B is multiplied by alpha / rank. Only for a LoRA with `form`
            "diffusers".
        checkpoint: "latest", "best" (highest evaluation reward), or the number of an iteration.
        force: Whether an existing file, or the files in an existing directory, are replaced.

    Returns:
        "iteration" (of the checkpoint), "rank" and "alpha" (the rank with `fold_alpha`), and for
        parameters trained in full the number of these arrays, "trained_in_full".

    Raises:
        InputError: If `run` is no run directory or has no such checkpoint, `out` cannot be written
            or exists without `force`, an option does not suit the run, or the parameters are not
            finite in `dtype`, or adapters change nothing.
        ConfigError: If the configuration of the run is invalid.
        RunError: If the checkpoint is damaged, or the disk refuses.
    """
    config = read_run(run)
    if fold_alpha and form == "peft":
        raise InputError("fold_alpha=True: PEFT always reads alpha; leave it out")
    pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
    with in_one_line():
        whole = find_targets(pipeline.transformer, config).whole
    if whole and (form == "peft" or fold_alpha):
        argument = "form=peft" if form == "peft" else "fold_alpha=True"
        raise InputError(
            f"{argument}: {run} trains {len(whole)} parameter(s) in full, which a LoRA does not "
            "hold; leave it out"
        )
    if whole:
        transformer_files.check_directory(out)
    else:
        lora_files.check_target(out, form)
    existing = list(out.iterdir()) if out.is_dir() else [out]
    files.refuse_existing("out", existing, force, folders=True)
    if out.is_symlink() and out.is_dir():
        raise InputError(f"out={out}: is a link; name the directory itself")
    path = find_checkpoint(run, checkpoint)
    files.writable_directory(out.absolute().parent, "out")

    # Only the names, shapes and devices of the weights are needed.
    backbone = load_backbone(pipeline, config.rollout.precision, make_mesh(-1, 1))
    trainable, iteration = load_ema(run, config, backbone, path)
    settings = LoraSettings(config.lora.rank, config.lora.alpha)
    table = backbone.parameter_table()
    array_dtype = DTYPES[dtype]
    if whole:
        transformer_files.export_transformer(out, backbone, trainable, settings, dtype=array_dtype)
    elif form == "peft":
        lora_files.export_peft(out, trainable, settings, table, dtype=array_dtype)
    else:
        lora_files.export_diffusers(
            out, trainable, settings, table, dtype=array_dtype, fold=fold_alpha
        )
    alpha = float(settings.rank) if fold_alpha else settings.alpha
    summary = {"iteration": iteration, "rank": settings.rank, "alpha": alpha}
    return summary | ({"trained_in_full": len(whole)} if whole else {})


def export_lora(
    experiment: Experiment,
    adapters: Trainable,
    path: str | Path,
    form: Literal["diffusers", "peft"] = "diffusers",
) -> None:
    """Writes adapters in memory as a LoRA, in float32. `export` does so for a run directory.

    Rank and alpha are those of the experiment's configuration. An existing file, or an earlier
    export of PEFT, is replaced.

    Args:
        experiment: The experiment that the adapters were trained in. Its model gives the names of
            the layers, and its configuration rank and alpha.
        adapters: LoRA adapters by the path of their layer, {"a": [..., in, rank], "b": [..., rank,
            out]} each, e.g. `state.ema`.
        path: A file that ends in .safetensors for "diffusers", or a directory for "peft", which
            must hold nothing but an earlier export. Missing parent directories are created. `~` is
            not expanded.
        form: The program that is to load it, "diffusers" or "peft".

    Raises:
        InputError: If `path` or `form` cannot be used, if parameters are trained in full, or if the
            adapters have paths or shapes that the network lacks, are not finite or change nothing.
        RunError: If the disk refuses.
    """
    if form not in ("diffusers", "peft"):
        raise InputError(f"form={brief_repr(form)}: accepted: diffusers, peft")
    settings = LoraSettings(experiment.config.lora.rank, experiment.config.lora.alpha)
    table = experiment.backbone.parameter_table()
    if form == "peft":
        lora_files.export_peft(Path(path), adapters, settings, table)
    else:
        lora_files.export_diffusers(Path(path), adapters, settings, table)


def export_transformer(experiment: Experiment, trained: Trainable, folder: str | Path) -> None:
    """Writes a policy with parameters trained in full as the transformer of a pipeline, in float32.

    An earlier export in the directory is replaced. The parameters that are not trained are those of
    the base.

    Args:
        experiment: The experiment that the parameters were trained in. Its base model gives all
            other parameters.
        trained: The trainable parameters by path, e.g. `state.ema`. Adapters among them become a
            LoRA in the directory.
        folder: The directory to write, which `from_pretrained` of the transformer's class loads.
            `~` is not expanded.

    Raises:
        InputError: If `folder` is a file or ends in .safetensors, if the directory holds other
            files, a parameter is not finite, or the adapters change nothing.
        RunError: If the disk refuses.
    """
    settings = LoraSettings(experiment.config.lora.rank, experiment.config.lora.alpha)
    transformer_files.export_transformer(Path(folder), experiment.backbone, trained, settings)


def import_lora(experiment: Experiment, path: str | Path) -> tuple[Trainable, LoraSettings]:
    """Reads the adapters of a LoRA for the model of an experiment.

    Args:
        experiment: The experiment, whose model has the layers. Its own rank and alpha do not
            matter.
        path: A LoRA file of diffusers, kohya, ai-toolkit or ComfyUI, or a directory with one, such
            as that of PEFT. `~` is not expanded.

    Returns:
        The adapters in float32, {"a": [..., in, rank], "b": [..., rank, out]} by the path of their
        linear layer, and their rank and alpha. If the layers of the file differ in these, they are
        brought to the largest rank, and alpha equals it.

    Raises:
        InputError: If the file cannot be read or has layers or shapes that the model lacks, if
            values are not finite, or if it has adapters of text encoders, trained biases or DoRA.
    """
    return lora_files.import_lora(Path(path), experiment.backbone.parameter_table())
