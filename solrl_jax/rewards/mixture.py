"""The weighted sum of several rewards, as one reward."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.rewards.protocol import LARGEST, Check, Host, Reward, Scores
from solrl_jax.storage.errors import first_line


def add_total(weights: Mapping[str, float], scores: Mapping[str, Array | np.ndarray]) -> dict[str, Any]:
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
    kinds = {part.sees for part in parts.values()}
    sees = kinds.pop() if len(kinds) == 1 else "both" if kinds else "pictures"

    def score(params: dict[str, Any], seen: Any, prepared: dict[str, Any]) -> Scores:
        out: Scores = {}
        # what is not finite has no score
        sound = jnp.stack([jnp.isfinite(x).all((1, 2, 3)) for x in jax.tree.leaves(seen)]).all(0)
        images, latents = seen if sees == "both" else (seen, seen)
        for name, part in parts.items():
            assert part.score is not None
            for key, value in part.score(params[name], part.seen(images, latents), prepared[name]).items():
                out[name if key == "reward" else f"{name}/{key}"] = jnp.where(sound, value, jnp.nan)
        return add_total(weights, out)

    checks = {name: part.check for name, part in parts.items()}
    checks |= {part.name: part.check for part in (host.rewards if host else ())}
    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=lambda prompts: {name: part.prepare(prompts) for name, part in parts.items()},
        score=score if parts else None,
        host=host,
        check=_named(checks),
        sees=sees,
    )


def _named(checks: Mapping[str, Check]) -> Check:
    """All checks as one, whose message names the reward."""

    def check(prompt: Prompt) -> None:
        for name, one in checks.items():
            try:
                one(prompt)
            except Exception as error:  # a check of the user's may raise anything
                head = f"reward '{name}': "
                text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
                raise ValueError(head + text.removeprefix(head)) from error

    return check
