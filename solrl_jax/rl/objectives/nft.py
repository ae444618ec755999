"""The forward-process loss of DiffusionNFT (arXiv 2509.16117, eq. 5 and section 3.3;
docs/method.md, section 4).
"""

import jax

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    PerSample,
    TrainingTarget,
    Velocities,
    add_reference_term,
    distance_to_old,
    distance_to_reference,
    self_weighted_error,
)


def nft(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Computes the objective of Sol-RL, the loss of DiffusionNFT: `nft_loss` with the configured
    coefficients.

    It pulls the policy towards each sample with the weight q, the optimality of the sample, and
    pushes it away with the weight 1 - q.

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            predict for the noised samples. Only v has a gradient. The reference is not read if
            `kl_coef` is 0.
        target: The noised samples to train on, their clean samples, their sigmas, and the
            optimality q in [0, 1] of each.
        algorithm: `beta` is the mixing weight of DiffusionNFT, above 0: the positive and the
            negative policy are `v_old + beta (v - v_old)` and `v_old - beta (v - v_old)`. `kl_coef`
            is the weight of the distance to the reference, and `adv_clip_max / beta` multiplies the
            rest of the loss.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the loss without
        the distance to the reference), "loss/drift" (mean((v - v_old)^2), which is not trained on)
        and, unless `kl_coef` is 0, "loss/kl" (the mean squared difference of the velocities of the
        trained and the reference policy, without `kl_coef`).
    """
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
    """Computes the forward-process loss of DiffusionNFT (arXiv 2509.16117, eq. 5).

    It pulls the policy towards good samples and pushes it away from bad ones: for a bad sample (q =
    0) the fitted velocity is v_neg, on the other side of v_old (for beta 1 the mirror image of v).

        v_pos = beta v + (1 - beta) v_old         v_neg = (1 + beta) v_old - beta v
        l(u)  = mean((x - sigma u - x0)^2) / max(mean|x - sigma u - x0|, 1e-5)
        loss  = adv_clip_max (q l(v_pos) + (1 - q) l(v_neg)) / beta + kl_coef mean((v - v_ref)^2)

    The denominator of l has no gradient. Means are over the dimensions of a sample. With
    `kl_fraction` below 1, mean((v - v_ref)^2) is 0 for samples without a reference and scaled up
    for the others (`distance_to_reference`).

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. Only v has a gradient.
        target: The noised samples x to train on, with their clean latents x0, their sigma and their
            optimality q in [0, 1].
        beta: The mixing weight of the paper, above 0: the weight of v in v_pos, and how far v_neg
            lies on the other side of v_old.
        kl_coef: The weight of the distance to the reference, a Python number, not an array. With 0,
            no result depends on `velocities.reference`, so XLA does not compute that array under
            jit. It must be given even then.
        adv_clip_max: The factor of the first term, `algorithm.adv_clip_max`. Advantages were
            clipped to this bound, divided by it, and mapped from [-1, 1] to [0, 1] to give q.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the first term),
        "loss/drift" (mean((v - v_old)^2), which is not trained on) and, unless `kl_coef` is 0,
        "loss/kl" (the distance to the reference, without `kl_coef`).
    """
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    positive = self_weighted_error(beta * v + (1 - beta) * v_old, target, target.x0)
    negative = self_weighted_error((1 + beta) * v_old - beta * v, target, target.x0)
    policy = (
        adv_clip_max * (target.optimality * positive + (1 - target.optimality) * negative) / beta
    )
    parts = {"loss/policy": policy, "loss/drift": distance_to_old(velocities)}
    return add_reference_term(policy, parts, distance_to_reference(velocities), kl_coef)
