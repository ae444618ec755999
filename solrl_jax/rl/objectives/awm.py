"""Advantage Weighted Matching (arXiv 2509.25050): flow matching in place of the log-probability of a sample."""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    PerSample,
    TrainingTarget,
    Velocities,
    clipped_policy,
    matching_error,
    matching_gap,
    mean_per_sample,
)

# of the released code's weighting, "ghuber": robust to large errors
POWER = 0.25
FLOOR = 1e-10
ANCHOR = (
    1.0  # weight of the distance to the old policy, which is the slow copy of the released code
)


def awm(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Fits good samples better than the old policy does, and bad ones worse.

    l    = mean((v - (noise - x0))^2)       log p = -sigma ((l + 1e-10)^p - 1e-10^p) / p,  p = 1/4
    R    = p / p_old                        A in [-1, 1]
    loss = max(-A R, -A clip(R, 1 - c, 1 + c)) + kl_coef mean((v - v_ref)^2) + mean((v - v_old)^2)
    """
    v, v_old, v_ref = velocities.trained, *map(jax.lax.stop_gradient, velocities[1:])
    error_old = matching_error(v_old, target)
    error = error_old + matching_gap(
        v, v_old, target
    )  # so that at the old policy the ratio is 1 to the last bit
    log_r = -target.sigma * ((error + FLOOR) ** POWER - (error_old + FLOOR) ** POWER) / POWER
    loss, metrics = clipped_policy(log_r, target, algorithm, 1.0)
    kl = mean_per_sample(jnp.square(v - v_ref))
    drift = mean_per_sample(jnp.square(v - v_old))
    return loss + algorithm.kl_coef * kl + ANCHOR * drift, metrics | {
        "loss/kl": kl,
        "loss/drift": drift,
    }
