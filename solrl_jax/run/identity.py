"""Which run a directory holds: what the trained adapters depend on, and what may differ between two starts."""

import functools
import hashlib
import json
import operator
from pathlib import Path
from typing import Any

import yaml

from solrl_jax.config.presets import from_yaml, to_yaml
from solrl_jax.config.schema import Config
from solrl_jax.numerics.formats import AUTO, resolve
from solrl_jax.rewards.registry import reward_name, reward_names
from solrl_jax.storage.errors import InputError
from solrl_jax.training.experiment import device_facts

# what the adapters do not depend on; what is read from the cache is what would be computed, to the bit
FREE = (
    "version", "run", "eval", "mesh", "preset", "prompts.test", "train.iterations", "model.cache",
    "reward.watched", "reward.workers", "reward.timeout", "reward.on_failure",
)  # fmt: skip


def refuse_another_run(folder: Path, config: Config) -> None:
    """Checks that a run that is there is this one."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    there, name = from_yaml(path.read_text()), f"run.dir={str(folder)!r}"
    here = resolve(config.rollout.explore.precision, device_facts()).name
    precision = there.rollout.explore.precision
    was = precision if precision != AUTO else _explored_in(folder) or here
    if fingerprint(there, was) == fingerprint(config, here):
        return
    if fingerprint(there, here) == fingerprint(config, here):
        field = "rollout.explore.precision"
        means = f"explored in {was}, and {field}={config.rollout.explore.precision} is {here} here"
        raise InputError(f"{name} {means}; set {field}={was} to go on, or name another directory")
    changed = ", ".join(_differences(_bound(there), _bound(config)))
    raise InputError(f"{name} holds another run ({changed}); name another directory, or remove it")


def _explored_in(folder: Path) -> str | None:
    """The format that a run's record says it explores in; None for a run that stopped before it wrote one."""
    path = folder / "run.json"
    return json.loads(path.read_text())["exploration"]["format"] if path.exists() else None


def fingerprint(config: Config, explored_in: str) -> str:
    """Names everything that the trained adapters depend on; equal fingerprints may resume one another.

    explored_in: the format that `rollout.explore.precision` is on the devices of the run.
    """
    tree = _bound(config)
    tree["rollout"]["explore"]["precision"] = explored_in
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _bound(config: Config) -> dict[str, Any]:
    """The configuration without what may differ between starts: lengths, logging, devices, how rewards are run."""
    tree = yaml.safe_load(to_yaml(config))
    for name in FREE:
        *sections, field = name.split(".")
        functools.reduce(operator.getitem, sections, tree).pop(field)
    trained = reward_names(config.reward.weights)
    for field in ("paths", "options"):  # of what is only watched
        tree["reward"][field] = {name: value for name, value in tree["reward"][field].items() if reward_name(name) in trained}
    return tree


def _differences(there: dict, here: dict, prefix: str = "") -> list[str]:
    out = []
    for key in there.keys() | here.keys():
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return sorted(out)
