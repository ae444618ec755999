"""Solvers as tables: a step of any solver here is one linear combination, whose weights depend on the sigmas alone.

    x_next = a x + b x0_hat[i] + c x0_hat[i - 1] + d x0_hat[i - 2] + e noise,      x0_hat = x - sigma v

A row (a, b, c, d, e) for each step is computed in float64 on the host. The sampler then neither branches nor divides, and one
compiled program serves all solvers. Sources: DDIM, arXiv 2010.02502 (eq. 12, with the noise level of its general form);
DPM-Solver++ 2M, arXiv 2211.01095 (algorithm 2), midpoint form, in `lambda = ln((1 - sigma) / sigma)`; the SDEs of Flow-GRPO
(arXiv 2505.05470, eq. 9) and DanceGRPO (arXiv 2505.07818).

A stochastic step draws from a Gaussian, of mean `a x + b x0_hat` and standard deviation e. So the table is also all that the
probability of a step needs.
"""

import itertools

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "steps 5"]
Row = tuple[float, float, float, float, float]
Sigmas = Float[np.ndarray, " steps_plus_one"]
STOCHASTIC = ("ddim", "flow_sde", "dance_sde")
SOLVERS = ("euler", "dpm1", "dpm2", *STOCHASTIC)


def solver_table(
    name: str, sigmas: Sigmas, eta: float | Float[np.ndarray, " steps"] = 0.0
) -> Table:
    """The coefficients [steps, 5] float32 of solver `name` on `sigmas` (decreasing, last 0).

    For a linear flow, `euler`, `dpm1` and `ddim` with eta 0 are the same step: first-order exponential integrators are exact on
    straight paths. All are named because users of the recipes look for them. eta: the noise level of a stochastic solver, one
    for all steps or one a step; 0 is Euler's step. For `ddim` 1 is as much fresh noise as the forward process lost. The last
    step of an SDE takes no noise: it ends on the prediction. Raises ValueError for another solver, or noise in a
    deterministic one.
    """
    if name not in SOLVERS:
        raise ValueError(f"rollout.solver={name!r}: accepted are {', '.join(SOLVERS)}")
    if np.any(eta) and name not in STOCHASTIC:
        raise ValueError(
            f"rollout.noise_level={eta}: only {', '.join(STOCHASTIC)} take noise; {name} is deterministic"
        )
    steps = list(itertools.pairwise(sigmas))
    levels = np.broadcast_to(eta, len(steps)) * (np.arange(len(steps)) < len(steps) - 1)
    match name:
        case "dpm2":
            ends = (0, len(steps) - 1)
            rows = [
                _first_order(*s) if i in ends else _second_order(sigmas[i - 1], *s)
                for i, s in enumerate(steps)
            ]
        case "flow_sde":  # at sigma = 1 the noise would be infinite: as released, the next sigma stands for it there
            rows = [
                _sde(s, t, g**2 * s / (1 - (s if s < 1 else t)))
                for (s, t), g in zip(steps, levels, strict=True)
            ]
        case "dance_sde":
            rows = [_sde(*s, g**2) for s, g in zip(steps, levels, strict=True)]
        case _:
            rows = [_ddim(*s, g) for s, g in zip(steps, levels, strict=True)]
    return np.array(rows, np.float32)


def overlap(
    sigmas: Sigmas, full: Float[np.ndarray, " full_plus_one"]
) -> Float[np.ndarray, "steps full_steps"]:
    """How much of each step of `sigmas` lies within each step of a `full` schedule, in units of sigma."""
    inner = np.minimum.outer(sigmas[:-1], full[:-1]) - np.maximum.outer(sigmas[1:], full[1:])
    return np.where(inner > 1e-9, inner, 0.0)  # less is rounding: the schedules meet there


def shared_noise(
    sigmas: Sigmas, full: Float[np.ndarray, " full_plus_one"], std: Float[np.ndarray, " full_steps"]
) -> Float[np.ndarray, "steps full_steps"]:
    """Weights of the draws of a `full` schedule that make one draw for each step of `sigmas`, of the same Brownian path.

    std: of the noise that each full step adds. A step adds up the noise that the full schedule adds between the same sigmas, to
    variance 1. Then one seed means one path on both schedules, and on the full schedule itself each step has its own draw.
    """
    weights = overlap(sigmas, full) / -np.diff(full) * std
    norm = np.sqrt((weights**2).sum(1, keepdims=True))
    return (weights / np.where(norm > 0, norm, 1.0)).astype(np.float32)


def _first_order(sigma: float, after: float) -> Row:
    """`x' = (s'/s) x + (1 - s'/s) x0_hat`: Euler's step, DPM-Solver's first and DDIM's are this."""
    ratio = after / sigma
    return ratio, 1 - ratio, 0.0, 0.0, 0.0


def _ddim(sigma: float, after: float, eta: float) -> Row:
    """DDIM with `x' = alpha' x0_hat + sqrt(s'^2 - e^2) eps_hat + e noise`; e^2 = eta^2 times the posterior's variance.

    For a process with `x = alpha x0 + s eps`, alpha = 1 - s, that variance is `s'^2 / s^2 (s^2 - (alpha / alpha')^2 s'^2)`.
    """
    alpha = 1 - sigma
    alpha_after = 1 - after
    forward = sigma**2 - (alpha / alpha_after) ** 2 * after**2
    e = eta * after / sigma * np.sqrt(forward)
    rest = np.sqrt(after**2 - e**2)
    return rest / sigma, alpha_after - rest * alpha / sigma, 0.0, 0.0, e


def _sde(sigma: float, after: float, g2: float) -> Row:
    """Euler's step of `dx = (v + g^2 / (2 s) eps_hat) ds + g dw`, whose marginals are the flow's."""
    h = after - sigma
    # v = (x - x0) / s, eps_hat = (x - (1 - s) x0) / s
    along_v = h / sigma
    along_eps = h * g2 / (2 * sigma**2)
    return 1 + along_v + along_eps, -along_v - (1 - sigma) * along_eps, 0.0, 0.0, np.sqrt(-h * g2)


def _second_order(before: float, sigma: float, after: float) -> Row:
    """DPM-Solver++ 2M: the first-order step towards a linear extrapolation of the two last data predictions."""

    # at sigma = 1, lambda is minus infinity: the previous step then carries no slope, and h / h_before is 0
    def half_log_snr(s):
        return np.log1p(-s) - np.log(s) if s < 1 else -np.inf

    h = half_log_snr(after) - half_log_snr(sigma)
    h_before = half_log_snr(sigma) - half_log_snr(before)
    slope = 0.5 * h / h_before
    a, b, *_ = _first_order(sigma, after)
    return a, b * (1 + slope), -b * slope, 0.0, 0.0
