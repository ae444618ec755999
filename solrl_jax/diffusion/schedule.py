"""`Schedule`: the noise levels that a sampler visits and the solver that goes from one to the next, as arrays."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.config.schema import Rollout
from solrl_jax.diffusion.sigmas import Mu, Sigmas, make_sigmas
from solrl_jax.diffusion.solver import Table, overlap, shared_noise, solver_table

Timesteps = Float[np.ndarray, " steps"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule and a solver. A compiled program depends on the number of steps and on `guided`, not on the values."""

    sigmas: Float[Array | np.ndarray, " steps"]  # where each step starts, in (0, 1], decreasing
    timesteps: Float[
        Array | np.ndarray, " steps"
    ]  # the timestep that the network is given there, in 0..1000
    table: Float[Array | np.ndarray, "steps 5"]  # the solver's coefficients (`diffusion.solver`)
    noise_weights: Float[
        Array | np.ndarray, "steps draws"
    ]  # weights of a seed's draws in a step's noise (`solver.shared_noise`)
    embedded_guidance: (
        Float[Array | np.ndarray, ""] | np.float32
    )  # given to networks with embedded guidance (FLUX.1)
    guidance_scale: (
        Float[Array | np.ndarray, ""] | np.float32
    )  # of classifier-free guidance (arXiv 2207.12598)
    # whether there is classifier-free guidance: then a step evaluates the network twice
    guided: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_config(
        cls,
        rollout: Rollout,
        steps: int,
        tokens: int,
        embedded_guidance: bool,
        start: int | None = 0,
        mu: Mu | None = None,
    ) -> "Schedule":
        """The grid of `steps` solver steps that a configuration asks for.

        tokens: image tokens of one latent, from which FLUX derives its shift, by `mu` (None: FLUX.1's). embedded_guidance: the
        network is given `rollout.guidance_scale`; classifier-free guidance is then `true_guidance`. start: of the full schedule's
        `rollout.num_sde_steps` steps, the first; None: no step adds noise. Fewer steps add the noise of the full schedule.
        """

        def schedule(steps):
            return make_sigmas(rollout.schedule, steps, rollout.shift, tokens, mu)

        sigmas = schedule(steps)
        full = sigmas if steps > rollout.num_steps else schedule(rollout.num_steps)
        noisy = np.zeros(len(full) - 1)
        if start is not None:
            noisy[start : start + (rollout.sde_window_size or len(noisy))] = 1.0
        # a step within which the full schedule adds noise for a while alone adds as much less
        levels = rollout.noise_level * np.sqrt(overlap(sigmas, full) @ noisy / -np.diff(sigmas))
        std = solver_table(rollout.solver, full, rollout.noise_level * noisy)[:, 4].astype(
            np.float64
        )
        scale = rollout.true_cfg_scale if embedded_guidance else rollout.guidance_scale
        table = solver_table(rollout.solver, sigmas, levels)
        grid = cls.from_sigmas(
            sigmas,
            table,
            embedded_guidance=rollout.guidance_scale,
            guidance_scale=scale,
            guided=scale != 1.0,
        )
        return dataclasses.replace(grid, noise_weights=shared_noise(sigmas, full, std))

    @classmethod
    def from_sigmas(
        cls,
        sigmas: Sigmas,
        table: Table,
        timesteps: Timesteps | None = None,
        *,
        embedded_guidance: float,
        guidance_scale: float,
        guided: bool,
    ) -> "Schedule":
        """A grid on `sigmas`, of which the last is 0; a draw a step. timesteps: 1000 `sigmas` if None."""
        starts = sigmas[:-1].astype(np.float32)
        timesteps = 1000 * starts if timesteps is None else timesteps.astype(np.float32)
        return cls(
            starts,
            timesteps,
            table,
            np.eye(len(starts), dtype=np.float32),
            np.float32(embedded_guidance),
            np.float32(guidance_scale),
            guided,
        )

    @property
    def steps(self) -> int:
        return len(self.sigmas)

    def with_sigmas(self, sigmas: Sigmas, table: Table) -> "Schedule":
        """The same guidance on other sigmas, of which the last is 0."""
        starts = sigmas[:-1].astype(np.float32)
        draws = np.eye(len(starts), dtype=np.float32)
        return dataclasses.replace(
            self, sigmas=starts, timesteps=1000 * starts, table=table, noise_weights=draws
        )

    def slice_steps(self, start: int, stop: int | None = None) -> "Schedule":
        """The steps from `start` up to `stop`, as a slice counts them."""
        cut = slice(start, stop)
        names = ("sigmas", "timesteps", "table", "noise_weights")
        return dataclasses.replace(self, **{name: getattr(self, name)[cut] for name in names})
