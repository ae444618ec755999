"""Solvers as tables of coefficients.

A step of every solver in this package is one linear combination of latents, whose coefficients
depend on the sigmas alone:

    x_next = a x + b x0_hat[i] + c x0_hat[i - 1] + d x0_hat[i - 2] + e noise
    x0_hat = x - sigma v

The coefficients (a, b, c, d, e) of each step are computed in float64 on the host. The sampler then
neither branches nor divides, and one compiled program serves all solvers. A stochastic step draws
from a Gaussian of mean `a x + b x0_hat` and standard deviation e, so the table is also all that the
probability of a step depends on.

Sources:

  - DDIM: arXiv 2010.02502 (eq. 12, with the noise level of its general form).
  - DPM-Solver++ 2M: arXiv 2211.01095 (algorithm 2), midpoint form, in `lambda = ln((1 - sigma) /
    sigma)`.
  - The SDEs of Flow-GRPO (arXiv 2505.05470, eq. 9) and of DanceGRPO (arXiv 2505.07818).
  - Coefficients-preserving sampling: arXiv 2509.05952.
  - UniPC: arXiv 2302.04867 (algorithms 7 and 8, with B2).
"""

import itertools
from typing import get_args

import numpy as np
from jaxtyping import Float

from solrl_jax.config.schema import STOCHASTIC_SOLVERS, Solver

Table = Float[np.ndarray, "steps 5"]
# The column of a table that has the standard deviation of the noise.
NOISE = 4
Coefficients = tuple[float, float, float, float, float]
Sigmas = Float[np.ndarray, " steps_plus_one"]
SOLVERS = get_args(Solver)


def solver_table(
    name: str, sigmas: Sigmas, eta: float | Float[np.ndarray, " steps"] = 0.0
) -> Table:
    """Computes the coefficients of every step of a solver.

    For a linear flow, "euler", "dpm1" and "ddim" with `eta` 0 are the same step; all three names
    are accepted since users of the published recipes look for them. "dpm2" is of second order,
    except for its first and its last step, and for its second one if the first sigma is 1.

    Args:
        name: One of `SOLVERS`: "euler", "dpm1", "dpm2", "ddim", "flow_sde", "dance_sde" or "cps".
        sigmas: The noise levels in [0, 1], decreasing, the last one 0.
        eta: The noise level of a stochastic solver ("ddim", "flow_sde", "dance_sde" or "cps"): one
            number for all steps, or one per step. With 0 the step is an Euler step. For "ddim", 1
            adds noise with the posterior variance of the forward process. For "cps", the noise at
            the next sigma s' is `s' sin(eta pi / 2)` times fresh and `s' cos(eta pi / 2)` times
            predicted noise. The SDEs add `g dw`, with `g = eta sqrt(s / (1 - s))` at the sigma s
            ("flow_sde"; at s = 1 the divisor is 1 minus the next sigma) or `g = eta` ("dance_sde").
            The last step never adds noise. The deterministic solvers ("euler", "dpm1" and "dpm2")
            accept only 0.

    Returns:
        The coefficients (a, b, c, d, e) of each step, float32, one row per step, in `x_next = a x +
        b x0[i] + c x0[i - 1] + d x0[i - 2] + e noise`, where x0[i] is the prediction `x - sigma v`
        at step i. d is 0, and so is c except for "dpm2".

    Raises:
        ValueError: If there is no solver of that name, `eta` is not 0 for a deterministic solver,
            or `eta` has neither one value nor one per step.
    """
    if name not in SOLVERS:
        raise ValueError(f"rollout.solver={name!r}: must be one of {', '.join(SOLVERS)}")
    if np.any(eta) and name not in STOCHASTIC_SOLVERS:
        raise ValueError(
            f"rollout.noise_level={eta}: the solver {name!r} is deterministic; "
            f"only {', '.join(STOCHASTIC_SOLVERS)} add noise"
        )
    steps = list(itertools.pairwise(sigmas))
    last = len(steps) - 1
    noise_levels = np.broadcast_to(eta, len(steps)) * (np.arange(len(steps)) < last)
    rows: list[Coefficients] = []
    for i, (sigma, next_sigma) in enumerate(steps):
        level = noise_levels[i]
        if name == "dpm2" and 0 < i < last:
            rows.append(_second_order(sigmas[i - 1], sigma, next_sigma))
        elif name == "dpm2":
            rows.append(_first_order(sigma, next_sigma))
        elif name == "flow_sde":
            # At sigma = 1 the noise would be infinite. As in the released code, the next sigma
            # takes its place there.
            divisor = 1 - (sigma if sigma < 1 else next_sigma)
            rows.append(_sde(sigma, next_sigma, level**2 * sigma / divisor))
        elif name == "dance_sde":
            rows.append(_sde(sigma, next_sigma, level**2))
        elif name == "cps":
            angle = level * np.pi / 2
            rows.append(
                _renoised(sigma, next_sigma, next_sigma * np.cos(angle), next_sigma * np.sin(angle))
            )
        else:
            rows.append(_ddim(sigma, next_sigma, level))
    return np.array(rows, np.float32)


