"""From noise to latents: a scan of solver steps over a `Schedule`. No decoding, no reward, no model inside.

Convention (docs/method.md, section 0): `x_sigma = (1 - sigma) x0 + sigma noise`, velocity `v = noise - x0`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import normal

# (latents [b, ...] float32, time [] in 0..1000) -> velocities [b, ...]
Velocity = Callable[[Float[Array, " b *latent"], Float[Array, ""]], Float[Array, " b *latent"]]


def interpolate(
    x0: Float[Array, " b *latent"], noise: Float[Array, " b *latent"], sigma: Float[Array, " b"]
) -> Float[Array, " b *latent"]:
    """The forward process: `(1 - sigma) x0 + sigma noise`, with one sigma a row."""
    sigma = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
    return (1 - sigma) * x0 + sigma * noise


def trajectory(
    segments: Sequence[tuple[Velocity, Schedule]],
    noise: Float[Array, " b *latent"],
    seeds: UInt32[Array, "b 2"],
    recorded: int,
) -> tuple[Float[Array, " b *latent"], Float[Array, " b states *latent"] | None]:
    """Follows the flow from `noise` at the first sigma to clean latents at sigma 0, float32 whatever a velocity computes in.

    With them, the states before and after each of the first `recorded` stochastic steps, one after another. The steps follow
    each other, so there are `recorded` + 1 states. None if `recorded` is 0: then no state is kept.
    segments: one after another, each a velocity and the steps that it is followed for. Each segment is a scan of its own.
    seeds: one a row; read only where a step adds noise.
    """

    def step(velocity, carry, inputs):
        before, previous, before_previous = carry
        sigma, time, (a, b, c, d, e), weights = inputs
        x0 = before - sigma * velocity(before, time).astype(jnp.float32)
        x = a * before + b * x0 + c * previous + d * before_previous
        x = jax.lax.cond(
            e > 0, lambda: x + e * _solver_noise(seeds, weights, x.shape[1:]), lambda: x
        )
        return (x, x0, previous), before if recorded else None

    carry = (noise, jnp.zeros_like(noise), jnp.zeros_like(noise))
    path = []
    for velocity, grid in segments:
        inputs = (
            grid.sigmas,
            grid.timesteps,
            tuple(jnp.asarray(grid.table).T),
            jnp.asarray(grid.noise_weights),
        )
        carry, states = jax.lax.scan(partial(step, velocity), carry, inputs)
        path.append(states)
    if not recorded:
        return carry[0], None
    first = jnp.argmax(jnp.concatenate([jnp.asarray(grid.table)[:, 4] for _, grid in segments]) > 0)
    states = jax.lax.dynamic_slice_in_dim(
        jnp.concatenate([*path, carry[0][None]]), first, recorded + 1
    )
    return carry[0], jnp.moveaxis(states, 0, 1)


def _solver_noise(
    seeds: UInt32[Array, "b 2"], weights: Float[Array, " draws"], shape: tuple[int, ...]
) -> Float[Array, "b ..."]:
    """The sum of the seeds' numbered draws, each times its weight. A draw of weight 0 is not made."""

    def add(i, total):
        return jax.lax.cond(
            weights[i] > 0,
            lambda: total + weights[i] * normal(seeds, "solver", shape, i),
            lambda: total,
        )

    return jax.lax.fori_loop(0, len(weights), add, jnp.zeros((len(seeds), *shape)))
