"""What an objective is, and what several of them share. Each objective is a file in `rl/objectives/`.

An objective is one function: predictions, what they are trained on and the configuration in; a loss and metrics a row out. A
line of `config.schema.OBJECTIVES` names it and what it trains on, and a file in `configs/objective/` has its settings.
"""

import importlib
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.config.schema import Algorithm as AlgorithmConfig

Latents: TypeAlias = Float[Array, " b *latent"]
PerSample: TypeAlias = Float[Array, " b"]


class Velocities(NamedTuple):
    """What three policies predict at the same latents."""

    trained: Latents
    old: Latents  # the policy that sampled the rollouts
    reference: Latents  # the base without adapters


class Step(NamedTuple):
    """A recorded step of an SDE: `after` was drawn from the Gaussian of mean `a x + b x0_hat` and deviation `std`."""

    after: Latents
    a: PerSample
    b: PerSample
    std: PerSample
    length: PerSample  # how far sigma fell


class TrainingTarget(NamedTuple):
    """The samples that are trained on. Of pairs, each best sample is followed by its worst one, at the same noise."""

    x: Latents  # where velocities are predicted: noised, (1 - sigma) x0 + sigma noise, or a state of the trajectory
    x0: Latents  # clean
    sigma: PerSample
    optimality: PerSample  # q in [0, 1]; 2 q - 1 is the advantage over its clip
    step: Step | None = None  # of objectives that train on transitions


@runtime_checkable
class Objective(Protocol):
    """One loss a row and metrics a row, from what three policies predict at `target.x`. Pure, and traced by jit."""

    def __call__(
        self, velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
    ) -> tuple[PerSample, dict[str, PerSample]]: ...


def find_objective(name: str) -> Objective:
    """The objective of that name in `rl/objectives/`."""
    return getattr(importlib.import_module(f"solrl_jax.rl.objectives.{name}"), name)


def mean_per_sample(x: Latents) -> PerSample:
    """The mean over everything but rows."""
    return x.mean(tuple(range(1, x.ndim)))


def along(values: PerSample, x: Latents) -> Float[Array, " b *ones"]:
    """One value a row, to be multiplied by latents."""
    return values.reshape(-1, *(1,) * (x.ndim - 1))


def matching_error(velocity: Latents, target: TrainingTarget) -> PerSample:
    """The flow-matching loss: the mean squared distance to the velocity that leads from the noised sample to the clean one."""
    return mean_per_sample(jnp.square(velocity - _lead(target)))


def matching_gap(velocity: Latents, other: Latents, target: TrainingTarget) -> PerSample:
    """The flow-matching loss of `velocity` less that of `other`: exactly 0 where they are equal, to the last bit nearby."""
    return mean_per_sample((velocity - other) * (velocity + other - 2 * _lead(target)))


def _lead(target: TrainingTarget) -> Latents:
    return (target.x - target.x0) / along(target.sigma, target.x)


def log_ratio(velocity: Latents, old: Latents, target: TrainingTarget) -> PerSample:
    """ln p(after | x) - ln p_old(after | x) of the recorded step: exactly 0 where the velocities are equal.

    The mean over dimensions, not the sum, of the log-densities of two Gaussians with one `std` (Flow-GRPO, arXiv 2505.05470).
    """
    assert target.step is not None
    a, b, sigma = (
        along(values, target.x) for values in (target.step.a, target.step.b, target.sigma)
    )
    both = 2 * (a * target.x + b * target.x - target.step.after) - b * sigma * (velocity + old)
    return mean_per_sample(b * sigma * (velocity - old) * both) / (2 * target.step.std**2)


def clipped_policy(
    log_r: PerSample, target: TrainingTarget, algorithm: AlgorithmConfig, scale: float
) -> tuple[PerSample, dict[str, PerSample]]:
    """PPO's loss (arXiv 1707.06347, eq. 7) on a ratio of probabilities, trained to old, and what happened to the ratio.

    max(-A R, -A clip(R, 1 - c, 1 + c)),     A = scale (2 q - 1)
    """
    advantage = scale * (2 * target.optimality - 1)
    ratio = jnp.exp(log_r)
    c = algorithm.clip_range
    loss = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1 - c, 1 + c))
    ratio = jax.lax.stop_gradient(ratio)
    return loss, {
        "loss/policy": loss,
        "ratio": ratio,
        "ratio/clipped": (jnp.abs(ratio - 1) > c).astype(jnp.float32),
    }
