"""Assertions for tests: does exploration rank, select and quantize well enough?

    from solrl_jax.testing import assert_ranking_preserved
    assert_ranking_preserved(proxy, true, spearman=0.9, top_k=4, within=12)

They follow the style of chex, and also work under jit in functions wrapped by `chex.chexify`. Each
raises AssertionError with the name of the figure, its value and the bound.
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
    """Asserts that exploration ranks the candidates of each prompt nearly as their true rewards do.

    Three figures can be checked, each as a mean over prompts: two rank correlations, and the
    fraction of the best candidates that exploration finds. At least one of them must be asked for.
    Candidates with a reward that is not finite are left out of the correlations, and never count as
    found. A prompt is left out of the correlations if its proxy or its true rewards have fewer than
    two distinct values. It is left out of the fraction if none of its true rewards is finite; if
    fewer than `top_k` are, the fraction is taken of these. For equal rewards, the fraction counts
    the lower index as the better one.

    Args:
        proxy: The rewards of the candidates in exploration, [prompts, candidates]: a NumPy or JAX
            array, in a function wrapped by `chex.chexify` also a traced one.
        true: The rewards of the same candidates when they are fully generated, [prompts,
            candidates].
        spearman: The smallest accepted Spearman correlation, in [-1, 1]. None: not checked.
        kendall: The smallest accepted Kendall correlation (tau-b), in [-1, 1]. None: not checked.
        top_k: How many of the truly best candidates exploration has to find, at least 1. None: not
            checked.
        within: A candidate counts as found if it is among so many best ones by proxy reward; from
            `top_k` to the number of candidates. None means `top_k`.
        match: The smallest accepted fraction of the `top_k` candidates that is found, in [0, 1].
            None means 1.

    Raises:
        AssertionError: If a figure is below its bound, or all prompts are left out.
        ValueError: If the two arrays do not have one shape [prompts, candidates], nothing is asked
            for, `within` or `match` comes without `top_k`, or not 1 <= top_k <= within <=
            candidates.
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
        count = _check_within(top_k, within, proxy)
        share = _mean(lambda x, y: overlap(x, y, top_k, count), proxy, true)
        _check(share >= match, "Top-k match {} is below {}", share, match)


def assert_top_k_regret(
    proxy: Values, true: Values, *, top_k: int, within: int | None = None, bound: Bound
) -> None:
    """Asserts that the candidates that exploration finds are nearly as good as the truly best ones.

    The regret of a prompt is (A - B) / R. A is the mean true reward of its `top_k` truly best
    candidates, B that of the `top_k` truly best among its `within` best by proxy reward, and R the
    range of its true rewards. It is 0 if exploration finds candidates that are just as good, or if
    all true rewards are equal. Rewards that are not finite are left out. If fewer than `top_k`
    candidates remain for B, the smallest true reward of the prompt stands in for each missing one.
    In a prompt with fewer than `top_k` finite true rewards, `top_k` is their number. A prompt
    without any has no regret.

    Args:
        proxy: The rewards of the candidates in exploration, [prompts, candidates]: a NumPy or JAX
            array, in a function wrapped by `chex.chexify` also a traced one.
        true: The rewards of the same candidates when they are fully generated, [prompts,
            candidates].
        top_k: How many candidates are compared, at least 1.
        within: How many of the best candidates by proxy reward the `top_k` are taken from, from
            `top_k` to the number of candidates. None means `top_k`.
        bound: The largest accepted mean regret over the prompts that have one, in [0, 1]: a number
            or a scalar array.

    Raises:
        AssertionError: If the regret is above the bound, or no prompt has one.
        ValueError: If the two arrays do not have one shape [prompts, candidates], or not 1 <= top_k
            <= within <= candidates.
    """
    proxy, true = _pools(proxy, true)
    count = _check_within(top_k, within, proxy)
    mean_regret = _mean(lambda x, y: regret(x, y, top_k, count), proxy, true)
    _check(mean_regret <= bound, "Top-k regret {} is above {}", mean_regret, bound)


