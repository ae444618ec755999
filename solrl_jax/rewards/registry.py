"""The rewards by name. To add one: a file with a function that scores or returns a `Reward`, and a line in `REWARDS`."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from solrl_jax.config import schema as config
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.openers import (
    InJax,
    Opener,
    Options,
    entry_points,
    is_service,
    outside,
    plugin,
    released,
    service,
    shipped,
)
from solrl_jax.rewards.protocol import Host, HostReward, Reward
from solrl_jax.rewards.shapes import shapes_reward
from solrl_jax.rewards.sources import SOURCES
from solrl_jax.storage.errors import InputError, in_one_line

REWARDS: dict[str, Opener] = {
    "shapes": shipped(shapes_reward),
    "tiny-clip": shipped(tiny_clip),
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


def open_reward(
    weights: Mapping[str, float],
    paths: Mapping[str, str],
    *,
    options: Mapping[str, Options] | None = None,
    watched: Sequence[str] = (),
    workers: int = 2,
    timeout: float = 120.0,
    skip: bool = False,
) -> Callable[[Mesh | None], Rewards]:
    """The weighted sum of named scores as one reward: `shapes` is that reward itself, `shapes/strict` another score of it.

    The sum also returns every score under its name. Here, names, options, functions and files are found and checked. The
    function that is returned reads the files. The arguments are fields of `config.schema.Reward`; skip: `on_failure` is "skip".
    Raises InputError in one line.
    """
    options = options or {}
    if strange := [name for name in paths if name not in SOURCES]:
        raise InputError(f"reward.paths: unknown name {_quoted(strange)}; there are {', '.join(SOURCES)}")
    names, available = reward_names((*weights, *watched)), (*REWARDS, *entry_points())
    field = lambda wrong: "reward.weights" if {*wrong} & {*weights, *reward_names(weights)} else "reward.watched"
    if unknown := [name for name in names if name not in available and ":" not in name]:
        there = f"{', '.join(available)}, module.path:function and http://HOST:PORT/PATH"
        raise InputError(f"{field(unknown)}: unknown reward {_quoted(unknown)}; there are {there}")
    if idle := [name for name in options if name not in names]:
        raise InputError(f"reward.options: no reward {_quoted(idle)}; there are {', '.join(names)}")

    opened = {name: _opener(name)(name, options.get(name, {}), timeout) for name in names}
    known = [score for name in names for score in (name, *(f"{name}/{other}" for other in opened[name].others or ()))]
    if absent := [s for s in (*weights, *watched) if s not in known and opened[reward_name(s)].others is not None]:
        raise InputError(f"{field(absent)}: unknown score {_quoted(absent)}; there are {', '.join(known)}")
    with in_one_line():  # a config or a tensor that does not fit
        loaders = {name: part.find(paths) for name, part in opened.items() if isinstance(part, InJax)}
    outside_jax = [part for part in opened.values() if isinstance(part, HostReward)]

    def load(mesh: Mesh | None) -> Rewards:
        parts = {name: loader(mesh) for name, loader in loaders.items()}

        def summed(scores: Sequence[str]) -> Reward:
            chosen = reward_names(scores)
            inside = {score: weight for score, weight in weights.items() if reward_name(score) in parts}
            functions = tuple(_returning(part, scores) for part in outside_jax if part.name in chosen)
            others = {score: weight for score, weight in weights.items() if score not in inside}
            host = Host(functions, others, workers, timeout, skip) if functions else None
            return mixture(inside, {name: part for name, part in parts.items() if name in chosen}, host)

        trained = summed(tuple(weights))
        return Rewards(trained, summed((*weights, *watched)) if watched else trained)

    return load


def open_rewards(settings: config.Reward) -> Callable[[Mesh | None], Rewards]:
    """`open_reward` with the settings of the configuration's section."""
    return open_reward(
        settings.weights,
        settings.paths,
        options=settings.options,
        watched=settings.watched,
        workers=settings.workers,
        timeout=settings.timeout,
        skip=settings.on_failure == "skip",
    )


def reward_name(score: str) -> str:
    """The reward that a score belongs to: `geneval` for `geneval/strict`, the whole address for a service."""
    return score if is_service(score) else score.split("/")[0]


def reward_names(scores: Iterable[str]) -> list[str]:
    """The rewards that scores belong to, sorted, each once."""
    return sorted({reward_name(score) for score in scores})


def _opener(name: str) -> Opener:
    return REWARDS.get(name, service if is_service(name) else plugin)


def _returning(part: HostReward, scores: Sequence[str]) -> HostReward:
    """The reward, with those of `scores` that must come from it."""
    named = [score.removeprefix(f"{part.name}/") for score in scores if reward_name(score) == part.name and score != part.name]
    return dataclasses.replace(part, others=tuple(dict.fromkeys((*(part.others or ()), *named))))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
