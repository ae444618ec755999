"""A reward of your own: a function of images, prompts and metadata.

    python examples/own_reward.py [KEY=VALUE]...
    solrl train tiny reward=own_reward:redness run.dir=runs/red        (in this folder)

The function runs in worker processes, so it may use any library. Images with a non-finite score
are not trained on.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import solrl_jax as solrl


def redness(
    images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> np.ndarray:
    """Scores how red images are.

    Args:
        images: Float32 [n, height, width, 3] in [0, 1].
        prompts: The n prompts.
        metadata: The metadata of each prompt; empty for prompt sets without metadata.

    Returns:
        One score per image, higher is better.
    """
    red, green, blue = np.moveaxis(images, -1, 0)
    return (red - (green + blue) / 2).mean(axis=(1, 2))


def main(*overrides: str) -> None:
    weights = 'reward.weights={"own_reward:redness": 1}'
    summary = solrl.train("tiny", weights, "run.dir=runs/own-reward", *overrides)
    before = summary["before"]["eval/reward"]
    after = summary["after"]["eval/reward"]
    print(f"reward: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main(*sys.argv[1:])
