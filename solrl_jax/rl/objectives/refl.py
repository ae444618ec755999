"""ReFL, reward feedback learning (ImageReward, arXiv 2304.05977; THUDM/ImageReward).

The policy predicts clean latents at one of the last steps of a trajectory. They are decoded and
scored, and the parameters follow the gradient of the reward through reward model, decoder and
network. docs/objectives.md lists the differences from the released code.
"""

import jax
import jax.numpy as jnp

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.rl.objective import (
    Latents,
    PerSample,
    RewardGradient,
    TrainingTarget,
    Velocities,
    add_reference_term,
    distance_to_old,
    distance_to_reference,
    reward_gradients,
)


def targets(
    gradient: RewardGradient, anchor: Latents, algorithm: AlgorithmConfig
) -> dict[str, Latents]:
    """Returns the gradient of the reward at the clean latents that the old policy predicts.

    Args:
        gradient: Returns the rewards of clean latents, and their gradients. It is called once.
        anchor: The clean latents that the old policy predicts at the drawn step.
        algorithm: Not read.

    Returns:
        "gradient": the gradient, in the shape of `anchor`.
    """
    return {"gradient": gradient(anchor)[1]}


@reward_gradients(targets)
def refl(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Moves the predicted clean latents y = x - sigma v along the gradient g of the reward R, which
    was taken where the old policy predicts them, at y_old = x - sigma v_old.

        loss = -<g, y - y_old> + kl_coef mean((v - v_ref)^2)
             = sigma <g, v - v_old> + kl_coef mean((v - v_ref)^2)

    <,> sums the products over the dimensions of a sample, so the first term is the change of -R to
    first order. Where v equals v_old it is 0, and its gradient with respect to the parameters is
    that of -R(y) as one `jax.grad` through network, decoder and reward would give it. That is so in
    the first optimizer step of an iteration if the old policy was set to the trained one before it
    (`algorithm.decay_type` 0). In further steps, or with an old policy that follows slowly, g is
    still the gradient at y_old. All samples count alike, whatever their reward is.

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. Only v has a gradient. The reference is not read if `kl_coef` is 0.
        target: The states x of the trajectories, their sigmas, and in `targets` the gradient g
            ("gradient"). The optimality is not read.
        algorithm: `kl_coef` is the weight of the distance to the reference
            (`distance_to_reference`: with `kl_fraction` below 1, it is 0 or scaled up for a
            sample).

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the loss without
        the distance to the reference), "loss/drift" (mean((v - v_old)^2), which is not trained on),
        "gradient/norm" (|g|) and, unless `kl_coef` is 0, "loss/kl" (the distance to the reference,
        without `kl_coef`).

    Raises:
        AssertionError: If the target has no `targets`.
    """
    assert target.targets is not None
    g = target.targets["gradient"]
    axes = tuple(range(1, g.ndim))
    change = velocities.trained - jax.lax.stop_gradient(velocities.old)
    policy = target.sigma * jnp.sum(g * change, axes)
    parts = {
        "loss/policy": policy,
        "loss/drift": distance_to_old(velocities),
        "gradient/norm": jnp.sqrt(jnp.sum(jnp.square(g), axes)),
    }
    kl = distance_to_reference(velocities)
    return add_reference_term(policy, parts, kl, algorithm.kl_coef)
