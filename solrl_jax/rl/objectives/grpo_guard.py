"""GRPO-Guard (arXiv 2510.22319, eq. 8): Flow-GRPO with ratios that are alike at all steps.

The log-ratio of a step is a mean over dimensions that is shifted below 0 by the distance of the
policies, and that grows as the noise of the step shrinks, so that one clip does not fit all steps.
The released code (in yifan123/flow_grpo) adds the shift back and multiplies by the standard
deviation of the step (RatioNorm), and it divides the loss by the length of the step, so that each
noise level has its share of the gradient.
"""

import jax

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    PerSample,
    TrainingTarget,
    Velocities,
    add_reference_term,
    clipped_policy,
    distance_to_old,
    distance_to_reference,
    expand_like,
    mean_per_sample,
    step_divergence,
)


def grpo_guard(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Makes the steps to good samples more probable, and those to bad ones less probable.

        log R = mean((after - m_old) (m - m_old)) / std
        A     = adv_clip_max (2 q - 1)
        loss  = max(-A R, -A clip(R, 1 - c, 1 + c)) / length
                + kl_coef mean((m - m_ref)^2) length / (2 std^2)
        m     = a x + b (x - sigma v)                the mean of the step

    log R is the normalized log-ratio of the paper, `std (log p(after | x) - log p_old(after | x) +
    mean((m - m_old)^2) / (2 std^2))`. With `kl_fraction` below 1, the KL term is 0 for samples
    without a reference and scaled up for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. m_old and m_ref are the means with v_old and v_ref in place of v. Only
            v has a gradient.
        target: The recorded steps to train on: the latents x and `after`, the coefficients a and b,
            the standard deviation `std`, the sigma, `length` (by how much sigma falls), and the
            optimality q in [0, 1] of their samples.
        algorithm: `clip_range` is c, `adv_clip_max` the largest advantage, and `kl_coef` the weight
            of the distance to the reference.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the first term,
        with the division by `length`), "ratio" (R, at most 1e6 in this metric), "ratio/clipped" (1
        if R differs from 1 by more than c, else 0), "loss/drift" (mean((v - v_old)^2), which is not
        trained on) and, unless `kl_coef` is 0, "loss/kl" (the second term without `kl_coef`).

    Raises:
        AssertionError: If the target has no recorded step.
    """
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    step = target.step
    assert step is not None
    a = expand_like(step.a, target.x)
    b = expand_like(step.b, target.x)
    sigma = expand_like(target.sigma, target.x)
    noise = step.after - a * target.x - b * (target.x - sigma * v_old)  # times std
    log_r = mean_per_sample(noise * (b * sigma * (v_old - v))) / step.std
    loss, metrics = clipped_policy(log_r, target, algorithm, algorithm.adv_clip_max)
    policy = loss / step.length
    kl = step_divergence(distance_to_reference(velocities), target) * step.length
    metrics |= {"loss/policy": policy, "loss/drift": distance_to_old(velocities)}
    return add_reference_term(policy, metrics, kl, algorithm.kl_coef)
