"""The rewards by name, and how those of a configuration are opened, loaded and summed.

To add a reward to the package, write a file with a function that scores images or opens a `Reward`,
and add a line to `REWARDS`. Functions and services of users need no line.
"""

import dataclasses
import importlib.metadata
import inspect
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from solrl_jax.config import schema as config
from solrl_jax.config.overrides import ENTRY_POINTS
from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError, first_line, in_one_line
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.host import import_object
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.protocol import (
    MAX_BATCH,
    Check,
    HostReward,
    HostRewards,
    Reward,
    accept,
    reward_code,
)
from solrl_jax.rewards.shapes import shapes
from solrl_jax.rewards.sources import SOURCES

Options = Mapping[str, Any]
# The arguments of a function outside JAX, before its options.
ARGUMENTS = ("images", "prompts", "metadata")
# How the name of a reward that is a service begins. The name is its address.
SERVICE = ("http://", "https://")


@dataclasses.dataclass(frozen=True)
class InJax:
    """A reward of the package that is scored inside JAX. It has no options.

    Attributes:
        open: Opens the reward, given `reward.paths`. It finds and checks the files, and reads no
            weights.
        others: The names of its scores beside "reward".
    """

    open: Callable[[Mapping[str, str]], Reward]
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OutsideJax:
    """A reward of the package that worker processes score.

    Attributes:
        target: The function, as "module:function".
        others: The names of its scores beside "reward".
    """

    target: str
    others: tuple[str, ...] = ()


REWARDS: dict[str, InJax | OutsideJax] = {
    "shapes": InJax(shapes, ("strict",)),
    "tiny-clip": InJax(tiny_clip),
    "pickscore": InJax(pickscore),
    "clipscore": InJax(clipscore),
    "hpsv2": InJax(hpsv2),
    "imagereward": InJax(imagereward),
    "aesthetic": InJax(aesthetic),
    "ocr": OutsideJax("solrl_jax.rewards.ocr:ocr"),
    "geneval": OutsideJax("solrl_jax.rewards.geneval:geneval", ("strict",)),
    "jpeg_compressibility": OutsideJax("solrl_jax.rewards.jpeg:jpeg_compressibility"),
    "jpeg_incompressibility": OutsideJax("solrl_jax.rewards.jpeg:jpeg_incompressibility"),
}


class Rewards(NamedTuple):
    """The two rewards of a run. They are one object if `reward.eval_only` is empty.

    Attributes:
        trained: The weighted sum that is trained on.
        evaluated: The same sum, with the scores of `reward.eval_only` beside it.
    """

    trained: Reward
    evaluated: Reward


@dataclasses.dataclass(frozen=True)
class OpenedRewards:
    """The rewards of a configuration, with names, options, functions and files checked.

    Attributes:
        settings: The section "reward" of the configuration.
        dtype: The dtype of the matmuls of scoring networks.
        rewards: The rewards by name.
    """

    settings: config.Reward
    dtype: DTypeLike
    rewards: Mapping[str, Reward | HostReward]

    def load(self, mesh: Mesh | None) -> Rewards:
        """Reads the parameters of the rewards inside JAX, and sums all rewards.

        Args:
            mesh: The mesh for the parameters. None: JAX's default device.

        Raises:
            InputError: If the parameters of a user's reward cannot be placed on the mesh.
        """
        loaded: dict[str, Reward | HostReward] = dict(self.rewards)
        for name, reward in self.rewards.items():
            if isinstance(reward, HostReward):
                continue
            if name in REWARDS:
                loaded[name] = reward.load(mesh, self.dtype)
            else:
                with reward_code(name, "params: {}"):
                    loaded[name] = reward.load(mesh, self.dtype)
        weights = self.settings.weights
        trained = self._sum(loaded, tuple(weights))
        if not self.settings.eval_only:
            return Rewards(trained, trained)
        return Rewards(trained, self._sum(loaded, (*weights, *self.settings.eval_only)))

    def _sum(self, rewards: Mapping[str, Reward | HostReward], scores: Sequence[str]) -> Reward:
        """Returns the weighted sum of `reward.weights` that also computes the other `scores`.

        Args:
            rewards: The loaded rewards by name. Those without a score in `scores` are left out.
            scores: The names of scores.
        """
        settings = self.settings
        names = reward_names(scores)
        inside = {}
        outside = []
        for name, reward in rewards.items():
            if name not in names:
                continue
            if isinstance(reward, Reward):
                inside[name] = reward
            else:
                # Only the scores that the configuration names are known for a user's function.
                named = [
                    score.removeprefix(f"{name}/")
                    for score in scores
                    if reward_name(score) == name and score != name
                ]
                others = tuple(dict.fromkeys((*(reward.others or ()), *named)))
                outside.append(dataclasses.replace(reward, others=others))
        inside_weights: dict[str, float] = {}
        outside_weights: dict[str, float] = {}
        for score, weight in settings.weights.items():
            chosen = inside_weights if reward_name(score) in inside else outside_weights
            chosen[score] = weight
        host = None
        if outside:
            host = HostRewards(
                rewards=tuple(outside),
                weights=outside_weights,
                workers=settings.workers,
                timeout=settings.timeout,
                skip=settings.on_failure == "skip",
            )
        return mixture(inside_weights, inside, host)


