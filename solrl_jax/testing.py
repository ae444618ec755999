"""Assertions for your own tests, in the style of chex: does exploration rank, select and quantise well enough?

    from solrl_jax.testing import assert_ranking_preserved
    assert_ranking_preserved(proxy, true, spearman=0.9, top_k=4, within=12)

Each raises AssertionError with the name of the figure, its value and the bound. They take concrete arrays. Under jit they work
in a function that `chex.chexify` wraps.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from solrl_jax.rl.fidelity import overlap, rank_correlations, regret

Given: TypeAlias = Num[
    Array | np.ndarray, "..."
]  # shapes are checked by the functions, which say what they accept
Bound: TypeAlias = float | int | np.floating | Float[Array, ""]
Rewards: TypeAlias = Float[Array, "p n"]  # p prompts, n candidates each

# Half the widest step of E2M1 (4 to 6) in units of the block scale, which E4M3 keeps within 1/16 of a sixth of the maximum.
NVFP4_BLOCK_ERROR = (1 + 1 / 16) / 6


def assert_ranking_preserved(
    proxy: Given,
    true: Given,
    *,
    spearman: Bound | None = None,
    kendall: Bound | None = None,
    top_k: int | None = None,
    within: int | None = None,
    match: Bound | None = None,
) -> None:
    """Proxy rewards order the candidates of a prompt as the true rewards do. Each figure is a mean over prompts.

    Args:
        proxy: rewards [prompts, candidates] of the exploration.
        true: rewards of the same candidates.
        spearman: the least rank correlation (rho). Pairs with a value that is not finite are left out, and so are prompts whose
            rewards are all equal on either side.
        kendall: the same for tau-b.
        top_k: how many of the truly best candidates are looked for.
        within: among how many of the proxy's best (default: `top_k`).
        match: the least share of them that is found there (default: 1). The paper's Top-4 match is `top_k=4, within=kept / 2`
            (Sol-RL, arXiv 2604.06916).

    Raises AssertionError, and ValueError for shapes or numbers that make no sense.
    """
    proxy, true = _pools(proxy, true)
    if top_k is None and not (match is within is None):
        given = f"match={match}, within={within}"
        raise ValueError(
            f"assert_ranking_preserved: {given} without top_k; accepted: top_k, at least 1, beside them"
        )
    if spearman is None and kendall is None and top_k is None:
        raise ValueError(
            "assert_ranking_preserved: nothing is asked for; accepted: spearman, kendall, top_k"
        )
    if spearman is not None:
        rho = _mean(lambda x, y: rank_correlations(x, y).spearman, proxy, true)
        _check(rho >= spearman, "Spearman {} is below {}", rho, spearman)
    if kendall is not None:
        tau = _mean(lambda x, y: rank_correlations(x, y).kendall, proxy, true)
        _check(tau >= kendall, "Kendall {} is below {}", tau, kendall)
    if top_k is not None:
        match = 1.0 if match is None else match
        count = _within(top_k, within, proxy)
        found = _mean(lambda x, y: overlap(x, y, top_k, count), proxy, true)
        _check(found >= match, "Top-k match {} is below {}", found, match)


def assert_top_k_regret(
    proxy: Given, true: Given, *, top_k: int, within: int | None = None, bound: Bound
) -> None:
    """The best `top_k` among the proxy's `within` best are nearly as good as the best `top_k` of all candidates.

    Their mean true reward is lower by at most the share `bound` of the true range (`solrl_jax.rl.fidelity.regret`), in the
    mean over prompts. Unlike a match, this allows to miss a candidate if others are as good. within: `top_k` by default.

    Raises AssertionError, and ValueError for shapes or numbers that make no sense.
    """
    proxy, true = _pools(proxy, true)
    count = _within(top_k, within, proxy)
    lost = _mean(lambda x, y: regret(x, y, top_k, count), proxy, true)
    _check(lost <= bound, "Top-k regret {} is above {}", lost, bound)


def assert_selection_range(proxy: Given, true: Given, *, kept: int, delta: Bound) -> None:
    """For every prompt, the kept/2 best and kept/2 worst by proxy span the true range of all candidates, minus `4 delta`.

    delta: the largest |proxy - true| that is allowed; it is asserted too. Given that, the bound on the range is a theorem (two
    deltas at each end; Sol-RL, section 3). If only the range fails, the rewards were not selected by this proxy.
    """
    proxy, true = _pools(proxy, true)
    if not 2 <= kept <= proxy.shape[1] or kept % 2:
        raise ValueError(
            f"assert_selection_range: kept={kept}; accepted: even, 2 to {proxy.shape[1]}"
        )
    error = jnp.abs(proxy - true).max()
    _check(
        error <= delta,
        "The largest difference of proxy and true reward {} is above {}",
        error,
        delta,
    )
    order = jnp.argsort(-proxy, axis=1)
    ends = jnp.concatenate([order[:, : kept // 2], order[:, -kept // 2 :]], axis=1)
    missing = (
        jnp.ptp(true, axis=1) - jnp.ptp(jnp.take_along_axis(true, ends, axis=1), axis=1)
    ).max()
    _check(
        missing <= 4 * delta,
        "The selected range is short of the pool's by {}, more than {}",
        missing,
        4 * delta,
    )


def assert_block_error(
    x: Given, quantized: Given, *, bound: Bound = NVFP4_BLOCK_ERROR, block: int = 16, axis: int = -1
) -> None:
    """In every block of `block` values along `axis`, the largest error is at most `bound` times the largest magnitude.

    x: the values before quantisation; quantized: the values that the codes stand for, of the same shape. The default bound is
    that of NVFP4, for blocks whose scale E4M3 holds as a normal number. The last block may be short. A block with a value that
    is not finite fails.
    """
    x = jnp.asarray(x, jnp.float32)
    quantized = jnp.asarray(quantized, jnp.float32)
    if x.shape != quantized.shape or x.size == 0 or x.ndim == 0:
        raise ValueError(
            f"assert_block_error: shapes {x.shape} and {quantized.shape}; accepted: equal, with axes, not empty"
        )
    if block < 1:
        raise ValueError(f"assert_block_error: block={block}; accepted: 1 or more")
    x, quantized = (jnp.moveaxis(a, axis, -1) for a in (x, quantized))
    fill = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)]

    def blocks(a):
        return jnp.pad(jnp.abs(a), fill).reshape(*x.shape[:-1], -1, block).max(-1)

    largest = blocks(x)
    error = blocks(x - quantized)
    worst = jnp.where(
        error == 0, 0.0, error / jnp.where(error == 0, 1.0, largest)
    ).max()  # NaN, which no bound holds, stays
    _check(
        worst <= bound, "A block errs by {} of its largest magnitude, more than {}", worst, bound
    )


def _pools(proxy: Given, true: Given) -> tuple[Rewards, Rewards]:
    proxy = jnp.asarray(proxy, jnp.float32)
    true = jnp.asarray(true, jnp.float32)
    if proxy.ndim != 2 or proxy.shape != true.shape or proxy.size == 0:
        raise ValueError(
            f"proxy {proxy.shape}, true {true.shape}; accepted: both [prompts, candidates], at least one of each"
        )
    return proxy, true


def _within(top_k: int, within: int | None, proxy: Rewards) -> int:
    """How many of the proxy's best count, checked."""
    within = top_k if within is None else within
    if not 1 <= top_k <= within <= proxy.shape[1]:
        raise ValueError(
            f"top_k={top_k}, within={within}; accepted: 1 <= top_k <= within <= {proxy.shape[1]}"
        )
    return within


def _mean(
    figure: Callable[[np.ndarray, np.ndarray], Any], proxy: Rewards, true: Rewards
) -> Float[Array, ""]:
    """The mean of a figure of `rl.fidelity` over the prompts that have one, else NaN. Computed on the host."""

    def on_host(*pools: Array) -> np.float32:
        values = np.atleast_1d(figure(*map(np.asarray, pools)))
        values = values[np.isfinite(values)]
        return np.float32(values.mean() if len(values) else np.nan)

    return jax.pure_callback(
        on_host, jax.ShapeDtypeStruct((), jnp.float32), proxy, true, vmap_method="sequential"
    )


def _check(holds: Any, message: str, *values: Bound) -> None:
    """Asserts a scalar truth value in the form of chex that works for concrete and for traced arrays."""
    chex.assert_trees_all_equal(
        jnp.asarray(holds), jnp.asarray(True), include_default_message=False,
        custom_message=message, custom_message_format_vars=[jnp.asarray(v) for v in values],
    )  # fmt: skip
