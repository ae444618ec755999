"""The forward-process policy loss of DiffusionNFT (arXiv 2509.16117, eq. 5 and section 3.3; spec, section 4).

A policy objective is one function: clean latents, predictions and weights in, a scalar and metrics out.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SMALLEST_DENOMINATOR = 1e-5

Latents = Float[Array, " b *latent"]


def nft_loss(
    v: Latents, v_old: Latents, v_ref: Latents, x: Latents, x0: Latents, sigma: Float[Array, " b"], q: Float[Array, " b"],
    *, beta: float, kl_weight: float, advantage_clip: float,
) -> tuple[Float[Array, " b"], dict[str, Float[Array, " b"]]]:  # fmt: skip
    """Pulls the policy towards good samples and away from bad ones, mirrored about the old policy. One loss a row.

        v_pos = beta v + (1 - beta) v_old         v_neg = (1 + beta) v_old - beta v
        l(u)  = mean((x - sigma u - x0)^2) / max(mean|x - sigma u - x0|, 1e-5)
        loss  = clip (q l(v_pos) + (1 - q) l(v_neg)) / beta + kl_weight mean((v - v_ref)^2)

    v, v_old, v_ref: velocities of the trained policy, the sampling one and the base at `x = (1 - sigma) x0 + sigma noise`;
    q in [0, 1]: optimality; `beta` is the paper's mixing weight, `advantage_clip` its advantage scale. The denominator of l
    has no gradient; it weights a sample by how far off it is, in place of a hand-made weight on sigma.
    """
    v_old, v_ref = jax.lax.stop_gradient(v_old), jax.lax.stop_gradient(v_ref)
    positive = _self_weighted(x, sigma, beta * v + (1 - beta) * v_old, x0)
    negative = _self_weighted(x, sigma, (1 + beta) * v_old - beta * v, x0)
    policy = advantage_clip * (q * positive + (1 - q) * negative) / beta
    kl = _mean(jnp.square(v - v_ref))
    return policy + kl_weight * kl, {"loss/policy": policy, "loss/kl": kl, "loss/drift": _mean(jnp.square(v - v_old))}


def _self_weighted(x: Array, sigma: Array, velocity: Array, x0: Array) -> Float[Array, " b"]:
    error = x - sigma.reshape(-1, *(1,) * (x.ndim - 1)) * velocity - x0
    weight = jax.lax.stop_gradient(jnp.maximum(_mean(jnp.abs(error)), SMALLEST_DENOMINATOR))
    return _mean(jnp.square(error)) / weight


def _mean(x: Latents) -> Float[Array, " b"]:
    """The mean over everything but rows."""
    return x.mean(tuple(range(1, x.ndim)))
