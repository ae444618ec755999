"""The functions for Python users: lists in, arrays out. The commands of `solrl` call them.

`solrl_jax.__all__` lists them with the public names that other modules define.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Precision
from solrl_jax.config.values import brief_repr, expand_home
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.leaf import Matrix, Quantized
from solrl_jax.rl import rank as ranking
from solrl_jax.rl.experiment import Experiment, build
from solrl_jax.rl.iteration import no_progress
from solrl_jax.rl.trainable import lora_files, transformer_files
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs import trainer
from solrl_jax.runs.generation import Generation, Request, generate_images
from solrl_jax.runs.progress import TerminalProgress


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
    latents: Float[np.ndarray, "n c h w"] | None = None,
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
        model: A run directory, a directory in the layout of diffusers, or "embedded:NAME".
        prompts: The prompts, or a single one.
        num_steps: The number of solver steps, 1 to 1000. None: that of the run's evaluation, or 10.
        guidance_scale: The guidance scale of the model. Models that embed it (FLUX.1) take it as
            an input. For all others it is the scale of classifier-free guidance, and values up to
            1 mean no guidance, as in diffusers. None: the run's, or 1.
        true_cfg_scale: The scale of classifier-free guidance for models that embed
            `guidance_scale`; other models accept only 1. Values up to 1 mean none. None: the run's,
            or 1.
        negative_prompt: The negative prompt of classifier-free guidance, the same for all images.
        seed: The seed of the initial noise, 0 to 2**31 - 1.
        size: Height and width of the images in pixels. None: that of the run's evaluation, or the
            model's default.
        latents: The initial noise to use in place of that of `seed`, float32, with one entry per
            prompt and the axes that diffusers uses.
        lora: A LoRA of diffusers (a .safetensors file) or PEFT (a directory) to apply. A run has
            its own and accepts none.
        precision: The number format of all steps: "bf16", "fp32", "fp8", "nvfp4", or "auto" for
            the fastest one that the device runs natively.
        max_sequence_length: The number of tokens to which prompts are padded or cut. None: the
            run's, or the model's default.
        instruction: The text that precedes every prompt, for SANA. None: the run's, or none.
        vae_tile_size: The side in pixels of the tiles in which images are decoded, which takes
            less memory. None: the run's, or whole images.
        batch_size: The largest number of images that each device generates at once.
        checkpoint: The checkpoint of a run: "latest", "best" (highest evaluation reward), or the
            number of an iteration.

    Returns:
        The images, float32, with values in [0, 1], in the order of the prompts.
        `generate_with_latents` also returns the initial noise.

    Raises:
        InputError: If an argument cannot be used. Nothing is loaded then.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, or the checkpoint is damaged.
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
        model: A run directory, a directory in the layout of diffusers, or "embedded:NAME".
        prompts: The prompts, or a single one.
        progress: Called with the number of further images that are done.
        **options: The other keyword arguments of `generate`, by their names.

    Returns:
        The images in `images`, the initial noise in `latents`, the number of steps and the number
        format. The noise can be given to `generate` or to a pipeline of diffusers as `latents`.

    Raises:
        InputError: If an argument is unknown or cannot be used. Nothing is loaded then.
        ConfigError: If the configuration of the run is invalid.
        RunError: If an image is not finite, or the checkpoint is damaged.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    request = Request.check({"model": expand_home(str(model)), "prompts": texts, **options})
    return generate_images(request, progress)


def load(preset: str, *overrides: str) -> Experiment:
    """Builds the experiment of a preset with `key=value` overrides, as `solrl train` takes them. Loads the model.

    Raises ConfigError or InputError in one line for what cannot be.
    """
    return build(resolve(preset, overrides))


def train(preset: str, *overrides: str) -> dict[str, Any]:
    """`solrl train`: trains in `run.dir`, or goes on there. Returns the run's directory, its scores before and after.

    Raises KeyboardInterrupt if it was interrupted, after the last whole iteration is saved.
    """
    config = resolve(preset, overrides)
    with TerminalProgress(bars=False) as progress:
        summary = trainer.run(config, progress)
    if summary["interrupted"]:
        raise KeyboardInterrupt(
            f"{summary['run']}: saved after iteration {summary['iterations']}; the same call goes on"
        )
    return summary


def rank(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int = 8,
    formats: Sequence[str] = (),
    explore: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """`solrl rank`: how well exploration ranks the candidates of the first test prompts. One row of figures a setting.

    formats: explored in, by name; explore: recipes of `configs/explore/`. Empty: the experiment's own.
    """
    if prompts not in range(1, (most := len(experiment.test_prompts)) + 1):
        raise InputError(
            f"prompts={brief_repr(prompts)}: accepted: 1 to {most}, the number of test prompts"
        )

    def joined(names):
        return ",".join([names] if isinstance(names, str) else names) or None

    settings = ranking.sweep(experiment.config, explore=joined(explore), formats=joined(formats))
    pools = ranking.explore_and_regenerate(experiment, adapters, prompts, settings, no_progress)
    return [
        ranking.summarise(pools, setting, experiment.config.rollout.kept) for setting in settings
    ]


def quantize(w: Matrix, precision: str = "nvfp4") -> Quantized:
    """Quantises weight matrices to a format of `FORMATS`. `matmul(x, leaf)` multiplies by it, `dequantize(leaf)` undoes it.

    Raises InputError for a format that quantises nothing or that does not exist, and for what is no matrix.
    """
    quantizing = [name for name, form in FORMATS.items() if form.quantize is not None]
    form = FORMATS.get(str(precision))
    if form is None or form.quantize is None:
        raise InputError(f"precision={precision!r}: accepted are {', '.join(quantizing)}")
    try:
        w = jnp.asarray(w)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"w: {brief_repr(w)}; accepted: real matrices [..., in, out] that are not empty"
        ) from error
    if w.ndim < 2 or w.size == 0 or not jnp.isrealobj(w):
        raise InputError(
            f"w: is {w.dtype} {list(w.shape)}; accepted: real matrices [..., in, out] that are not empty"
        )
    return form.quantize(w)


def export_lora(
    experiment: Experiment,
    adapters: Trainable,
    path: str | Path,
    form: Literal["diffusers", "peft"] = "diffusers",
) -> None:
    """Writes adapters, e.g. `state.ema`, as a LoRA: a .safetensors file for diffusers, or a directory for PEFT.

    Raises InputError for a path that cannot be written to, and for another form.
    """
    if form not in ("diffusers", "peft"):
        raise InputError(f"form={brief_repr(form)}: accepted: diffusers, peft")
    lora = experiment.config.lora
    table = experiment.backbone.parameter_table()
    export = lora_files.export_peft if form == "peft" else lora_files.export_diffusers
    export(Path(path), adapters, LoraSettings(lora.rank, lora.alpha), table)


def export_transformer(experiment: Experiment, trained: Trainable, folder: str | Path) -> None:
    """Writes a policy with parameters trained in full, e.g. `state.ema`: a directory for `from_pretrained` of diffusers.

    Trainable on other parameters become a LoRA in it. Raises InputError for a directory that cannot be written to.
    """
    lora = experiment.config.lora
    settings = LoraSettings(lora.rank, lora.alpha)
    transformer_files.export_transformer(Path(folder), experiment.backbone, trained, settings)


def import_lora(experiment: Experiment, path: str | Path) -> tuple[Trainable, LoraSettings]:
    """Reads a LoRA of diffusers or PEFT: adapters by parameter path, and rank and alpha. Raises InputError."""
    return lora_files.import_lora(Path(path), experiment.backbone.parameter_table())
