"""Diffusion-DPO (arXiv 2311.12908, eq. 14), online: the pairs are the best and the worst of what the policy sampled."""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    PerSample,
    TrainingTarget,
    Velocities,
    matching_gap,
    mean_per_sample,
)


def dpo(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Fits the better sample of a pair more than the base does, and the worse one less. Both rows have the pair's loss.

        d    = mean((v - (noise - x0))^2) - mean((v_ref - (noise - x0))^2)
        loss = -log sigmoid(-beta / 2 (d_better - d_worse)) + kl_coef mean((v - v_ref)^2)

    SeedBatch 2 i and 2 i + 1 are a pair, the better one first. As released, beta stands for the paper's beta, steps and weight.
    """
    v, v_old, v_ref = velocities.trained, *map(jax.lax.stop_gradient, velocities[1:])
    gained = matching_gap(v, v_ref, target)
    margin = -algorithm.beta / 2 * (gained[::2] - gained[1::2])
    loss = -jax.nn.log_sigmoid(margin).repeat(2)
    kl = mean_per_sample(jnp.square(v - v_ref))
    agreed = (margin > 0).astype(jnp.float32).repeat(2)
    parts = {
        "loss/policy": loss,
        "loss/kl": kl,
        "loss/drift": mean_per_sample(jnp.square(v - v_old)),
        "preferred": agreed,
    }
    return loss + algorithm.kl_coef * kl, parts