def open_rewards(settings: config.Reward, dtype: DTypeLike = jnp.float32) -> OpenedRewards:
    """Opens the rewards of a configuration: checks names and options, imports functions and checks
    files. No weights are read.

    Args:
        settings: The section "reward" of the configuration.
        dtype: The dtype of the matmuls of scoring networks: float32, float16 or bfloat16.

    Raises:
        InputError: If a reward cannot be used.
    """
    names = reward_names((*settings.weights, *settings.eval_only))
    _check_names(settings, names)
    rewards: dict[str, Reward | HostReward] = {}
    others: dict[str, tuple[str, ...] | None] = {}
    for name in names:
        entry = REWARDS.get(name)
        options = settings.options.get(name, {})
        if isinstance(entry, InJax):
            if options:
                raise InputError(f"reward.options.{name}={dict(options)!r}: it takes none")
            others[name] = entry.others
            continue
        if isinstance(entry, OutsideJax):
            rewards[name] = open_function(name, entry.target, options, entry.others)
        elif name.startswith(SERVICE):
            rewards[name] = open_service(name, options, settings.timeout)
        else:
            rewards[name] = open_plugin(name, options)
        others[name] = rewards[name].others
    _check_scores(settings, others)
    for name in names:
        entry = REWARDS.get(name)
        if isinstance(entry, InJax):
            with in_one_line():  # a configuration or a tensor that does not fit
                rewards[name] = entry.open(settings.paths)
    return OpenedRewards(settings, dtype, {name: rewards[name] for name in names})


def open_function(
    name: str, target: str, options: Options, others: tuple[str, ...] | None
) -> HostReward:
    """Opens a function outside JAX. Also imports it here, to check its options.

    The function may have an attribute `check`, which is called as check(prompt, metadata,
    **options) and raises ValueError for a prompt that the function cannot score.

    Args:
        name: The name of the reward.
        target: The function, as "module:function".
        options: Its keyword arguments.
        others: The names of its scores beside "reward". None: unknown.

    Raises:
        InputError: If it cannot be imported or called.
    """
    function, signature = _import_function(name, target)
    _check_options(name, signature, options, ARGUMENTS)
    return HostReward(name, target, options, others, check=_bind_check(function, options))


def open_plugin(name: str, options: Options) -> Reward | HostReward:
    """Opens a function of a user.

    A function with required arguments is scored outside JAX. Any other is called here, and returns
    a `Reward`.

    Args:
        name: "module:function", or the name of an entry point of an installed package.
        options: The keyword arguments of the function.

    Raises:
        InputError: If the function cannot be used.
    """
    target = entry_points().get(name, name)
    function, signature = _import_function(name, target)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in variadic:
            return open_function(name, target, options, None)
    _check_options(name, signature, options, ())
    with reward_code(name):
        reward = function(**options)
        if not isinstance(reward, Reward):
            raise ValueError(
                f"returned {brief_repr(reward)}: expected a solrl_jax.rewards.protocol.Reward; "
                f"a function outside JAX takes ({', '.join(ARGUMENTS)})"
            )
        if reward.host is not None:
            raise ValueError(
                f"host={brief_repr(reward.host)}: expected None; name a function outside JAX in "
                "reward.weights"
            )
    return reward


