"""An objective of your own: filtered distillation. The policy moves towards the good half of the samples, and ignores the rest.

python examples/own_objective.py [KEY=VALUE]...
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


def good_half(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Flow matching on samples whose advantage is positive, held near the base by the KL weight. One loss a row."""
    error = matching_error(velocities.trained, target)
    kl = mean_per_sample((velocities.trained - velocities.reference) ** 2)
    loss = jnp.where(target.optimality > 0.5, error, 0.0) + algorithm.kl_coef * kl
    return loss, {"loss/policy": error, "loss/kl": kl}


def main(*overrides: str) -> None:
    experiment = solrl.load("tiny", *overrides)
    state = solrl.fresh_state(experiment)
    for i in range(1, experiment.config.train.iterations + 1):
        state, outcome = solrl.iterate(experiment, state, i, objective=good_half)
        print(
            f"{i:3}: kept {outcome.metrics['kept/reward']:.3f}, loss {outcome.metrics['loss']:.4f}"
        )
    print(f"held-out reward: {solrl.evaluate(experiment, state.ema).means['reward']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
