"""A reward of your own: pictures, prompts and metadata in, a score a picture out.

solrl train tiny reward=own_reward:redness run.dir=runs/red        (in this folder)
python examples/own_reward.py [KEY=VALUE]...

The function runs in processes of its own, so it may use any library. A score that is not finite is not trained on.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import solrl_jax as solrl


def redness(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> np.ndarray:
    """How red the pictures are. images: float32 [n, height, width, 3] in [0, 1]. Returns [n], higher is better."""
    red, green, blue = np.moveaxis(images, -1, 0)
    return (red - (green + blue) / 2).mean(axis=(1, 2))


def main(*overrides: str) -> None:
    weights = 'reward.weights={"own_reward:redness": 1}'
    summary = solrl.train("tiny", weights, "run.dir=runs/own-reward", *overrides)
    print(
        f"reward: {summary['before']['eval/reward']:.3f} before, {summary['after']['eval/reward']:.3f} after"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