def open_service(url: str, options: Options, timeout: float) -> HostReward:
    """Opens a reward service. No request is sent.

    Args:
        url: Its address.
        options: May have "batch", the most images in one request.
        timeout: Seconds that one request may take.

    Raises:
        InputError: If the address is no URL, or an option is unknown.
    """
    with in_one_line(lambda message: f"reward {url!r}: {message}"):
        address = urllib.parse.urlsplit(url)
        if not address.hostname or address.port == 0 or url.split() != [url]:
            raise ValueError("expected http://HOST:PORT/PATH")
    unknown = [option for option in options if option != "batch"]
    if unknown:
        raise InputError(f"reward.options.{url}: unknown option '{unknown[0]}'; there is batch")
    batch = options.get("batch", MAX_BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(
            f"reward.options.{url}.batch={brief_repr(batch)}: expected an integer of at least 1"
        )
    arguments = {"url": url, "timeout": timeout}
    return HostReward(url, "solrl_jax.rewards.http:http", arguments, (), batch)


def reward_name(score: str) -> str:
    """Returns the reward that a score belongs to.

    This is "geneval" for "geneval/strict", and the whole address for a service.
    """
    return score if score.startswith(SERVICE) else score.split("/")[0]


def reward_names(scores: Iterable[str]) -> list[str]:
    """Returns the rewards that scores belong to, sorted, each once."""
    return sorted({reward_name(score) for score in scores})


def entry_points() -> dict[str, str]:
    """Returns the rewards that installed packages name: "module:function" by name."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in points}


def _check_names(settings: config.Reward, names: Sequence[str]) -> None:
    """Raises InputError if a setting names a reward or a source of files that is unknown.

    Args:
        settings: The section "reward" of the configuration.
        names: The rewards that it uses.
    """
    unknown_paths = [name for name in settings.paths if name not in SOURCES]
    if unknown_paths:
        raise InputError(
            f"reward.paths: unknown name {_quoted(unknown_paths)}; there are {', '.join(SOURCES)}"
        )
    own = [name for name in names if name not in REWARDS and ":" not in name]
    if own:
        installed = entry_points()
        unknown = [name for name in own if name not in installed]
        if unknown:
            known = ", ".join((*REWARDS, *installed))
            raise InputError(
                f"{_field(settings, unknown)}: unknown reward {_quoted(unknown)}; there are "
                f"{known}, module.path:function and http://HOST:PORT/PATH"
            )
    unused = [name for name in settings.options if name not in names]
    if unused:
        raise InputError(
            f"reward.options: no reward {_quoted(unused)}; there are {', '.join(names)}"
        )


def _check_scores(settings: config.Reward, others: Mapping[str, tuple[str, ...] | None]) -> None:
    """Raises InputError if a setting names a score that its reward does not have.

    Args:
        settings: The section "reward" of the configuration.
        others: The names of the scores of each reward beside "reward". None: unknown.
    """
    known = []
    for name, other_names in others.items():
        known += [name, *(f"{name}/{other}" for other in other_names or ())]
    unknown = [
        score
        for score in (*settings.weights, *settings.eval_only)
        if score not in known and others[reward_name(score)] is not None
    ]
    if unknown:
        raise InputError(
            f"{_field(settings, unknown)}: unknown score {_quoted(unknown)}; there are "
            f"{', '.join(known)}"
        )


def _field(settings: config.Reward, names: Sequence[str]) -> str:
    """Returns the setting that names some rewards or scores, for messages.

    Args:
        settings: The reward section of the configuration.
        names: Names of rewards or of scores.

    Returns:
        "reward.weights" if one of the names is trained on, otherwise "reward.eval_only".
    """
    trained = {*settings.weights, *reward_names(settings.weights)}
    return "reward.eval_only" if trained.isdisjoint(names) else "reward.weights"


def _bind_check(function: Callable[..., Any], options: Options) -> Check:
    """Returns the check of prompts of a function outside JAX.

    Args:
        function: The function. Without an attribute `check`, any prompt passes.
        options: Its keyword arguments.
    """
    check_function = getattr(function, "check", None)
    if check_function is None:
        return accept

    def check(prompt: Prompt) -> None:
        check_function(str(prompt), prompt.metadata, **options)

    return check


def _import_function(name: str, target: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """Imports a function, also from the working directory.

    Args:
        name: The name of the reward, for messages.
        target: The function, as "module:function".

    Returns:
        The function and its signature.

    Raises:
        InputError: If it cannot be imported, or is no function.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # the worker processes inherit it
    template = "cannot be imported ({})"
    if ":" in name:
        template += "; expected module.path:function"
    with reward_code(name, template):
        function = import_object(target)
    if not callable(function):
        raise InputError(f"reward '{name}': {brief_repr(function)} is no function")
    try:
        return function, inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward '{name}': {first_line(error)}") from error


def _check_options(
    name: str, signature: inspect.Signature, options: Options, arguments: tuple[str, ...]
) -> None:
    """Checks that a function can be called.

    Args:
        name: The name of the reward, for messages.
        signature: The signature of the function.
        options: The keyword arguments of the call.
        arguments: The names of its positional arguments.

    Raises:
        InputError: If it cannot.
    """
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        keywords = (f"{key}={brief_repr(value)}" for key, value in options.items())
        call = ", ".join((*arguments, *keywords))
        problem = str(error).replace(" keyword-only", "")  # Python 3.12 and 3.13 differ
        raise InputError(
            f"reward.options.{name}: called as ({call}): {problem}; accepted: {signature}"
        ) from None


def _quoted(names: Sequence[str]) -> str:
    """Returns names in quotation marks, separated by commas."""
    return ", ".join(map(repr, names))
