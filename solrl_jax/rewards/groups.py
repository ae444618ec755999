"""Rewards that compare the candidates of a prompt: groups, pairs and win rates.

The candidates of a prompt are divided into groups of at most `reward.group_size`. A groupwise
reward gets one group and returns a score for each of its images. A pairwise reward compares two
images; a round robin within a group, with both orders, makes a groupwise reward of it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# The score of an image without opponents.
ALONE = 0.5


def group_slices(prompts: Sequence[Any], size: int) -> list[slice]:
    """Divides a series of images into groups of the same prompt.

    Args:
        prompts: The prompt of each image, or anything else that is equal for equal prompts, such as
            an index. Only neighbors are grouped: if a prompt comes again after another one, its
            images there form groups of their own.
        size: The most images in a group, at least 1. More images of a prompt are divided into as
            few groups as possible, whose sizes differ by at most 1, and of which the larger ones
            need not come first: with size 2, three images become groups of one and two.

    Returns:
        The range of the images of each group. The ranges follow each other and cover all images;
        [] without images.
    """
    slices = []
    start = 0
    while start < len(prompts):
        stop = start
        while stop < len(prompts) and prompts[stop] == prompts[start]:
            stop += 1
        count = math.ceil((stop - start) / size)
        bounds = [start + (stop - start) * i // count for i in range(count + 1)]
        slices += [slice(a, b) for a, b in itertools.pairwise(bounds)]
        start = stop
    return slices


def ordered_pairs(count: int) -> Int[np.ndarray, "pairs 2"]:
    """Returns all pairs of two different indices, in both orders.

    Args:
        count: The number of indices, 0, ..., count - 1. It may be 0.

    Returns:
        An array [count (count - 1), 2] of int64, sorted by the first index, then by the second.
    """
    first, second = np.nonzero(~np.eye(count, dtype=bool))
    return np.stack([first, second], axis=1)


def win_rates(preferences: Float[np.ndarray, "n n"]) -> Float[np.ndarray, " n"]:
    """Returns the win rate of each image: its mean preference over the other images of its group.

        w[i, j] = (p[i, j] + 1 - p[j, i]) / 2
        score[i] = mean of w[i, j] over j != i

    Both orders are averaged, so a preference for a position cancels: w[i, j] + w[j, i] = 1.

    Args:
        preferences: p[i, j] in [0, 1] is how much image i is preferred to image j when i comes
            first; the range is not checked. NaN or infinite: they were not compared in this order.
            The diagonal is not read.

    Returns:
        The scores in [0, 1], float32. A pair is left out of the means unless its preferences in
        both orders are finite. The only image of a group scores 0.5 (`ALONE`). An image whose pairs
        were all left out scores NaN.
    """
    count = len(preferences)
    if count == 1:
        return np.full(1, ALONE, np.float32)
    wins = (preferences + 1 - preferences.T) / 2
    known = np.isfinite(wins) & ~np.eye(count, dtype=bool)
    total = np.where(known, wins, 0).sum(1)
    with np.errstate(invalid="ignore"):
        return (total / known.sum(1)).astype(np.float32)


def round_robin(prefer: Callable[[Any, Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Turns a comparison of two images into the function `score` of a groupwise reward inside JAX.

        Reward(params, prepare, score=round_robin(prefer), groupwise=True)

    The score of an image is its win rate in its group: the mean of (p[i, j] + 1 - p[j, i]) / 2 over
    the other images j, where p[i, j] is how much image i is preferred to image j when i comes
    first.

    Args:
        prefer: A pure function (params, first, second, prepared) -> preferences [n] in [0, 1]: how
            much `first[k]` is preferred to `second[k]`, for each of n pairs. `params` are those of
            the reward. `first` and `second` are images [n, H, W, 3] (clips [n, T, H, W, 3] with
            `Reward.clips`), latents, or tuples of both, according to `Reward.inputs`. `prepared`
            has n rows, all equal to that of the group's prompt in the result of `Reward.prepare`.

    Returns:
        A function (params, inputs, prepared) -> {"reward": win rates [n] in [0, 1]} for a group of
        n images, which jit can trace. It calls `prefer` n times in sequence, each time with one
        image, repeated n times as `first`, against all n. A group of one image scores 0.5 without a
        call. Pairs with a non-finite preference are left out; an image without any other pair
        scores NaN. The function raises ValueError, while it is traced, if the preferences do not
        have the shape [n].
    """

    def score(params: Any, inputs: Any, prepared: Any) -> dict[str, Array]:
        inputs = jax.tree.map(jnp.asarray, inputs)
        count = len(jax.tree.leaves(inputs)[0])

        def against_all(i: Array) -> Array:
            first = jax.tree.map(lambda x: jnp.broadcast_to(x[i], x.shape), inputs)
            preferences = jnp.asarray(prefer(params, first, inputs, prepared))
            if preferences.shape != (count,):
                raise ValueError(
                    f"returned shape {preferences.shape} for {count} pairs: expected one "
                    "preference in [0, 1] for each"
                )
            return preferences

        if count == 1:
            return {"reward": jnp.full(1, ALONE)}
        preferences = jax.lax.map(against_all, jnp.arange(count))
        wins = (preferences + 1 - preferences.T) / 2
        known = jnp.isfinite(wins) & ~jnp.eye(count, dtype=bool)
        return {"reward": jnp.where(known, wins, 0).sum(1) / known.sum(1)}

    return score
