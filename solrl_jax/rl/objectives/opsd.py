"""DiffusionOPSD, on-policy self-distillation (arXiv 2608.24646; worldbench/DiffusionOPSD).

The old policy predicts clean latents. Moved up the gradient of the reward, they are the target for
good samples; moved down, the target that bad samples are pushed away from. Both targets are fixed,
and the policy is fitted to them as in DiffusionNFT. docs/objectives.md lists the differences from
the released code.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.parallel import sharding
from solrl_jax.rl.objective import (
    Latents,
    PerSample,
    RewardGradient,
    TrainingTarget,
    Velocities,
    add_reference_term,
    distance_to_old,
    distance_to_reference,
    expand_like,
    mean_per_sample,
    reward_gradients,
    self_weighted_error,
)

# Added to the norm of a gradient, as in the released code: a gradient of zero then moves nothing.
SMALLEST_NORM = 1e-12


def targets(
    gradient: RewardGradient, anchor: Latents, algorithm: AlgorithmConfig
) -> dict[str, Latents]:
    """Moves the predicted clean latents y0 up and down the reward R, by a bounded length.

        y <- y +- (rho |y0| / n) g / (|g| + 1e-12)        n times from y0; g is the gradient at y

    Norms are over the dimensions of a sample, so neither the scale of the reward nor that of the
    latents matters. No target lies further than `rho |y0|` from y0. The released code also clips
    the distance to this length, which has no effect on steps of this size.

    Args:
        gradient: Returns the rewards of clean latents, and their gradients. It is called 2 n - 1
            times: both targets begin with the same gradient.
        anchor: The clean latents y0 that the old policy predicts.
        algorithm: `target_radius` is rho, and `target_steps` is n.

    Returns:
        "positive", the latents that were moved up the reward, and "negative", those that were moved
        down, both in the shape of `anchor`. Whether the reward there is higher or lower is not
        checked. If a gradient of a sample has a non-finite value, so has the target made with it.
    """
    length = algorithm.target_radius / algorithm.target_steps
    _, first = gradient(anchor)
    moved = {}
    for name, step in (("positive", length), ("negative", -length)):
        latents = _move(anchor, first, anchor, step)
        for _ in range(algorithm.target_steps - 1):
            latents = _move(latents, gradient(latents)[1], anchor, step)
        moved[name] = latents
    return moved


@reward_gradients(targets)
def opsd(
    velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
) -> tuple[PerSample, dict[str, PerSample]]:
    """Pulls the policy towards the positive targets of good samples, and its mirror image towards
    the negative targets of bad ones.

        v_pos = beta v + (1 - beta) v_old         v_neg = (1 + beta) v_old - beta v
        l(u, y) = mean((x - sigma u - y)^2) / max(mean|x - sigma u - y|, 1e-5)
        loss  = adv_clip_max (q l(v_pos, y_pos) + (1 - q) l(v_neg, y_neg))
                + kl_coef mean((v - v_ref)^2)

    The denominator of l has no gradient. Unlike DiffusionNFT, the released code does not divide by
    beta. Means are over the dimensions of a sample. The distance to v_ref is
    `distance_to_reference`: with `kl_fraction` below 1, it is 0 or scaled up for a sample.

    Args:
        velocities: The velocities that the trained (v), the old (v_old) and the reference policy
            (v_ref) predict. Only v has a gradient. The reference is not read if `kl_coef` is 0.
        target: The states x of the trajectories, their sigmas, the optimality q of the samples, and
            in `targets` the latents y_pos ("positive") and y_neg ("negative").
        algorithm: `beta` is how far the positive and the negative policy lie from the old one,
            `kl_coef` the weight of the distance to the reference, and `adv_clip_max` a factor of
            the loss without that distance.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the loss without
        the distance to the reference), "loss/drift" (mean((v - v_old)^2), which is not trained on),
        "target/distance" (the distance from the clean latents that v_old predicts to y_pos, divided
        by the norm of those latents) and, unless `kl_coef` is 0, "loss/kl" (the distance to the
        reference, without `kl_coef`).

    Raises:
        AssertionError: If the target has no `targets`.
    """
    assert target.targets is not None
    beta = algorithm.beta
    v = velocities.trained
    v_old = jax.lax.stop_gradient(velocities.old)
    positive = target.targets["positive"]
    good = self_weighted_error(beta * v + (1 - beta) * v_old, target, positive)
    bad = self_weighted_error((1 + beta) * v_old - beta * v, target, target.targets["negative"])
    policy = algorithm.adv_clip_max * (target.optimality * good + (1 - target.optimality) * bad)
    anchor = target.x - expand_like(target.sigma, target.x) * v_old
    squared_distance = mean_per_sample(jnp.square(positive - anchor))
    size = mean_per_sample(jnp.square(anchor))
    parts = {
        "loss/policy": policy,
        "loss/drift": distance_to_old(velocities),
        "target/distance": jnp.sqrt(squared_distance / jnp.maximum(size, SMALLEST_NORM)),
    }
    kl = distance_to_reference(velocities)
    return add_reference_term(policy, parts, kl, algorithm.kl_coef)


@sharding.jit
def _move(
    latents: Float[Array, " b *latent"],
    gradient: Float[Array, " b *latent"],
    anchor: Float[Array, " b *latent"],
    step: Float[Array, ""] | float,
) -> Float[Array, " b *latent"]:
    """Moves latents along the direction of a gradient.

    Args:
        latents: The latents.
        gradient: The gradient of the reward at `latents`. A gradient of zero moves nothing.
        anchor: The clean latents whose norm is the unit of the distance.
        step: The distance in this unit; below 0 against the gradient.

    Returns:
        `latents + step |anchor| gradient / (|gradient| + 1e-12)`, with norms over the dimensions of
        each sample.
    """

    def norm(x):
        return jnp.sqrt(jnp.sum(jnp.square(x), tuple(range(1, x.ndim))))

    length = step * norm(anchor) / (norm(gradient) + SMALLEST_NORM)
    return latents + expand_like(length, latents) * gradient
