"""Solvers as tables: every step of every solver here is one linear combination, whose weights depend on the sigmas alone.

    x_next = a x + b x0_hat + c x0_hat_previous + d noise,      x0_hat = x - sigma v

One row (a, b, c, d) a step, worked out in float64 on the host; the sampler then neither branches nor divides, and one
compiled program serves all solvers. Sources: DDIM, arXiv 2010.02502 (eq. 12, with the noise level of its general form);
DPM-Solver++ 2M, arXiv 2211.01095 (algorithm 2), midpoint form, in `lambda = ln((1 - sigma) / sigma)`.
"""

import itertools

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "steps 4"]
SOLVERS = ("euler", "dpm1", "dpm2", "ddim")
PREVIEW_EXTRAPOLATION = 0.4  # of 0, 0.4, 0.6, 1 the best on tiny-sana (benchmarks/rank-previews.json)


def solver_table(name: str, sigmas: Float[np.ndarray, "steps_plus_one"], eta: float = 0.0) -> Table:
    """The coefficients [steps, 4] float32 of solver `name` on `sigmas` (decreasing, last 0).

    `euler`, `dpm1` and `ddim` with eta 0 are one and the same step for a linear flow (exponential integrators of first order
    are exact where the path is straight); they are all named because users of the recipes look for them. eta: only for
    `ddim`, 0 (deterministic) to 1 (as much fresh noise as the forward process lost).
    """
    if name not in SOLVERS:
        raise ValueError(f"rollout.solver={name!r}: accepted are {', '.join(SOLVERS)}")
    if eta and name != "ddim":
        raise ValueError(f"rollout.eta={eta}: only the ddim solver takes noise; {name} is deterministic")
    steps = list(itertools.pairwise(sigmas))
    if name == "dpm2":
        rows = [_first_order(*s) if i in (0, len(steps) - 1) else _second_order(sigmas[i - 1], *s) for i, s in enumerate(steps)]
    else:
        rows = [_ddim(*s, eta) for s in steps]
    return np.array(rows, np.float32)


def preview_table(
    name: str, sigmas: Float[np.ndarray, "steps_plus_one"], whole: Float[np.ndarray, "whole_plus_one"], eta: float = 0.0
) -> Table:
    """The coefficients [steps, 4] float32 of solver `name` on `schedule.first_sigmas` of a schedule `whole`.

    In solvers of first order a long step, which stands for several of the whole schedule's, takes its data prediction
    `PREVIEW_EXTRAPOLATION` of the way from its own sigma to where theirs are in the mean, on the line through the last two:

        x0_hat + k (x0_hat - x0_hat_previous),      k = PREVIEW_EXTRAPOLATION (sigma - mean) / (sigma_previous - sigma)

    Predictions change less and less along the path: all of the way would be too far. `dpm2` extrapolates by itself.
    """
    table = solver_table(name, sigmas, eta)
    for i in range(1, len(table) if name != "dpm2" else 0):
        before, sigma, after = sigmas[i - 1 : i + 2]
        stood_for = whole[(whole <= sigma) & (whole >= after)]
        if len(stood_for) > 2:
            k = PREVIEW_EXTRAPOLATION * (sigma - _mean_sigma(stood_for)) / (before - sigma)
            a, b, _, d = _ddim(sigma, after, eta)
            table[i] = a, b * (1 + k), -b * k, d
    return table


def _mean_sigma(sigmas: Float[np.ndarray, "n"]) -> float:
    """Of first-order steps from the first of `sigmas` to the last, each with the weight that its data prediction ends with."""
    weights: list[float] = []
    for sigma, after in itertools.pairwise(sigmas):
        a, b, _, _ = _first_order(sigma, after)
        weights = [*(a * weight for weight in weights), b]
    return float(np.average(sigmas[:-1], weights=weights))


def _first_order(sigma: float, after: float) -> tuple[float, float, float, float]:
    """`x' = (s'/s) x + (1 - s'/s) x0_hat`: Euler's step, DPM-Solver's first and DDIM's are this."""
    ratio = after / sigma
    return ratio, 1 - ratio, 0.0, 0.0


def _ddim(sigma: float, after: float, eta: float) -> tuple[float, float, float, float]:
    """DDIM with `x' = alpha' x0_hat + sqrt(s'^2 - d^2) eps_hat + d noise`; d^2 = eta^2 times the posterior's variance.

    For a process with `x = alpha x0 + s eps`, alpha = 1 - s, that variance is `s'^2 / s^2 (s^2 - (alpha / alpha')^2 s'^2)`.
    """
    alpha, alpha_after = 1 - sigma, 1 - after
    forward = sigma**2 - (alpha / alpha_after) ** 2 * after**2
    d = eta * after / sigma * np.sqrt(forward)
    rest = np.sqrt(after**2 - d**2)
    return rest / sigma, alpha_after - rest * alpha / sigma, 0.0, d


def _second_order(before: float, sigma: float, after: float) -> tuple[float, float, float, float]:
    """DPM-Solver++ 2M: the first-order step towards a linear extrapolation of the two last data predictions."""
    # at sigma = 1, lambda is minus infinity: the previous step then carries no slope, and h / h_before is 0
    half_log_snr = lambda s: np.log1p(-s) - np.log(s) if s < 1 else -np.inf
    h, h_before = half_log_snr(after) - half_log_snr(sigma), half_log_snr(sigma) - half_log_snr(before)
    slope = 0.5 * h / h_before
    a, b, _, _ = _first_order(sigma, after)
    return a, b * (1 + slope), -b * slope, 0.0
