"""Solvers as tables: a step of any solver here is one linear combination, whose weights depend on the sigmas alone.

    x_next = a x + b x0_hat[i] + c x0_hat[i - 1] + d x0_hat[i - 2] + e noise,      x0_hat = x - sigma v

A row (a, b, c, d, e) for each step is computed in float64 on the host. The sampler then neither branches nor divides, and one
compiled program serves all solvers. Sources: DDIM, arXiv 2010.02502 (eq. 12, with the noise level of its general form);
DPM-Solver++ 2M, arXiv 2211.01095 (algorithm 2), midpoint form, in `lambda = ln((1 - sigma) / sigma)`.
"""

import itertools

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "steps 5"]
Row = tuple[float, float, float, float, float]
SOLVERS = ("euler", "dpm1", "dpm2", "ddim")


def solver_table(name: str, sigmas: Float[np.ndarray, " steps_plus_one"], eta: float = 0.0) -> Table:
    """The coefficients [steps, 5] float32 of solver `name` on `sigmas` (decreasing, last 0).

    For a linear flow, `euler`, `dpm1` and `ddim` with eta 0 are the same step: first-order exponential integrators are exact on
    straight paths. All are named because users of the recipes look for them. eta: for `ddim` alone, from 0 (deterministic) to 1
    (as much fresh noise as the forward process lost). Raises ValueError for another solver, or noise in a deterministic one.
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


def _first_order(sigma: float, after: float) -> Row:
    """`x' = (s'/s) x + (1 - s'/s) x0_hat`: Euler's step, DPM-Solver's first and DDIM's are this."""
    ratio = after / sigma
    return ratio, 1 - ratio, 0.0, 0.0, 0.0


def _ddim(sigma: float, after: float, eta: float) -> Row:
    """DDIM with `x' = alpha' x0_hat + sqrt(s'^2 - e^2) eps_hat + e noise`; e^2 = eta^2 times the posterior's variance.

    For a process with `x = alpha x0 + s eps`, alpha = 1 - s, that variance is `s'^2 / s^2 (s^2 - (alpha / alpha')^2 s'^2)`.
    """
    alpha, alpha_after = 1 - sigma, 1 - after
    forward = sigma**2 - (alpha / alpha_after) ** 2 * after**2
    e = eta * after / sigma * np.sqrt(forward)
    rest = np.sqrt(after**2 - e**2)
    return rest / sigma, alpha_after - rest * alpha / sigma, 0.0, 0.0, e


def _second_order(before: float, sigma: float, after: float) -> Row:
    """DPM-Solver++ 2M: the first-order step towards a linear extrapolation of the two last data predictions."""
    # at sigma = 1, lambda is minus infinity: the previous step then carries no slope, and h / h_before is 0
    half_log_snr = lambda s: np.log1p(-s) - np.log(s) if s < 1 else -np.inf
    h, h_before = half_log_snr(after) - half_log_snr(sigma), half_log_snr(sigma) - half_log_snr(before)
    slope = 0.5 * h / h_before
    a, b, *_ = _first_order(sigma, after)
    return a, b * (1 + slope), -b * slope, 0.0, 0.0
