"""Assertions for tests: does exploration rank, select and quantize well enough?

    from solrl_jax.testing import assert_ranking_preserved
    assert_ranking_preserved(proxy, true, spearman=0.9, top_k=4, within=12)

They follow the style of chex. Each raises AssertionError with the name of the figure, its value and
the bound. They take concrete arrays; under jit they work in a function wrapped by `chex.chexify`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from solrl_jax.rl.fidelity import overlap, rank_correlations, regret

# The functions check the shapes themselves, with messages that say what is accepted.
Values: TypeAlias = Num[Array | np.ndarray, "..."]
Bound: TypeAlias = float | int | np.floating | Float[Array, ""]
Rewards: TypeAlias = Float[Array, "p n"]  # p prompts, n candidates each

# Half the widest step of E2M1 (4 to 6) in units of the block scale, which E4M3 keeps within 1/16 of
# a sixth of the maximum.
NVFP4_BLOCK_ERROR = (1 + 1 / 16) / 6


def assert_ranking_preserved(
    proxy: Values,
    true: Values,
    *,
    spearman: Bound | None = None,
    kendall: Bound | None = None,
    top_k: int | None = None,
    within: int | None = None,
    match: Bound | None = None,
) -> None:
    """Asserts that proxy rewards order the candidates of each prompt as the true rewards do.

    Each figure is a mean over prompts, computed on the host from float32 rewards. At least one of
    `spearman`, `kendall` and `top_k` is needed. Prompts for which a figure is undefined are left
    out; if it is undefined for all, the assertion fails.

    Args:
        proxy: The rewards of the exploration [prompts, candidates].
        true: The rewards of the fully generated images of the same candidates, [prompts,
            candidates].
        spearman: The smallest accepted rank correlation (rho). Pairs with a non-finite value are
            left out, and so are prompts whose rewards are all equal on either side. None: not
            checked.
        kendall: The smallest accepted rank correlation tau-b, from the same pairs and prompts.
            None: not checked.
        top_k: How many of the truly best candidates are looked for, at least 1. None: not checked.
        within: Among how many of the best candidates by proxy, from `top_k` to the number of
            candidates. None means `top_k`.
        match: The smallest accepted share of them, in [0, 1], that is among these. None means 1. A
            non-finite reward is never among the best, and of equal rewards the earlier candidate
            is. The paper's Top-4 match is `top_k=4, within=kept / 2` (Sol-RL, arXiv 2604.06916).

    Raises:
        AssertionError: If a figure is below its bound. The first one fails, in the order Spearman,
            Kendall, match.
        ValueError: If the rewards are not two arrays of one shape [prompts, candidates] with at
            least one entry, nothing is asked for, `within` or `match` comes without `top_k`, or not
            1 <= top_k <= within <= candidates.
    """
    proxy, true = _pools(proxy, true)
    if top_k is None and not (match is within is None):
        settings = f"match={match}, within={within}"
        raise ValueError(
            f"assert_ranking_preserved: {settings} without top_k; "
            "accepted: top_k, at least 1, beside them"
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
        share = _mean(lambda x, y: overlap(x, y, top_k, count), proxy, true)
        _check(share >= match, "Top-k match {} is below {}", share, match)


def assert_top_k_regret(
    proxy: Values, true: Values, *, top_k: int, within: int | None = None, bound: Bound
) -> None:
    """Asserts that the candidates chosen by the proxy are nearly as good as the truly best ones.

    The best `top_k` among the proxy's `within` best are compared with the best `top_k` of all by
    their mean true reward, relative to the range of the true rewards (`rl.fidelity.regret`). Unlike
    a match, this accepts a missed candidate if others are as good. A candidate with a non-finite
    reward cannot be chosen, and prompts without a finite true reward are left out; if no prompt is
    left, the assertion fails.

    Args:
        proxy: The rewards of the exploration [prompts, candidates].
        true: The rewards of the fully generated images of the same candidates, [prompts,
            candidates].
        top_k: How many candidates are chosen, at least 1.
        within: Among how many of the best candidates by proxy, from `top_k` to the number of
            candidates. None means `top_k`.
        bound: The largest accepted regret, in [0, 1], in the mean over prompts.

    Raises:
        AssertionError: If the regret is above the bound.
        ValueError: If the rewards are not two arrays of one shape [prompts, candidates] with at
            least one entry, or not 1 <= top_k <= within <= candidates.
    """
    proxy, true = _pools(proxy, true)
    count = _within(top_k, within, proxy)
    mean_regret = _mean(lambda x, y: regret(x, y, top_k, count), proxy, true)
    _check(mean_regret <= bound, "Top-k regret {} is above {}", mean_regret, bound)


def assert_selection_range(proxy: Values, true: Values, *, kept: int, delta: Bound) -> None:
    """Asserts that the selected candidates span nearly the true range of all candidates.

    For every prompt, the kept/2 best and the kept/2 worst by proxy must span the true range of all
    candidates minus `4 delta`. If proxy and true reward differ by at most `delta`, which is
    asserted first, this is a theorem: two deltas at each end (Sol-RL, section 3). If only the range
    fails, the rewards were not selected by this proxy.

    Args:
        proxy: The rewards of the exploration [prompts, candidates]. Of equal ones the earlier
            candidate counts as better.
        true: The rewards of the fully generated images of the same candidates, [prompts,
            candidates].
        kept: How many candidates are selected per prompt; even, from 2 to the number of candidates.
        delta: The largest accepted |proxy - true|, in the unit of the rewards.

    Raises:
        AssertionError: If a difference or a missing range is too large, or a reward is not finite.
        ValueError: If the rewards are not two arrays of one shape [prompts, candidates] with at
            least one entry, or `kept` is odd or out of range.
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
    x: Values,
    quantized: Values,
    *,
    bound: Bound = NVFP4_BLOCK_ERROR,
    block: int = 16,
    axis: int = -1,
) -> None:
    """Asserts that the largest error in every block is small compared with its largest magnitude.

    A block with a value that is not finite fails, and so does a block of zeros with an error.

    Args:
        x: The values before quantization, of any shape with at least one axis.
        quantized: The dequantized values, of the same shape as `x`, which are compared with it.
        bound: The largest accepted ratio. The default, (1 + 1/16) / 6 = 0.177, is that of NVFP4,
            for blocks whose scale is a normal number in E4M3.
        block: The number of values in a block, at least 1. The last block may be shorter.
        axis: The axis that blocks lie along.

    Raises:
        AssertionError: If the error of a block is too large.
        ValueError: If the shapes differ or are empty, or `block` is below 1.
    """
    x = jnp.asarray(x, jnp.float32)
    quantized = jnp.asarray(quantized, jnp.float32)
    if x.shape != quantized.shape or x.size == 0 or x.ndim == 0:
        raise ValueError(
            f"assert_block_error: shapes {x.shape} and {quantized.shape}; "
            "accepted: equal, with axes, not empty"
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


def _pools(proxy: Values, true: Values) -> tuple[Rewards, Rewards]:
    """Returns proxy and true rewards as float32 arrays of JAX, in this order.

    Args:
        proxy: The proxy rewards, [prompts, candidates].
        true: The true rewards, [prompts, candidates] like `proxy`.

    Raises:
        ValueError: If the shapes differ, or an array is empty or not two-dimensional.
    """
    proxy = jnp.asarray(proxy, jnp.float32)
    true = jnp.asarray(true, jnp.float32)
    if proxy.ndim != 2 or proxy.shape != true.shape or proxy.size == 0:
        raise ValueError(
            f"proxy {proxy.shape}, true {true.shape}; "
            "accepted: both [prompts, candidates], at least one of each"
        )
    return proxy, true


def _within(top_k: int, within: int | None, proxy: Rewards) -> int:
    """Returns the value of `within`, or `top_k` if it is None.

    Args:
        top_k: The number of best candidates by true reward.
        within: The number of best candidates by proxy reward, or None.
        proxy: The proxy rewards [prompts, n]. Their number n of candidates is the upper limit.

    Raises:
        ValueError: Unless 1 <= top_k <= within <= n.
    """
    within = top_k if within is None else within
    if not 1 <= top_k <= within <= proxy.shape[1]:
        raise ValueError(
            f"top_k={top_k}, within={within}; accepted: 1 <= top_k <= within <= {proxy.shape[1]}"
        )
    return within


def _mean(
    figure: Callable[[np.ndarray, np.ndarray], Any], proxy: Rewards, true: Rewards
) -> Float[Array, ""]:
    """Returns the mean over prompts of a measure of rank fidelity, a float32 scalar.

    The measure is computed on the host by a callback, so that traced arrays are accepted.

    Args:
        figure: A function of NumPy arrays (proxy, true) that returns one number or one per prompt,
            for instance of `rl.fidelity`. Non-finite numbers are left out of the mean; it is NaN if
            none is left.
        proxy: The proxy rewards, [prompts, candidates].
        true: The true rewards, [prompts, candidates] like `proxy`.
    """

    def on_host(*pools: Array) -> np.float32:
        values = np.atleast_1d(figure(*map(np.asarray, pools)))
        values = values[np.isfinite(values)]
        return np.float32(values.mean() if len(values) else np.nan)

    return jax.pure_callback(
        on_host, jax.ShapeDtypeStruct((), jnp.float32), proxy, true, vmap_method="sequential"
    )


def _check(holds: Any, message: str, *values: Bound) -> None:
    """Asserts a scalar truth value through chex, for concrete and for traced arrays alike.

    Args:
        holds: The truth value, a Boolean scalar.
        message: The message of the failure, a format string with one `{}` per value.
        *values: The scalars for the format string.

    Raises:
        AssertionError: If `holds` is false. For traced arrays it is raised when the function that
            `chex.chexify` wrapped runs.
    """
    chex.assert_trees_all_equal(
        jnp.asarray(holds), jnp.asarray(True), include_default_message=False,
        custom_message=message, custom_message_format_vars=[jnp.asarray(v) for v in values],
    )  # fmt: skip
