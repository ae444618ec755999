"""Reads a run directory: its configuration, its checkpoints, and the EMA policy.

Most commands also take a preset or a model instead of a run directory. `read_target` and
`load_policy` accept all three. `identity.py` decides whether a run may write to a directory.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solrl_jax.config.overrides import quote_override
from solrl_jax.config.presets import override, preset_names, resolve
from solrl_jax.config.schema import Config, is_plugin
from solrl_jax.config.serialization import from_yaml
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError, RunError
from solrl_jax.models.backbone import DTYPES, Backbone
from solrl_jax.parallel import hosts
from solrl_jax.rewards.registry import REWARDS, reward_names
from solrl_jax.rl.state import abstract_state, read_start
from solrl_jax.rl.trainable.trainable import Trainable, find_trained_paths
from solrl_jax.runs import checkpoint
from solrl_jax.storage.files import disk_reason
from solrl_jax.storage.readers import is_short_digits, read_text
from solrl_jax.storage.stores import RunPath, run_path

# Settings that decide, beside all of `lora`, which parameters a checkpoint holds.
_TRAINED = (
    "train.parameters",
    "model.attention",
    "model.mhla_blocks",
    "model.mhla_released",
    "model.mhla_norm",
)


def read_target(
    target: str, overrides: tuple[str, ...], preset: str | None, *, trust: bool
) -> tuple[Config, RunPath | None]:
    """Returns the configuration that a command-line target stands for. Loads no model.

    Args:
        target: A run directory (one with a `config.yaml`), the name of a preset, or a model (a
            directory or "embedded:NAME"); the first of these that applies.
        overrides: Overrides of the form `key=value`. For a run, they cannot change which parameters
            are trained.
        preset: If `target` is a model: the name of the preset whose `model.path` it replaces. None:
            models are not accepted.
        trust: Whether a run directory may name reward functions, reward services and objectives
            from outside the package. Such functions run code that the author of the directory
            chose. False: only those that `overrides` name are accepted.

    Returns:
        A tuple: the configuration with the overrides, and the run directory as a path (None for a
        preset or a model). If the overrides replace rewards of a run, the `reward.options` of the
        replaced rewards are dropped, unless the overrides changed them.

    Raises:
        InputError: If `target` is none of the three, or is a model while `preset` is None; if an
            override changes which parameters a run trains, if a run needs `trust`, or if its
            `config.yaml` cannot be read.
        ConfigError: If the configuration or an override is invalid.
    """
    if is_run(target):
        saved = read_run(target)
        config = _without_unused_options(saved, override(saved, overrides))
        _refuse_other_parameters(target, saved, config)
        if not trust:
            _refuse_foreign_rewards(target, saved, config, overrides)
            _refuse_foreign_objective(target, saved, config, overrides)
        return config, run_path(target)
    if target in preset_names():
        return resolve(target, overrides), None
    is_model = Path(target).is_dir() or target.startswith("embedded:")
    if preset is None or not is_model:
        raise InputError(f"{target!r}: no run directory and no preset (see `solrl presets`)")
    return resolve(preset, (quote_override("model.path", target), *overrides)), None


def _without_unused_options(saved: Config, config: Config) -> Config:
    """Drops `reward.options` of a run for rewards that overrides have replaced.

    Args:
        saved: The configuration that the run was trained with.
        config: The configuration `saved` with the overrides applied.

    Returns:
        `config` without those options. Options that differ from those in `saved` stay even if their
        reward is not used; opening the rewards then raises an error.
    """
    used = _reward_names(config)
    options = {
        name: values
        for name, values in config.reward.options.items()
        if name in used or saved.reward.options.get(name) != values
    }
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, options=options))


def _reward_names(config: Config) -> list[str]:
    """Returns the names of all rewards of a configuration, sorted.

    Args:
        config: The configuration. The names are taken from the scores in `reward.weights` (trained
            on), `reward.eval_only` (recorded only) and `rollout.explore.reward` (ranks candidates);
            "geneval/strict" is a score of the reward "geneval".
    """
    explored = config.rollout.explore.reward or {}
    return reward_names((*config.reward.weights, *config.reward.eval_only, *explored))


def _refuse_other_parameters(target: str, saved: Config, config: Config) -> None:
    """Checks that overrides did not change which parameters a run trains.

    It compares the section `lora` and the settings in `_TRAINED`: `train.parameters`,
    `model.attention`, `model.mhla_blocks`, `model.mhla_released` and `model.mhla_norm`.

    Args:
        target: The run directory, for the message.
        saved: The configuration that the run was trained with.
        config: The configuration `saved` with the overrides applied.

    Raises:
        InputError: If one of these settings differs. The message names the first one.
    """
    lora = [f"lora.{field.name}" for field in dataclasses.fields(saved.lora)]
    for name in (*_TRAINED, *lora):
        get = operator.attrgetter(name)
        if get(config) != get(saved):
            raise InputError(
                f"{name}={get(config)}: {target} is a run and has its own adapters; leave it out"
            )


def _refuse_foreign_rewards(
    target: str, saved: Config, config: Config, overrides: tuple[str, ...]
) -> None:
    """Checks that a run directory names no reward functions or services from outside the package.

    These are the texts that `_foreign_names` returns, such as "module:function", "judge-NAME" and
    URLs. Those that the user's overrides name are accepted, even if the run directory names them
    too.

    Args:
        target: The run directory, for the message.
        saved: The configuration that the run was trained with. To find which rewards the overrides
            name, they are applied to a copy of it without rewards.
        config: The configuration `saved` with the overrides applied. All of its rewards are
            checked, and all texts with a colon in `reward.options`.
        overrides: The user's overrides, of the form `key=value`.

    Raises:
        InputError: If `config` names such functions or services and the overrides do not.
    """
    explore = dataclasses.replace(saved.rollout.explore, reward=None)
    # Two names that stand for any others, because `reward.combine=advantages` requires two.
    placeholders = {"": 1.0, "-": 1.0}
    without_rewards = dataclasses.replace(
        saved,
        reward=dataclasses.replace(saved.reward, weights=placeholders, eval_only=(), options={}),
        rollout=dataclasses.replace(saved.rollout, explore=explore),
    )
    chosen_by_user = _foreign_names(override(without_rewards, overrides))
    foreign = sorted(_foreign_names(config) - chosen_by_user)
    if foreign:
        raise InputError(
            f"{target}: scores with {', '.join(foreign)}, which is not part of the package; use "
            "trust=True if you trust whoever wrote the directory, or name the rewards yourself: "
            "reward.weights={NAME: 1}"
        )


def _refuse_foreign_objective(
    target: str, saved: Config, config: Config, overrides: tuple[str, ...]
) -> None:
    """Checks that a run directory names no objective outside of the package.

    An objective that the overrides name is accepted, even if the run directory names the same one.

    Args:
        target: The run directory, for the message.
        saved: The configuration that the run was trained with. To find whether the overrides name
            the objective, they are applied to a copy of it with an objective of the package.
        config: The configuration `saved` with the overrides applied. Its `algorithm.objective` is
            checked.
        overrides: The user's overrides, of the form `key=value`.

    Raises:
        InputError: If the objective is "module:function" and the overrides do not name it.
    """
    objective = config.algorithm.objective
    if not is_plugin(objective):
        return
    # nft stands for any objective of the package.
    algorithm = dataclasses.replace(saved.algorithm, objective="nft")
    without_objective = dataclasses.replace(saved, algorithm=algorithm)
    if override(without_objective, overrides).algorithm.objective != objective:
        raise InputError(
            f"{target}: trains with {objective}, which is not part of the package; use trust=True "
            "if you trust whoever wrote the directory, or name an objective of the package: "
            "algorithm.objective=nft"
        )


def _foreign_names(config: Config) -> set[str]:
    """Returns the texts in a configuration that may name reward code or services outside the
    package.

    Args:
        config: The configuration.

    Returns:
        The names of the rewards in `reward.weights`, `reward.eval_only` and
        `rollout.explore.reward` that are not in `REWARDS`: "module:function", names of entry
        points, URLs, and "judge-NAME". Also every text with a colon among the values of
        `reward.options`, at any depth, because an option may name a function or service too, such
        as the address of a judge.
    """

    def texts_with_colon(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            if ":" in value:
                yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from texts_with_colon(item)
        elif isinstance(value, list):
            for item in value:
                yield from texts_with_colon(item)

    names = set(_reward_names(config)) - set(REWARDS)
    return names | set(texts_with_colon(config.reward.options))


def is_run(path: str | RunPath) -> bool:
    """Whether a path is a run directory, that is, a directory with a file `config.yaml`.

    Args:
        path: The path or the URL of a store. It need not exist.
    """
    return (run_path(path) / "config.yaml").is_file()


def read_run(path: str | RunPath) -> Config:
    """Reads the configuration of a run directory.

    A configuration of the previous format (field `version`) is translated in memory. The file stays
    as it is.

    Args:
        path: The run directory, in which `config.yaml` is read.

    Returns:
        The resolved configuration with which the run was last started.

    Raises:
        InputError: If `path` is no run directory, or if its `config.yaml` cannot be read as text.
        ConfigError: If the configuration is invalid. The message begins with the file's path.
    """
    if not is_run(path):
        raise InputError(f"{path}: not a run directory (it has no config.yaml)")
    file = run_path(path) / "config.yaml"
    try:
        return from_yaml(read_text(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (OSError, ValueError) as error:
        reason = disk_reason(error) or error
        raise InputError(f"{file}: cannot be read as UTF-8 text ({reason})") from error


def find_checkpoint(target: str | RunPath, which: str) -> RunPath | None:
    """Finds a checkpoint of a run by its description.

    The checkpoint is verified quickly: names and sizes of all files and, unless it is in an object
    store, the contents of those of at most 1 MiB. `load_ema` verifies everything. If there are
    several processes, each must call it.

    Args:
        target: The run directory.
        which: "latest", "best" (the highest "eval/reward" of those that pass the quick check; the
            newest one if several are equal) or the number of an iteration, as text.

    Returns:
        The directory of the checkpoint. None for "latest": `load_ema` then loads the newest intact
        one. If `target` is a run, at least one of its checkpoints has passed the quick check.

    Raises:
        InputError: If `which` is none of the three; if the run has no such checkpoint (for "best",
            no intact one with an evaluation); or if `target` is not a run directory (with "latest"
            it may be a model or preset, for which nothing is checked).
        RunError: If the checkpoint of that iteration is damaged, or, for "latest", if all are; or
            if the directory of checkpoints cannot be read.
    """
    name = f"checkpoint={which}"
    if not isinstance(which, str):
        raise InputError(f"{name}: expected text")
    root = run_path(target) / "checkpoints"

    def verify_quickly(path: RunPath) -> None:
        checkpoint.verify(path, contents=False)

    if which == "latest":
        if is_run(target) and checkpoint.newest_usable(root, verify_quickly) is None:
            raise InputError(f"{target}: has no checkpoint yet")
        return None
    if which != "best" and not is_short_digits(which):
        raise InputError(f"{name}: must be best, latest or an iteration")
    if not is_run(target):
        raise InputError(f"{name}: {target} is no run directory; only runs have checkpoints")

    def find_name() -> str:
        if which == "best":
            ranking = checkpoint.rank_by_reward(root)
            if not ranking:
                raise InputError(
                    f"{name}: no checkpoint in {root} holds an evaluation; run.keep_best=1 saves "
                    "whatever is evaluated"
                )
            return ranking[0].name
        # From old to new, so that a checkpoint takes precedence over one that it replaces.
        by_iteration = {
            checkpoint.iteration_of(path): path
            for path in reversed(checkpoint.list_checkpoints(root))
        }
        if int(which) not in by_iteration:
            raise InputError(f"{name}: {root} has {', '.join(map(str, by_iteration)) or 'none'}")
        path = by_iteration[int(which)]
        with _damage_as_run_error():
            verify_quickly(path)
        return path.name

    # The first process decides: a run that saves meanwhile may change what each would find.
    return root / hosts.from_first(find_name)


def load_policy(
    run: RunPath | None, config: Config, backbone: Backbone, path: RunPath | None = None
) -> tuple[Trainable, int]:
    """Loads the policy of a run, or the policy that training would start from.

    If there are several processes, each must call it with the same arguments.

    Args:
        run: The run directory, whose EMA is loaded (`load_ema`, which also reads its `config.yaml`
            for the dtype of saved arrays). None: the start of training, which is the LoRA at
            `lora.path` or, without one, the base model.
        config: The configuration of the run, preset or model, with overrides.
        backbone: The model of that configuration.
        path: The directory of a checkpoint of the run. None: its newest intact one. No effect
            without a run.

    Returns:
        A tuple. First, the trainable parameters in float32 by path, e.g. "blocks/attn/to_q/kernel":
        {"a": ..., "b": ...} for a layer with an adapter, an array for a parameter that is trained
        in full; on the backbone's mesh. Without a run, only the adapters of the LoRA, on the
        default device ({} without one), because parameters trained in full start as the base's.
        Second, the number of iterations that they were trained for; 0 without a run.

    Raises:
        RunError: If the checkpoint at `path` (if that is None: every checkpoint of the run) is
            damaged or has other arrays than `config` trains.
        InputError: If the run has no checkpoint, its `config.yaml` cannot be read, or `lora.path`
            cannot be used, e.g. because its rank or alpha is not that of `config`.
        ConfigError: If the `config.yaml` of the run is invalid.
        ValueError: If a pattern in `train.parameters` or `lora.target_modules` matches no parameter
            of the model.
    """
    if run is not None:
        return load_ema(run, config, backbone, path)
    trained_paths = find_trained_paths(backbone.pipeline.transformer, config)
    return read_start(config.lora, trained_paths.adapted, backbone.parameter_table()), 0


def load_ema(
    folder: RunPath, config: Config, backbone: Backbone, path: RunPath | None = None
) -> tuple[Trainable, int]:
    """Loads the EMA of the trainable parameters from a checkpoint of a run.

    Every byte of the checkpoint is verified, and the whole `TrainState` is read onto the devices
    for a moment. If there are several processes, each must call it with the same arguments.

    Args:
        folder: The run directory. The `rollout.precision` in its `config.yaml` is the dtype of the
            checkpoint's whole arrays in `TrainState.old`.
        config: The configuration of the run, perhaps with overrides. It tells which parameters are
            trained, hence which arrays the checkpoint holds. Its `rollout.precision` is not used.
        backbone: The model of that configuration, in any precision. The parameters are placed on
            its mesh.
        path: The directory of the checkpoint. None: the newest intact one of the run.

    Returns:
        A tuple. First, the EMA in float32 by path, e.g. "blocks/attn/to_q/kernel": {"a": ...,
        "b": ...} for an adapter, an array for a parameter that is trained in full.
        Second, the iteration of the checkpoint.

    Raises:
        RunError: If the checkpoint at `path` (if that is None: every checkpoint of the run) is
            damaged or has other arrays than `config` trains.
        InputError: If the run has no checkpoint, or its `config.yaml` cannot be read.
        ConfigError: If its `config.yaml` is invalid.
        ValueError: If a pattern in `train.parameters` or `lora.target_modules` matches no parameter
            of the model.
    """
    transformer = backbone.pipeline.transformer
    trained_paths = find_trained_paths(transformer, config)
    base = transformer.abstract_params(DTYPES[read_run(folder).rollout.precision])
    abstract = abstract_state(base, trained_paths, config.lora, config.optimizer, backbone.mesh)
    with _damage_as_run_error():
        if path is not None:
            state, meta = checkpoint.restore(path, abstract)
            return state.ema, meta["iteration"]
        restored = checkpoint.restore_latest(folder / "checkpoints", abstract, {})
    if restored is None:
        raise InputError(f"{folder}: has no checkpoint yet")
    state, meta, _ = restored
    return state.ema, meta["iteration"]


@contextlib.contextmanager
def _damage_as_run_error() -> Iterator[None]:
    """A context manager that raises RunError in place of a CheckpointError of its body.

    Raises:
        RunError: "checkpoint", followed by the message of the CheckpointError.
    """
    try:
        yield
    except checkpoint.CheckpointError as error:
        raise RunError(f"checkpoint {error}") from error
