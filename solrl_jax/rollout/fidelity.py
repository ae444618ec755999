"""How faithfully a proxy ranks candidates: rank correlations within prompts, the overlap at both ends, and what it costs."""

import dataclasses

import numpy as np
from jaxtyping import Float
from scipy import stats

Rewards = Float[np.ndarray, "p n"]


@dataclasses.dataclass(frozen=True)
class RankCorrelations:
    """Means over prompts; NaN when no prompt has two distinct rewards on both sides."""

    spearman: float
    kendall: float
    per_prompt: tuple[tuple[float, float], ...]  # (spearman, kendall), NaN where undefined


def rank_correlations(proxy: Rewards, true: Rewards) -> RankCorrelations:
    """Spearman's rho and Kendall's tau-b of proxy and true rewards within each prompt; non-finite pairs are left out."""
    pairs = []
    for x, y in zip(proxy, true, strict=True):
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite], y[finite]
        defined = len(np.unique(x)) > 1 and len(np.unique(y)) > 1
        pairs.append((stats.spearmanr(x, y).statistic, stats.kendalltau(x, y).statistic) if defined else (np.nan, np.nan))
    finite_pairs = np.array([p for p in pairs if np.isfinite(p[0])]).reshape(-1, 2)
    means = finite_pairs.mean(0) if len(finite_pairs) else np.full(2, np.nan)
    return RankCorrelations(float(means[0]), float(means[1]), tuple((float(s), float(k)) for s, k in pairs))


def overlap(proxy: Rewards, true: Rewards, top: int, within: int, *, best: bool = True) -> Float[np.ndarray, " p"]:
    """The share of the `top` truly best (or worst) candidates that are among the proxy's `within` best (worst), by prompt.

    The paper's Top-4 match is `top=4, within=K/2`: are the extremes found among those that are kept? A reward that is not
    finite is neither best nor worst: where fewer than `top` true ones are finite, the share is of those, and NaN of none.
    """

    def extremes(x: Float[np.ndarray, " n"], count: int) -> np.ndarray:
        finite = np.isfinite(x)
        order = np.argsort(np.where(finite, -x if best else x, np.inf), kind="stable")
        return order[: min(count, finite.sum())]

    pairs = [(extremes(t, top), extremes(p, within)) for p, t in zip(proxy, true, strict=True)]
    return np.array([np.isin(wanted, found).mean() if len(wanted) else np.nan for wanted, found in pairs])


def regret(proxy: Rewards, true: Rewards, top: int, within: int) -> Float[np.ndarray, " p"]:
    """What the pool's best lose by being chosen by proxy, as a share of the prompt's true range, 0 to 1: 0 loses nothing.

    The mean true reward of the `top` best of all candidates, less that of the `top` best among the proxy's `within` best. It
    tells candidates that are missed and stand out from those that others equal: where a reward saturates, `overlap` counts
    both alike. What is not finite on either side cannot be chosen; a place that is left empty by it counts as the pool's worst.
    NaN for a prompt without a finite true reward.
    """

    def lost(p: Float[np.ndarray, " n"], t: Float[np.ndarray, " n"]) -> float:
        pool = -np.sort(-t[np.isfinite(t)])
        if not len(pool):
            return np.nan
        order = np.argsort(np.where(np.isfinite(p), -p, np.inf), kind="stable")[: min(within, np.isfinite(p).sum())]
        chosen = -np.sort(-t[order][np.isfinite(t[order])])
        wanted = pool[:top]
        got = np.append(chosen, np.full(len(wanted), pool[-1]))[: len(wanted)]
        spread = pool[0] - pool[-1]
        return float((wanted.mean() - got.mean()) / spread) if spread > 0 else 0.0

    return np.array([lost(p, t) for p, t in zip(proxy, true, strict=True)])
