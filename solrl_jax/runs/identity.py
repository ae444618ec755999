"""Whether a run may write to a directory: it may if the directory is empty of runs, or holds this very run.

Two starts are of one run if their configurations have the same `fingerprint`: all that the trained adapters depend on.
"""

import contextlib
import functools
import hashlib
import json
import operator
import os
from pathlib import Path
from typing import Any

import yaml

from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import drop_defaults, to_yaml
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import AUTO, resolve_format
from solrl_jax.rewards.registry import reward_name, reward_names
from solrl_jax.rl.experiment import local_device
from solrl_jax.runs import checkpoint, ledger, metrics
from solrl_jax.runs.directory import is_run, read_run
from solrl_jax.storage.files import atomic_write, writing
from solrl_jax.storage.readers import parse_json, read_text

# settings that the adapters do not depend on; the cache holds the very bits that would be computed
FREE = (
    "version", "run", "eval", "mesh", "preset", "prompts.test", "train.iterations", "model.prompt_cache_dir",
    "reward.eval_only", "reward.workers", "reward.timeout", "reward.on_failure",
)  # fmt: skip
# what a run writes besides config.yaml, which it writes first
RECORDS = (
    "checkpoints",
    "ledger",
    "metrics.jsonl",
    "pictures",
    "profile",
    "report.html",
    "run.json",
)


def refuse_another_run(folder: Path, config: Config) -> None:
    """Raises InputError if training `config` in `folder` would overwrite anything but this run's own records."""
    name = f"run.dir={str(folder)!r}"
    if not is_run(folder):
        if found := [record for record in RECORDS if _holds_something(folder / record)]:
            raise InputError(
                f"{name} has {found[0]} but no config.yaml, so it may not be a run's; name another directory"
            )
        return
    there = read_run(folder)
    here = resolve_format(config.rollout.explore.precision, local_device()).name
    precision = there.rollout.explore.precision
    was = precision if precision != AUTO else _explored_in(folder) or here
    if fingerprint(there, was) == fingerprint(config, here):
        _refuse_lost_checkpoints(folder, name)
        return
    if fingerprint(there, here) == fingerprint(config, here):
        field = "rollout.explore.precision"
        means = f"explored in {was}, and {field}={config.rollout.explore.precision} is {here} here"
        raise InputError(f"{name} {means}; set {field}={was} to go on, or name another directory")
    changed = ", ".join(_differences(_bound(there), _bound(config)))
    raise InputError(f"{name} holds another run ({changed}); name another directory, or remove it")


def _holds_something(path: Path) -> bool:
    """Whether there is a file or link `path`, or a directory that is not empty."""
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def _refuse_lost_checkpoints(folder: Path, name: str) -> None:
    """Raises InputError if a run had checkpoints and has none: it would start over and erase its records.

    A run that stopped before its first save has an empty `checkpoints` (see `claim`). It may start over.
    """
    root = folder / "checkpoints"
    iterations = [
        *ledger.iterations_in(folder / "ledger"),
        *(row["iteration"] for row in metrics.read(folder)),
    ]
    had_checkpoints = not root.is_dir() or "finished_after_iteration" in _recorded(folder)
    if had_checkpoints and max(iterations, default=0) > 0 and not checkpoint.candidates(root):
        lost = f"{name} records {max(iterations)} iterations, but {root} holds no checkpoint"
        raise InputError(f"{lost}; put the checkpoints back, or name another directory")


def claim(folder: Path, config: Config) -> None:
    """Makes `folder` the run directory of `config`. Raises RunError if the disk refuses."""
    with writing(folder / "checkpoints"):
        (folder / "checkpoints").mkdir(exist_ok=True)
    atomic_write(folder / "config.yaml", to_yaml(config))


def _explored_in(folder: Path) -> str | None:
    """The format that `run.json` says the run explores in; None if it cannot be read: the checkpoints then decide."""
    with contextlib.suppress(LookupError, TypeError):
        return str(_recorded(folder)["exploration"]["format"])
    return None


def _recorded(folder: Path) -> dict[str, Any]:
    """What `run.json` holds; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(facts := parse_json(read_text(folder / "run.json")), dict):
            return facts
    return {}


def fingerprint(config: Config, explored_in: str) -> str:
    """A hash of all that the trained adapters depend on. A run may resume another with the same fingerprint.

    Only settings that differ from the defaults are hashed, so that a field that is added later does not change it.

    explored_in: the format that `rollout.explore.precision` stands for on the devices of the run.
    """
    tree = _bound(config)
    tree["rollout"]["explore"]["precision"] = explored_in
    tree = drop_defaults(tree)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _bound(config: Config) -> dict[str, Any]:
    """The configuration without settings that may differ between starts: lengths, logging, devices, how rewards are run."""
    tree = yaml.safe_load(to_yaml(config))
    for name in FREE:
        *sections, field = name.split(".")
        functools.reduce(operator.getitem, sections, tree).pop(field)
    trained = reward_names(config.reward.weights)
    for field in ("paths", "options"):  # of what is only watched
        tree["reward"][field] = {
            name: value
            for name, value in tree["reward"][field].items()
            if reward_name(name) in trained
        }
    return tree


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """A line for each setting in which two configurations differ."""
    out = []
    for key in there.keys() | here.keys():
        a = there.get(key)
        b = here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return sorted(out)
