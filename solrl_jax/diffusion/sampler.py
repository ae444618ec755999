"""Integration of the flow from noise to latents: a scan of solver steps over a `Schedule`.

There is no decoding, reward or model in here. The convention is `x_sigma = (1 - sigma) x0 + sigma
noise`, with velocity `v = noise - x0` (docs/method.md, section 0).
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import draw_steps, normal

# (latents [b, ...] float32, timestep [] in 0 to 1000) -> velocities [b, ...]
Velocity = Callable[[Float[Array, " b *latent"], Float[Array, ""]], Float[Array, " b *latent"]]


def interpolate(
    x0: Float[Array, " b *latent"], noise: Float[Array, " b *latent"], sigma: Float[Array, " b"]
) -> Float[Array, " b *latent"]:
    """Computes the forward process, `(1 - sigma) x0 + sigma noise`.

    Args:
        x0: Clean latents, one row per sample.
        noise: Standard normal noise in the shape of `x0`.
        sigma: One noise level in [0, 1] per latent: 0 gives `x0`, 1 gives `noise`.

    Returns:
        The noisy latents, of the shape of `x0` and the dtype to which JAX promotes the arguments.
    """
    sigma = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
    return (1 - sigma) * x0 + sigma * noise


def trajectory(
    segments: Sequence[tuple[Velocity, Schedule]],
    noise: Float[Array, " b *latent"],
    seeds: UInt32[Array, "b 2"],
    recorded_steps: int,
    query_steps: range | None = None,
) -> tuple[
    Float[Array, " b *latent"],
    Float[Array, " b states *latent"] | None,
    Float[Array, " b *latent"],
]:
    """Integrates the flow from noise at the first sigma to clean latents at sigma 0.

    Each step computes `x_next = a x + b x0[i] + c x0[i - 1] + d x0[i - 2] + e noise`, where (a, b,
    c, d, e) is a row of the schedule's table and `x0[i] = x - sigma v` is the prediction at step i.
    Predictions before the first step are zeros; a later segment continues with those of the segment
    before it. The latents are float32, whatever precision a velocity is computed in. For use under
    jit.

    Args:
        segments: Pairs (velocity field, schedule), at least one, whose steps are taken one after
            another. A field maps the latents and the timestep of the schedule (a scalar in 0 to
            1000) to velocities `noise - x0` in the shape of the latents and of any float dtype.
        noise: The latents at the first sigma, float32.
        seeds: One seed per latent, the two words of a key. The noise of a stochastic step is a sum
            of the numbered draws in the stream "solver" of the seed, weighted by the step's row of
            `noise_weights` in its schedule.
        recorded_steps: The number of consecutive steps to record, starting with the first step of
            any segment that adds noise (with step 0 if none does). It must not exceed the number of
            steps from there to the end. If it is above 0, the latents of all steps are kept in
            memory until the end. 0 records nothing. Ignored with `query_steps`.
        query_steps: Consecutive steps, counted from 0 over all segments, one of which is drawn for
            each sample from the stream "query" of its seed (`draw_steps` draws the same one again).
            The state at the start of that step is returned in place of recorded steps. None: no
            step is drawn.

    Returns:
        A tuple: the clean latents, float32, in the shape of `noise`; the recorded latents, float32;
        and the latents after the first segment, float32. The recorded latents are those before the
        first recorded step and after each recorded step. With `query_steps`, they are instead the
        latents before the drawn step and the clean latents that are predicted there. The recorded
        latents are None if `recorded_steps` is 0 and `query_steps` is None. Velocities that are not
        finite make the latents of their sample non-finite.
    """

    drawn_steps = None
    if query_steps is not None:
        drawn_steps = draw_steps(seeds, query_steps.start, len(query_steps))
        drawn_steps = drawn_steps.reshape(-1, *(1,) * (noise.ndim - 1))

    def step(velocity, carry, inputs):
        (x, previous_x0, second_previous_x0), query_states = carry
        number, sigma, timestep, (a, b, c, d, e), weights = inputs
        x0 = x - sigma * velocity(x, timestep).astype(jnp.float32)
        next_x = a * x + b * x0 + c * previous_x0 + d * second_previous_x0
        next_x = jax.lax.cond(
            e > 0,
            lambda: next_x + e * _solver_noise(seeds, weights, next_x.shape[1:]),
            lambda: next_x,
        )
        if query_states is not None:
            query_states = tuple(
                jnp.where(number == drawn_steps, new, old)
                for new, old in zip((x, x0), query_states, strict=True)
            )
        return ((next_x, x0, previous_x0), query_states), x if recorded_steps else None

    zeros = jnp.zeros_like(noise)
    carry = ((noise, zeros, zeros), None if drawn_steps is None else (zeros, zeros))
    path = []
    ends = []
    first_step = 0
    for velocity, schedule in segments:
        inputs = (
            first_step + jnp.arange(schedule.steps),
            schedule.sigmas,
            schedule.timesteps,
            tuple(jnp.asarray(schedule.table).T),
            jnp.asarray(schedule.noise_weights),
        )
        carry, states = jax.lax.scan(partial(step, velocity), carry, inputs)
        path.append(states)
        ends.append(carry[0][0])
        first_step += schedule.steps
    latents = ends[-1]
    query_states = carry[1]
    if query_states is not None:
        return latents, jnp.stack(query_states, axis=1), ends[0]
    if not recorded_steps:
        return latents, None, ends[0]
    std = jnp.concatenate([jnp.asarray(schedule.noise_std) for _, schedule in segments])
    first = jnp.argmax(std > 0)
    states = jnp.concatenate([*path, latents[None]])
    states = jax.lax.dynamic_slice_in_dim(states, first, recorded_steps + 1)
    return latents, jnp.moveaxis(states, 0, 1), ends[0]


def _solver_noise(
    seeds: UInt32[Array, "b 2"], weights: Float[Array, " draws"], shape: tuple[int, ...]
) -> Float[Array, "b ..."]:
    """Computes the noise of one solver step: for each seed, a weighted sum of standard normal
    draws.

    Args:
        seeds: One seed per sample. Each has numbered draws in its stream "solver".
        weights: The weights of draws 0, 1, and so on, each at least 0. Draws of weight 0 are not
            computed.
        shape: The shape of one sample, without the batch axis.

    Returns:
        The noise, float32 [b, *shape].
    """

    def add(i, total):
        return jax.lax.cond(
            weights[i] > 0,
            lambda: total + weights[i] * normal(seeds, "solver", shape, i),
            lambda: total,
        )

    return jax.lax.fori_loop(0, len(weights), add, jnp.zeros((len(seeds), *shape)))