def unipc_table(sigmas: Sigmas) -> Table:
    """Computes the coefficients of every step of UniPC of second order, for data prediction and
    with `B(h) = expm1(-h)` ("bh2" of diffusers).

    A step of UniPC first corrects the current state, using the data prediction made at it, and then
    predicts the next state from the corrected one. The predicted and the corrected state are both
    computed from the previous corrected state, and their difference is a linear combination of the
    last three data predictions. Correction and prediction together are therefore one step of the
    form that all tables here have. The first and the last step predict in first order, and the
    first step has no correction.

    Args:
        sigmas: The noise levels, decreasing, the last one 0. If the first one is 1, where `lambda =
            ln((1 - sigma) / sigma)` is minus infinity, the second step predicts in first order, and
            the third step corrects its state without the data prediction made at 1. diffusers
            starts just below 1 instead.

    Returns:
        The coefficients (a, b, c, d, 0) of each step, float32, one row per step, in `x_next = a x +
        b x0[i] + c x0[i - 1] + d x0[i - 2]`, where x0[i] is the data prediction at step i. The 0 is
        the coefficient of noise.
    """
    steps = len(sigmas) - 1
    rows = []
    correction = (0.0, 0.0, 0.0)  # weights of the last three predictions, the latest first
    for i in range(steps):
        sigma = sigmas[i]
        next_sigma = sigmas[i + 1]
        ratio = next_sigma / sigma
        h = _half_log_snr(next_sigma) - _half_log_snr(sigma)
        reach = -(1 - next_sigma) * np.expm1(-h)  # -alpha B(h)
        second_order = 0 < i < steps - 1
        # the slope of the predictions over lambda, as weight of the one before the last
        slope = h / (_half_log_snr(sigmas[i - 1]) - _half_log_snr(sigma)) if second_order else 0.0
        rows.append(
            (
                ratio,
                ratio * correction[0] + reach * (1 - 0.5 * slope),
                ratio * correction[1] + reach * 0.5 * slope,
                ratio * correction[2],
                0.0,
            )
        )
        slope_weight, next_weight = _unic_weights(h, slope) if second_order else (0.5, 0.5)
        change = reach * (slope_weight - 0.5) * slope
        correction = (reach * next_weight, -change - reach * next_weight, change)
    return np.array(rows, np.float32)


