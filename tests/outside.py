"""Rewards outside JAX for the tests, imported by worker processes: one that is well, and one that fails as it is told."""

import os
import time
from pathlib import Path

import numpy as np


def mean(images, prompts, metadata, *, scale=1.0):
    return scale * images.mean((1, 2, 3)) + 0.01 * np.array([len(prompt) for prompt in prompts])


def several(images, prompts, metadata):
    return {"reward": images[..., 0].mean((1, 2)), "green": images[..., 1].mean((1, 2))}


def told(images, prompts, metadata):
    return [m.get("score", -1) for m in metadata]


def told_or_mean(images, prompts, metadata):
    if "refused" in prompts:
        raise ValueError("no such prompt")
    return [float("nan") if m["n"] == 3 else x + m["n"] for x, m in zip(mean(images, prompts, metadata), metadata, strict=True)]


def where(images, prompts, metadata):
    """1 in a process that leaves accelerators alone; it says so."""
    print("here", flush=True)
    return [float(os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ["CUDA_VISIBLE_DEVICES"])] * len(images)


def pid(images, prompts, metadata):
    return [os.getpid()] * len(images)


def failing(images, prompts, metadata, *, how, prompt="", file="", once=False):
    """The mean, unless `prompt` is asked for (any, if "") and `file`, if one is named, is there; once: it is removed then."""
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
    """Goes on when `file` is there, which it is not before the next chunk has been made."""
    while not Path(file).exists():
        time.sleep(0.01)
    return images.mean((1, 2, 3))


def in_jax(scale=1.0):
    from solrl_jax.rewards.protocol import Reward  # workers do without

    score = lambda params, images, prepared: {"reward": params * images.mean((1, 2, 3))}
    return Reward(np.float32(scale), lambda prompts: np.zeros(len(prompts), np.float32), score)


def not_a_reward():
    return 3
