"""Rewards outside JAX that do not behave."""

import os
import sys
import time

import numpy as np


def hungry(images, prompts, metadata):
    """Takes memory without end."""
    arrays = []
    while True:
        arrays.append(np.ones(2**25))


def quiet(images, prompts, metadata):
    """Ends its process as if all were well."""
    time.sleep(0.5)
    os._exit(0)


def deaf(images, prompts, metadata, *, begun=os.devnull):
    """Hangs within C, and holds the interpreter's lock. begun: a file to make before."""
    open(begun, "w").close()
    10**10**9


def patient(images, prompts, metadata, *, begun=os.devnull):
    """Hangs, after the wall clock was set back."""
    open(begun, "w").close()
    time.time = lambda: 0.0
    time.sleep(600)


def wrong(images, prompts, metadata):
    raise ValueError("never")


class Mute(Exception):
    """An exception without words."""

    def __str__(self) -> str:
        raise ValueError


def scores_by_prompt(images, prompts, metadata):
    """Does what the first prompt says; without orders, the mean."""
    match prompts[0]:
        case "exit":
            sys.exit(0)
        case "surrogate":
            raise ValueError("\ud800")
        case "mute":
            raise Mute
    mean = images.mean((1, 2, 3))
    answers = {"words": ["1"], "truths": [True], "complex": [1j], "more": [*mean, 0.0]}
    return answers.get(prompts[0], mean)


def nothing_finite(images, prompts, metadata, *, file=""):
    """NaN for every picture, if `file` exists (or ""). For the gray pictures that a run begins
    with: 0.
    """
    gray = bool((images == 0.5).all())
    return [
        0.0 if gray else float("nan") if not file or os.path.exists(file) else float(images.mean())
    ] * len(images)


def leaving():
    """A reward inside JAX whose score ends the process as if all were well."""
    from solrl_jax.rewards.protocol import (
        Reward,
    )  # imported here, because workers and the server do not need it

    return Reward(
        None,
        lambda prompts: np.zeros(len(prompts), np.float32),
        lambda params, images, rows: sys.exit(0),
    )
