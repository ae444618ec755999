"""Assertions for a user's own tests, in the manner of chex: does exploration rank, select and quantise as well as it must?

    from solrl_jax.testing import assert_ranking_preserved
    assert_ranking_preserved(proxy, true, spearman=0.9, top_k=4, within=12)

Each raises AssertionError that names the figure, its value and what was asked for. They work on concrete arrays, and under jit
in a function that `chex.chexify` wraps.
"""

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Rewards = Float[Array, "p n"]  # p prompts, n candidates each

# Half the widest step of E2M1 (4 to 6) in units of the block scale, which E4M3 keeps within 1/16 of a sixth of the maximum.
NVFP4_BLOCK_ERROR = (1 + 1 / 16) / 6


def assert_ranking_preserved(
    proxy: Rewards,
    true: Rewards,
    *,
    spearman: float | None = None,
    kendall: float | None = None,
    top_k: int | None = None,
    within: int | None = None,
    match: float | None = None,
    regret: float | None = None,
) -> None:
    """Proxy rewards order the candidates of a prompt as the true ones do; figures are means over prompts.

    spearman, kendall: the least rank correlation (rho; tau-b). Pairs of which one is not finite are left out, and prompts
    whose rewards do not differ on one of the sides. top_k: at least the share `match` of the `top_k` truly best are among the
    `within` best by proxy (default: `top_k`; the paper's Top-4 match is `top_k=4, within=kept / 2`; Sol-RL, arXiv 2604.06916).
    regret: the best `top_k` among those have a mean true reward below the pool's best by at most this share of the true range
    (`solrl_jax.rollout.fidelity.regret`); candidates that others equal may then be missed. match is 1 where neither is given.

    Raises AssertionError, and ValueError for shapes or numbers that make no sense.
    """
    proxy, true = _pools(proxy, true)
    if top_k is None and not (match is within is regret is None):
        given = f"match={match}, within={within}, regret={regret}"
        raise ValueError(f"assert_ranking_preserved: {given} without top_k; accepted: top_k, at least 1, beside them")
    if spearman is None and kendall is None and top_k is None:
        raise ValueError("assert_ranking_preserved: nothing is asked for; accepted: spearman, kendall, top_k")
    above, better = _signs(proxy, true)
    if spearman is not None:
        rho = _mean_correlation(above.sum(-1), better.sum(-1), (-1,))
        _check(rho >= spearman, "Spearman {} is below {}", rho, spearman)
    if kendall is not None:
        tau = _mean_correlation(above, better, (-2, -1))
        _check(tau >= kendall, "Kendall {} is below {}", tau, kendall)
    if top_k is not None:
        within = top_k if within is None else within
        if not 1 <= top_k <= within <= proxy.shape[1]:
            accepted = f"1 <= top_k <= within <= {proxy.shape[1]}"
            raise ValueError(f"assert_ranking_preserved: top_k={top_k}, within={within}; accepted: {accepted}")
        match = 1.0 if match is regret is None else match
        if match is not None:
            found = _found(proxy, true, top_k, within)
            _check(found >= match, "Top-k match {} is below {}", found, match)
        if regret is not None:
            lost = _regret(proxy, true, top_k, within)
            _check(lost <= regret, "Top-k regret {} is above {}", lost, regret)


