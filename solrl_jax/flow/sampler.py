"""From noise to latents: a scan of one solver step over a table. No decoding, no reward, no model inside.

Convention (spec, section 0): `x_sigma = (1 - sigma) x0 + sigma noise`, velocity `v = noise - x0`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from solrl_jax.numerics.randomness import stream

# (latents [b, ...] float32, time [] as the network wants it) -> velocities [b, ...]
Velocity = Callable[[Float[Array, " b *latent"], Float[Array, ""]], Float[Array, " b *latent"]]


def interpolate(x0: Array, noise: Array, sigma: Array) -> Array:
    """`(1 - sigma) x0 + sigma noise`; sigma [b] broadcasts over the rest."""
    sigma = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
    return (1 - sigma) * x0 + sigma * noise


def sample(
    velocity: Velocity,
    noise: Float[Array, " b *latent"],
    sigmas: Float[Array, " steps"],
    times: Float[Array, " steps"],
    table: Float[Array, "steps 5"],
    seeds: UInt32[Array, "b 2"],
    first: tuple[Velocity, int] | None = None,
) -> Float[Array, " b *latent"]:
    """Follows the flow from `noise` at sigmas[0] to latents at 0; float32 throughout, whatever `velocity` computes in.

    sigmas: where each step starts; times: what the network is told there; table: `solver_table`; seeds: one a row, read
    only where a step adds noise. first: another velocity, and in how many steps, the first ones, it takes that one's place.
    """

    def step(velocity, carry, inputs):
        x, (previous, before) = carry
        index, sigma, time, (a, b, c, d, e) = inputs
        x0 = x - sigma * velocity(x, time).astype(jnp.float32)
        x = a * x + b * x0 + c * previous + d * before
        x = jax.lax.cond(e > 0, lambda: x + e * _step_noise(seeds, index, x.shape[1:]), lambda: x)
        return (x, (x0, previous)), None

    indices, none = jnp.arange(len(sigmas)), jnp.zeros_like(noise)
    carry, inputs, taken = (noise, (none, none)), (indices, sigmas, times, tuple(table.T)), 0
    if first is not None:  # a scan of its own, so that no step branches
        earlier, taken = first
        carry, _ = jax.lax.scan(partial(step, earlier), carry, jax.tree.map(lambda x: x[:taken], inputs))
    (x, _), _ = jax.lax.scan(partial(step, velocity), carry, jax.tree.map(lambda x: x[taken:], inputs))
    return x


def _step_noise(seeds: Array, index: Array, shape: tuple[int, ...]) -> Array:
    draw = lambda seed: jax.random.normal(
        jax.random.fold_in(stream(jax.random.wrap_key_data(seed), "solver"), index), shape, jnp.float32
    )
    return jax.vmap(draw)(seeds)
