"""Decides whether a run may write to a directory.

It may if the directory holds neither a run nor any file of one, or if it holds this same run. Two
starts belong to the same run if their configurations have the same `fingerprint`, a hash of all
settings that the trained parameters depend on.
"""

import contextlib
import functools
import hashlib
import json
import operator
from typing import Any

from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import drop_defaults, from_yaml, to_tree, to_yaml
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import AUTO, resolve_format
from solrl_jax.rewards.judge.settings import FREE as JUDGE_FREE
from solrl_jax.rewards.registry import is_judge, reward_name, reward_names
from solrl_jax.rl.experiment import first_device_info
from solrl_jax.runs import checkpoint, ledger, metrics
from solrl_jax.runs.directory import is_run, read_run
from solrl_jax.storage.files import atomic_write, disk_errors_as_run_errors, exists
from solrl_jax.storage.readers import parse_json, read_text
from solrl_jax.storage.stores import RunPath

# Sections and fields that may differ between the starts of a run, because the trained parameters do
# not depend on them. The prompt cache is one: it holds the very bits that would be computed.
FREE = (
    "version", "run", "eval", "mesh", "preset", "prompts.test", "train.iterations",
    "model.prompt_cache_dir", "reward.eval_only", "reward.workers", "reward.timeout",
    "reward.on_failure",
)  # fmt: skip

# The files and directories that a run writes after `config.yaml`.
RECORDS = (
    "checkpoints",
    "ledger",
    "metrics.jsonl",
    "pictures",
    "profile",
    "report.html",
    "run.json",
)


def refuse_another_run(folder: RunPath, config: Config) -> None:
    """Checks that training `config` in `folder` overwrites nothing but the files of this very run.

    Nothing is written. A directory without a file of a run is accepted, whatever else it holds.

    Args:
        folder: The run directory. It need not exist.
        config: The resolved configuration of the run that is about to start.

    Raises:
        InputError: If the directory has files of a run (`RECORDS`, such as `metrics.jsonl`) but no
            `config.yaml`; if it holds a run with another `fingerprint`; if it holds this run but
            its checkpoints are gone (a run that stopped before its first save may start over); if
            its `config.yaml` cannot be read; or if its `metrics.jsonl` is too large to be read. For
            another fingerprint, the message lists the settings that differ, or the two exploration
            formats if only those differ (`rollout.explore.precision=auto` depends on the devices).
        ConfigError: If the directory's `config.yaml` is not a configuration.
        RunError: If the directory of checkpoints cannot be read.
    """
    name = f"run.dir={str(folder)!r}"
    if not is_run(folder):
        for record in RECORDS:
            if _is_occupied(folder / record):
                raise InputError(
                    f"{name} has {record} but no config.yaml, so it may not be a run's; name "
                    "another directory"
                )
        return
    saved = read_run(folder)
    current_format = resolve_format(config.rollout.explore.precision, first_device_info()).name
    saved_format: str = saved.rollout.explore.precision
    if saved_format == AUTO:
        saved_format = _recorded_format(folder) or current_format
    current_fingerprint = fingerprint(config, current_format)
    if fingerprint(saved, saved_format) == current_fingerprint:
        _refuse_lost_checkpoints(folder, name)
        return
    if fingerprint(saved, current_format) == current_fingerprint:
        field = "rollout.explore.precision"
        raise InputError(
            f"{name} explored in {saved_format}, and {field}={config.rollout.explore.precision} is "
            f"{current_format} here; set {field}={saved_format} to go on, or name another directory"
        )
    changed = ", ".join(
        _differences(_fingerprinted_settings(saved), _fingerprinted_settings(config))
    )
    raise InputError(f"{name} holds another run ({changed}); name another directory, or remove it")


def _is_occupied(path: RunPath) -> bool:
    """Whether `path` is a file, a link that leads nowhere, or a directory that is not empty.

    Args:
        path: The path. A link to a directory or file counts as its target.
    """
    if path.is_dir():
        return any(path.iterdir())
    return exists(path)


def _refuse_lost_checkpoints(folder: RunPath, name: str) -> None:
    """Checks that a run whose checkpoints are gone is not started over, erasing its files.

    Checkpoints are gone if there are metrics or a ledger of iterations from 1 on but no checkpoint.
    A run that stopped before its first save has no checkpoint either, and may start over. Any run
    without a checkpoint is taken for such a run, even if its checkpoints were removed, as long as
    the directory `checkpoints` exists and `run.json` does not say that the run finished.

    Args:
        folder: The run directory. Its `run.json`, `ledger/`, `metrics.jsonl` and `checkpoints/` are
            looked at.
        name: The directory as the message names it.

    Raises:
        InputError: If the checkpoints are gone (damaged ones count as checkpoints), or if
            `metrics.jsonl` is too large to be read.
        RunError: If the directory of checkpoints cannot be read.
    """
    root = folder / "checkpoints"
    finished = "finished_after_iteration" in _read_facts(folder)
    if root.is_dir() and not finished:
        return  # nothing shows that there ever was a checkpoint
    iterations = ledger.iterations_in(folder / "ledger")
    iterations += [row["iteration"] for row in metrics.read(folder)]
    last = max(iterations, default=0)
    if last > 0 and not checkpoint.list_checkpoints(root):
        raise InputError(
            f"{name} records {last} iterations, but {root} holds no checkpoint; put the "
            "checkpoints back, or name another directory"
        )