def _unic_weights(h: float, inverse_r: float) -> tuple[float, float]:
    """Solves for the two weights of UniC of second order with "bh2", so that the correction is
    exact for predictions that are quadratic in lambda.

    Args:
        h: The length of the corrected step in `lambda = ln((1 - sigma) / sigma)`, above 0 and
            finite.
        inverse_r: `h / (lambda at the start of the preceding step - lambda at the start of the
            corrected step)`, at most 0: `1 / r` for the r of arXiv 2302.04867.

    Returns:
        The weights of two terms: `inverse_r` times (the prediction at the start of the preceding
        step minus the one at the start of the corrected step), and (the prediction at the end of
        the corrected step minus the one at its start).
    """
    b = np.expm1(-h)
    phi_2 = b / -h - 1
    phi_3 = phi_2 / -h - 0.5
    first = phi_2 / b
    second = 2 * phi_3 / b
    if inverse_r == 0:  # the previous prediction is infinitely far away
        return 0.0, first
    slope_weight = (second - first) / (1 / inverse_r - 1)
    return slope_weight, first - slope_weight


def _half_log_snr(sigma: float) -> float:
    """Returns `lambda = ln((1 - sigma) / sigma)`: minus infinity at 1, and infinity at 0.

    Args:
        sigma: A noise level in [0, 1].
    """
    if sigma >= 1:
        return -np.inf
    return np.log1p(-sigma) - np.log(sigma) if sigma > 0 else np.inf


def overlap(
    sigmas: Sigmas, full: Float[np.ndarray, " full_plus_one"]
) -> Float[np.ndarray, "steps full_steps"]:
    """Computes the length, in units of sigma, that each step of one schedule shares with each step
    of another.

    Args:
        sigmas: The `steps` + 1 sigmas of the first schedule, decreasing, the last one 0.
        full: The `full_steps` + 1 sigmas of the second schedule, decreasing, the last one 0.

    Returns:
        A matrix with one row per step of the first schedule and one column per step of the second,
        float64. It is 0 for steps that do not overlap, and for lengths of at most 1e-9, which are
        rounding.
    """
    upper = np.minimum.outer(sigmas[:-1], full[:-1])
    lower = np.maximum.outer(sigmas[1:], full[1:])
    # A shared length below 1e-9 is rounding: the two steps only meet at a sigma.
    return np.where(upper - lower > 1e-9, upper - lower, 0.0)


def shared_noise(
    sigmas: Sigmas, full: Float[np.ndarray, " full_plus_one"], std: Float[np.ndarray, " full_steps"]
) -> Float[np.ndarray, "steps full_steps"]:
    """Computes the weights that combine the draws of a full schedule into the noise of a coarser
    one, along the same Brownian path.

    A coarse step sums the noise that the full schedule adds between the same sigmas, scaled to
    variance 1. The noise of a full step that it covers in part is weighted by the covered fraction
    (not by its square root). One seed then follows the same path on both schedules. On the full
    schedule itself, every step that adds noise has its own draw.

    Args:
        sigmas: The sigmas of the coarse schedule, decreasing, including the final 0.
        full: The sigmas of the full schedule, decreasing, including the final 0.
        std: The standard deviation of the noise that each full step adds, at least 0.

    Returns:
        One row per coarse step and one column per step of the full schedule (column j has the
        weights of draw j), float32. A row has unit norm, or is all zeros if the full schedule adds
        no noise within that step.
    """
    weights = overlap(sigmas, full) / -np.diff(full) * std
    norm = np.sqrt((weights**2).sum(1, keepdims=True))
    return (weights / np.where(norm > 0, norm, 1.0)).astype(np.float32)


def _first_order(sigma: float, next_sigma: float) -> Coefficients:
    """Returns the coefficients (s'/s, 1 - s'/s, 0, 0, 0) of the step `x' = (s'/s) x + (1 - s'/s)
    x0_hat` from sigma s to sigma s', where x0_hat are the predicted clean latents. It is the step
    of Euler, and of first-order DPM-Solver and DDIM.

    Args:
        sigma: The sigma s before the step, above 0.
        next_sigma: The sigma s' after the step, at least 0.
    """
    ratio = next_sigma / sigma
    return ratio, 1 - ratio, 0.0, 0.0, 0.0


