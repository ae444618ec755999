"""Rewards of users for the tests that compare the candidates of a prompt, also wrong ones."""

import jax.numpy as jnp
import numpy as np

import solrl_jax
from solrl_jax.rewards.groups import round_robin
from solrl_jax.rewards.host import ScoringFailure


def ranks(images, prompts, metadata):
    """The rank of the brightness within the group, from 0 to 1. All images have one prompt."""
    assert len(set(prompts)) == 1
    return images.mean((1, 2, 3)).argsort().argsort() / max(len(images) - 1, 1)


ranks.groupwise = True


def brighter(first, second, prompts, metadata, *, bias=0.0):
    """1 for the brighter image; the first one is preferred by `bias`."""
    difference = first.mean((1, 2, 3)) - second.mean((1, 2, 3))
    return np.clip(0.5 + 0.4 * np.sign(difference) + bias, 0, 1)


brighter.pairwise = True


def brighter_and_why(first, second, prompts, metadata):
    """`brighter` with entries beside the reward, one of them not even numbers."""
    return {
        "reward": brighter(first, second, prompts, metadata),
        "reason": ["light"] * len(first),
    }


brighter_and_why.pairwise = True


def brighter_while_it_lasts(first, second, prompts, metadata):
    """`brighter` for calls of 16 pairs; the shorter last call of a group has no answer."""
    if len(first) < 16:
        raise ScoringFailure("overloaded")
    return brighter(first, second, prompts, metadata)


brighter_while_it_lasts.pairwise = True


def wrong(first, second, prompts, metadata, *, how):
    """Preferences that are none."""
    preferences = np.full(len(first), 0.5)
    return {"length": preferences[:-1], "range": preferences + 1, "words": ["A"] * len(first)}[how]


wrong.pairwise = True


def of_one(images, prompts, metadata):
    """Takes the arguments of a reward that is not pairwise."""


of_one.pairwise = True


def short(images, prompts, metadata):
    """One score for the whole group."""
    return [1.0]


short.groupwise = True


def ranks_inside():
    """`ranks` inside JAX."""

    def score(params, images, prepared):
        count = max(len(images) - 1, 1)
        return {"reward": images.mean((1, 2, 3)).argsort().argsort() / count}

    return solrl_jax.Reward((), lambda prompts: np.zeros(len(prompts)), score, groupwise=True)


def brighter_inside(shape="right"):
    """`brighter` inside JAX."""

    def prefer(params, first, second, prepared):
        difference = first.mean((1, 2, 3)) - second.mean((1, 2, 3))
        preferences = 0.5 + 0.4 * jnp.sign(difference)
        return preferences if shape == "right" else preferences[:1]

    return solrl_jax.Reward(
        (), lambda prompts: np.zeros(len(prompts)), round_robin(prefer), groupwise=True
    )
