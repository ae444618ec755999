"""Several rewards in place of one: `reward.combine` (docs/method.md, section 3).

"sum" ranks and trains on the weighted sum of the scores, `Samples.reward`. "advantages" normalises
each score over the candidates of its prompt and sums the results with the weights of the scores, so
that the scale and the offset of a score do not matter. That is how MixGRPO (arXiv 2507.21802) and
GDPO (arXiv 2601.05242, NVlabs/GDPO) combine rewards.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from solrl_jax.config.schema import Combine
from solrl_jax.rewards.protocol import MAX_REWARD
from solrl_jax.rl.advantages import MODES, TIE, advantages

Values = Float[np.ndarray, "p n"]


def ranking_values(
    combine: Combine,
    scores: Mapping[str, Float[np.ndarray, "..."]],
    weights: Mapping[str, float],
    prompts: int,
) -> Values:
    """Returns the values by which the candidates of each prompt are ordered, larger being better.

    Args:
        combine: `reward.combine`. "sum": the result is the score "reward". "advantages": it is the
            `weighted_advantages` of the scores in `weights`.
        scores: The scores of the samples (`Samples.scores`), flat arrays: each score by its name,
            and their weighted sum as "reward". The samples are ordered by prompt, with equally many
            of each.
        weights: The weight of each score by its name (`reward.weights` or
            `rollout.explore.reward`). "sum" does not use it, since "reward" is weighted already.
        prompts: p, the number of prompts.

    Returns:
        One row per prompt and one column per candidate. Candidates that cannot be ordered have a
        value that is not finite.

    Raises:
        KeyError: If `scores` lacks "reward" (with "sum") or a name in `weights` (with
            "advantages").
        ValueError: If the prompts do not divide the samples.
    """
    if combine == "sum":
        return scores["reward"].reshape(prompts, -1)
    rows = {name: np.asarray(scores[name]).reshape(prompts, -1) for name in weights}
    return weighted_advantages(rows, weights)


def weighted_advantages(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """The weighted sum of the advantages of each score over the candidates of a prompt.

        A_j = (r_j - mean of r_j) / std of r_j            per score j and prompt
        A   = sum over j of w_j A_j

    Mean and population standard deviation are over the candidates of the prompt all of whose scores
    are finite and at most 1e18 in magnitude; only these get a value. There is no constant beside
    the standard deviation, so multiplying a score by a positive number changes nothing, and nothing
    to the last bit if the number is a power of two. Instead, differences that are rounding count as
    ties: a score that differs from its mean by at most 4e-6 (`TIE`) times the largest magnitude
    among the scores of the prompt has `A_j` 0, and so have all where the standard deviation is 0. A
    sum that cancels up to 4e-6 of its terms is 0.

    Args:
        scores: The scores by name, one row per prompt and one column per candidate. Names that
            `weights` lacks are ignored.
        weights: The weight of each score by its name, any finite number; at least one.

    Returns:
        The sums A in float64, in the shape of a score, not clipped. NaN for candidates without a
        value.

    Raises:
        KeyError: If there is no score of a name in `weights`.
    """
    counted = np.all([np.abs(scores[name]) <= MAX_REWARD for name in weights], axis=0)
    total = np.zeros(counted.shape)
    magnitude = np.zeros(counted.shape)
    for name, weight in weights.items():
        term = weight * _standardised(scores[name], counted)
        total += term
        magnitude += np.abs(term)
    total[np.abs(total) <= TIE * magnitude] = 0.0
    return np.where(counted, total, np.nan)


def _standardised(scores: Values, counted: Bool[np.ndarray, "p n"]) -> Values:
    """Centres a score on the mean of its prompt and divides it by its standard deviation there.

    Args:
        scores: The values of one score, one row per prompt and one column per candidate.
        counted: Which candidates take part. The others may have any score, also NaN.

    Returns:
        The standardised scores, float64; 0 for ties with the mean and for candidates that do not
        take part.
    """
    number = np.maximum(counted.sum(1, keepdims=True), 1)
    r = np.where(counted, scores, 0.0).astype(np.float64)
    centred = r - r.sum(1, keepdims=True) / number
    tied = np.abs(centred) <= TIE * np.abs(r).max(1, keepdims=True)
    centred = np.where(counted & ~tied, centred, 0.0)
    # Dividing by the largest one first keeps the squares of tiny and huge scores representable.
    largest = np.abs(centred).max(1, keepdims=True)
    unit = centred / np.where(largest > 0, largest, 1.0)
    std = np.sqrt((unit**2).sum(1, keepdims=True) / number)
    return unit / np.where(std > 0, std, 1.0)


def combined_advantages(
    combine: Combine,
    values: Float[Array | np.ndarray, "p k"],
    *,
    clip: float,
    global_std: bool,
    mode: str,
) -> Float[Array, "p k"]:
    """The advantages of the kept samples, from the values that order them.

    With "sum" they are those of `advantages`: the value minus the mean of its prompt, divided by a
    standard deviation and clipped. With "advantages" they are

        clip(A, -clip, clip)              without `global_std` (MixGRPO)
        clip(A / std of A, -clip, clip)   with it (GDPO)

    where the population standard deviation is over all finite A of the iteration, about 0, which is
    the mean of A for each prompt. If it is 0, so are the advantages.

    Args:
        combine: `reward.combine`: "sum" or "advantages", which says what the values are.
        values: The `ranking_values` of the kept samples, A in the formulas, one row per prompt.
        clip: The largest absolute advantage, above 0.
        global_std: `algorithm.global_std`. With "sum", whether the standard deviation is over all
            samples instead of those of a prompt; with "advantages", whether A is divided by one at
            all.
        mode: `algorithm.adv_mode`, applied last: "all" changes nothing, "positive_only" and
            "negative_only" replace advantages of the other sign by 0, "one_only" returns 1 where
            they are positive, else 0, and "binary" their sign.

    Returns:
        One finite advantage per sample, float32. It is 0 where the value is not finite.

    Raises:
        ValueError: With "sum", if there is no such mode, `values` does not have two axes, or `clip`
            is not above 0.
        KeyError: With "advantages", if there is no such mode.
    """
    if combine == "sum":
        return advantages(jnp.asarray(values), clip=clip, global_std=global_std, mode=mode)
    finite = np.isfinite(values)
    result = np.where(finite, values, 0.0)
    if global_std:
        std = np.sqrt((result**2).sum() / max(finite.sum(), 1))
        result = result / (std if std > 0 else 1.0)
    return MODES[mode](jnp.asarray(np.clip(result, -clip, clip), jnp.float32))
