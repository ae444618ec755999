"""The weighted sum of several rewards, as one reward."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.rewards.frames import mean_over_frames
from solrl_jax.rewards.protocol import (
    MAX_REWARD,
    HostRewards,
    Inputs,
    Reward,
    Scores,
    reward_code,
    sample_inputs,
)


def mixture(
    weights: Mapping[str, float],
    parts: Mapping[str, Reward],
    host: HostRewards | None,
    group: Reward | None = None,
    frames: int = 1,
) -> Reward:
    """Makes one reward of several: its "reward" is the weighted sum of their scores.

    It also returns every score of the parts: the reward of a part under the name of the part,
    another score as "part/score". An image with a non-finite value (or latent, if a part reads
    latents) scores NaN throughout. Rewards outside JAX and groupwise rewards cannot be computed in
    the same program: they are only kept in the fields `host` and `group` of the result, and the
    caller scores them and adds them with `add_total`.

    Args:
        weights: The weights of the scores of `parts`, by name ("part" or "part/score"). Scores
            without a weight are only recorded. If it is empty, there is no "reward" among the
            returned scores.
        parts: Rewards inside JAX by name, all of which score single images; or, for a sum that
            becomes a `group`, all of which are groupwise. (The caller then sets the fields
            `groupwise` and `group_size` of the result.) May be empty if there is a `host` or
            `group`; the result's `score` is None then.
        host: Rewards outside JAX with their own weights, or None.
        group: The `mixture` of groupwise rewards inside JAX, with its own weights, or None.
        frames: The number of frames of a clip that parts which score images get, each as an image;
            the score of the clip is the mean over them.

    Returns:
        A reward. Its `params` and what its `prepare` returns are dicts by the name of the part (for
        `prepare` also of the parts of `group`). Its `inputs` are those of the parts if they agree,
        "both" if they differ, and "images" without parts. It has `clips` set if a part has. Its
        `check` also calls the checks of `host` and `group`. Its `check`, `prepare` and `score`
        raise InputError with the name of the part if that of a part raises or returns arrays of a
        wrong form.

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
        arrays = jax.tree.leaves(mixed_inputs)
        is_finite = jnp.stack([jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in arrays]).all(0)
        images, latents = mixed_inputs if inputs == "both" else (mixed_inputs, mixed_inputs)
        for name, part in parts.items():
            assert part.score is not None
            with reward_code(name):
                # If any part gets whole clips, frames are sampled here for the others.
                part_inputs, rows, count = sample_inputs(
                    part, part.select_inputs(images, latents), prepared[name], frames
                )
                part_scores = part.score(params[name], part_inputs, rows)
                _check_scores(part_scores, part.others, count * len(is_finite))
            part_scores = mean_over_frames(part_scores, count)
            for key, value in part_scores.items():
                full_name = name if key == "reward" else f"{name}/{key}"
                scores[full_name] = jnp.where(is_finite, value, jnp.nan)
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
    )


def add_total(
    weights: Mapping[str, float], scores: Mapping[str, Array | np.ndarray]
) -> dict[str, Any]:
    """Adds weighted scores to the total under the name "reward".

    It is called twice for the same images: inside JAX with the scores computed there, and then with
    the scores computed outside JAX.

    Args:
        weights: The weights of scores by name. Empty: the scores are returned unchanged.
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


def _check_scores(scores: Any, others: Sequence[str], count: int) -> None:
    """Checks the names and shapes of the scores that the function `score` of a reward returned.

    Values are not checked: NaN and infinities pass.

    Args:
        scores: The returned value: a mapping of names to arrays [count] of real numbers (integers
            and Booleans too). Names beyond the required ones pass.
        others: The names that are required beside "reward".
        count: The number of images.

    Raises:
        ValueError: If `scores` is no mapping, lacks "reward" or one of `others`, or has a complex
            array or one of another shape. The message is one line.
        TypeError: If a value cannot be converted to an array, such as text.
    """
    expected = ("reward", *others)
    if not isinstance(scores, Mapping) or not {*expected} <= scores.keys():
        names = ", ".join(map(repr, expected))
        raise ValueError(f"score returned {brief_repr(scores)}; expected a dict with {names}")
    for name, value in scores.items():
        array = jnp.asarray(value)
        if array.shape != (count,) or jnp.iscomplexobj(array):
            raise ValueError(
                f"score returned {array.dtype} of shape {array.shape} as {name!r} for {count} "
                "images; expected real numbers [b], one for each image"
            )
