"""Flow-GRPO (arXiv 2505.05470): the loss of PPO on the steps of an SDE, with a KL term.

It follows equations 5 and 9 of the paper, and its released code in that the KL term is divided by
`2 g^2` for a step with the standard deviation `g sqrt(length)`.
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


def flow_grpo(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Makes the steps to good samples more probable, and those to bad ones less probable.

        R    = exp(mean(ln p(after | x) - ln p_old(after | x)))     mean over dimensions
        A    = adv_clip_max (2 q - 1)
        loss = max(-A R, -A clip(R, 1 - c, 1 + c))
               + kl_coef mean((m - m_ref)^2) length / (2 std^2)
        m    = a x + b (x - sigma v)                 the mean of the step

    As in the released code, the KL term divides by the variance per unit of sigma, std^2 / length.
    With `algorithm.kl_fraction` below 1, the KL term is 0 for samples without a reference and
    scaled up for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. m_ref is the mean with v_ref in place of v, and p_old has the mean with
            v_old. Only v has a gradient.
        target: The recorded steps to train on: the latents x and `after`, the coefficients a and b,
            the standard deviation `std`, the sigma, `length` (by how much sigma falls), and the
            optimality q in [0, 1] of their samples.
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
    loss, metrics = clipped_policy(
        log_ratio(v, v_old, target), target, algorithm, algorithm.adv_clip_max
    )
    kl = step_divergence(distance_to_reference(velocities), target) * step.length
    metrics |= {"loss/drift": distance_to_old(velocities)}
    return add_reference_term(loss, metrics, kl, algorithm.kl_coef)
