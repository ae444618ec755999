"""`rollout.explore.sigmas=first`: explores on the first sigmas of the full schedule, and then takes
long fitted steps.

A schedule with fewer steps normally leaves the full schedule at once, although the content of a
sample is decided at high noise. With this option, half of the steps are the first ones of the full
schedule, and the others divide the rest of it. The solver coefficients of the long steps are fitted
once, on the base, by least squares (a solver fitted to a network: arXiv 2403.01329).
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
# Rows of a solver table: a step that returns its input, and one that returns the data prediction.
STAY = (1.0, 0.0, 0.0, 0.0, 0.0)
PREDICT = (0.0, 1.0, 0.0, 0.0, 0.0)
# Fitted coefficients are rounded to this many decimals, so that the last bits of sums on the host
# do not make two runs differ.
DIGITS = 6


class Preview(ExplorationOption):
    """Replaces the schedule of exploration by the first sigmas of the full one and long fitted
    steps.

    The first n / 2 of n exploration steps (rounded down) are the first steps of the full schedule.
    The others divide the rest of it, and their solver coefficients are fitted once to samples of
    the base model. It applies to all formats.
    """

    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration `explore` has "first" as `sigmas`."""
        return explore.sigmas == "first"

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Returns whether there are fewer exploration steps than regeneration steps: only then are
        solver coefficients fitted.

        Args:
            explore: The section `rollout.explore` of the configuration. `num_steps` is the number
                of exploration steps.
            full_steps: The number of steps of the regeneration.
            quantizes: Whether the exploration format quantizes weights, which plays no part here.
        """
        return explore.num_steps < full_steps

    def schedule(self, explore: Explore, calibration: Calibration, schedule: Schedule) -> Schedule:
        """Returns the schedule with the first sigmas of the full one and then long steps, whose
        solver coefficients are fitted to follow samples of the base on the full schedule.

        This encodes the calibration prompts and samples from the base, unless the full schedule
        itself is returned. Every process of a run must call it.

        Args:
            explore: The section `rollout.explore` of the configuration, which plays no part here.
            calibration: The base policy, its full schedule, and the prompts and seeds of the
                samples that this method generates and fits the steps to.
            schedule: The schedule to replace. Only its number of steps matters.

        Returns:
            The schedule, with the guidance of the full one and without noise (with this option, the
            configuration allows none). If `schedule` has at least as many steps as the full one,
            the full schedule itself.

        Raises:
            numpy.linalg.LinAlgError: If the base predicts values that are not finite.
            InputError, OSError, RunError: If the prompts of the calibration cannot be encoded.
        """
        full = calibration.schedule
        if schedule.steps >= full.steps:
            return full
        prompt_batch = calibration.encode_prompts()

        def one_step(x: Latents | None, sigma: float, row: tuple[float, ...]) -> Latents:
            step = full.with_sigmas(np.array([sigma, 0.0]), np.array([row], np.float32))
            return calibration.generate(step, prompt_batch, x)

        def predict(x: Latents, sigma: float) -> Latents:
            return one_step(x, sigma, PREDICT)

        full_sigmas = np.append(full.sigmas, np.float32(0))
        sigmas = first_sigmas(full_sigmas, schedule.steps)
        noise = one_step(None, 1.0, STAY)
        table = fitted_table(predict, noise, full_sigmas, np.asarray(full.table), sigmas)
        return full.with_sigmas(sigmas, table)


def first_sigmas(
    full: Float[np.ndarray, " full_plus_one"], steps: int
) -> Float[np.ndarray, " steps_plus_one"]:
    """Selects sigmas of a full schedule: half of them from its start, the others evenly spaced
    among the indices of the rest, rounded to the nearest index.

    Args:
        full: The sigmas of the full schedule, including the final 0.
        steps: The number of steps of the selection, at least 1. The first `steps // 2` are the
            first steps of the full schedule.

    Returns:
        The `steps` + 1 sigmas, including the first of `full` and the final 0. `full` itself if it
        has at most `steps` steps.
    """
    last = len(full) - 1
    if steps >= last:
        return full
    num_first = steps // 2
    num_long = steps - num_first
    offsets = np.rint(np.arange(num_long + 1) * (last - num_first) / num_long).astype(int)
    return full[[*range(num_first), *(num_first + offsets)]]


def fitted_table(
    predict: Callable[[Latents, float], Latents],
    noise: Latents,
    full: Float[np.ndarray, " full_plus_one"],
    table: Table,
    sigmas: Float[np.ndarray, " preview_steps_plus_one"],
) -> Float[np.ndarray, "preview_steps 5"]:
    """Fits solver coefficients with which samples on few sigmas follow samples on all of them.

    The first steps keep their coefficients while they start and end at the same sigmas on both
    schedules. Each later step is fitted, after the steps before it, to the latents that the full
    schedule reaches at the same sigma:

        min sum (a x + b x0[i] + c x0[i - 1] + d x0[i - 2] - x_full(sigma_next))^2

    There are four unknowns, and every value of every latent is an equation, so a few samples
    suffice.

    Args:
        predict: (latents, their sigma) -> data predictions of the base, the clean latents x0. It is
            called once per step of the full schedule, and once per step on `sigmas`, except for the
            leading steps that start at the same sigmas on both, which reuse the predictions.
        noise: The latents that all samples start from, at the first sigma, [samples, ...].
        full: The sigmas of the full schedule, including the final 0.
        table: The coefficients of the solver on the full schedule, without noise.
        sigmas: Some of `full`, including its first and its last.

    Returns:
        The coefficients (a, b, c, d, 0) of each step, float32; fitted ones are rounded to six
        decimals.

    Raises:
        KeyError: If a fitted step ends at a sigma that is not in `full`.
        numpy.linalg.LinAlgError: If latents or predictions that a fitted step combines or is fitted
            to are not finite.
    """
    x = noise
    history = (np.zeros_like(noise),) * 3  # the last three data predictions, the newest first
    latents_at = {float(full[0]): noise}
    predictions = []
    for (sigma, next_sigma), row in zip(itertools.pairwise(full), table, strict=True):
        predictions.append(predict(x, float(sigma)))
        history = (predictions[-1], *history[:2])
        x = _step(row, x, history)
        latents_at[float(next_sigma)] = x
    num_shared = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(sigmas, full, strict=False)
        )
    )
    rows = []
    x = noise
    history = (np.zeros_like(noise),) * 3
    for i, (sigma, next_sigma) in enumerate(itertools.pairwise(sigmas)):
        # In shared steps, the latents and predictions are those of the full schedule.
        prediction = predictions[i] if i < num_shared else predict(x, float(sigma))
        history = (prediction, *history[:2])
        row = table[i]
        if i + 1 >= num_shared:
            row = _fit((x, *history), latents_at[float(next_sigma)])
        x = _step(row, x, history)
        rows.append(row)
    return np.array(rows, np.float32)


def _step(row: Float[np.ndarray, " 5"], x: Latents, history: Sequence[Latents]) -> Latents:
    """Takes one solver step without noise.

    Args:
        row: The coefficients (a, b, c, d, e) of the step; e is not read.
        x: The latents before the step.
        history: The last three data predictions, the newest first; zeros where there are fewer.

    Returns:
        The latents after the step: `a x + b history[0] + c history[1] + d history[2]`.
    """
    return row[0] * x + row[1] * history[0] + row[2] * history[1] + row[3] * history[2]


def _fit(terms: Sequence[Latents], target: Latents) -> Float[np.ndarray, " 5"]:
    """Fits the linear combination of some latents that is nearest to others (least squares).

    Args:
        terms: The four latents to combine, of one shape: the state and the last three data
            predictions, the newest first.
        target: The latents to approximate, in the same shape.

    Returns:
        The weights of the four terms, rounded to six decimals, and 0 for the noise. If the best
        weights are not unique, those of smallest norm; terms that are zero get weight 0.

    Raises:
        numpy.linalg.LinAlgError: If a term or the target is not finite.
    """
    terms = [term.astype(np.float64).reshape(-1) for term in terms]
    gram = np.array([[a @ b for b in terms] for a in terms])
    correlations = [term @ target.reshape(-1) for term in terms]
    weights = np.linalg.pinv(gram, rcond=1e-12, hermitian=True) @ correlations
    if not np.isfinite(weights).all():
        raise np.linalg.LinAlgError("the latents to approximate are not finite")
    return np.array([*weights.round(DIGITS), 0.0], np.float32)
