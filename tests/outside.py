"""Rewards for the tests. Those outside JAX are imported by worker processes; some fail on
request.
"""

import dataclasses
import os
import time
from pathlib import Path

import numpy as np


def mean(images, prompts, metadata, *, scale=1.0):
    return scale * images.mean((1, 2, 3)) + 0.01 * np.array([len(prompt) for prompt in prompts])


def several(images, prompts, metadata):
    return {"reward": images[..., 0].mean((1, 2)), "green": images[..., 1].mean((1, 2))}


def motion(clips, prompts, metadata):
    """How much the red channel changes from the first frame to the last."""
    return (clips[:, -1] - clips[:, 0])[..., 0].mean((1, 2))


motion.clips = True


def brighter_end(first, second, prompts, metadata):
    """Prefers the clip whose last frame is brighter."""
    return first[:, -1].mean((1, 2, 3)) > second[:, -1].mean((1, 2, 3))


brighter_end.pairwise = True
brighter_end.clips = True


def metadata_scores(images, prompts, metadata):
    return [m.get("score", -1) for m in metadata]


def told_or_mean(images, prompts, metadata):
    if "refused" in prompts:
        raise ValueError("no such prompt")
    return [
        float("nan") if m["n"] == 3 else x + m["n"]
        for x, m in zip(mean(images, prompts, metadata), metadata, strict=True)
    ]


def where(images, prompts, metadata):
    """1 in a process that does not use accelerators. Prints a line, too."""
    print("here", flush=True)
    return [
        float(os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ["CUDA_VISIBLE_DEVICES"])
    ] * len(images)


def pid(images, prompts, metadata):
    return [os.getpid()] * len(images)


def failing(images, prompts, metadata, *, how, prompt="", file="", once=False):
    """Fails as `how` says, if `prompt` is among the prompts (or "") and `file` exists (or "");
    otherwise returns the mean.

    once: removes `file`, so that the next call does not fail.
    """
    scores = images.mean((1, 2, 3))
    if prompt and prompt not in prompts:
        return scores
    if file:
        try:
            Path(file).unlink() if once else Path(file).stat()
        except FileNotFoundError:
            return scores
    match how:
        case "nan":
            return np.where(np.modf(scores * 1000)[0] < 0.4, np.nan, scores)
        case "raise":
            raise ValueError("no\n  such thing")
        case "hang":
            time.sleep(60)
        case "exit":
            # by then the run knows which worker has this call; otherwise it would repeat the call
            time.sleep(0.5)
            os._exit(3)
        case "leave":
            raise SystemExit(3)
        case "length":
            return scores[1:]
        case "words":
            return ["good"] * len(scores)
        case "nothing":
            return None
        case "nameless":
            return {"score": scores}


def waiting(images, prompts, metadata, *, file):
    """Waits until `file` exists: the test writes it when the next chunk is made."""
    while not Path(file).exists():
        time.sleep(0.01)
    return images.mean((1, 2, 3))


def in_jax(scale=1.0):
    from solrl_jax.rewards.protocol import Reward  # imported here, because workers do not need it

    def score(params, images, prepared):
        return {"reward": params * images.mean((1, 2, 3))}

    return Reward(np.float32(scale), lambda prompts: np.zeros(len(prompts), np.float32), score)


def with_group(alone=False):
    """A reward with a groupwise one in it, as only weighted sums have. alone: and no score."""
    group = dataclasses.replace(in_jax(), groupwise=True)
    return dataclasses.replace(in_jax(), score=None if alone else in_jax().score, group=group)


def checked(images, prompts, metadata, *, color="red"):
    return images.mean((1, 2, 3))


def _check(prompt, metadata, *, color="red"):
    if color in prompt:
        raise ValueError(f"{color} is not for me")


checked.check = _check


def checked_in_jax():
    from solrl_jax.rewards.protocol import Reward

    def check(prompt):
        if "red" in prompt:
            raise KeyError("red")

    return Reward(
        (),
        lambda prompts: np.zeros(len(prompts), np.float32),
        lambda params, images, _: {},
        check=check,
    )


def not_a_reward():
    return 3
