"""The rewards by name, and their weighted sum. To add one: a function that returns a `Reward`, and a line here."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from solrl_jax.config import schema as config
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.host import Host, HostReward, Workers
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.plugins import Options, entry_points, host_reward, is_service, open_plugin, open_service
from solrl_jax.rewards.protocol import Loader, Reward, Scores
from solrl_jax.rewards.shapes import shapes_reward
from solrl_jax.rewards.sources import SOURCES
from solrl_jax.storage.errors import InputError, in_one_line

# those that are shipped with the package
REWARDS: dict[str, Callable[[], Reward]] = {"shapes": shapes_reward, "tiny-clip": tiny_clip}
# those that are read from released files: these are found and checked by the function, and read by the loader it returns
RELEASED: dict[str, Callable[[Mapping[str, str]], Loader]] = {
    "pickscore": pickscore,
    "clipscore": clipscore,
    "hpsv2": hpsv2,
    "imagereward": imagereward,
    "aesthetic": aesthetic,
}
# those outside JAX: where the function is, and what it returns beside the reward
OUTSIDE: dict[str, tuple[str, tuple[str, ...]]] = {
    "ocr": ("solrl_jax.rewards.ocr:ocr", ()),
    "geneval": ("solrl_jax.rewards.geneval:geneval", ("strict",)),
    "jpeg_compressibility": ("solrl_jax.rewards.jpeg:jpeg_compressibility", ()),
    "jpeg_incompressibility": ("solrl_jax.rewards.jpeg:jpeg_incompressibility", ()),
}


class Rewards(NamedTuple):
    """What is trained on, and the same with what is watched beside it: one object where nothing is."""

    trained: Reward
    evaluated: Reward


def open_reward(
    weights: Mapping[str, float],
    paths: Mapping[str, str],
    *,
    options: Mapping[str, Options] | None = None,
    watched: Sequence[str] = (),
    workers: Workers | None = None,
    skip: bool = False,
) -> Callable[[Mesh | None], Rewards]:
    """The weighted sum of named scores as one reward: `shapes` is that reward itself, `shapes/strict` another of its scores.

    Its own scores also hold every part, under these names. Every file, function and option is found and checked here; what is
    returned reads the files. Arguments are the fields of `reward` in the configuration; workers: two, if None.
    Raises InputError in one line for a name that is not known, and for a file that is missing or does not fit.
    """
    options, workers = options or {}, workers or Workers(2, 120.0)
    if strange := [name for name in paths if name not in SOURCES]:
        raise InputError(f"reward.paths: unknown name {', '.join(map(repr, strange))}; there are {', '.join(SOURCES)}")
    names, known = reward_names((*weights, *watched)), (*REWARDS, *RELEASED, *OUTSIDE, *entry_points())
    if unknown := [name for name in names if name not in known and ":" not in name]:
        field = "reward.weights" if set(unknown) & set(reward_names(weights)) else "reward.watched"
        there = f"{', '.join(known)}, module.path:function and http://HOST:PORT/PATH"
        raise InputError(f"{field}: unknown reward {', '.join(map(repr, unknown))}; there are {there}")
    if idle := [name for name in options if name not in names]:
        raise InputError(f"reward.options: no reward {', '.join(map(repr, idle))}; there are {', '.join(names)}")
    if closed := [name for name in options if name in (*REWARDS, *RELEASED) and options[name]]:
        raise InputError(f"reward.options.{closed[0]}={dict(options[closed[0]])!r}: it takes none")

    released = [name for name in names if name in RELEASED]
    opened = {name: _open(name, options.get(name, {}), workers) for name in names if name not in RELEASED}
    given = [n for name, part in opened.items() for n in (name, *(f"{name}/{other}" for other in part.others or ()))] + released
    told_later = [name for name, part in opened.items() if part.others is None]  # what else they return
    if absent := [n for n in (*weights, *watched) if n not in given and reward_name(n) not in told_later]:
        field = "reward.weights" if absent[0] in weights else "reward.watched"
        raise InputError(f"{field}: unknown score {', '.join(map(repr, absent))}; there are {', '.join(given)}")
    with in_one_line():  # a config or a tensor that does not fit
        loaders = {name: RELEASED[name](paths) for name in released}
    shipped = {name: part for name, part in opened.items() if isinstance(part, Reward)}
    outside = {name: part for name, part in opened.items() if isinstance(part, HostReward)}

    def load(mesh: Mesh | None) -> Rewards:
        placed = {name: dataclasses.replace(part, params=_placed(part.params, mesh)) for name, part in shipped.items()}
        parts = placed | {name: loader(mesh) for name, loader in loaders.items()}

        def summed(scores: Iterable[str]) -> Reward:
            chosen = reward_names(scores)
            of = lambda name: [s.removeprefix(f"{name}/") for s in scores if reward_name(s) == name and s != name]
            beside = {name: of(name) for name in chosen if name in outside}
            weighed = {score: weight for score, weight in weights.items() if reward_name(score) in outside}
            host = Host(tuple(outside[name] for name in beside), weighed, beside, workers, skip) if beside else None
            return mixture(weights, {n: part for n, part in parts.items() if n in chosen}, tuple(given), host)

        trained = summed(tuple(weights))
        return Rewards(trained, summed((*weights, *watched)) if watched else trained)

    return load


def open_rewards(settings: config.Reward) -> Callable[[Mesh | None], Rewards]:
    """`open_reward` by the configuration's section."""
    return open_reward(
        settings.weights, settings.paths, options=settings.options, watched=settings.watched,
        workers=Workers(settings.workers, settings.timeout), skip=settings.on_failure == "skip",
    )  # fmt: skip


def make_reward(weights: Mapping[str, float], paths: Mapping[str, str] | None = None, mesh: Mesh | None = None) -> Reward:
    """`open_reward`, loaded onto `mesh`; None: onto JAX's default device."""
    return open_reward(weights, paths or {})(mesh).trained


def mixture(weights: Mapping[str, float], parts: Mapping[str, Reward], scores: tuple[str, ...], host: Host | None) -> Reward:
    """The weighted sum of those of `scores` that `parts` have; the `host` adds its own."""
    weighed = {score: weight for score, weight in weights.items() if reward_name(score) in parts}

    def score(params: dict[str, Any], images: Array, prepared: dict[str, Any]) -> Scores:
        out: Scores = {}
        for name, part in parts.items():
            assert part.score is not None
            for key, value in part.score(params[name], images, prepared[name]).items():
                out[name if key == "reward" else f"{name}/{key}"] = value
        total = sum((weight * out[name] for name, weight in weighed.items()), jnp.zeros(len(images)))
        return out | {"reward": jnp.asarray(total, jnp.float32)}

    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=lambda prompts: {name: part.prepare(prompts) for name, part in parts.items()},
        score=score if parts else None,
        others=scores,
        host=host,
    )


def reward_name(score: str) -> str:
    """The reward that a score belongs to: `geneval` for `geneval/strict`, and all of an address."""
    return score if is_service(score) else score.split("/")[0]


def reward_names(scores: Iterable[str]) -> list[str]:
    return sorted({reward_name(score) for score in scores})


def _open(name: str, options: Options, workers: Workers) -> Reward | HostReward:
    if name in REWARDS:
        return REWARDS[name]()
    if name in OUTSIDE:
        target, others = OUTSIDE[name]
        return host_reward(name, target, options, others)
    return open_service(name, options, workers.timeout) if is_service(name) else open_plugin(name, options)


def _placed(params: Any, mesh: Mesh | None) -> Any:
    return params if mesh is None else jax.tree.map(hosts.put, params, sharding.parameter_sharding(mesh, params))
