"""What Python users call, beside the functions that `solrl_jax.__all__` names where they are defined."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from solrl_jax.cli.sample import requested
from solrl_jax.cli.sample import sample as _sample
from solrl_jax.config.presets import resolve
from solrl_jax.config.values import brief_repr
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
from solrl_jax.runs.progress import TerminalProgress


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


def sample(
    target: str | Path, prompts: str | Path, out: str | Path, **options: Any
) -> dict[str, Any]:
    """`solrl sample`: pictures of a file of prompts, by a diffusers directory or a run's averaged policy.

    options: the command's, with its defaults: steps, guidance, seed, size=(height, width), precision, lora, ... Raises
    InputError as the command does, which names the option, its value and what is accepted.
    """
    return _sample(str(target), requested(str(target), prompts=str(prompts), out=out, **options))


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
