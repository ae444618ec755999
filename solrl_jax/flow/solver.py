"""Solvers as tables: every step of every solver here is one linear combination, whose weights depend on the sigmas alone.

    x_next = a x + b x0_hat[i] + c x0_hat[i - 1] + d x0_hat[i - 2] + e noise,      x0_hat = x - sigma v

One row (a, b, c, d, e) a step, worked out in float64 on the host; the sampler then neither branches nor divides, and one
compiled program serves all solvers. Sources: DDIM, arXiv 2010.02502 (eq. 12, with the noise level of its general form);
DPM-Solver++ 2M, arXiv 2211.01095 (algorithm 2), midpoint form, in `lambda = ln((1 - sigma) / sigma)`.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "steps 5"]
Row = tuple[float, float, float, float, float]
Latents = Float[np.ndarray, " b *latent"]
SOLVERS = ("euler", "dpm1", "dpm2", "ddim")
STAY: Row = (1.0, 0.0, 0.0, 0.0, 0.0)  # a step that ends where it starts
PREDICT: Row = (0.0, 1.0, 0.0, 0.0, 0.0)  # one that ends on the data prediction, as the last step of every solver does


def solver_table(name: str, sigmas: Float[np.ndarray, " steps_plus_one"], eta: float = 0.0) -> Table:
    """The coefficients [steps, 5] float32 of solver `name` on `sigmas` (decreasing, last 0).

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


def fitted_table(
    predict: Callable[[Latents, float], Latents], noise: Latents, whole: Float[np.ndarray, " whole_plus_one"], table: Table,
    sigmas: Float[np.ndarray, " steps_plus_one"],
) -> Table:  # fmt: skip
    """The coefficients [steps, 5] float32 with which a preview on `sigmas` comes nearest to what a whole schedule comes to.

    whole, table: that schedule and its solver's coefficients, without noise; sigmas: some of `whole`, the first and the last
    among them. predict: latents and their sigma to data predictions, of the network that is to be previewed. Steps that the
    whole schedule takes too stay as they are. Each longer one is fitted by least squares over all values of the samples from
    `noise`, after those before it, to where the whole schedule is by then:

        min sum (a x + b x0_hat[i] + c x0_hat[i - 1] + d x0_hat[i - 2] - x_whole(sigma_next))^2

    A solver that is fitted to one network in this way, and of this form: arXiv 2403.01329. A few samples suffice: a row has
    four unknowns, and every value of every latent is an equation.
    """
    x, last = noise, (np.zeros_like(noise),) * 3
    there, predicted = {float(whole[0]): noise}, []
    for (sigma, after), row in zip(itertools.pairwise(whole), table, strict=True):
        predicted.append(predict(x, float(sigma)))
        last = (predicted[-1], *last[:2])
        there[float(after)] = x = _step(row, x, last)
    rows, taken = [], list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sigmas, whole, strict=False)))
    x, last = noise, (np.zeros_like(noise),) * 3
    for i, (sigma, after) in enumerate(itertools.pairwise(sigmas)):
        last = (predicted[i] if i < len(taken) else predict(x, float(sigma)), *last[:2])  # as long as both go the same way
        row = table[i] if i + 1 < len(taken) else _fit((x, *last), there[float(after)])
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
    weights = np.linalg.pinv(products, rcond=1e-12, hermitian=True) @ [term @ target.reshape(-1) for term in terms]
    # to six places: the last bits of a sum on the host must not make two runs of one
    return np.array([*weights.round(6), 0.0], np.float32)


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