def assert_selection_range(proxy: Rewards, true: Rewards, *, kept: int, delta: float) -> None:
    """The kept/2 best and kept/2 worst by proxy span the pool's true range, but for `4 delta`, for every prompt.

    delta: the largest |proxy - true| that is allowed; it is asserted too. Given that, the bound on the range is a theorem (two
    deltas at each end; Sol-RL, section 3): where only the range fails, the rewards were not selected by this proxy.
    """
    proxy, true = _pools(proxy, true)
    if not 2 <= kept <= proxy.shape[1] or kept % 2:
        raise ValueError(f"assert_selection_range: kept={kept}; accepted: even, 2 to {proxy.shape[1]}")
    error = jnp.abs(proxy - true).max()
    _check(error <= delta, "The largest difference of proxy and true reward {} is above {}", error, delta)
    order = jnp.argsort(-proxy, axis=1)
    ends = jnp.concatenate([order[:, : kept // 2], order[:, -kept // 2 :]], axis=1)
    missing = (jnp.ptp(true, axis=1) - jnp.ptp(jnp.take_along_axis(true, ends, axis=1), axis=1)).max()
    _check(missing <= 4 * delta, "The selected range is short of the pool's by {}, more than {}", missing, 4 * delta)


def assert_block_error(
    x: Float[Array, "..."],
    quantized: Float[Array, "..."],
    *,
    bound: float = NVFP4_BLOCK_ERROR,
    block: int = 16,
    axis: int = -1,
) -> None:
    """In every block of `block` values along `axis`, the largest error is at most `bound` times the largest magnitude.

    x: what was quantised; quantized: what the codes stand for, of the same shape. The default bound is the format's own, for
    blocks whose scale E4M3 holds as a normal number. A last block may be short.
    """
    if x.shape != quantized.shape or x.ndim == 0:
        raise ValueError(f"assert_block_error: shapes {x.shape} and {quantized.shape}; accepted: equal, one axis or more")
    x, quantized = (jnp.moveaxis(jnp.asarray(a, jnp.float32), axis, -1) for a in (x, quantized))
    fill = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)]
    blocks = lambda a: jnp.pad(jnp.abs(a), fill).reshape(*x.shape[:-1], -1, block).max(-1)
    largest, error = blocks(x), blocks(x - quantized)
    excess = jnp.where(error > 0, error / jnp.where(largest > 0, largest, 1.0), 0.0)
    worst = jnp.where(largest > 0, excess, jnp.where(error > 0, jnp.inf, 0.0)).max()
    _check(worst <= bound, "A block errs by {} of its largest magnitude, more than {}", worst, bound)


def _pools(proxy: Rewards, true: Rewards) -> tuple[Array, Array]:
    proxy, true = jnp.asarray(proxy, jnp.float32), jnp.asarray(true, jnp.float32)
    if proxy.ndim != 2 or proxy.shape != true.shape:
        raise ValueError(f"proxy {proxy.shape}, true {true.shape}; accepted: both [prompts, candidates]")
    return proxy, true


def _signs(proxy: Rewards, true: Rewards) -> tuple[Float[Array, "p n n"], Float[Array, "p n n"]]:
    """-1, 0 or 1: is candidate i below, like or above j? 0 too where one of the two is not finite on either side.

    Their sums over j are twice the centred ranks (ties share their mean), so both correlations are cosines of these.
    """
    finite = jnp.isfinite(proxy) & jnp.isfinite(true)
    both = finite[:, :, None] & finite[:, None, :]
    sign = lambda x: jnp.where(both, jnp.sign(x[:, :, None] - x[:, None, :]), 0.0)
    proxy, true = (jnp.where(finite, x, 0.0) for x in (proxy, true))
    return sign(proxy), sign(true)


def _mean_correlation(a: Array, b: Array, axes: tuple[int, ...]) -> Float[Array, ""]:
    """The mean of the cosines over `axes`; NaN where no prompt has one."""
    norm = jnp.sqrt((a**2).sum(axes) * (b**2).sum(axes))
    cosines = (a * b).sum(axes) / jnp.where(norm > 0, norm, 1.0)
    return (cosines * (norm > 0)).sum() / (norm > 0).sum()


def _found(proxy: Rewards, true: Rewards, top: int, within: int) -> Float[Array, ""]:
    """The share of the `top` truly best among the `within` best by proxy; what is not finite is not among the best."""
    wanted = _best(true, top)
    return (wanted & _best(proxy, within)).sum() / wanted.sum()


def _regret(proxy: Rewards, true: Rewards, top: int, within: int) -> Float[Array, ""]:
    """The mean of `solrl_jax.rollout.fidelity.regret` over the prompts that have one."""
    finite = jnp.isfinite(true)
    least = jnp.where(finite, true, jnp.inf).min(1, keepdims=True)
    chosen = _best(proxy, within) & finite
    best = lambda among: -jnp.sort(jnp.where(among, -true, -least), axis=1)[:, :top]
    places = jnp.minimum(finite.sum(1), top)
    missing = jnp.where(jnp.arange(top) < places[:, None], best(finite) - best(chosen), 0.0).sum(1) / places
    spread = jnp.where(finite, true, -jnp.inf).max(1) - least[:, 0]
    return jnp.nanmean(missing / jnp.where(spread == 0, 1.0, spread))


def _best(x: Rewards, count: int) -> Bool[Array, "p n"]:
    """Which are the `count` best of their prompt, the first of equal ones; what is not finite is not among them."""
    places = jnp.argsort(jnp.argsort(jnp.where(jnp.isfinite(x), -x, jnp.inf), axis=1), axis=1)
    return (places < count) & jnp.isfinite(x)


def _check(holds: Bool[Array, ""], message: str, *values: Float[Array, ""] | float) -> None:
    """An assertion on a value in the one form that chex has for concrete arrays and for traced ones."""
    chex.assert_trees_all_equal(
        jnp.asarray(holds), jnp.asarray(True), include_default_message=False,
        custom_message=message, custom_message_format_vars=[jnp.asarray(v) for v in values],
    )  # fmt: skip
