"""`rollout.explore.sigmas=first`: explore on the full schedule's first sigmas, then in long fitted steps.

A schedule of its own with fewer steps leaves the full schedule at once. What a sample will show is decided at high noise. So
half of the steps are the full schedule's first ones, and the others divide what is left of it. The solver's coefficients of
the long steps are fitted once, on the base, by least squares (a solver fitted to a network: arXiv 2403.01329).
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from solrl_jax.config.schema import Explore
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.solver import Table
from solrl_jax.rl.explore.option import Calibration, ExplorationOption

Latents = Float[np.ndarray, " b *latent"]
STAY = (1.0, 0.0, 0.0, 0.0, 0.0)  # the row of a step that ends where it starts
PREDICT = (0.0, 1.0, 0.0, 0.0, 0.0)  # the row of a step that ends on the data prediction
DIGITS = (
    6  # of a fitted coefficient: the last bits of a sum on the host must not make two runs of one
)


class Preview(ExplorationOption):
    """Replaces the exploring grid."""

    def active(self, explore: Explore) -> bool:
        return explore.sigmas == "first"

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        return explore.num_steps < full_steps

    def schedule(self, explore: Explore, calibration: Calibration, grid: Schedule) -> Schedule:
        full = calibration.schedule
        if grid.steps >= full.steps:
            return full

        def one_step(x: Latents | None, sigma: float, row: tuple[float, ...]) -> Latents:
            return calibration.generate(
                full.with_sigmas(np.array([sigma, 0.0]), np.array([row], np.float32)), x
            )

        sigmas = np.append(full.sigmas, np.float32(0))
        chosen = first_sigmas(sigmas, grid.steps)

        def predict(x, sigma):
            return one_step(x, sigma, PREDICT)

        return full.with_sigmas(
            chosen,
            fitted_table(
                predict, one_step(None, 1.0, STAY), sigmas, np.asarray(full.table), chosen
            ),
        )


def first_sigmas(
    full: Float[np.ndarray, " full_plus_one"], steps: int
) -> Float[np.ndarray, " steps_plus_one"]:
    """Half of `steps` are the first ones of `full`; the others divide the rest, rounded to the nearest sigmas of `full`."""
    last = len(full) - 1
    if steps >= last:
        return full
    own = steps // 2
    long = np.rint(np.arange(steps - own + 1) * (last - own) / (steps - own)).astype(int)
    return full[[*range(own), *(own + long)]]


def fitted_table(
    predict: Callable[[Latents, float], Latents],
    noise: Latents,
    full: Float[np.ndarray, " full_plus_one"],
    table: Table,
    sigmas: Float[np.ndarray, " preview_steps_plus_one"],
) -> Float[np.ndarray, "preview_steps 5"]:
    """The coefficients [steps, 5] float32 with which samples on `sigmas` come nearest to samples on the `full` schedule.

    predict: latents and their sigma to data predictions of the base. noise: where the samples start. full, table: the full
    schedule and its solver's coefficients, without noise. sigmas: some of `full`, its first and last among them.

    Steps that both schedules take keep their row. Each longer step is fitted, after the steps before it, to where the full
    schedule has arrived by then:

        min sum (a x + b x0[i] + c x0[i - 1] + d x0[i - 2] - x_full(sigma_next))^2

    A row has four unknowns and every value of every latent is an equation, so a few samples suffice.
    """
    x = noise
    last = (np.zeros_like(noise),) * 3
    there = {float(full[0]): noise}
    predicted = []
    for (sigma, after), row in zip(itertools.pairwise(full), table, strict=True):
        predicted.append(predict(x, float(sigma)))
        last = (predicted[-1], *last[:2])
        there[float(after)] = x = _step(row, x, last)
    rows = []
    shared = list(
        itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sigmas, full, strict=False))
    )
    x = noise
    last = (np.zeros_like(noise),) * 3
    for i, (sigma, after) in enumerate(itertools.pairwise(sigmas)):
        last = (predicted[i] if i < len(shared) else predict(x, float(sigma)), *last[:2])
        row = table[i] if i + 1 < len(shared) else _fit((x, *last), there[float(after)])
        x = _step(row, x, last)
        rows.append(row)
    return np.array(rows, np.float32)


def _step(row: Float[np.ndarray, " 5"], x: Latents, last: Sequence[Latents]) -> Latents:
    """The latents after a step without noise; last: the last three data predictions, the newest first."""
    return row[0] * x + row[1] * last[0] + row[2] * last[1] + row[3] * last[2]


def _fit(terms: Sequence[Latents], target: Latents) -> Float[np.ndarray, " 5"]:
    """The row whose combination of `terms` is nearest to `target`; terms that are zero get no weight."""
    terms = [term.astype(np.float64).reshape(-1) for term in terms]
    products = np.array([[a @ b for b in terms] for a in terms])
    weights = np.linalg.pinv(products, rcond=1e-12, hermitian=True) @ [
        term @ target.reshape(-1) for term in terms
    ]
    return np.array([*weights.round(DIGITS), 0.0], np.float32)
