"""The functions for Python users: lists in, arrays out. The commands of `solrl` call them.

`solrl_jax.__all__` lists them, together with the public names that other modules define.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Precision
from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.backbone import DTYPES, load_backbone
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.planning import proposals
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.leaf import Matrix, Quantized
from solrl_jax.rl import rank as ranking
from solrl_jax.rl.experiment import Experiment, build, first_device_info
from solrl_jax.rl.iteration import Progress, no_progress
from solrl_jax.rl.memory_check import device_memory
from solrl_jax.rl.trainable import lora_files, transformer_files
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import Trainable, find_trained_paths
from solrl_jax.runs import trainer
from solrl_jax.runs.directory import (
    find_checkpoint,
    load_ema,
    load_policy,
    read_run,
    read_target,
)
from solrl_jax.runs.generation import Generation, Request, generate_images
from solrl_jax.runs.model_card import add_card, check_name, check_replaceable
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage import files
from solrl_jax.storage.hub import check_login, push
from solrl_jax.storage.stores import RunPath, expand_home, local_path, run_path


def load(preset: str, *overrides: str) -> Experiment:
    """Builds the experiment of a preset: models, prompts and rewards of a run, ready to use.

    Downloads models, rewards and prompt sets unless their newest revision is in the hub's cache
    (without a network, the newest cached revision is used). Loads the weights onto the devices.
    Imports the rewards and objectives `module:function` that the configuration names, with the
    working directory appended to `sys.path`. Tries rewards outside of JAX with a gray image. This
    starts their worker processes (which end with this process) and sends requests to judges and
    services. Writes no run directory. Warns (UserWarning) about the settings that "mesh=auto"
    chose, about numbers of prompts that were reduced because a prompt set has fewer, and about an
    objective that trains on reward gradients while `reward.eval_only` is empty. With several
    processes (`parallel.hosts.initialize`), all must call it with the same arguments.

    Args:
        preset: The name of a preset, e.g. "tiny". `preset_names()` lists all.
        *overrides: Settings that differ from the preset, as `key=value`, e.g. "seed=1". A later one
            takes precedence. "mesh=auto" chooses the mesh, the gradient checkpointing and the batch
            sizes for the devices of this host, from the plans that the package contains for the
            model, the platform and at least this image size (`planning.proposals`). If there are
            such plans but none fits the devices, the settings are a guess that saves memory, with
            `model.vae_tile_size` for images above 512 pixels in height or width. Nothing is chosen
            if there are no such plans (a CPU has none), or if `train.parameters` is not "adapters".
            "mesh=auto" changes no setting that another override names.

    Returns:
        The experiment (`rl.experiment.Experiment`): the configuration, the models with their
        weights, the rewards and the prompts. If several training sizes are configured, its images
        have the first one.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If a file, model or function that they name cannot be used, or if there are too
            few devices or too little memory.
        RunError: If a reward outside of JAX fails on a trial image and `reward.on_failure` is
            "stop", or if another process gives no answer.
    """
    settings, note = proposals.expand_mesh_auto(preset, overrides, this_machine)
    if note is not None:
        warnings.warn(note, UserWarning, stacklevel=2)
    return build(resolve(preset, settings))


def this_machine() -> proposals.Machine:
    """Describes the devices of this host, as a basis for "mesh=auto".

    It starts JAX's backend. With several processes, all must call it.

    Returns:
        The fields `platform` ("gpu", "tpu" or "cpu"), `kind` (JAX's `device_kind`), `devices` (the
        number of this process's devices) and `memory` (the bytes of one device that JAX may use; on
        a CPU, the memory of the machine; with several processes, the smallest of all).

    Raises:
        RunError: If another process gives no answer.
    """
    device = first_device_info()
    return proposals.Machine(
        device.platform, device.kind, jax.local_device_count(), device_memory()
    )


def open_policy(
    target: str | Path,
    *overrides: str,
    preset: str | None = None,
    checkpoint: str = "latest",
    trust: bool = False,
) -> tuple[Experiment, Trainable, int]:
    """Opens a policy to evaluate or rank it: that of a run, or the starting point of training from
    a preset or a model.

    Builds the experiment as `load` does, with the same effects: downloads, loads weights, imports
    configured functions, and tries rewards outside of JAX, which sends requests to judges and
    services. For a run, the EMA policy (with the exponential moving average of the trained
    parameters) is opened.

    Args:
        target: A run directory, which may be in an object store (gs:// or s3://); the name of a
            preset; or a model: a directory in the layout of diffusers, or "embedded:NAME" for a
            small model in this package. The first of these that applies counts. OWNER/NAME of a
            repository on the hub is not accepted. `~` is expanded.
        *overrides: Settings that differ, as `key=value`, but not "mesh=auto". Those of a run may
            not change which parameters are trained (InputError).
        preset: If `target` is a model: the preset that gives prompts, reward and sampler. None:
            `target` must not be a model. No effect for a run or a preset.
        checkpoint: The checkpoint of a run: "latest" (the newest that is not damaged), "best"
            (highest evaluation reward; of equal ones the newest), or the number of an iteration as
            text. A preset or a model accepts only "latest".
        trust: Whether a run directory may name rewards and objectives outside of this package,
            which run code that the author of the directory chose. If not, such a run is an
            InputError, unless `overrides` name the same ones.

    Returns:
        (experiment, parameters, iterations). The trainable parameters are float32 by path:
        {"blocks/attn/to_q/kernel": {"a": ..., "b": ...}} for a LoRA adapter, with a plain array for
        a parameter trained in full. Without a run they are those of `lora.path`, or {} if it is
        None. The last item is the number of iterations that they were trained for, 0 without a run.

    Raises:
        ConfigError: If the configuration or an override is invalid.
        InputError: If `target`, `checkpoint` or a file cannot be used, if a run needs `trust`, if a
            pattern in `train.parameters` or `lora.target_modules` matches no parameter of the
            model, or if latents, images and trained parameters are estimated to need more memory
            than the devices have.
        RunError: If the checkpoint is damaged, or a reward outside of JAX fails on its trial image.
        ValueError: If `target` begins with the `~USER` of a user that does not exist.
    """
    config, run = read_target(expand_home(str(target)), overrides, preset, trust=trust)
    path = find_checkpoint(run or str(target), checkpoint)
    experiment = build(config)
    trainable, iteration = load_policy(run, config, experiment.backbone, path)
    return experiment, trainable, iteration


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C or SIGTERM.

    The last complete iteration was saved, with two exceptions: there is none yet, or the
    interruption came in the middle of a parameter update. This is a KeyboardInterrupt, which
    `except Exception` does not catch.

    Attributes:
        summary: The dictionary that `train` returns, for the iterations so far, with "interrupted"
            True. "saved" is False in the two exceptions.
    """

    def __init__(self, summary: dict[str, Any]) -> None:
        """Creates the exception, with a message that names the run and the iteration, and says
        whether the iteration was saved.

        Args:
            summary: The dictionary that `train` would have returned, with "interrupted" True and
                "saved" True or False. It is kept as the attribute `summary`.
        """
        iterations = summary["iterations"]
        if summary["saved"]:
            outcome = f"saved after iteration {iterations}; the same call resumes"
        else:
            outcome = (
                f"stopped after iteration {iterations}, and nothing new was saved; the same call "
                "resumes from the last checkpoint, or starts anew if there is none"
            )
        super().__init__(f"{summary['run']}: {outcome}")
        self.summary = summary


def train(
    preset: str,
    *overrides: str,
    profile: Iterable[int] = (),
    html_report: bool = False,
    force: bool = False,
    progress_bar: bool = False,
) -> dict[str, Any]:
    """Trains a policy, in a new run directory or from the last checkpoint of an existing one.

    The directory is the setting `run.dir`; it gets the configuration, checkpoints, metrics, the
    ledger of all candidates (Parquet) and images. Progress is printed on standard error. Models and
    rewards are loaded with the effects of `load`: downloads, imports of configured functions, and
    trial requests to judges and services. With several processes, all must call it with the same
    arguments.

    If this is called in the main thread, the first Ctrl-C or SIGTERM stops training after the
    current batch (with several processes, after the current phase, e.g. all of exploration); a
    second one ends the process with exit code 130. The earlier handlers are restored at the end.

    Args:
        preset: The name of a preset, e.g. "tiny". `preset_names()` lists all.
        *overrides: Settings that differ from the preset, as `key=value`, e.g. "run.dir=runs/a".
            "mesh=auto" chooses mesh, gradient checkpointing and batch sizes for this machine, as
            for `load`.
        profile: Numbers of iterations, from 1 to `train.iterations`, during which a trace for
            TensorBoard is written to `profile/` in the run directory. One that is complete already
            is an InputError.
        html_report: Whether to keep a page `report.html` in the run directory up to date.
        force: Whether to go on in three cases that are an InputError otherwise: input files have
            changed since the last checkpoint, the run is estimated to need more memory than there
            is, or a `report.html` that this package did not write would be replaced.
        progress_bar: Whether to show a progress bar on a terminal, instead of one line per
            iteration.

    Returns:
        A dictionary: "run" (the directory as text), "iterations" (the number of complete ones),
        "interrupted" (False; only the summary of TrainingInterrupted has True), "saved" (True),
        "trained_in_full" (the number of arrays that are trained in full, 0 for LoRA alone), and
        "before" and "after" (the first and the last evaluation of the run: a dictionary of numbers
        by metric, e.g. "eval/reward", with None for one that is not finite; {} if there is none).

    Raises:
        TrainingInterrupted: If it was interrupted. A KeyboardInterrupt. The last complete iteration
            was saved first, unless "saved" is False in the `summary` of the exception.
        ConfigError: If the preset or an override is invalid.
        InputError: If the run directory or an input file cannot be used, or the directory holds
            another run (with other settings that the trained parameters depend on), or another
            process uses it.
        RunError: If the run fails, for example because the disk is full, a reward fails, or
            training diverges (`Diverged`). The last complete iteration is then saved, except after
            `Diverged`.
        OSError: If the file system does not support locks, or a folder of the cache of prompts may
            not be searched.
    """
    settings, note = proposals.expand_mesh_auto(preset, overrides, this_machine)
    config = resolve(preset, settings)
    with TerminalProgress(bars=progress_bar) as progress:
        if note is not None:
            progress.line(note)
        summary = trainer.run(config, progress, tuple(profile), html_report, force=force)
    if summary["interrupted"]:
        raise TrainingInterrupted(summary)
    return summary


def rank(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int = 8,
    formats: Iterable[str] = (),
    explore: Iterable[str] = (),
    steps: Iterable[int] = (),
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Measures how well cheap exploration ranks candidate images, compared with full generation
    (docs/method.md, section 2).

    The candidates of some test prompts are generated once with all steps in the training precision,
    which gives their true rewards. They are also generated once for every combination of
    exploration options, formats and numbers of steps, which gives proxy rewards (those of
    `rollout.explore.reward` if it is set). With `reward.combine=advantages`, the weighted sums of
    normalized scores take the place of rewards. The seeds of the candidates depend on `eval.seed`,
    not on the run's seed. If the prompt cache lacks prompts, the text encoders are loaded, and the
    encoded prompts are added to the cache. With several processes, all must call it with the same
    arguments.

    Args:
        experiment: The experiment, with its test prompts, rewards and exploration. In its
            configuration, `rollout.candidates` is the number of candidates per prompt, and
            `rollout.kept` how many of them training would keep.
        adapters: The trainable parameters of the policy by path, e.g. those of `open_policy`. {} is
            the base model.
        prompts: The number of test prompts to use, from the first one on.
        formats: Number formats to explore in, e.g. ["nvfp4", "fp8"], or a single one as text;
            "auto" stands for the fastest native one. Empty: that of each set of options. In all
            three lists, repeated entries count once.
        explore: Names of sets of exploration options, files in `configs/explore/`, e.g. ["paper",
            "best"], or a single one as text. Empty: the experiment's own options.
        steps: Numbers of solver steps to explore with, from 1 to `rollout.num_steps`. Empty: that
            of each set of options.
        progress: A function that is called as images are generated, with the name of the phase
            ("regenerate" or "explore"), its total number of images, and the number of images in the
            last batch (0 when a phase starts; "explore" starts once per combination). The default
            does nothing.

    Returns:
        One dictionary per combination. "explore" (the name of the options, "" for the experiment's
        own), "precision" (the format itself, not "auto"; `rollout.precision` for a format that
        quantizes nothing) and "steps" identify it. "candidates" (per prompt), "kept", "prompts" and
        "top_k" (4) are counts. The figures follow; each is the mean over the prompts for which it
        is defined. An undefined figure is NaN, and h is half of `rollout.kept`, rounded down and at
        least 1. "spearman" and "kendall" are the rank correlations of proxy and true rewards,
        undefined if all proxy or all true rewards are equal. "top_k_match" is the fraction of the 4
        truly best candidates (of all, if there are fewer) that is among the h best by proxy, and
        "bottom_k_match" the same for the worst. "top_k_regret" is (A - B) / R. A is the mean true
        reward of the 4 truly best of all candidates. B is that of the 4 truly best of the h best
        by proxy (if h is below 4, the smallest true reward of the prompt stands in for those that
        are missing). R is the range of the true rewards; if it is 0, so is the regret.
        "true_rank_best" and "true_rank_worst" are the mean true ranks, 1 for the best, of the h
        best and the h worst by proxy; "perfect_rank_best" and "perfect_rank_worst" are the same for
        a perfect proxy. "per_prompt" is a list with a dictionary per prompt: its text as "prompt",
        and its figures but those of a perfect proxy.

    Raises:
        InputError: If `prompts` is not from 1 to the number of test prompts, an entry of a list or
            a quantization rule cannot be used, or the prompts cannot be encoded.
        ConfigError: If a set of options does not exist or does not fit the configuration, or a
            number of steps does not.
        RunError: If a reward outside of JAX fails and `reward.on_failure` is "stop", or if the
            cache of prompts cannot be written.
        PermissionError: If a folder of the cache of prompts may not be searched.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    available = len(experiment.test_prompts)
    if isinstance(prompts, float) or prompts not in range(1, available + 1):
        raise InputError(
            f"prompts={brief_repr(prompts)}: must be from 1 to {available}, the number of test "
            "prompts"
        )
    settings = ranking.sweep(
        experiment.config,
        explore=_entries(explore),
        formats=_entries(formats),
        steps=steps,
    )
    pools = ranking.explore_and_regenerate(experiment, adapters, prompts, settings, progress)
    return [
        ranking.summarize(pools, setting, experiment.config.rollout.kept) for setting in settings
    ]


def _entries(names: Iterable[str]) -> Iterable[str]:
    """Returns the names to iterate over: `[names]` for a single text, else `names` itself.

    Args:
        names: The names, e.g. ["nvfp4", "fp8"], or a single name as text.
    """
    return [names] if isinstance(names, str) else names


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    num_steps: int | None = None,
    guidance_scale: float | None = None,
    true_cfg_scale: float | None = None,
    negative_prompt: str = "",
    seed: int = 0,
    size: tuple[int, ...] | None = None,
    latents: Float[np.ndarray, "n c ... latent_h latent_w"] | None = None,
    lora: str | Path | None = None,
    precision: Precision = "bf16",
    max_sequence_length: int | None = None,
    instruction: str | None = None,
    vae_tile_size: int | None = None,
    batch_size: int = 16,
    checkpoint: str = "latest",
) -> Float[np.ndarray, "n ... h w 3"]:
    """Generates one image or clip per prompt, with a diffusers model or with the policy of a run.

    A model samples as its diffusers pipeline does. A run samples as its evaluation does, with its
    EMA policy, and reads and extends the run's prompt cache. The model is loaded onto all devices
    in every call, so pass all prompts at once. With several processes, all must call it with the
    same arguments.

    An image depends on its prompt and the seed, not on the other prompts. Repetitions of a prompt
    get different noise.

    Args:
        model: A run directory, which may be in an object store (gs:// or s3://), a directory in the
            layout of diffusers, "embedded:NAME" (a small model in this package), or OWNER/NAME of a
            repository on the hub, whose newest revision is downloaded if the cache lacks it
            (without a network, the newest one in the cache is used). The first of these that
            applies counts. `~` is expanded.
        prompts: The prompts, at least one, or a single one as text. A prompt may be empty; it has
            at most 20,000 characters and no control characters.
        num_steps: The number of solver steps, 1 to 1000. None: that of the run's evaluation; 10 for
            a model.
        guidance_scale: The guidance scale, at least 0. FLUX.1-dev takes it as an input of the
            network. FLUX.1-schnell and distilled FLUX.2-klein take none, so that it is at most 1.
            For all other models it is the scale of classifier-free guidance, and values up to 1
            mean no guidance. None: that of the run; 1 for a model.
        true_cfg_scale: The scale of classifier-free guidance for FLUX.1 and distilled FLUX.2-klein.
            Values up to 1 mean none. Other models accept only 1. None: that of the run; 1 for a
            model.
        negative_prompt: The negative prompt of classifier-free guidance, for all images. Without
            such guidance it must be "".
        seed: The seed of the initial noise, 0 to 2**31 - 1.
        size: (height, width) of the images in pixels, 1 to 16,384 each. Both must be multiples of a
            number that depends on the model. For video models (Wan), (height, width, frames) with 1
            plus a multiple of 4 frames. None: the size of `latents` if they are given, else that of
            the run's evaluation or the model's default. A missing number of frames has the same
            source. A size must not contradict `latents`.
        latents: The initial noise, float32 [N, C, h, w] with one entry per prompt, or [N, C, t, h,
            w] for video models, as for the pipelines of diffusers (those of FLUX and Qwen-Image
            take it packed). All values must be finite. The seed then has no effect. None: drawn
            from the seed.
        lora: A LoRA to apply to a model: a .safetensors file of diffusers, kohya, ai-toolkit or
            ComfyUI, or a directory of PEFT. `~` is expanded. None: no LoRA. A run has its own and
            accepts none.
        precision: The number format in which linear layers compute in all steps: "bf16", "fp32",
            "int8", "fp8", "nvfp4", or "auto" for the fastest one that the device supports. A format
            that it does not support is emulated, which is slower. The rest of the transformer
            computes in BF16 (in float32 for "fp32"), as do the linear layers that the rules of
            `model.quantization` exclude. These rules are those of the run, or of the presets for
            the model.
        max_sequence_length: The number of tokens to which prompts are padded or cut, 1 to 2048.
            None: that of the run, or the model's default.
        instruction: Text before every prompt, for SANA only; "" is no text. None: that of the run;
            none for a model. Other models than SANA accept only None.
        vae_tile_size: The side in pixels of the tiles in which images are decoded to save memory, a
            multiple of the pixels per latent pixel (8 for FLUX.1 and SD3, 32 for SANA). None: that
            of the run; whole images for a model.
        batch_size: The greatest number of images that each device generates at once, at least 1.
        checkpoint: The checkpoint of a run: "latest" (the newest that is not damaged), "best"
            (highest evaluation reward; of equal ones the newest), or the number of an iteration as
            text. A model accepts only "latest".

    Returns:
        The images, float32 [N, height, width, 3] in [0, 1], or clips, [N, frames, height, width,
        3], in the order of the prompts.

    Raises:
        InputError: If an argument cannot be used, or the images need more memory than the host has.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, the checkpoint is damaged, or the prompt cache cannot
            be written.
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
            OWNER/NAME of a repository on the hub. `~` is expanded.
        prompts: The prompts, at least one, or a single one as text, as for `generate`.
        progress: A function that is called with the number of images of each batch, when the batch
            has been sent to the devices (before it is computed). The default does nothing.
        **options: The other keyword arguments of `generate`, e.g. `num_steps`, `guidance_scale`,
            `seed` and `size`.

    Returns:
        A `Generation` with arrays of NumPy: `images`, float32 [N, height, width, 3] in [0, 1], or
        clips, [N, frames, height, width, 3]; `latents`, the initial noise, float32 [N, C, h, w], or
        [N, C, t, h, w] for clips, for `generate` or a pipeline of diffusers (for those of FLUX.1
        and Qwen-Image it must first be packed, with their `_pack_latents`); `num_steps`;
        `precision`, a description of the number format; and `frames_per_second`, an int that has no
        meaning for images.

    Raises:
        InputError: If an argument is unknown or cannot be used, or the images need more memory than
            the host has.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, the checkpoint is damaged, or the prompt cache cannot
            be written.
        ValueError: If `model` begins with the `~USER` of a user that does not exist.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    request = Request.check({"model": expand_home(str(model)), "prompts": texts, **options})
    return generate_images(request, progress)


def quantize(w: Matrix, precision: str = "nvfp4") -> Quantized:
    """Quantizes weight matrices, for `solrl_jax.matmul(x, leaf)`. `solrl_jax.dequantize(leaf)`
    gives their rounded values.

    Args:
        w: Real matrices [..., in, out], not empty, in any form that `jnp.asarray` accepts. The
            values should be finite. This is not checked: non-finite values make the result
            non-finite.
        precision: The number format: "nvfp4", "fp8" or "int8". "auto" is not accepted.

    Returns:
        The quantized matrices, a leaf of a parameter tree. Padding that a format needs is internal:
        `matmul` and `dequantize` have the shapes of `w`.

    Raises:
        InputError: If the format does not exist or quantizes nothing ("bf16", "fp32"), or if `w`
            has complex numbers, fewer than two axes or no element, or is no array.
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
    """Writes the EMA policy of a run to files that diffusers or PEFT load.

    LoRA adapters become a LoRA. A run that trains parameters in full becomes a directory for
    `from_pretrained` of the transformer's class (with a LoRA in it if there are adapters too). In
    both cases the weights of the base model are loaded, and downloaded if the hub's cache lacks
    them.

    With `hub`, a folder is written and uploaded to the Hugging Face hub. It has the weights
    (`pytorch_lora_weights.safetensors` or `transformer/`), a model card and, if the run is finished
    and its last iteration is exported, the image of samples before and after training.

    Args:
        run: The run directory, which without `hub` may be in an object store (gs:// or s3://). `~`
            is expanded.
        out: The path to write: a .safetensors file, or a directory for PEFT and for parameters
            trained in full. With `hub`, it is the folder to upload. A directory may contain nothing
            but an earlier export. None is the folder `hub` in the run directory if `hub` is given,
            and an InputError if not. Missing parent directories are created. `~` is expanded.
        form: The program that is to load it, "diffusers" or "peft". Parameters trained in full need
            "diffusers".
        dtype: The number format of the written tensors, "fp32" or "bf16".
        fold_alpha: Whether the factor B of a LoRA is multiplied by alpha / rank, for programs that
            ignore alpha. Only for "diffusers", and for LoRA adapters alone.
        checkpoint: "latest" (the newest that is not damaged), "best" (highest evaluation reward; of
            equal ones the newest), or the number of an iteration as text.
        force: Whether existing files may be replaced. If not, they are an InputError.
        hub: The repository to upload to, OWNER/NAME, which is created if it does not exist. In an
            existing one, files of the same names are replaced, and others stay. Only for
            "diffusers". None: nothing is uploaded.
        private: Whether a new repository is private. Only with `hub`.
        dry_run: Whether to write the folder without uploading it. Only with `hub`.

    Returns:
        A dictionary: "iteration" (of the checkpoint), "rank" and "alpha" (those of the run's
        settings, also without adapters; with `fold_alpha`, alpha is the rank, as in the file). For
        parameters trained in full also "trained_in_full" (their number of arrays). With `hub` also
        "folder" (the absolute path of the uploaded folder) and, unless `dry_run`, "url" (the
        address of the repository).

    Raises:
        InputError: If `run` has no such checkpoint, `out` cannot be written or exists without
            `force`, an option does not suit the run or the other options, the parameters are not
            finite in `dtype`, the adapters change nothing (every product B A is 0), the user is not
            logged in to the hub or it cannot be reached, or a run in an object store is to be
            uploaded.
        ConfigError: If the configuration of the run is invalid.
        RunError: If the checkpoint is damaged, the disk refuses, or the upload fails (the folder is
            then complete).
        ValueError: If a path begins with the `~USER` of a user that does not exist.
    """
    directory = run_path(expand_home(str(run)))
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
        out = local_path("out", out)
        return _export_files(
            directory, out, form=form, dtype=dtype, fold_alpha=fold_alpha, checkpoint=checkpoint,
            force=force,
        )  # fmt: skip
    check_name(hub)
    if form != "diffusers":
        raise InputError(f"form={brief_repr(form)}: a run is published as diffusers; leave it out")
    if not isinstance(directory, Path):
        raise InputError(
            f"hub={hub}: {directory} is in an object store; a run is published from a disk, so "
            "copy it to one"
        )
    folder = directory / "hub" if out is None else local_path("out", out)
    config = read_run(directory)
    check_replaceable(folder)
    files.refuse_existing("out", [folder], force, folders=True)
    if not dry_run:
        check_login(hub)
    folder = folder.absolute()
    with files.atomic_directory(folder) as filled:
        pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
        with as_input_error():
            whole = find_trained_paths(pipeline.transformer, config).whole
        target = filled / ("transformer" if whole else lora_files.DIFFUSERS_FILE)
        summary = _export_files(
            directory, target, form=form, dtype=dtype, fold_alpha=fold_alpha, checkpoint=checkpoint,
            force=False,
        )  # fmt: skip
        add_card(filled, directory, config, hub, summary, type(pipeline))
    summary |= {"folder": str(folder)}
    if not dry_run:
        message = f"solrl_jax: the policy after iteration {summary['iteration']}"
        summary["url"] = push(folder, hub, private=private, message=message)
    return summary


def _export_files(
    run: RunPath,
    out: Path,
    *,
    form: Literal["diffusers", "peft"],
    dtype: Literal["fp32", "bf16"],
    fold_alpha: bool,
    checkpoint: str,
    force: bool,
) -> dict[str, Any]:
    """Writes the files of `export` for a run, without a model card. The weights of the base model
    are loaded.

    Args:
        run: The run directory.
        out: The .safetensors file to write; for PEFT and for parameters trained in full, a
            directory, which may contain nothing but an earlier export. Missing parent directories
            are created.
        form: The program that is to load it, "diffusers" or "peft". Parameters trained in full need
            "diffusers".
        dtype: The number format of the written tensors, "fp32" or "bf16".
        fold_alpha: Whether the factor B of a LoRA is multiplied by alpha / rank. Only for
            "diffusers", and for LoRA adapters alone.
        checkpoint: "latest" (the newest that is not damaged), "best" (highest evaluation reward; of
            equal ones the newest), or the number of an iteration as text.
        force: Whether existing files may be replaced.

    Returns:
        A dictionary: "iteration" (of the checkpoint), "rank" and "alpha" (those of the run's
        settings, also without adapters; with `fold_alpha`, alpha is the rank, as in the file), and
        for parameters trained in full "trained_in_full" (their number of arrays).

    Raises:
        InputError: If `run` has no such checkpoint, `out` cannot be written or exists without
            `force`, an option does not suit the run, the parameters are not finite in `dtype`, or
            the adapters change nothing (every product B A is 0).
        ConfigError: If the configuration of the run is invalid.
        RunError: If the checkpoint is damaged, or the disk refuses.
    """
    config = read_run(run)
    if fold_alpha and form == "peft":
        raise InputError("fold_alpha=True: PEFT always reads alpha; leave it out")
    pipeline = open_model(config.model.path, mhla=mhla_override(config.model))
    with as_input_error():
        whole = find_trained_paths(pipeline.transformer, config).whole
    if whole and (form == "peft" or fold_alpha):
        argument = "form=peft" if form == "peft" else "fold_alpha=True"
        raise InputError(
            f"{argument}: {run} trains {len(whole)} parameter(s) in full, which a LoRA does not "
            "hold; leave it out"
        )
    transformer_files.refuse_component(out, pipeline.folder)
    if whole:
        transformer_files.check_directory(out)
    else:
        lora_files.check_target(out, form)
    if whole or form == "peft":
        files.refuse_link("out", out)
    existing = list(out.iterdir()) if out.is_dir() else [out]
    files.refuse_existing("out", existing, force, folders=True)
    path = find_checkpoint(run, checkpoint)
    files.writable_directory(out.absolute().parent, "out")

    # A LoRA needs only the names, shapes and devices of the weights; a whole transformer also needs
    # their values.
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
    """Writes LoRA adapters in memory to files, in float32. `export` does this for a run directory.

    An existing file (even if it is no export) or directory of an earlier export is replaced without
    asking. Layers (also single ones of a stack) whose factors a and b are both zero are left out.

    Args:
        experiment: The experiment in which the adapters were trained. Its model gives the names of
            the layers, and its configuration rank and alpha.
        adapters: The adapters by the path of their layer, each {"a": [..., in, rank], "b": [...,
            rank, out]}.
        path: For "diffusers" a file that ends in .safetensors; for "peft" a directory, which may
            contain nothing but an earlier export. Missing parent directories are created. `~` is
            expanded.
        form: The program that is to load them, "diffusers" or "peft".

    Raises:
        InputError: If `path` or `form` cannot be used, or `path` is or lies in the directory of a
            component of the base model (e.g. its `transformer/`), or if the adapters do not fit
            the network, are not finite, change nothing (every product B A is 0), or are not all
            LoRA adapters.
        RunError: If the disk refuses.
    """
    if form not in ("diffusers", "peft"):
        raise InputError(f"form={brief_repr(form)}: accepted: diffusers, peft")
    settings = LoraSettings(experiment.config.lora.rank, experiment.config.lora.alpha)
    table = experiment.backbone.parameter_table()
    out = local_path("path", path)
    transformer_files.refuse_component(out, experiment.backbone.pipeline.folder)
    if form == "peft":
        lora_files.export_peft(out, adapters, settings, table)
    else:
        lora_files.export_diffusers(out, adapters, settings, table)


def export_transformer(experiment: Experiment, trained: Trainable, folder: str | Path) -> None:
    """Writes a policy with parameters trained in full as a transformer in the layout of diffusers,
    in float32.

    All other parameters are those of the base model. An earlier export is replaced.

    Args:
        experiment: The experiment in which the parameters were trained.
        trained: The trainable parameters by path. LoRA adapters among them, or alone, become a LoRA
            in the directory, beside the whole transformer.
        folder: The directory to write, for `from_pretrained` of the transformer's class. It may
            contain nothing but an earlier export. Missing parent directories are created. `~` is
            expanded.

    Raises:
        InputError: If `folder` cannot be used, a parameter is not finite, or the adapters change
            nothing.
        RunError: If the disk refuses.
    """
    settings = LoraSettings(experiment.config.lora.rank, experiment.config.lora.alpha)
    folder = local_path("folder", folder)
    transformer_files.export_transformer(folder, experiment.backbone, trained, settings)


def import_lora(experiment: Experiment, path: str | Path) -> tuple[Trainable, LoraSettings]:
    """Reads a LoRA as adapters for the model of an experiment, which stays as it is.

    Args:
        experiment: The experiment. Only its model matters.
        path: A LoRA file of diffusers, kohya, ai-toolkit or ComfyUI, or a directory with one, such
            as PEFT writes. `~` is expanded.

    Returns:
        (adapters, settings). The adapters, float32, by the path of their linear layer: {"a": [...,
        in, rank], "b": [..., rank, out]}, with zeros for layers of a stack that the file lacks. The
        settings are their rank and alpha, where a layer without an alpha has its rank as alpha. If
        the layers of the file differ in these, all are padded with zeros to the largest rank, alpha
        equals it, and B is scaled so that the effect stays the same.

    Raises:
        InputError: If the file cannot be read, does not fit the model, is not finite, or has parts
            that are not supported (adapters of text encoders, trained biases, DoRA).
    """
    return lora_files.import_lora(local_path("path", path), experiment.backbone.parameter_table())