def check_record(config: Config) -> None:
    """Checks that the `config.yaml` of a run with this configuration can be read again.

    Args:
        config: The resolved configuration.

    Raises:
        InputError: If its text is longer than the 65,536 characters that `from_yaml` accepts, or is
            nested too deeply.
    """
    try:
        from_yaml(to_yaml(config))
    except ConfigError as error:
        raise InputError(f"the configuration is too large for a run: {error}") from error


def write_config(folder: RunPath, config: Config) -> None:
    """Makes an existing directory the run directory of `config`. One process of a run calls it.

    Creates a directory `checkpoints` in it if there is none (in a store, an empty object that
    stands for it), then writes `config.yaml` atomically, which replaces an older one.

    Args:
        folder: The directory, for which `refuse_another_run` has raised nothing.
        config: The resolved configuration, which becomes `config.yaml`.

    Raises:
        RunError: If the disk refuses the write.
    """
    with disk_errors_as_run_errors(folder / "checkpoints"):
        (folder / "checkpoints").mkdir(exist_ok=True)
    atomic_write(folder / "config.yaml", to_yaml(config))


def _recorded_format(folder: RunPath) -> str | None:
    """Reads from a run's `run.json` which format the run explores in.

    Args:
        folder: The run directory, in which `run.json` is read.

    Returns:
        The name of the format, e.g. "nvfp4"; None if the file is absent, damaged or lacks it.
    """
    with contextlib.suppress(LookupError, TypeError):
        return str(_read_facts(folder)["exploration"]["format"])
    return None


def _read_facts(folder: RunPath) -> dict[str, Any]:
    """Returns the content of a run's `run.json`; {} if the file is missing, cannot be read or is
    not a JSON dict.

    Args:
        folder: The run directory, in which `run.json` is read.
    """
    with contextlib.suppress(OSError, ValueError):
        facts = parse_json(read_text(folder / "run.json"))
        if isinstance(facts, dict):
            return facts
    return {}


def fingerprint(config: Config, explore_format: str) -> str:
    """Hashes all settings that the trained parameters depend on.

    A run may be continued with a configuration of the same fingerprint. Settings that have their
    default value are not hashed, so that a new field with a default does not change the fingerprint
    of older runs.

    Args:
        config: The resolved configuration of the run. Only the settings of
            `_fingerprinted_settings` are hashed, without, for example, the run directory, the
            evaluation and the number of iterations.
        explore_format: The name of the format that `rollout.explore.precision` resolves to on the
            devices of the run, e.g. "nvfp4". It takes the place of that setting.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    settings = _fingerprinted_settings(config)
    settings["rollout"]["explore"]["precision"] = explore_format
    text = json.dumps(drop_defaults(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprinted_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of a configuration that may not differ between the starts of a run.

    Settings that the trained parameters do not depend on are left out:

    * those in `FREE`, such as the sections `run`, `eval` and `mesh`, the test prompts and the
        number of iterations;
    * the paths and options of rewards that are neither trained on nor rank candidates;
    * options of judges that no score depends on, such as the address.

    Args:
        config: The resolved configuration, which is not changed.

    Returns:
        New nested dicts of plain values, also of defaults, e.g. {"rollout": {"kept": 24, ...}}.
    """
    settings = to_tree(config)
    for name in FREE:
        *sections, field = name.split(".")
        section = functools.reduce(operator.getitem, sections, settings)
        section.pop(field)
    trained = reward_names(config.training_scores)
    for field in ("paths", "options"):
        settings["reward"][field] = {
            name: value
            for name, value in settings["reward"][field].items()
            if reward_name(name) in trained
        }
    for name, options in settings["reward"]["options"].items():
        if is_judge(name):
            settings["reward"]["options"][name] = {
                option: value for option, value in options.items() if option not in JUDGE_FREE
            }
    return settings


def _differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """Describes the settings in which two configurations differ.

    Args:
        saved: The settings of the run in the directory, as nested dicts.
        current: The settings of the run that is about to start, as nested dicts of the same form.
        prefix: The name of the section that both belong to, with a dot at the end; "" for the whole
            configuration.

    Returns:
        For each differing setting, "NAME: OLD there, NEW here" with its dotted name, sorted. A
        setting that one of the two lacks counts as None. An empty list if they are equal.
    """
    differences = []
    for key in saved.keys() | current.keys():
        old = saved.get(key)
        new = current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences.append(f"{prefix}{key}: {old!r} there, {new!r} here")
    return sorted(differences)
