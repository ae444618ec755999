"""`Schedule`: the sigmas that a sampler visits, with the solver that steps between them, as
arrays.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.config.schema import Rollout
from solrl_jax.diffusion.sigmas import Mu, Sigmas, make_sigmas
from solrl_jax.diffusion.solver import NOISE, Table, overlap, shared_noise, solver_table

Timesteps = Float[np.ndarray, " steps"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The sigmas, the solver coefficients and the guidance of a sampling run.

    A schedule is a pytree and an argument of compiled programs. A program depends on the number of
    steps and of draws and on `guided`, not on the values of the arrays. All arrays are float32.

    Attributes:
        sigmas: The sigma at which each step starts, in (0, 1], decreasing. The final 0 is not among
            them.
        timesteps: The timestep that the network is given at each step, in 0 to 1000.
        table: The coefficients (a, b, c, d, e) of the solver at each step, in `x_next = a x + b
            x0[i] + c x0[i - 1] + d x0[i - 2] + e noise`, where x0[i] is the prediction `x - sigma
            v` at step i. Column 4, e, is the standard deviation of the noise that a step adds; 0
            for a deterministic step.
        noise_weights: One row per step and one column per draw. The noise of a step is the sum of
            the standard normal draws 0, 1, ... of a seed, with the row as weights: column j is the
            weight of draw j. A row has norm 1; it may be zero for a step without noise. Usually
            step i uses draw i alone. A coarse schedule combines the draws of the full one, so that
            one seed gives both the same noise.
        embedded_guidance: The guidance scale given as an input to networks that embed it (FLUX.1),
            a scalar. Other networks ignore it.
        guidance_scale: The scale of classifier-free guidance (arXiv 2207.12598), a scalar. Ignored
            unless `guided`.
        guided: Whether classifier-free guidance is applied, so that each step evaluates the network
            twice: as in diffusers, for a `guidance_scale` above 1. Static under jit.
    """

    sigmas: Float[Array | np.ndarray, " steps"]
    timesteps: Float[Array | np.ndarray, " steps"]
    table: Float[Array | np.ndarray, "steps 5"]
    noise_weights: Float[Array | np.ndarray, "steps draws"]
    embedded_guidance: Float[Array | np.ndarray, ""] | np.float32
    guidance_scale: Float[Array | np.ndarray, ""] | np.float32
    guided: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_config(
        cls,
        rollout: Rollout,
        steps: int,
        tokens: int,
        embedded_guidance: bool,
        noise_start: int | None = 0,
        mu: Mu | None = None,
        shift_terminal: float | None = None,
    ) -> "Schedule":
        """Builds the schedule that a configuration asks for, with any number of steps.

        The full schedule is that with `rollout.num_steps` steps. One with fewer steps adds the same
        noise between the same sigmas for the same seed. One with more steps draws other noise: step
        i has draw i.

        Args:
            rollout: The section `rollout` of the configuration: `schedule` and `shift` give the
                sigmas, `num_steps` the full schedule, `solver` the coefficients, `noise_level` and
                `sde_window_size` the noise, and `guidance_scale` and `true_cfg_scale` the guidance.
            steps: Number of solver steps, at least 1.
            tokens: Number of image tokens of one latent, from which FLUX derives its shift.
            embedded_guidance: Whether the network takes its guidance scale as an input.
                `rollout.guidance_scale` is then that input, and classifier-free guidance is
                `rollout.true_cfg_scale`. Otherwise `rollout.guidance_scale` is classifier-free
                guidance, and `rollout.true_cfg_scale` has no effect.
            noise_start: The first step of the full schedule, counted from 0, that adds noise if
                `rollout.noise_level` is above 0. The noisy steps are the `rollout.sde_window_size`
                steps from there on, or all steps from there on without a window size. If they cover
                only a share of a coarser step, that step has the noise level times the square root
                of the share. If `steps` exceeds `rollout.num_steps`, the first step and the window
                are counted in steps of the returned schedule instead. The last step never adds
                noise. None: no step does.
            mu: (number of steps, number of tokens) -> the logarithm of the shift of the "flux"
                schedule. None uses the formula of FLUX.1 (`sigmas.flux_mu`). Other schedules do not
                call it.
            shift_terminal: The lowest sigma before the final 0 of the "flux" schedule, to which the
                sigmas above it are stretched linearly. None and 0: they are not stretched.

        Returns:
            The schedule with NumPy arrays on the host.

        Raises:
            ValueError: If `rollout.schedule` or `rollout.solver` has no such name, or if the solver
                is deterministic but a step is to add noise.
        """

        def sigmas_of(count: int) -> Sigmas:
            return make_sigmas(rollout.schedule, count, rollout.shift, tokens, mu, shift_terminal)

        sigmas = sigmas_of(steps)
        full = sigmas if steps > rollout.num_steps else sigmas_of(rollout.num_steps)
        noisy = np.zeros(len(full) - 1)
        if noise_start is not None:
            noisy[noise_start : noise_start + (rollout.sde_window_size or len(noisy))] = 1.0
        # The square of a coarse step's noise level is proportional to the share of the step that
        # the full schedule makes noisy.
        noise_levels = rollout.noise_level * np.sqrt(
            overlap(sigmas, full) @ noisy / -np.diff(sigmas)
        )
        full_table = solver_table(rollout.solver, full, rollout.noise_level * noisy)
        full_std = full_table[:, NOISE].astype(np.float64)
        scale = rollout.true_cfg_scale if embedded_guidance else rollout.guidance_scale
        schedule = cls.from_sigmas(
            sigmas,
            solver_table(rollout.solver, sigmas, noise_levels),
            embedded_guidance=rollout.guidance_scale,
            guidance_scale=scale,
        )
        return dataclasses.replace(schedule, noise_weights=shared_noise(sigmas, full, full_std))

    @classmethod
    def from_sigmas(
        cls,
        sigmas: Sigmas,
        table: Table,
        timesteps: Timesteps | None = None,
        *,
        embedded_guidance: float,
        guidance_scale: float,
    ) -> "Schedule":
        """Builds a schedule from its sigmas and solver coefficients. Nothing is checked.

        `noise_weights` is the identity: step i uses the noise draw number i of a seed, if it adds
        noise.

        Args:
            sigmas: The `steps` + 1 noise levels, decreasing, the last one 0.
            table: The solver coefficients on these sigmas, [steps, 5].
            timesteps: The timestep that the network is given at each step, in 0 to 1000. None means
                1000 times the sigma.
            embedded_guidance: The guidance scale given as an input to networks that embed it.
            guidance_scale: The scale of classifier-free guidance. At most 1 means no guidance.

        Returns:
            The schedule with NumPy arrays, float32. `table` is taken as it is.
        """
        starts = sigmas[:-1].astype(np.float32)
        return cls(
            sigmas=starts,
            timesteps=1000 * starts if timesteps is None else timesteps.astype(np.float32),
            table=table,
            noise_weights=np.eye(len(starts), dtype=np.float32),
            embedded_guidance=np.float32(embedded_guidance),
            guidance_scale=np.float32(guidance_scale),
            guided=guidance_scale > 1.0,
        )

    @property
    def steps(self) -> int:
        """The number of solver steps. The sigmas with the final 0 are one more."""
        return len(self.sigmas)

    @property
    def noise_std(self) -> Float[Array | np.ndarray, " steps"]:
        """The standard deviation of the noise that each step adds; 0 for a deterministic step."""
        return self.table[:, NOISE]

    def nearest_step(self, sigma: float) -> Array:
        """Returns the index, int32, of the step that starts nearest to a noise level; the first of
        several that are equally near.

        Args:
            sigma: The noise level, in (0, 1].
        """
        return jnp.argmin(jnp.abs(jnp.asarray(self.sigmas) - sigma))

    def locate_query_steps(self, last: int | None, sigma: float) -> tuple[int | Array, int]:
        """Returns the consecutive steps among which objectives on reward gradients draw one per
        sample.

        Args:
            last: The number of last steps that are drawn from, 1 to `steps` (not checked). None:
                there is one step, the one that starts nearest to `sigma`.
            sigma: The noise level in (0, 1]. Not read unless `last` is None.

        Returns:
            The index of the first of these steps (an int, or an int32 scalar if `last` is None),
            and their number.
        """
        return (self.nearest_step(sigma), 1) if last is None else (self.steps - last, last)

    def with_sigmas(self, sigmas: Sigmas, table: Table) -> "Schedule":
        """Returns a schedule with other sigmas and coefficients, and the guidance of this one.

        Its timesteps are 1000 times the sigmas, and its `noise_weights` the identity: step i uses
        draw i. The sigmas, timesteps and `noise_weights` are float32 NumPy arrays; `table` is taken
        as it is.

        Args:
            sigmas: The noise levels, decreasing, the last one 0. There may be more or fewer than in
                this schedule.
            table: The solver coefficients on these sigmas, [number of sigmas - 1, 5].
        """
        starts = sigmas[:-1].astype(np.float32)
        return dataclasses.replace(
            self,
            sigmas=starts,
            timesteps=1000 * starts,
            table=table,
            noise_weights=np.eye(len(starts), dtype=np.float32),
        )

    def slice_steps(self, start: int, stop: int | None = None) -> "Schedule":
        """Returns a new schedule of some of the steps, with their noise weights and the guidance of
        this one.

        The rows of `table` are not changed. With a multistep solver, the first rows of the slice
        may still use predictions of steps before `start`.

        Args:
            start: The first step, counted from 0; as in a slice of a list, a negative number counts
                from the end.
            stop: The step after the last one, counted as `start` is. None: up to the end.
        """
        steps = slice(start, stop)
        return dataclasses.replace(
            self,
            sigmas=self.sigmas[steps],
            timesteps=self.timesteps[steps],
            table=self.table[steps],
            noise_weights=self.noise_weights[steps],
        )
