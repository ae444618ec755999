"""An objective of your own: flow matching on the better samples.

The policy moves towards samples with a positive advantage and ignores the others.

    python examples/own_objective.py [KEY=VALUE]...
    solrl train tiny objective=own_objective:better_half run.dir=runs/mine       (in this folder)

Such a run has metrics, checkpoints, resume and evaluation like any other.
"""

import sys

import jax.numpy as jnp

import solrl_jax as solrl
from solrl_jax.rl.objective import (
    AlgorithmConfig,
    PerSample,
    TrainingTarget,
    Velocities,
    matching_error,
    mean_per_sample,
)


def better_half(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Flow matching on samples with a positive advantage, held near the base by the KL term.

    Args:
        velocities: The velocities that the trained, the old and the reference policy predict.
        target: The noised samples and their optimality probabilities.
        algorithm: The algorithm section of the configuration. Only `kl_coef` is used.

    Returns:
        One loss per sample, and metrics with one value per sample.
    """
    error = matching_error(velocities.trained, target)
    kl = mean_per_sample((velocities.trained - velocities.reference) ** 2)
    loss = jnp.where(target.optimality > 0.5, error, 0.0) + algorithm.kl_coef * kl
    return loss, {"loss/policy": error, "loss/kl": kl}


def main(*overrides: str) -> None:
    objective = "objective=own_objective:better_half"
    summary = solrl.train("tiny", objective, "run.dir=runs/own-objective", *overrides)
    before = summary["before"]["eval/reward"]
    after = summary["after"]["eval/reward"]
    print(f"reward: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main(*sys.argv[1:])
