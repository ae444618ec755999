"""The weighted sum of several rewards, as one reward."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.rewards.protocol import LARGEST, Check, Host, Reward, Scores, calling


def add_total(
    weights: Mapping[str, float], scores: Mapping[str, Array | np.ndarray]
) -> dict[str, Any]:
    """Adds the weighted sum of `scores` to their "reward", or to 0 if there is none yet, in float32. NaN beyond `LARGEST`.

    It is called twice for the same pictures: in JAX with the scores made there, then with the scores made outside JAX.
    """
    if not weights:
        return dict(scores)
    terms = (np.float32(weight) * scores[name] for name, weight in weights.items())
    total: Any = sum(terms, scores.get("reward", np.float32(0))).astype(np.float32)
    where = jnp.where if isinstance(total, Array) else np.where
    return {**scores, "reward": where(abs(total) <= LARGEST, total, np.float32("nan"))}


def mixture(weights: Mapping[str, float], parts: Mapping[str, Reward], host: Host | None) -> Reward:
    """One reward of several: the weighted sum of their scores, beside which it returns every score under its name.

    weights: of the scores that `parts` make; `host` has the weights of its own. parts: rewards inside JAX, by name.
    """
    kinds = {part.inputs for part in parts.values()}
    inputs = kinds.pop() if len(kinds) == 1 else "both" if kinds else "pictures"

    def score(params: dict[str, Any], seen: Any, prepared: dict[str, Any]) -> Scores:
        out: Scores = {}
        # what is not finite has no score
        sound = jnp.stack([jnp.isfinite(x).all((1, 2, 3)) for x in jax.tree.leaves(seen)]).all(0)
        images, latents = seen if inputs == "both" else (seen, seen)
        for name, part in parts.items():
            assert part.score is not None
            with calling(name):
                scores = part.score(
                    params[name], part.select_inputs(images, latents), prepared[name]
                )
                _check_scores(scores, part.others, len(sound))
            for key, value in scores.items():
                out[name if key == "reward" else f"{name}/{key}"] = jnp.where(sound, value, jnp.nan)
        return add_total(weights, out)

    def prepare(prompts: Sequence[str]) -> dict[str, Any]:
        prepared = {}
        for name, part in parts.items():
            with calling(name):
                prepared[name] = part.prepare(prompts)
                shapes = map(np.shape, jax.tree.leaves(prepared[name]))
                if wrong := [shape for shape in shapes if shape[:1] != (len(prompts),)]:
                    raise ValueError(
                        f"prepare returned shape {wrong[0]} for {len(prompts)} prompts; expected a row for each"
                    )
        return prepared

    checks = {name: part.check for name, part in parts.items()}
    checks |= {part.name: part.check for part in (host.rewards if host else ())}
    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=prepare,
        score=score if parts else None,
        host=host,
        check=_named(checks),
        inputs=inputs,
    )


def _named(checks: Mapping[str, Check]) -> Check:
    """All checks as one, whose message names the reward."""

    def check(prompt: Prompt) -> None:
        for name, one in checks.items():
            with calling(name):
                one(prompt)

    return check


def _check_scores(scores: Any, others: Sequence[str], count: int) -> None:
    """Raises ValueError in one line unless these are real numbers [count] by name, "reward" and `others` among them."""
    if not isinstance(scores, Mapping) or not {"reward", *others} <= scores.keys():
        raise ValueError(
            f"score returned {brief_repr(scores)}; expected a dict with {', '.join(map(repr, ('reward', *others)))}"
        )
    for name, value in scores.items():
        array = jnp.asarray(value)
        if array.shape != (count,) or jnp.iscomplexobj(array):
            what = f"{array.dtype} of shape {array.shape} as {name!r} for {count} pictures"
            raise ValueError(
                f"score returned {what}; expected real numbers [b], one for each picture"
            )
