"""What a run directory, a preset or a model means to the commands: its configuration, its averaged policy."""

from pathlib import Path

from solrl_jax import checkpoint, files
from solrl_jax.backbone import Backbone
from solrl_jax.config import Config
from solrl_jax.files import InputError
from solrl_jax.policy.lora import Adapters, matching
from solrl_jax.presets import from_yaml, override, preset_names, resolve
from solrl_jax.state import abstract_state, read_start


def configuration(target: str, overrides: tuple[str, ...], preset: str | None) -> tuple[Config, Path | None]:
    """The configuration that `target` means, and its run directory if it is one.

    A run directory has its own; a preset is resolved; anything else is a model, for which `preset` gives the rest.
    """
    if is_run(target):
        return override(read_run(target), overrides), Path(target)
    if target in preset_names():
        return resolve(target, overrides), None
    if preset is None or not (Path(target).is_dir() or target.startswith("embedded:")):
        raise InputError(f"{target!r}: no run directory and no preset (see `solrl presets`)")
    return resolve(preset, (f"model.path={target}", *overrides)), None


def is_run(path: str | Path) -> bool:
    return (Path(path) / "config.yaml").is_file()


def read_run(path: str | Path) -> Config:
    """The configuration of a run directory. Raises InputError or ConfigError."""
    if not is_run(path):
        raise InputError(f"{path}: not a run directory (it has no config.yaml)")
    return from_yaml((Path(path) / "config.yaml").read_text())


def load_ema(folder: Path, config: Config, backbone: Backbone) -> tuple[Adapters, int]:
    """The averaged adapters of a run's newest good checkpoint, and its iteration."""
    targets = matching(backbone.transformer, config.lora.targets, "lora.targets")
    abstract = abstract_state(backbone.transformer, targets, config.lora, config.optimizer, backbone.mesh)
    restored = checkpoint.restore_latest(folder / "checkpoints", abstract, {})
    if restored is None:
        raise InputError(f"{folder}: has no checkpoint yet")
    state, meta, _ = restored
    return state.ema, meta["iteration"]


def load_policy(run: Path | None, config: Config, backbone: Backbone) -> tuple[Adapters, int]:
    """The averaged adapters of `run` and its iteration; without a run, those that `lora.init` names, before the first."""
    if run:
        return load_ema(run, config, backbone)
    targets = matching(backbone.transformer, config.lora.targets, "lora.targets")
    return read_start(config.lora, targets, backbone.parameter_table()), 0


def output_directory(path: Path) -> Path:
    """The directory `path` that `--out` names, made if need be. Raises InputError where nothing can be written there."""
    try:
        return files.writable_directory(path)
    except InputError as error:
        raise InputError(str(error).replace("the run directory", "--out", 1)) from error
