"""Combines several rewards into one: `reward.combine` (docs/method.md, section 3).

"sum" ranks and trains on the weighted sum of the scores, `Samples.reward`. "advantages" normalizes
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
    """Returns the values by which the candidates of each prompt are ordered; a larger value is
    better.

    Args:
        combine: How several scores become one value (`reward.combine`). "sum": the weighted sum of
            the scores, which `scores` holds as "reward". "advantages": the sum, with `weights`, of
            the scores after each is standardized within the prompt (`weighted_advantages`).
        scores: Flat arrays by the name of the score, and "reward" for their weighted sum. Each has
            one entry per sample, prompt by prompt, with the same number of candidates per prompt.
        weights: The weight of each score by its name. Used for "advantages" only.
        prompts: p, the number of prompts.

    Returns:
        The values [prompts, candidates], in the dtype of the scores ("sum") or float64
        ("advantages"). The value of a candidate is not finite if its reward ("sum") or one of its
        scores in `weights` ("advantages") is not finite.

    Raises:
        KeyError: If `scores` lacks "reward" (with "sum") or a name in `weights` (with
            "advantages").
        ValueError: If the number of samples is not a multiple of `prompts`.
    """
    if combine == "sum":
        return scores["reward"].reshape(prompts, -1)
    rows = {name: np.asarray(scores[name]).reshape(prompts, -1) for name in weights}
    return weighted_advantages(rows, weights)


def weighted_advantages(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """Computes the weighted sum of several scores, each standardized within its prompt.

        A_j = (r_j - mean of r_j) / std of r_j            for score j, over the prompt's candidates
        A   = sum over j of w_j A_j

    The standard deviation is the population's; where it is 0, A_j is 0. A candidate is left out of
    the means and standard deviations of all scores, and its A is NaN, if any of its scores in
    `weights` is not finite (or above 1e18 in magnitude). Values that may be rounding errors count
    as 0: a difference between a score and its mean of at most 4e-6 times the largest magnitude of
    the score in the prompt, and a sum A of at most 4e-6 times the sum of |w_j A_j|.

    Args:
        scores: Each score by its name, [prompts, candidates]. Names that `weights` lacks are
            ignored.
        weights: The weight w_j of each score by its name, any finite number; at least one.

    Returns:
        The sums A [prompts, candidates], float64, not clipped.

    Raises:
        KeyError: If `scores` lacks a name in `weights`.
    """
    mask = np.all([np.abs(scores[name]) <= MAX_REWARD for name in weights], axis=0)
    total = np.zeros(mask.shape)
    magnitude = np.zeros(mask.shape)
    for name, weight in weights.items():
        term = weight * _standard_scores(scores[name], mask)
        total += term
        magnitude += np.abs(term)
    total[np.abs(total) <= TIE * magnitude] = 0.0
    return np.where(mask, total, np.nan)


def _standard_scores(scores: Values, mask: Bool[np.ndarray, "p n"]) -> Values:
    """Standardizes a score within each prompt: subtracts its mean and divides by its population
    standard deviation.

    Args:
        scores: One score, [prompts, candidates].
        mask: True for the candidates that count in the mean and the standard deviation. The others
            may have any score, also NaN.

    Returns:
        The standardized scores [prompts, candidates], float64. They are 0 for candidates outside
        the mask, and where a score equals the mean up to 4e-6 times the largest magnitude in the
        prompt.
    """
    number = np.maximum(mask.sum(1, keepdims=True), 1)
    r = np.where(mask, scores, 0.0).astype(np.float64)
    deviations = r - r.sum(1, keepdims=True) / number
    tied = np.abs(deviations) <= TIE * np.abs(r).max(1, keepdims=True)
    deviations = np.where(mask & ~tied, deviations, 0.0)
    # Dividing by the largest one first keeps the squares of tiny and huge scores representable.
    largest = np.abs(deviations).max(1, keepdims=True)
    unit = deviations / np.where(largest > 0, largest, 1.0)
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
    """Computes the advantages of the kept samples, from the values that order them.

    With "sum" the values are rewards, and the result is that of `advantages`: the reward minus the
    mean of its prompt, divided by a standard deviation and clipped. With "advantages" the values A
    are sums of scores that were standardized over the kept samples of each prompt. Before `mode` is
    applied, the result is then

        clip(A, -clip, clip)              without `global_std` (MixGRPO)
        clip(A / std, -clip, clip)        with it (GDPO)

    where std is the root mean square of all finite values; if it is 0, so is the result.

    Args:
        combine: `reward.combine`, "sum" or "advantages". It decides whether `values` are rewards
            or sums of standardized scores.
        values: The values of the kept samples, [prompts, kept]: the `ranking_values` of the scores
            of these samples, without those of other candidates.
        clip: The largest absolute advantage, above 0.
        global_std: `algorithm.global_std`. With "sum": True divides by the standard deviation over
            all prompts, False by that of the prompt. With "advantages": whether A is divided by
            std.
        mode: `algorithm.adv_mode`, applied last: "all" changes nothing, "positive_only" and
            "negative_only" replace advantages of the other sign by 0, "one_only" returns 1 where
            they are positive and else 0, and "binary" returns their sign.

    Returns:
        One finite advantage per sample [prompts, kept], float32; 0 where the value is not finite.

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
