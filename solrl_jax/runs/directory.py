"""What commands read from a run directory: its configuration, a checkpoint, the averaged policy.

Most commands also take a preset or a model instead: `configuration` and `load_policy`. `identity.py` decides whether a run may
write to a directory.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from solrl_jax.config.overrides import text_override
from solrl_jax.config.presets import override, preset_names, resolve
from solrl_jax.config.schema import Config, Reward, is_plugin
from solrl_jax.config.serialization import from_yaml
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError, RunError
from solrl_jax.models.backbone import Backbone
from solrl_jax.rewards.registry import REWARDS, reward_names
from solrl_jax.rl.state import abstract_state, read_start
from solrl_jax.rl.trainable.trainable import Trainable, find_targets
from solrl_jax.runs import checkpoint
from solrl_jax.storage.files import disk_reason
from solrl_jax.storage.readers import is_number, read_text


def configuration(
    target: str, overrides: tuple[str, ...], preset: str | None, *, trust: bool
) -> tuple[Config, Path | None]:
    """The configuration that `target` stands for, and the run directory if it is one.

    Args:
      target: a run directory, a preset, or a model (a directory or "embedded:NAME").
      overrides: `key=value`. What a run trains cannot be changed.
      preset: the rest of the configuration for a model.
      trust: whether functions and services that a run directory names may be used, because the user said so or because the
        command uses no reward. Whoever wrote the directory chose them.

    Raises InputError or ConfigError.
    """
    if is_run(target):
        own = read_run(target)
        config = override(own, overrides)
        trained = (
            "train.parameters",
            "model.attention",
            "model.mhla_blocks",
            "model.mhla_released",
            "model.mhla_norm",
        )
        for name in (*trained, *(f"lora.{field.name}" for field in dataclasses.fields(own.lora))):
            if (value := operator.attrgetter(name)(config)) != operator.attrgetter(name)(own):
                raise InputError(
                    f"{name}={value}: {target} is a run and has its own adapters; leave it out"
                )
        blank = dataclasses.replace(
            own, reward=dataclasses.replace(own.reward, weights={"": 1.0}, eval_only=(), options={})
        )
        said = _outside(override(blank, overrides).reward)  # by this command line
        if not trust and (foreign := sorted(_outside(config.reward) - said)):
            how = "add --trust-run if you trust whoever wrote it, or name the rewards yourself: reward.weights={NAME: 1}"
            raise InputError(
                f"{target}: scores with {', '.join(foreign)}, which it brings from outside the package; {how}"
            )
        objective = config.algorithm.objective
        if not trust and is_plugin(objective) and not _names_objective(overrides):
            how = "add --trust-run if you trust whoever wrote it, or name an objective of the package: algorithm.objective=nft"
            raise InputError(
                f"{target}: trains with {objective}, which it brings from outside the package; {how}"
            )
        return config, Path(target)
    if target in preset_names():
        return resolve(target, overrides), None
    if preset is None or not (Path(target).is_dir() or target.startswith("embedded:")):
        raise InputError(f"{target!r}: no run directory and no preset (see `solrl presets`)")
    return resolve(preset, (text_override("model.path", target), *overrides)), None


def _names_objective(overrides: tuple[str, ...]) -> bool:
    """Whether the command line itself chooses the objective, so that it does not come from the run directory."""
    return any(override.partition("=")[0] == "algorithm.objective" for override in overrides)


def _outside(reward: Reward) -> set[str]:
    """What rewards may run or ask outside the package: functions, services, and texts of options that may name such."""

    def texts(value: Any) -> Iterator[str]:
        parts = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        yield from [value] if isinstance(value, str) and ":" in value else []
        yield from (text for part in parts for text in texts(part))

    return ({*reward_names((*reward.weights, *reward.eval_only))} - {*REWARDS}) | {
        *texts(reward.options)
    }


def is_run(path: str | Path) -> bool:
    """Whether `path` is a run directory."""
    return (Path(path) / "config.yaml").is_file()


def read_run(path: str | Path) -> Config:
    """The configuration of a run directory. Raises InputError or ConfigError."""
    if not is_run(path):
        raise InputError(f"{path}: not a run directory (it has no config.yaml)")
    file = Path(path) / "config.yaml"
    try:
        return from_yaml(read_text(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: cannot be read as UTF-8 text ({disk_reason(error) or error})"
        ) from error


def find_checkpoint(target: str | Path, which: str) -> Path | None:
    """The checkpoint that `--checkpoint` names in the run directory `target`; None for the newest good one.

    which: "latest", "best" (the highest eval/reward) or an iteration. Raises InputError for anything else, for a target that is
    no run directory, and for a checkpoint that is not there; RunError for one that is damaged. Names and sizes of its files are
    checked and the contents of small ones, which takes no time. `load_ema` checks all.
    """
    asked = f"--checkpoint {which}"
    root = Path(target) / "checkpoints"
    sound = partial(checkpoint.verify, contents=False)
    if which == "latest":
        if is_run(target) and checkpoint.newest(root, sound) is None:
            raise InputError(f"{target}: has no checkpoint yet")
        return None
    if which != "best" and not is_number(which):
        raise InputError(f"{asked}: must be best, latest or an iteration")
    if not is_run(target):
        raise InputError(f"{asked}: {target} is no run directory; only runs have checkpoints")
    if which == "best":
        if best := checkpoint.ranked(root):
            return best[0]
        raise InputError(
            f"{asked}: no checkpoint in {root} holds an evaluation; run.keep_best=1 saves whatever is evaluated"
        )
    there = {checkpoint.iteration_of(path): path for path in reversed(checkpoint.candidates(root))}
    if int(which) not in there:
        raise InputError(f"{asked}: {root} has {', '.join(map(str, there)) or 'none'}")
    with _damage_told():
        sound(there[int(which)])
    return there[int(which)]


def load_ema(
    folder: Path, config: Config, backbone: Backbone, path: Path | None = None
) -> tuple[Trainable, int]:
    """The averaged adapters (EMA) of a run's checkpoint, and its iteration.

    path: as `find_checkpoint` returns it. Raises RunError if that checkpoint is damaged, InputError if the run has none.
    """
    targets = find_targets(backbone.pipeline.transformer, config)
    abstract = abstract_state(
        backbone.transformer, targets, config.lora, config.optimizer, backbone.mesh
    )
    with _damage_told():
        root = folder / "checkpoints"
        restored = (
            checkpoint.restore(path, abstract)
            if path
            else checkpoint.restore_latest(root, abstract, {})
        )
    if restored is None:
        raise InputError(f"{folder}: has no checkpoint yet")
    return restored[0].ema, restored[1]["iteration"]


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    """Raises RunError in place of CheckpointError."""
    try:
        yield
    except checkpoint.CheckpointError as error:
        raise RunError(f"checkpoint {error}") from error


def load_policy(
    run: Path | None, config: Config, backbone: Backbone, path: Path | None = None
) -> tuple[Trainable, int]:
    """What `load_ema` returns for `run`; without a run, the adapters that training starts from (`lora.path`), and 0."""
    if run is not None:
        return load_ema(run, config, backbone, path)
    targets = find_targets(backbone.pipeline.transformer, config)
    return read_start(config.lora, targets.adapted, backbone.parameter_table()), 0
