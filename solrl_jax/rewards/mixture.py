"""The rewards by name, and their weighted sum. To add one: a function that returns a `Reward`, and a line here."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from solrl_jax import sharding
from solrl_jax.files import InputError, in_one_line
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.base import Loader, Reward, Scores
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.shapes import shapes_reward
from solrl_jax.rewards.sources import SOURCES

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


def open_reward(weights: Mapping[str, float], paths: Mapping[str, str]) -> Loader:
    """The weighted sum of named scores as one reward: `shapes` is that reward itself, `shapes/strict` another of its scores.

    Its own scores also hold every part, under these names. paths: `reward.paths` of the configuration. Every file is found and
    checked here; the loader that is returned reads them.
    Raises InputError in one line for a name that is not known, and for a file that is missing or does not fit.
    """
    if strange := [name for name in paths if name not in SOURCES]:
        raise InputError(f"reward.paths: unknown name {', '.join(map(repr, strange))}; there are {', '.join(SOURCES)}")
    names, known = sorted({name.split("/")[0] for name in weights}), (*REWARDS, *RELEASED)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"reward.weights: unknown reward {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    shipped = {name: REWARDS[name]() for name in names if name in REWARDS}
    released = [name for name in names if name not in REWARDS]
    given = [n for name, part in shipped.items() for n in (name, *(f"{name}/{other}" for other in part.others))] + released
    if absent := [name for name in weights if name not in given]:
        raise InputError(f"reward.weights: unknown score {', '.join(map(repr, absent))}; there are {', '.join(given)}")
    with in_one_line():  # a config or a tensor that does not fit
        loaders = {name: RELEASED[name](paths) for name in released}

    def load(mesh: Mesh | None) -> Reward:
        placed = {name: dataclasses.replace(part, params=_placed(part.params, mesh)) for name, part in shipped.items()}
        return mixture(weights, placed | {name: loader(mesh) for name, loader in loaders.items()}, tuple(given))

    return load


def make_reward(weights: Mapping[str, float], paths: Mapping[str, str] | None = None, mesh: Mesh | None = None) -> Reward:
    """`open_reward`, loaded onto `mesh`; None: onto JAX's default device."""
    return open_reward(weights, paths or {})(mesh)


def mixture(weights: Mapping[str, float], parts: Mapping[str, Reward], scores: tuple[str, ...]) -> Reward:
    """The weighted sum of `scores` of `parts`."""

    def score(params: dict[str, Any], images: Array, prepared: dict[str, Any]) -> Scores:
        out: Scores = {}
        for name, part in parts.items():
            for key, value in part.score(params[name], images, prepared[name]).items():
                out[name if key == "reward" else f"{name}/{key}"] = value
        total = sum((weight * out[name] for name, weight in weights.items()), jnp.zeros(()))
        return out | {"reward": jnp.asarray(total, jnp.float32)}

    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=lambda prompts: {name: part.prepare(prompts) for name, part in parts.items()},
        score=score,
        others=scores,
    )


def _placed(params: Any, mesh: Mesh | None) -> Any:
    return params if mesh is None else jax.device_put(params, sharding.parameter_sharding(mesh, params))