def assert_selection_range(proxy: Values, true: Values, *, kept: int, delta: Bound) -> None:
    """Asserts that the best and worst candidates by proxy reward are nearly the truly best and
    worst.

    First, no proxy reward may differ from the true one by more than `delta`. Then, for every
    prompt, the true rewards of the kept candidates (half of them the best by proxy, half the worst)
    must span the range of all true rewards less `4 delta`. Both are compared in float32, without a
    tolerance for rounding. Without rounding, the second follows from the first (Sol-RL, section 3).

    Args:
        proxy: The rewards of the candidates in exploration, [prompts, candidates]: a NumPy or JAX
            array, in a function wrapped by `chex.chexify` also a traced one.
        true: The rewards of the same candidates when they are fully generated, [prompts,
            candidates].
        kept: How many candidates are kept per prompt; even, from 2 to the number of candidates.
        delta: The largest accepted difference of proxy and true reward, in the unit of the rewards:
            a number or a scalar array.

    Raises:
        AssertionError: If one of the two conditions fails, or a reward is not finite.
        ValueError: If the two arrays do not have one shape [prompts, candidates], or `kept` is odd
            or out of range.
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
    """Asserts that quantization in blocks has a small error.

    The error of a block is its largest absolute error, divided by the largest absolute value of `x`
    in it (infinite if a block of zeros was changed); 0 if nothing was changed. If `block` does not
    divide the axis, the last block is shorter.

    Args:
        x: The values before quantization, of any shape with at least one axis: a NumPy or JAX
            array, in a function wrapped by `chex.chexify` also a traced one.
        quantized: The values after quantization and dequantization, of the same shape.
        bound: The largest accepted error of a block, a number or a scalar array. The default,
            0.177, is the bound of NVFP4.
        block: The number of values in a block, at least 1. The default, 16, is that of NVFP4.
        axis: The axis along which values form blocks, by default the last one.

    Raises:
        AssertionError: If a block has a larger error, or a value of either array is not finite.
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
    """Converts proxy and true rewards to float32 arrays of JAX, and checks their shapes.

    Args:
        proxy: The rewards of the candidates in exploration, [prompts, candidates], a NumPy or JAX
            array of numbers, possibly traced.
        true: Their true rewards, of the same shape.

    Returns:
        The pair (proxy, true).

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


def _check_within(top_k: int, within: int | None, proxy: Rewards) -> int:
    """Returns `within`, or its default `top_k` if it is None, and checks both.

    Args:
        top_k: How many of the truly best candidates are looked for.
        within: Among how many of the best candidates by proxy reward they are looked for, or None.
        proxy: The proxy rewards, [prompts, candidates], whose shape gives the number of candidates.

    Raises:
        ValueError: Unless 1 <= top_k <= within <= candidates.
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
    """Computes a figure of how well exploration ranks, and returns its mean over prompts.

    It is computed on the host by a callback, so the arrays may be traced.

    Args:
        figure: A function of two NumPy arrays (proxy, true), each [prompts, candidates]. It returns
            one number per prompt, or a single one. Numbers that are not finite are left out.
        proxy: The rewards of the candidates in exploration, [prompts, candidates].
        true: Their true rewards, of the same shape.

    Returns:
        A float32 scalar; NaN if no number is left.
    """

    def on_host(*pools: Array) -> np.float32:
        values = np.atleast_1d(figure(*map(np.asarray, pools)))
        values = values[np.isfinite(values)]
        return np.float32(values.mean() if len(values) else np.nan)

    return jax.pure_callback(
        on_host, jax.ShapeDtypeStruct((), jnp.float32), proxy, true, vmap_method="sequential"
    )


def _check(holds: Any, message: str, *values: Bound) -> None:
    """Asserts that a condition holds, for concrete and for traced arrays (`chex.chexify`).

    Args:
        holds: The condition, a boolean scalar.
        message: The message if it fails: a format string with one `{}` per value.
        *values: The scalars (numbers or scalar arrays) that are written into the message.

    Raises:
        AssertionError: If `holds` is false.
        RuntimeError: If an array is traced outside of `chex.chexify`.
    """
    chex.assert_trees_all_equal(
        jnp.asarray(holds), jnp.asarray(True), include_default_message=False,
        custom_message=message, custom_message_format_vars=[jnp.asarray(v) for v in values],
    )  # fmt: skip
