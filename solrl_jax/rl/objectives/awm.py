"""Advantage Weighted Matching (arXiv 2509.25050).

The flow-matching loss takes the place of the log-probability of a sample. The old policy is a slow
copy of the trained one (`decay_type` 3). It generates the samples, and the loss keeps the trained
policy close to it, as in the released code with `off_policy` on. docs/objectives.md lists the
differences from that code.
"""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    Latents,
    PerSample,
    TrainingTarget,
    Velocities,
    add_reference_term,
    clipped_policy,
    distance_to_old,
    distance_to_reference,
    matching_error,
    matching_gap,
)

# The exponent and the floor of "ghuber", the robust weighting of the released code.
POWER = 0.25
FLOOR = 1e-10
# The weight of the distance to the old policy, the slow copy, as in the released code.
ANCHOR = 1.0


def awm(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Trains to fit good samples better than the old policy does, and bad ones worse.

        l     = mean((v - (noise - x0))^2)                       l_old is that of v_old
        log R = 4 sigma ((l_old + 1e-10)^(1/4) - (l + 1e-10)^(1/4))
        A     = 2 q - 1, in [-1, 1]              the advantage divided by adv_clip_max
        loss  = max(-A R, -A clip(R, 1 - c, 1 + c))
                + kl_coef mean((v - v_ref)^2) + mean((v - v_old)^2)

    R is the ratio p / p_old of likelihoods. Means are over the dimensions of a sample. With
    `kl_fraction` below 1, mean((v - v_ref)^2) is 0 for samples without a reference and scaled up
    for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. Only v has a gradient.
        target: The noised samples to train on, with their sigma and optimality q. Their true
            velocity `noise - x0` is `(x - x0) / sigma`.
        algorithm: `clip_range` is c, and `kl_coef` the weight of the distance to the reference.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the first term),
        "ratio" (R, at most 1e6 in this metric), "ratio/clipped" (1 if R differs from 1 by more than
        c, else 0), "loss/drift" (mean((v - v_old)^2), the last term) and, unless `kl_coef` is 0,
        "loss/kl" (the distance to the reference, without `kl_coef`).
    """
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    error_old = matching_error(v_old, target)
    error = _error_near(error_old, v, v_old, target)
    log_r = -target.sigma * ((error + FLOOR) ** POWER - (error_old + FLOOR) ** POWER) / POWER
    loss, metrics = clipped_policy(log_r, target, algorithm, 1.0)
    kl = distance_to_reference(velocities)
    drift = distance_to_old(velocities)
    loss, metrics = add_reference_term(loss, metrics, kl, algorithm.kl_coef)
    return loss + ANCHOR * drift, metrics | {"loss/drift": drift}


def _error_near(
    error_old: PerSample, v: Latents, v_old: Latents, target: TrainingTarget
) -> PerSample:
    """Computes the flow-matching loss of `v`, accurate also where it is close to that of `v_old`.

    The result is `error_old` plus the difference of the two losses, so it equals `error_old`
    exactly for equal velocities. If the loss of `v`, computed directly, is less than half of
    `error_old`, the directly computed loss is returned instead, because the sum could round below
    0.

    Args:
        error_old: The flow-matching loss of `v_old`.
        v: The velocity that the trained policy predicts.
        v_old: The velocity that the old policy predicts.
        target: The noised samples, whose true velocity is `(x - x0) / sigma`.

    Returns:
        One loss per sample, at least 0.
    """
    by_itself = matching_error(v, target)
    by_difference = error_old + matching_gap(v, v_old, target)
    return jnp.maximum(jnp.where(by_itself < error_old / 2, by_itself, by_difference), 0.0)
