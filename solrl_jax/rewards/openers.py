"""How each kind of reward is opened: shipped, released, a function outside JAX, a function of the user's, a service."""

import dataclasses
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from solrl_jax.config.presets import ENTRY_POINTS
from solrl_jax.config.schema import shown
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.host import load
from solrl_jax.rewards.protocol import BATCH, HostReward, Loader, Reward
from solrl_jax.storage.errors import InputError, first_line

Options = Mapping[str, Any]
Find = Callable[[Mapping[str, str]], Loader]  # finds and checks a reward's files, given `reward.paths`
ARGUMENTS = ("images", "prompts", "metadata")  # of a function outside JAX, before its options


@dataclasses.dataclass(frozen=True)
class InJax:
    """A reward inside JAX whose options have been checked, and whose files have not been looked for."""

    find: Find
    others: tuple[str, ...] = ()  # the scores beside "reward"


# (name, options, timeout in seconds) -> the reward. Raises InputError in one line for options that it does not take.
Opener = Callable[[str, Options, float], InJax | HostReward]


def released(find: Find, *others: str) -> Opener:
    """Opens a reward inside JAX that is read from released files. others: the scores that it returns beside "reward"."""

    def opener(name: str, options: Options, timeout: float) -> InJax:
        if options:
            raise InputError(f"reward.options.{name}={dict(options)!r}: it takes none")
        return InJax(find, others)

    return opener


def shipped(make: Callable[[], Reward]) -> Opener:
    """Opens a reward inside JAX that comes with the package."""

    def opener(name: str, options: Options, timeout: float) -> InJax | HostReward:
        reward = make()
        return released(lambda paths: _placed(reward), *reward.others)(name, options, timeout)

    return opener


def outside(target: str, *others: str) -> Opener:
    """Opens a function of the package that scores outside JAX."""
    return lambda name, options, timeout: _host_reward(name, target, options, others)


def plugin(name: str, options: Options, timeout: float) -> InJax | HostReward:
    """Opens the function that `name` is, or that an entry point names.

    With required arguments it is a function outside JAX, otherwise it returns a `Reward`. Raises InputError in one line.
    """
    target = entry_points().get(name, name)
    function = _import(name, target)
    parameters = _parameters(name, function).values()
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return _host_reward(name, target, options, None)
    _check_options(name, function, options, ())
    try:
        reward = function(**options)
    except Exception as error:
        raise InputError(f"reward '{name}': {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(reward, Reward):
        expected = f"a solrl_jax.rewards.protocol.Reward; a function outside JAX takes ({', '.join(ARGUMENTS)})"
        raise InputError(f"reward '{name}': returned {shown(reward)}: expected {expected}")
    return InJax(lambda paths: _placed(reward), reward.others)


def service(url: str, options: Options, timeout: float) -> HostReward:
    """Opens a service. Its only option is `batch`, the number of pictures it gets at most in one request."""
    if unknown := [option for option in options if option != "batch"]:
        raise InputError(f"reward.options.{url}: unknown option '{unknown[0]}'; there is batch")
    batch = options.get("batch", BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(f"reward.options.{url}.batch={shown(batch)}: expected an integer of at least 1")
    return HostReward(url, "solrl_jax.rewards.http:http", {"url": url, "timeout": timeout}, (), batch)


def is_service(name: str) -> bool:
    """Whether the name of a reward is the address of a service."""
    return name.startswith(("http://", "https://"))


def entry_points() -> dict[str, str]:
    """The rewards that installed packages name: `module.path:function` by name."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _placed(reward: Reward) -> Loader:
    """The loader of a reward that has its parameters already."""

    def load(mesh: Mesh | None) -> Reward:
        if mesh is None:
            return reward
        params = jax.tree.map(hosts.put, reward.params, sharding.parameter_sharding(mesh, reward.params))
        return dataclasses.replace(reward, params=params)

    return load


def _host_reward(name: str, target: str, options: Options, others: tuple[str, ...] | None) -> HostReward:
    """A function outside JAX, imported here to check its options.

    The function may have an attribute `check`, called as check(prompt, metadata, **options): it raises ValueError for a prompt
    that the function cannot score.
    """
    function = _import(name, target)
    _check_options(name, function, options, ARGUMENTS)
    check = getattr(function, "check", None)
    if check is None:
        return HostReward(name, target, options, others)
    return HostReward(name, target, options, others, check=lambda prompt: check(str(prompt), prompt.metadata, **options))


def _import(name: str, target: str) -> Callable[..., Any]:
    """Imports what `target` names, from the working directory too. Raises InputError in one line."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # the processes that score inherit it
    try:
        found = load(target)
    except (Exception, SystemExit) as error:  # an imported module may do anything
        why = f"{type(error).__name__}: {first_line(error)}"
        expected = "; expected module.path:function" if ":" in name else ""
        raise InputError(f"reward '{name}': cannot be imported ({why}){expected}") from error
    if not callable(found):
        raise InputError(f"reward '{name}': {shown(found)} is no function")
    return found


def _parameters(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise InputError(f"reward '{name}': {first_line(error)}") from error


def _check_options(name: str, function: Callable[..., Any], options: Options, arguments: tuple[str, ...]) -> None:
    """Checks that `options` are the keywords of `function` beside its `arguments`. Raises InputError in one line."""
    parameters = list(_parameters(name, function).values())
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
