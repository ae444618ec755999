"""Diffusion-DPO (arXiv 2311.12908, eq. 14), online: the pairs are samples of the policy itself."""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    PerSample,
    TrainingTarget,
    Velocities,
    distance_to_old,
    distance_to_reference,
    matching_gap,
)


def dpo(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Trains to fit the better sample of a pair more than the base does, and the worse one less.

        d    = mean((v - (noise - x0))^2) - mean((v_ref - (noise - x0))^2)
        loss = -log sigmoid(-beta / 2 (d_better - d_worse)) + kl_coef mean((v - v_ref)^2)

    As in the released code, beta is the product of the paper's beta, number of steps and weight.

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. Only v has a gradient.
        target: The pairs to train on: the better sample in row 2 i, the worse one in row 2 i + 1,
            both with the same noise and sigma. The number of rows must be even. The optimality
            plays no part.
        algorithm: `beta` is the strength of the preference, and `kl_coef` the weight of the
            distance to the reference. `kl_fraction` must be 1, because every sample needs the
            reference; the configuration checks it.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the preference
        term), "loss/kl" (the distance to the reference, without its weight, also if that is 0),
        "loss/drift" (mean((v - v_old)^2), which is not trained on) and "preferred" (1 if d_better <
        d_worse, else 0). Both samples of a pair have the same preference term and "preferred".
    """
    v = velocities.trained
    v_ref = jax.lax.stop_gradient(velocities.reference)
    gap = matching_gap(v, v_ref, target)
    margin = -algorithm.beta / 2 * (gap[::2] - gap[1::2])
    loss = -jax.nn.log_sigmoid(margin).repeat(2)
    kl = distance_to_reference(velocities)
    preferred = (margin > 0).astype(jnp.float32).repeat(2)
    parts = {
        "loss/policy": loss,
        "loss/kl": kl,
        "loss/drift": distance_to_old(velocities),
        "preferred": preferred,
    }
    return loss + algorithm.kl_coef * kl, parts
