"""The weighted sum of several rewards, as one reward."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from solrl_jax.data.prompts import Prompt
from solrl_jax.rewards.protocol import (
    MAX_REWARD,
    HostRewards,
    Inputs,
    Reward,
    Scores,
    reward_code,
    score_frames,
)


def mixture(
    weights: Mapping[str, float],
    parts: Mapping[str, Reward],
    host: HostRewards | None,
    group: Reward | None = None,
    frames: int = 1,
) -> Reward:
    """Combines rewards into one, whose "reward" is the weighted sum of their scores.

    Its `score` also returns every score of the parts: the reward of a part under the name of the
    part, another score as "part/score". If a part reads a non-finite value of a sample, its scores
    of this sample are NaN, and so is the sum if any of these scores has a weight.

    Rewards outside JAX and groupwise rewards cannot be computed in the same program. They are only
    stored in the fields `host` and `group` of the result. The caller scores them, and adds their
    scores with `add_total`.

    Args:
        weights: The weights of the scores of `parts`, by name ("part" or "part/score"). Scores
            without a weight are only recorded. If it is empty, there is no "reward" among the
            returned scores. With a weight of a score that no part returns, the result's `score`
            raises KeyError.
        parts: Rewards inside JAX by name. Either none is groupwise, or all are, for a sum that
            becomes a `group`. (The caller then sets the fields `groupwise` and `group_size` of the
            result.) May be empty if there is a `host` or `group`; the result's `score` is then
            None.
        host: Rewards outside JAX with their own weights, or None.
        group: The `mixture` of groupwise rewards inside JAX, with its own weights, or None.
        frames: The number of frames of each clip that parts get if they score images. The score of
            the clip is the mean over these frames. The field `frames` of the parts has no effect.

    Returns:
        A reward with these fields:

          - `params`: a dict by the name of the part.
          - `prepare`: returns such a dict too, with further entries for the parts of `group`.
          - `inputs`: those of the parts if they agree, "both" if they differ, and "images" without
            parts.
          - `check`: calls the checks of the parts, of `host` and of `group`.
          - `frames`: the argument.
          - `is_sum`: true.
          - `clips`: whether any part gets whole clips.
          - `others`: empty.
          - `differentiable`: false.

        Its `check`, `prepare` and `score` raise InputError with the name of the part if the
        function of a part raises, or returns arrays of a wrong form.

    Raises:
        ValueError: If there are no parts, no `host` and no `group`.
    """
    kinds = {part.inputs for part in parts.values()}
    inputs: Inputs = "both" if kinds else "images"
    if len(kinds) == 1:
        (inputs,) = kinds
    checks = {name: part.check for name, part in parts.items()}
    if host is not None:
        checks |= {reward.name: reward.check for reward in host.rewards}

    def check(prompt: Prompt) -> None:
        for name, check_part in checks.items():
            with reward_code(name):
                check_part(prompt)
        if group is not None:
            group.check(prompt)

    def prepare(prompts: Sequence[str]) -> dict[str, Any]:
        prepared = {}
        for name, part in parts.items():
            with reward_code(name):
                prepared[name] = part.prepare(prompts)
                for array in jax.tree.leaves(prepared[name]):
                    if np.shape(array)[:1] != (len(prompts),):
                        raise ValueError(
                            f"prepare returned shape {np.shape(array)} for {len(prompts)} prompts; "
                            "expected a row for each"
                        )
        if group is not None:
            prepared |= group.prepare(prompts)
        return prepared

    def score(params: dict[str, Any], mixed_inputs: Any, prepared: dict[str, Any]) -> Scores:
        scores: Scores = {}
        images, latents = mixed_inputs if inputs == "both" else (mixed_inputs, mixed_inputs)
        for name, part in parts.items():
            part_inputs = part.select_inputs(images, latents)
            with reward_code(name):
                part_scores = score_frames(part, params[name], part_inputs, prepared[name], frames)
            for key, value in part_scores.items():
                scores[name if key == "reward" else f"{name}/{key}"] = value
        return add_total(weights, scores)

    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=prepare,
        score=score if parts else None,
        host=host,
        check=check,
        inputs=inputs,
        group=group,
        frames=frames,
        clips=any(part.clips for part in parts.values()),
        is_sum=True,
    )


def add_total(
    weights: Mapping[str, float], scores: Mapping[str, Array | np.ndarray]
) -> dict[str, Any]:
    """Adds weighted scores to the total under the name "reward".

    The scores computed inside JAX are added first, and those computed outside JAX, if any, by
    another call, each time with the weights of these scores alone.

    Args:
        weights: The weights of scores by name, all of which must be in `scores`. Empty: nothing is
            added, and the result is a copy of `scores`.
        scores: Scores by name, JAX or NumPy arrays [n]. If "reward" is among them, it is the total
            so far; otherwise the total starts from 0.

    Returns:
        A new dict with the scores and, as "reward", the new total [n] in float32. A total that is
        NaN, or whose magnitude is beyond 1e18 (`MAX_REWARD`), is NaN.

    Raises:
        KeyError: If there is a weight for a score that is not in `scores`.
    """
    if not weights:
        return dict(scores)
    terms = (np.float32(weight) * scores[name] for name, weight in weights.items())
    total: Any = sum(terms, scores.get("reward", np.float32(0))).astype(np.float32)
    where = jnp.where if isinstance(total, Array) else np.where
    return {**scores, "reward": where(abs(total) <= MAX_REWARD, total, np.float32("nan"))}
