"""Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a trust region in place of the clip.

One recorded step gives a noisy ratio, but the two Gaussians that it stands for are known, so their
divergence is exact (eq. 14). A term is left out if that divergence has reached a threshold and the
ratio has gone the way that the advantage pushes (eq. 18); otherwise its ratio is not limited. As in
the released code (Tencent-Hunyuan/UniRL), the divergence is a mean over dimensions, not a sum.
"""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    MAX_RATIO,
    PerSample,
    TrainingTarget,
    Velocities,
    add_reference_term,
    distance_to_old,
    distance_to_reference,
    log_ratio,
    step_divergence,
)


def flow_dppo(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Makes the steps to good samples more probable, and those to bad ones less probable.

        R      = exp(mean(ln p(after | x) - ln p_old(after | x)))     mean over dimensions
        A      = adv_clip_max (2 q - 1)
        D      = mean((m - m_old)^2) / (2 std^2)
        masked = D >= kl_mask_threshold and (A > 0 and R > 1 or A < 0 and R < 1)
        loss   = (0 if masked else -A R) + kl_coef mean((m - m_ref)^2) / (2 std^2)
        m      = a x + b (x - sigma v)               the mean of the step

    So a sample gives no gradient in the direction in which its step has already moved too far from
    the old policy. With `kl_fraction` below 1, the KL term is 0 for samples without a reference and
    scaled up for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. m_old and m_ref are the means with v_old and v_ref in place of v. Only
            v has a gradient.
        target: The recorded steps to train on: the latents x and `after`, the coefficients a and b,
            the standard deviation `std`, the sigma, and the optimality q in [0, 1] of their
            samples.
        algorithm: `kl_mask_threshold` is the divergence D from which a term may be left out,
            `adv_clip_max` the largest advantage, and `kl_coef` the weight of the distance to the
            reference.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the first term),
        "ratio" (R, at most 1e6 in this metric), "ratio/masked" (1 if the term is left out, else 0),
        "divergence" (D), "loss/drift" (mean((v - v_old)^2), which is not trained on) and, unless
        `kl_coef` is 0, "loss/kl" (the second term without `kl_coef`).

    Raises:
        AssertionError: If the target has no recorded step.
    """
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    drift = distance_to_old(velocities)
    divergence = jax.lax.stop_gradient(step_divergence(drift, target))
    advantage = algorithm.adv_clip_max * (2 * target.optimality - 1)
    log_r = log_ratio(v, v_old, target)
    outwards = ((advantage > 0) & (log_r > 0)) | ((advantage < 0) & (log_r < 0))
    masked = (divergence >= algorithm.kl_mask_threshold) & outwards
    # The ratio of a term without a gradient may overflow. It must not reach the loss and its
    # gradient, where 0 * inf is NaN.
    left_out = masked | (advantage == 0)
    policy = jnp.where(left_out, 0.0, -advantage * jnp.exp(jnp.where(left_out, 0.0, log_r)))
    # Eq. 17 divides by the whole variance of the step, and not by that per unit of sigma as
    # Flow-GRPO does.
    kl = step_divergence(distance_to_reference(velocities), target)
    metrics = {
        "loss/policy": policy,
        "ratio": jnp.minimum(jax.lax.stop_gradient(jnp.exp(log_r)), MAX_RATIO),
        "ratio/masked": masked.astype(jnp.float32),
        "divergence": divergence,
        "loss/drift": drift,
    }
    return add_reference_term(policy, metrics, kl, algorithm.kl_coef)
