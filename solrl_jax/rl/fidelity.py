"""Measures of how faithfully proxy rewards rank candidates compared with their true rewards.

`Rewards` have one row per prompt and one column per candidate.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Shaped

from solrl_jax.rl.select import rank_candidates

Rewards = Float[np.ndarray, "p n"]


@dataclasses.dataclass(frozen=True)
class RankCorrelations:
    """Rank correlations of two rewards within prompts. 1 means the same order, -1 the reverse one.

    A correlation is defined for a prompt if each of the two rewards has at least two distinct
    values among the candidates for which both are finite.

    Attributes:
        spearman: The mean of Spearman's rho over the prompts for which it is defined; NaN without
            any.
        kendall: The mean of Kendall's tau-b over the same prompts; NaN without any.
        per_prompt: (rho, tau-b) of each prompt; (NaN, NaN) where they are not defined.
    """

    spearman: float
    kendall: float
    per_prompt: tuple[tuple[float, float], ...]


def rank_correlations(proxy: Rewards, true: Rewards) -> RankCorrelations:
    """Computes Spearman's rho and Kendall's tau-b within each prompt.

    Args:
        proxy: The proxy rewards, one row per prompt and one column per candidate. Candidates with a
            non-finite reward on either side are left out.
        true: The true rewards of the same candidates, in the shape of `proxy`.

    Returns:
        The correlations of each prompt and their means. If one of the rewards has fewer than two
        distinct values among the candidates of a prompt that are not left out, the correlations of
        the prompt are NaN and the means leave it out. The means are NaN if no prompt remains.

    Raises:
        ValueError: If `proxy` and `true` differ in their numbers of prompts or of candidates.
    """
    from scipy import stats  # the import takes half a second, and most commands do not need it

    pairs = []
    for x, y in zip(proxy, true, strict=True):
        finite = np.isfinite(x) & np.isfinite(y)
        x = x[finite]
        y = y[finite]
        defined = len(np.unique(x)) > 1 and len(np.unique(y)) > 1
        pairs.append(
            (stats.spearmanr(x, y).statistic, stats.kendalltau(x, y).statistic)
            if defined
            else (np.nan, np.nan)
        )
    finite_pairs = np.array([p for p in pairs if np.isfinite(p[0])]).reshape(-1, 2)
    means = finite_pairs.mean(0) if len(finite_pairs) else np.full(2, np.nan)
    return RankCorrelations(
        float(means[0]), float(means[1]), tuple((float(s), float(k)) for s, k in pairs)
    )


def overlap(
    proxy: Rewards, true: Rewards, top: int, within: int, *, best: bool = True
) -> Float[np.ndarray, " p"]:
    """Computes the fraction of each prompt's truly best (or worst) candidates that the proxy finds.

    It is the fraction of the `top` candidates with the best true rewards that are among the
    `within` candidates with the best proxy rewards. The paper's Top-4 match has `top=4` and
    `within=K/2`, where K is the number of kept candidates of a prompt. Candidates without a finite
    true reward are never among the truly best ones, and those without a finite proxy reward are
    never found. If rewards are equal, the candidate with the lower index counts as the better one,
    so the one with the higher index is the first among the worst.

    Args:
        proxy: The proxy rewards, one row per prompt.
        true: The true rewards of the same candidates, in the shape of `proxy`.
        top: How many of the truly best (or worst) candidates are looked for.
        within: How many of the best (or worst) candidates by proxy count as found.
        best: True compares the best candidates, False the worst.

    Returns:
        One fraction in [0, 1] per prompt, float64. With only f < `top` finite true rewards, it is
        the fraction of these f; NaN if there is none.

    Raises:
        ValueError: If `proxy` and `true` differ in their numbers of prompts or of candidates.
    """
    return _mean_where(_extremes(proxy, within, best), _extremes(true, top, best))


def mean_true_rank(
    proxy: Rewards, true: Rewards, within: int, best: bool = True
) -> Float[np.ndarray, " p"]:
    """Computes the mean true rank of each prompt's best (or worst) candidates by proxy.

    Rank 1 is the truly best. If rewards are equal, the lower index counts as the better one. With N
    candidates, a perfect proxy scores (within + 1) / 2 at the best end and N - (within - 1) / 2 at
    the worst.

    Args:
        proxy: The proxy rewards, one row per prompt. A candidate whose proxy reward is not finite
            is never among the best or worst ones.
        true: The true rewards, in the shape of `proxy`. A candidate whose true reward is not finite
            ranks after all others and is left out of the mean.
        within: How many of the best (or worst) candidates by proxy are averaged.
        best: True averages the best candidates by proxy, False the worst.

    Returns:
        One mean rank per prompt, float64; NaN where no candidate is left.

    Raises:
        ValueError: If `proxy` and `true` differ in their numbers of prompts or of candidates.
    """
    return _mean_where(
        np.where(np.isfinite(true), rank_candidates(true) + 1, np.nan),
        _extremes(proxy, within, best),
    )


def regret(proxy: Rewards, true: Rewards, top: int, within: int) -> Float[np.ndarray, " p"]:
    """Computes how much reward is lost if the proxy chooses the best candidates, per prompt.

    The regret is the mean true reward of the `top` best of all candidates, minus that of the `top`
    best among the proxy's `within` best, divided by the range (largest minus smallest) of the
    finite true rewards of the prompt. `overlap` counts every missed candidate alike, whereas the
    regret is small where others are nearly as good, for example because a reward saturates.

    Args:
        proxy: The proxy rewards, one row per prompt. A candidate with a non-finite proxy reward is
            never among the proxy's best.
        true: The true rewards, in the shape of `proxy`. Non-finite ones are left out. If fewer than
            `top` of the proxy's best have a finite true reward, the smallest true reward of the
            prompt counts for each missing one.
        top: How many candidates are chosen, at least 1. If a prompt has fewer finite true rewards,
            `top` is their number.
        within: The number of best candidates by proxy that the `top` are chosen from.

    Returns:
        One number in [0, 1] per prompt, float64: 0 if all its true rewards are equal, and NaN for a
        prompt without a finite true reward.

    Raises:
        ValueError: If `proxy` and `true` differ in their numbers of prompts or of candidates.
    """

    def of_prompt(chosen: Bool[np.ndarray, " n"], rewards: Float[np.ndarray, " n"]) -> float:
        finite = np.isfinite(rewards)
        pool = -np.sort(-rewards[finite])
        among_chosen = -np.sort(-rewards[chosen & finite])
        if not len(pool):
            return np.nan
        best = pool[:top]
        reached = np.append(among_chosen, np.full(len(best), pool[-1]))[: len(best)]
        spread = pool[0] - pool[-1]
        return float((best.mean() - reached.mean()) / spread) if spread > 0 else 0.0

    chosen = _extremes(proxy, within, True)
    return np.array([of_prompt(c, t) for c, t in zip(chosen, true, strict=True)])


def _extremes(rewards: Rewards, count: int, best: bool) -> Bool[np.ndarray, "p n"]:
    """Marks the `count` best (or worst) candidates of each prompt. Non-finite rewards are never
    marked.

    Args:
        rewards: One row per prompt. If rewards are equal, the one with the lower index counts as
            the better one.
        count: How many candidates of each prompt are marked. If fewer have a finite reward, all of
            these are.
        best: True marks the best candidates, False the worst.

    Returns:
        True for each marked candidate, in the shape of `rewards`.
    """
    ranks = rank_candidates(rewards)
    finite = np.isfinite(rewards)
    return finite & (ranks < count if best else ranks >= finite.sum(1, keepdims=True) - count)


def _mean_where(
    values: Shaped[np.ndarray, "p n"], where: Bool[np.ndarray, "p n"]
) -> Float[np.ndarray, " p"]:
    """Computes the mean of selected values for each prompt.

    Args:
        values: One number or bool per candidate, one row per prompt. NaN values are left out,
            infinite ones are not.
        where: True for each value that is selected, in the shape of `values`.

    Returns:
        One mean per prompt, float64 for bool and float64 values; NaN where no value is left.

    Raises:
        ValueError: If the numbers of rows differ.
    """
    chosen = [v[w & ~np.isnan(v)] for v, w in zip(values, where, strict=True)]
    return np.array([row.mean() if len(row) else np.nan for row in chosen])
