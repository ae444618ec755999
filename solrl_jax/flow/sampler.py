"""From noise to latents: a scan of solver steps over a `Grid`. No decoding, no reward, no model inside.

Convention (docs/method.md, section 0): `x_sigma = (1 - sigma) x0 + sigma noise`, velocity `v = noise - x0`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from solrl_jax.flow.grid import Grid
from solrl_jax.numerics.randomness import normal

# (latents [b, ...] float32, time [] in 0..1000) -> velocities [b, ...]
Velocity = Callable[[Float[Array, " b *latent"], Float[Array, ""]], Float[Array, " b *latent"]]


def interpolate(
    x0: Float[Array, " b *latent"], noise: Float[Array, " b *latent"], sigma: Float[Array, " b"]
) -> Float[Array, " b *latent"]:
    """The forward process: `(1 - sigma) x0 + sigma noise`, with one sigma a row."""
    sigma = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
    return (1 - sigma) * x0 + sigma * noise


def sample(
    legs: Sequence[tuple[Velocity, Grid]], noise: Float[Array, " b *latent"], seeds: UInt32[Array, "b 2"]
) -> Float[Array, " b *latent"]:
    """Follows the flow from `noise` at the first sigma to clean latents at sigma 0, float32 whatever a velocity computes in.

    legs: one after another, each a velocity and the steps that it is followed for. Each leg is a scan of its own.
    seeds: one a row; read only where a step adds noise.
    """

    def step(velocity, carry, inputs):
        x, previous, before_previous = carry
        index, sigma, time, (a, b, c, d, e) = inputs
        x0 = x - sigma * velocity(x, time).astype(jnp.float32)
        x = a * x + b * x0 + c * previous + d * before_previous
        x = jax.lax.cond(e > 0, lambda: x + e * normal(seeds, "solver", x.shape[1:], index), lambda: x)
        return (x, x0, previous), None

    carry, taken = (noise, jnp.zeros_like(noise), jnp.zeros_like(noise)), 0
    for velocity, grid in legs:
        inputs = (taken + jnp.arange(grid.steps), grid.sigmas, grid.times, tuple(jnp.asarray(grid.table).T))
        carry, _ = jax.lax.scan(partial(step, velocity), carry, inputs)
        taken += grid.steps
    return carry[0]
