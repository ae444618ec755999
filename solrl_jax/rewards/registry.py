"""The rewards by name, and how each kind is opened: in JAX, outside it, a function of the user's, a service.

To add one: a file with a function that scores or returns a `Reward`, and a line in `REWARDS`.
"""

import dataclasses
import importlib.metadata
import inspect
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from solrl_jax.config import schema as config
from solrl_jax.config.overrides import ENTRY_POINTS
from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError, first_line, in_one_line
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.host import imported
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.protocol import BATCH, Host, HostReward, Loader, Reward, accept, calling
from solrl_jax.rewards.shapes import shapes_reward
from solrl_jax.rewards.sources import SOURCES

Options = Mapping[str, Any]
Find = Callable[
    [Mapping[str, str]], Loader
]  # finds and checks a reward's files, given `reward.paths`
ARGUMENTS = ("images", "prompts", "metadata")  # of a function outside JAX, before its options


@dataclasses.dataclass(frozen=True)
class InJax:
    """A reward inside JAX whose options have been checked, and whose files have not been looked for."""

    find: Find
    others: tuple[str, ...] = ()  # the scores beside "reward"


# (name, options, timeout in seconds) -> the reward. Raises InputError in one line for options that it does not take.
Opener = Callable[[str, Options, float], InJax | HostReward]


def released(find: Find, *others: str) -> Opener:
    """Opens a reward of the package inside JAX. others: the scores that it returns beside "reward"."""

    def opener(name: str, options: Options, timeout: float) -> InJax:
        if options:
            raise InputError(f"reward.options.{name}={dict(options)!r}: it takes none")
        return InJax(find, others)

    return opener


def outside(target: str, *others: str) -> Opener:
    """Opens a function of the package that scores outside JAX."""
    return lambda name, options, timeout: _host_reward(name, target, options, others)


def plugin(name: str, options: Options, timeout: float) -> InJax | HostReward:
    """Opens the function that `name` is, or that an entry point names.

    With required arguments it is a function outside JAX, otherwise it returns a `Reward`. Raises InputError in one line.
    """
    target = entry_points().get(name, name)
    function, signature = _import(name, target)
    parameters = signature.parameters.values()
    if any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    ):
        return _host_reward(name, target, options, None)
    _check_options(name, signature, options, ())
    with calling(name):
        reward = function(**options)
        if not isinstance(reward, Reward):
            expected = f"a solrl_jax.rewards.protocol.Reward; a function outside JAX takes ({', '.join(ARGUMENTS)})"
            raise ValueError(f"returned {brief_repr(reward)}: expected {expected}")
        if reward.host is not None:
            raise ValueError(
                f"host={brief_repr(reward.host)}: expected None; name a function outside JAX in reward.weights"
            )
    return InJax(lambda paths: _placed(name, reward), reward.others)


