"""Rewards that are not the package's: a function by `module.path:function` or entry point, a service by its address."""

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from solrl_jax.config.presets import ENTRY_POINTS
from solrl_jax.config.schema import shown
from solrl_jax.rewards.host import BATCH, HostReward, load
from solrl_jax.rewards.protocol import Reward
from solrl_jax.storage.errors import InputError, first_line

Options = Mapping[str, Any]
ARGUMENTS = ("images", "prompts", "metadata")  # of a function outside JAX, before its options


def is_service(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def entry_points() -> dict[str, str]:
    """What installed packages name: `module.path:function` by name."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def open_plugin(name: str, options: Options) -> Reward | HostReward:
    """The reward that an entry point, or else `name` itself, names.

    That is a function outside JAX (`HostReward`), or one without required arguments that returns a `Reward`.
    Raises InputError in one line.
    """
    target = entry_points().get(name, name)
    function = find(name, target)
    parameters = signature(name, function).values()
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return host_reward(name, target, options, None)
    check_options(name, function, options, ())
    try:
        reward = function(**options)
    except Exception as error:
        raise InputError(f"reward '{name}': {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(reward, Reward):
        expected = f"a solrl_jax.rewards.protocol.Reward; a function outside JAX takes ({', '.join(ARGUMENTS)})"
        raise InputError(f"reward '{name}': returned {shown(reward)}: expected {expected}")
    return reward


def host_reward(name: str, target: str, options: Options, others: tuple[str, ...] | None) -> HostReward:
    """The reward of a function outside JAX, imported and its options checked. Raises InputError in one line."""
    check_options(name, find(name, target), options, ARGUMENTS)
    return HostReward(name, target, options, others)


def open_service(url: str, options: Options, timeout: float) -> HostReward:
    """The reward of a service. Its one option is `batch`, the number of pictures it is sent at most."""
    if unknown := [option for option in options if option != "batch"]:
        raise InputError(f"reward.options.{url}: unknown option '{unknown[0]}'; there is batch")
    batch = options.get("batch", BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(f"reward.options.{url}.batch={shown(batch)}: expected an integer of at least 1")
    return HostReward(url, "solrl_jax.rewards.http:http", {"url": url, "timeout": timeout}, (), batch)


def find(name: str, target: str) -> Callable[..., Any]:
    """What `target` names, from the working directory too."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # workers inherit it
    try:
        found = load(target)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        why = f"{type(error).__name__}: {first_line(error)}"
        expected = "; expected module.path:function" if ":" in name else ""
        raise InputError(f"reward '{name}': cannot be imported ({why}){expected}") from error
    if not callable(found):
        raise InputError(f"reward '{name}': {shown(found)} is no function")
    return found


def signature(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise InputError(f"reward '{name}': {first_line(error)}") from error


def check_options(name: str, function: Callable[..., Any], options: Options, arguments: tuple[str, ...]) -> None:
    """Options are keywords of `function` beside its `arguments`. Raises InputError for one that is not, or is missing."""
    parameters = list(signature(name, function).values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(arguments) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise InputError(f"reward '{name}': takes {len(positional)} arguments; expected {', '.join(arguments)} and options")
    keywords = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = {key: p for key, p in keywords.items() if p not in positional[: len(arguments)]}
    there = f"there are {', '.join(accepted)}" if accepted else "it takes none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key, value in options.items():
            if key not in accepted:
                raise InputError(f"reward.options.{name}.{key}={shown(value)}: unknown option; {there}")
    if absent := [key for key, p in accepted.items() if p.default is p.empty and key not in options]:
        raise InputError(f"reward.options.{name}: missing option '{absent[0]}'; {there}")
