"""How faithfully a proxy ranks candidates: rank correlations within prompts, overlap and true ranks at both ends, regret."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Shaped

from solrl_jax.rl.select import rank

Rewards = Float[np.ndarray, "p n"]


@dataclasses.dataclass(frozen=True)
class RankCorrelations:
    """Means over prompts; NaN if no prompt has two distinct rewards on both sides."""

    spearman: float
    kendall: float
    per_prompt: tuple[tuple[float, float], ...]  # (spearman, kendall), NaN where undefined


def rank_correlations(proxy: Rewards, true: Rewards) -> RankCorrelations:
    """Spearman's rho and Kendall's tau-b of proxy and true rewards within each prompt; non-finite pairs are left out."""
    from scipy import stats  # half a second, which most commands need not wait for

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
    """The share of the `top` truly best (or worst) candidates that are among the proxy's `within` best (worst), by prompt.

    The paper's Top-4 match is `top=4, within=K/2`: are the extremes found among those that are kept? A reward that is not
    finite is neither best nor worst. Where fewer than `top` true rewards are finite, the share is of those, and NaN if none is.
    """
    wanted = _extremes(true, top, best)
    found = _extremes(proxy, within, best)
    return _mean(found, wanted)


def mean_true_rank(
    proxy: Rewards, true: Rewards, within: int, best: bool = True
) -> Float[np.ndarray, " p"]:
    """The mean true rank of the proxy's `within` best (or worst) candidates, by prompt; rank 1 is the truly best.

    Perfect is (within + 1) / 2 for the best, and N - (within - 1) / 2 for the worst of N candidates. Equal rewards are ranked
    by index, as selection does. A reward that is not finite is neither best nor worst, and has no rank: the mean leaves such
    candidates out. NaN where none is left.
    """
    return _mean(
        np.where(np.isfinite(true), rank(true) + 1, np.nan), _extremes(proxy, within, best)
    )


def regret(proxy: Rewards, true: Rewards, top: int, within: int) -> Float[np.ndarray, " p"]:
    """How much worse the best candidates are if the proxy chooses them, as a share of the prompt's true range, 0 to 1.

    The mean true reward of the `top` best of all candidates, minus that of the `top` best among the proxy's `within` best.
    `overlap` counts every missed candidate alike. The regret is small where other candidates are nearly as good, as where a
    reward saturates. A candidate whose proxy or true reward is not finite cannot be chosen; a place that stays empty counts as
    the pool's worst. NaN for a prompt without a finite true reward.
    """

    def lost(chosen: Bool[np.ndarray, " n"], t: Float[np.ndarray, " n"]) -> float:
        pool, found = (-np.sort(-t[among & np.isfinite(t)]) for among in (True, chosen))
        if not len(pool):
            return np.nan
        wanted = pool[:top]
        got = np.append(found, np.full(len(wanted), pool[-1]))[: len(wanted)]
        spread = pool[0] - pool[-1]
        return float((wanted.mean() - got.mean()) / spread) if spread > 0 else 0.0

    return np.array([lost(c, t) for c, t in zip(_extremes(proxy, within, True), true, strict=True)])


def _extremes(rewards: Rewards, count: int, best: bool) -> Bool[np.ndarray, "p n"]:
    """Which candidates are the `count` best (or worst) of their prompt, in the order of selection; none that is not finite."""
    places = rank(rewards)
    finite = np.isfinite(rewards)
    return finite & (places < count if best else places >= finite.sum(1, keepdims=True) - count)


def _mean(
    values: Shaped[np.ndarray, "p n"], where: Bool[np.ndarray, "p n"]
) -> Float[np.ndarray, " p"]:
    """The mean over each row's chosen values that are numbers; NaN where there is none."""
    chosen = [v[w & ~np.isnan(v)] for v, w in zip(values, where, strict=True)]
    return np.array([row.mean() if len(row) else np.nan for row in chosen])