def service(url: str, options: Options, timeout: float) -> HostReward:
    """Opens a service. Its only option is `batch`, the number of pictures it gets at most in one request."""
    with in_one_line(lambda said: f"reward {url!r}: {said}"):
        address = urllib.parse.urlsplit(url)
        if not address.hostname or address.port == 0 or url.split() != [url]:
            raise ValueError("expected http://HOST:PORT/PATH")
    if unknown := [option for option in options if option != "batch"]:
        raise InputError(f"reward.options.{url}: unknown option '{unknown[0]}'; there is batch")
    batch = options.get("batch", BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(
            f"reward.options.{url}.batch={brief_repr(batch)}: expected an integer of at least 1"
        )
    return HostReward(
        url, "solrl_jax.rewards.http:http", {"url": url, "timeout": timeout}, (), batch
    )


REWARDS: dict[str, Opener] = {
    "shapes": released(shapes_reward, "strict"),
    "tiny-clip": released(tiny_clip),
    "pickscore": released(pickscore),
    "clipscore": released(clipscore),
    "hpsv2": released(hpsv2),
    "imagereward": released(imagereward),
    "aesthetic": released(aesthetic),
    "ocr": outside("solrl_jax.rewards.ocr:ocr"),
    "geneval": outside("solrl_jax.rewards.geneval:geneval", "strict"),
    "jpeg_compressibility": outside("solrl_jax.rewards.jpeg:jpeg_compressibility"),
    "jpeg_incompressibility": outside("solrl_jax.rewards.jpeg:jpeg_incompressibility"),
}


class Rewards(NamedTuple):
    """The reward that is trained on, and the same with what is watched; one object if nothing is watched."""

    trained: Reward
    evaluated: Reward


def open_rewards(
    settings: config.Reward, dtype: DTypeLike = jnp.float32
) -> Callable[[Mesh | None], Rewards]:
    """The weighted sum of named scores as one reward: `shapes` is that reward itself, `shapes/strict` another score of it.

    The sum also returns every score under its name. Here, names, options, functions and files are found and checked. The
    function that is returned reads the files. dtype: of the products of networks. Raises InputError in one line.
    """
    weights = settings.weights
    watched = settings.eval_only
    options = settings.options
    if strange := [name for name in settings.paths if name not in SOURCES]:
        raise InputError(
            f"reward.paths: unknown name {_quoted(strange)}; there are {', '.join(SOURCES)}"
        )
    names = reward_names((*weights, *watched))
    available = (*REWARDS, *entry_points())

    def field(wrong):
        return (
            "reward.weights"
            if {*wrong} & {*weights, *reward_names(weights)}
            else "reward.eval_only"
        )

    if unknown := [name for name in names if name not in available and ":" not in name]:
        there = f"{', '.join(available)}, module.path:function and http://HOST:PORT/PATH"
        raise InputError(f"{field(unknown)}: unknown reward {_quoted(unknown)}; there are {there}")
    if idle := [name for name in options if name not in names]:
        raise InputError(f"reward.options: no reward {_quoted(idle)}; there are {', '.join(names)}")

    def opener(name):
        return REWARDS.get(name, service if is_service(name) else plugin)

    opened = {name: opener(name)(name, options.get(name, {}), settings.timeout) for name in names}
    known = [
        score
        for name in names
        for score in (name, *(f"{name}/{other}" for other in opened[name].others or ()))
    ]
    if absent := [
        s
        for s in (*weights, *watched)
        if s not in known and opened[reward_name(s)].others is not None
    ]:
        raise InputError(
            f"{field(absent)}: unknown score {_quoted(absent)}; there are {', '.join(known)}"
        )
    with in_one_line():  # a config or a tensor that does not fit
        loaders = {
            name: part.find(settings.paths)
            for name, part in opened.items()
            if isinstance(part, InJax)
        }
    outside_jax = [part for part in opened.values() if isinstance(part, HostReward)]

    def load(mesh: Mesh | None) -> Rewards:
        parts = {name: loader(mesh, dtype) for name, loader in loaders.items()}

        def summed(scores: Sequence[str]) -> Reward:
            chosen = reward_names(scores)
            inside = {
                score: weight for score, weight in weights.items() if reward_name(score) in parts
            }
            functions = tuple(
                _returning(part, scores) for part in outside_jax if part.name in chosen
            )
            others = {score: weight for score, weight in weights.items() if score not in inside}
            run = settings.workers, settings.timeout, settings.on_failure == "skip"
            host = Host(functions, others, *run) if functions else None
            return mixture(
                inside, {name: part for name, part in parts.items() if name in chosen}, host
            )

        trained = summed(tuple(weights))
        return Rewards(trained, summed((*weights, *watched)) if watched else trained)

    return load


def reward_name(score: str) -> str:
    """The reward that a score belongs to: `geneval` for `geneval/strict`, the whole address for a service."""
    return score if is_service(score) else score.split("/")[0]


def reward_names(scores: Iterable[str]) -> list[str]:
    """The rewards that scores belong to, sorted, each once."""
    return sorted({reward_name(score) for score in scores})


def is_service(name: str) -> bool:
    """Whether the name of a reward is the address of a service."""
    return name.startswith(("http://", "https://"))


def entry_points() -> dict[str, str]:
    """The rewards that installed packages name: `module.path:function` by name."""
    return {
        point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }


def _placed(name: str, reward: Reward) -> Loader:
    """The loader of a reward that has its parameters already."""

    def load(mesh: Mesh | None, dtype: DTypeLike) -> Reward:
        if mesh is None:
            return reward
        with calling(name, "params: {}"):
            params = jax.tree.map(
                hosts.put, reward.params, sharding.parameter_sharding(mesh, reward.params)
            )
        return dataclasses.replace(reward, params=params)

    return load


def _host_reward(
    name: str, target: str, options: Options, others: tuple[str, ...] | None
) -> HostReward:
    """A function outside JAX, imported here to check its options.

    The function may have an attribute `check`, called as check(prompt, metadata, **options): it raises ValueError for a prompt
    that the function cannot score.
    """
    function, signature = _import(name, target)
    _check_options(name, signature, options, ARGUMENTS)
    check = getattr(function, "check", None)
    bound = (
        accept if check is None else lambda prompt: check(str(prompt), prompt.metadata, **options)
    )
    return HostReward(name, target, options, others, check=bound)


def _import(name: str, target: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function that `target` names, from the working directory too, and its signature. Raises InputError in one line."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # the processes that score inherit it
    with calling(
        name, "cannot be imported ({})" + ("; expected module.path:function" if ":" in name else "")
    ):
        found = imported(target)
    if not callable(found):
        raise InputError(f"reward '{name}': {brief_repr(found)} is no function")
    try:
        return found, inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward '{name}': {first_line(error)}") from error


def _check_options(
    name: str, signature: inspect.Signature, options: Options, arguments: tuple[str, ...]
) -> None:
    """Checks that a function can be called with `arguments` and, by keyword, `options`. Raises InputError in one line."""
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        given = ", ".join(
            (*arguments, *(f"{key}={brief_repr(value)}" for key, value in options.items()))
        )
        why = str(error).replace(" keyword-only", "")  # Python 3.12 and 3.13 differ
        raise InputError(
            f"reward.options.{name}: called as ({given}): {why}; accepted: {signature}"
        ) from None


def _returning(part: HostReward, scores: Sequence[str]) -> HostReward:
    """The reward, with those of `scores` that must come from it."""
    named = [
        score.removeprefix(f"{part.name}/")
        for score in scores
        if reward_name(score) == part.name and score != part.name
    ]
    return dataclasses.replace(part, others=tuple(dict.fromkeys((*(part.others or ()), *named))))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
