"""Flow-GRPO with coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952).

The steps are those of `rollout.solver=cps` (`diffusion.solver`), which keep the coefficients of
image and noise at every sigma, so that samples have no visible noise. As in the released code
(IamCreateAI/FlowCPS, yifan123/flow_grpo), all constants are left out of the log-probability of a
step, also the division by its variance.
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
    log_ratio,
    step_divergence,
)


def flow_cps(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Makes the steps to good samples more probable, and those to bad ones less probable.

        log R = mean((after - m_old)^2) - mean((after - m)^2)
        A     = adv_clip_max (2 q - 1)
        loss  = max(-A R, -A clip(R, 1 - c, 1 + c)) + kl_coef mean((m - m_ref)^2) / (2 std^2)
        m     = a x + b (x - sigma v)                the mean of the step

    Means are over the dimensions of a sample. As in the released code, log R is not divided by
    `2 std^2`. With `algorithm.kl_fraction` below 1, the KL term is 0 for samples without a
    reference and scaled up for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. m_old and m_ref are the means with v_old and v_ref in place of v. Only
            v has a gradient.
        target: The recorded steps to train on: the latents x and `after`, the coefficients a and b,
            the standard deviation `std`, the sigma, and the optimality q in [0, 1] of their
            samples.
        algorithm: `clip_range` is c, `adv_clip_max` the largest advantage, and `kl_coef` the weight
            of the distance to the reference.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the first term),
        "ratio" (R, at most 1e6 in this metric), "ratio/clipped" (1 if R differs from 1 by more than
        c, else 0), "loss/drift" (mean((v - v_old)^2), which is not trained on) and, unless
        `kl_coef` is 0, "loss/kl" (the second term without `kl_coef`).

    Raises:
        AssertionError: If the target has no recorded step.
    """
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    step = target.step
    assert step is not None
    log_r = log_ratio(v, v_old, target) * (2 * step.std**2)
    loss, metrics = clipped_policy(log_r, target, algorithm, algorithm.adv_clip_max)
    kl = step_divergence(distance_to_reference(velocities), target)
    metrics |= {"loss/drift": distance_to_old(velocities)}
    return add_reference_term(loss, metrics, kl, algorithm.kl_coef)
