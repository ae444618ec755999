"""The forward-process loss of DiffusionNFT (arXiv 2509.16117, eq. 5 and section 3.3; docs/method.md, section 4)."""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    Latents,
    PerSample,
    TrainingTarget,
    Velocities,
    along,
    mean_per_sample,
)

SMALLEST_DENOMINATOR = 1e-5


def nft(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """The objective of Sol-RL: `nft_loss` with the configured weights."""
    return nft_loss(
        velocities,
        target,
        beta=algorithm.beta,
        kl_coef=algorithm.kl_coef,
        adv_clip_max=algorithm.adv_clip_max,
    )


def nft_loss(
    velocities: Velocities,
    target: TrainingTarget,
    *,
    beta: float,
    kl_coef: float,
    adv_clip_max: float,
) -> tuple[PerSample, dict[str, PerSample]]:
    """Pulls the policy towards good samples and away from bad ones, mirrored about the old policy.

        v_pos = beta v + (1 - beta) v_old         v_neg = (1 + beta) v_old - beta v
        l(u)  = mean((x - sigma u - x0)^2) / max(mean|x - sigma u - x0|, 1e-5)
        loss  = adv_clip_max (q l(v_pos) + (1 - q) l(v_neg)) / beta + kl_coef mean((v - v_ref)^2)

    The denominator of l has no gradient. It weights a sample by its error, in place of a hand-made weight on sigma.
    `beta` is the paper's mixing weight, `adv_clip_max` its advantage scale. Returns one loss a row, and its parts: that of
    the reference only if it has a weight.
    """
    v, v_old, v_ref = velocities.trained, *map(jax.lax.stop_gradient, velocities[1:])
    positive = _self_weighted(target, beta * v + (1 - beta) * v_old)
    negative = _self_weighted(target, (1 + beta) * v_old - beta * v)
    policy = (
        adv_clip_max * (target.optimality * positive + (1 - target.optimality) * negative) / beta
    )
    parts = {"loss/policy": policy, "loss/drift": mean_per_sample(jnp.square(v - v_old))}
    if kl_coef == 0:  # then nothing reads the reference, and XLA does not compute it
        return policy, parts
    kl = mean_per_sample(jnp.square(v - v_ref))
    return policy + kl_coef * kl, parts | {"loss/kl": kl}


def _self_weighted(target: TrainingTarget, velocity: Latents) -> PerSample:
    error = target.x - along(target.sigma, target.x) * velocity - target.x0
    weight = jax.lax.stop_gradient(
        jnp.maximum(mean_per_sample(jnp.abs(error)), SMALLEST_DENOMINATOR)
    )
    return mean_per_sample(jnp.square(error)) / weight