def _ddim(sigma: float, next_sigma: float, eta: float) -> Coefficients:
    """Returns the coefficients (a, b, 0, 0, e) of a step of DDIM: `x' = (1 - s') x0_hat + sqrt(s'^2
    - e^2) eps_hat + e noise`, with the predicted clean latents x0_hat and the predicted noise
    eps_hat.

    e is eta times the posterior standard deviation, whose square is `s'^2 / s^2 (s^2 - (1 - s)^2
    s'^2 / (1 - s')^2)`. Where e exceeds s', the root is 0.

    Args:
        sigma: The sigma s before the step, above 0.
        next_sigma: The sigma s' after the step, below 1.
        eta: The noise level; 0 is the deterministic step.
    """
    alpha = 1 - sigma
    next_alpha = 1 - next_sigma
    forward_variance = sigma**2 - (alpha / next_alpha) ** 2 * next_sigma**2
    # Both differences are at least 0, but close to 0 they can round below it.
    e = eta * next_sigma / sigma * np.sqrt(max(forward_variance, 0.0))
    return _renoised(sigma, next_sigma, np.sqrt(max(next_sigma**2 - e**2, 0.0)), e)


def _renoised(sigma: float, next_sigma: float, rest: float, e: float) -> Coefficients:
    """Returns the coefficients (a, b, 0, 0, e) of the step `x' = a x + b x0_hat + e noise` that
    equals `(1 - s') x0_hat + rest eps_hat + e noise`; the zeros are for earlier predictions.

    x0_hat are the predicted clean latents, and `eps_hat = (x - (1 - s) x0_hat) / s` is the
    predicted noise.

    If `rest^2 + e^2 = s'^2`, the result has as much noise as the forward process has at s',
    whatever e is (coefficients-preserving sampling).

    Args:
        sigma: The sigma s before the step, above 0.
        next_sigma: The sigma s' after the step.
        rest: The coefficient of the predicted noise.
        e: The standard deviation of the fresh noise.
    """
    return rest / sigma, 1 - next_sigma - rest * (1 - sigma) / sigma, 0.0, 0.0, e


def _sde(sigma: float, next_sigma: float, g2: float) -> Coefficients:
    """Returns the coefficients (a, b, 0, 0, e) of `x' = a x + b x0_hat + e noise`, an Euler step of
    `dx = (v + g^2 / (2 s) eps_hat) ds + g dw`, an SDE with the marginals of the flow. v is the
    predicted velocity, and eps_hat the predicted noise. e is `sqrt((s - s') g^2)`. The zeros are
    for earlier predictions.

    Args:
        sigma: The sigma s before the step, above 0.
        next_sigma: The sigma s' after the step, at most s.
        g2: `g^2`, the squared strength of the noise at s. 0 gives the deterministic Euler step.
    """
    h = next_sigma - sigma
    # v = (x - x0) / s, eps_hat = (x - (1 - s) x0) / s
    along_v = h / sigma
    along_eps = h * g2 / (2 * sigma**2)
    return 1 + along_v + along_eps, -along_v - (1 - sigma) * along_eps, 0.0, 0.0, np.sqrt(-h * g2)


def _second_order(previous_sigma: float, sigma: float, next_sigma: float) -> Coefficients:
    """Returns the coefficients (a, b, c, 0, 0) of DPM-Solver++ 2M: a first-order step with an
    extrapolation of the last two predictions of x0 in place of the last one.

    The extrapolation is linear in lambda = ln((1 - s) / s). Where `previous_sigma` is 1, lambda is
    infinite there, and the step is of first order (c is 0).

    Args:
        previous_sigma: The sigma of the prediction before the last one, at most 1.
        sigma: The sigma before the step, below 1.
        next_sigma: The sigma after the step, above 0.
    """
    # At sigma = 1, lambda is minus infinity. The previous step then carries no slope, and h /
    # h_previous is 0.
    h = _half_log_snr(next_sigma) - _half_log_snr(sigma)
    h_previous = _half_log_snr(sigma) - _half_log_snr(previous_sigma)
    slope = 0.5 * h / h_previous
    a, b, *_ = _first_order(sigma, next_sigma)
    return a, b * (1 + slope), -b * slope, 0.0, 0.0
