"""Every solver against diffusers, step by step, and the orders and marginals that theory says it
has.
"""

import itertools

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from solrl_jax.config.schema import STOCHASTIC_SOLVERS
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import SOLVERS, overlap, shared_noise, solver_table

STEPS = (2, 4, 10, 20)  # diffusers treats fewer than 15 steps differently
TOLERANCE = 1e-5
START = np.random.default_rng(0).standard_normal(16)
GRIDS = [("linear", 1.0), ("linear", 3.0), ("sd3", 3.0), ("flux", 3.0)]


def velocity(x, sigma):
    """Nonlinear in the latent and in the noise level."""
    return np.tanh(1.5 * x + sigma) * (1 + sigma) - 0.7 * np.cos(3 * sigma) * x


def follow(table, sigmas, x, field):
    """The latents after every step of a table."""
    path = []
    previous = np.zeros_like(x)
    before = np.zeros_like(x)
    for (a, b, c, d, _), sigma in zip(table.astype(np.float64), sigmas, strict=False):
        x0 = x - sigma * field(x, sigma)
        x, previous, before = a * x + b * x0 + c * previous + d * before, x0, previous
        path.append(x)
    return np.array(path)


def ours(name, sigmas, x=START, eta=0.0, field=velocity):
    return follow(solver_table(name, sigmas, eta), sigmas, x, field)


def theirs(scheduler, sigmas, x=START):
    """The latents after every step of a diffusers scheduler told these sigmas."""
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas = torch.from_numpy(sigmas.copy())
    scheduler.timesteps = 1000 * scheduler.sigmas[:-1]
    scheduler.set_begin_index(0)
    path = []
    x = torch.from_numpy(x)
    for sigma, t in zip(sigmas, scheduler.timesteps, strict=False):
        x = scheduler.step(torch.from_numpy(velocity(x.numpy(), sigma)), t, x, return_dict=False)[0]
        path.append(x.numpy())
    return np.array(path)


def dpm(order, flow_shift=1.0):
    return DPMSolverMultistepScheduler(
        solver_order=order,
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        final_sigmas_type="zero",
        flow_shift=flow_shift,
    )


def close(got, want):
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("steps", STEPS)
def test_euler_is_the_flow_match_scheduler(steps, grid):
    sigmas = make_sigmas(grid[0], steps, grid[1], 1024)
    want = theirs(FlowMatchEulerDiscreteScheduler(), sigmas)
    close(ours("euler", sigmas), want)
    assert np.abs(want[-1] - START).max() > 0.1


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("flow_shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", STEPS)
def test_dpm_is_the_multistep_scheduler_on_its_own_grid(steps, flow_shift, order):
    scheduler = dpm(order, flow_shift)
    scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.double().numpy()
    assert 0.99 < sigmas[0] < 1
    close(ours(f"dpm{order}", sigmas), theirs(scheduler, sigmas))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("steps", STEPS)
def test_dpm_is_the_multistep_scheduler_from_pure_noise(steps, grid, order):
    sigmas = make_sigmas(grid[0], steps, grid[1], 1024)
    close(ours(f"dpm{order}", sigmas), theirs(dpm(order), sigmas))


def test_second_order_is_not_first_order():
    """So that the tests above could tell."""
    for name, shift in GRIDS:
        for steps in (4, 10, 20):
            sigmas = make_sigmas(name, steps, shift, 1024)
            assert np.abs(ours("dpm2", sigmas) - ours("dpm1", sigmas)).max() > 1e3 * TOLERANCE


@pytest.mark.parametrize("grid", GRIDS)
def test_euler_dpm1_and_ddim_without_noise_are_one_solver(grid):
    sigmas = make_sigmas(grid[0], 10, grid[1], 1024)
    euler = solver_table("euler", sigmas)
    np.testing.assert_allclose(solver_table("dpm1", sigmas), euler, atol=1e-7, rtol=0)
    np.testing.assert_allclose(solver_table("ddim", sigmas, 0.0), euler, atol=1e-7, rtol=0)
    # a step along the velocity: x + (s' - s) v, with v = (x - x0) / s
    ratio = (sigmas[1:] / sigmas[:-1]).astype(np.float32)
    np.testing.assert_allclose(
        euler, np.stack([ratio, 1 - ratio, *[0 * ratio] * 3], 1), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("name", SOLVERS)
def test_tables_are_finite_and_end_on_the_prediction(name, steps):
    for schedule, shift in GRIDS:
        table = solver_table(
            name,
            make_sigmas(schedule, steps, shift, 1024),
            1.0 if name in STOCHASTIC_SOLVERS else 0.0,
        )
        assert table.shape == (steps, 5)
        assert table.dtype == np.float32
        assert np.isfinite(table).all()
        np.testing.assert_array_equal(table[-1], [0, 1, 0, 0, 0])


def test_dpm2_starts_and_ends_with_first_order_steps():
    sigmas = make_sigmas("linear", 6, 1.0, 1024)
    table = solver_table("dpm2", sigmas)
    first = solver_table("euler", sigmas)
    # at sigma 1 lambda is minus infinity, so the second step has no slope either
    np.testing.assert_array_equal(table[[0, 1, 5]], first[[0, 1, 5]])
    assert (np.abs(table - first)[2:5, 1:3] > 1e-3).all()
    almost = np.concatenate([[0.999], sigmas[1:]])
    assert np.abs(solver_table("dpm2", almost) - solver_table("euler", almost))[1].max() > 1e-3
    np.testing.assert_array_equal(
        solver_table("dpm2", sigmas[[0, 3, 6]]), solver_table("euler", sigmas[[0, 3, 6]])
    )


def test_orders_of_convergence():
    """Gaussian data N(m, s^2): the optimal velocity and the path it leads along are known in closed
    form.
    """
    mean = 0.7
    spread = 0.4

    def deviation(sigma):
        return np.sqrt((1 - sigma) ** 2 * spread**2 + sigma**2)

    def path(sigma):
        return (1 - sigma) * mean + deviation(sigma) * START

    def field(x, sigma):
        centered = x - (1 - sigma) * mean
        x0 = mean + spread**2 * (1 - sigma) / deviation(sigma) ** 2 * centered
        return (x - x0) / sigma

    def error(name, steps):
        sigmas = 1 / (1 + np.exp(np.linspace(-3.0, 3.0, steps + 1)))  # even in lambda
        return np.abs(ours(name, sigmas, path(sigmas[0]), field=field)[-1] - path(sigmas[-1])).max()

    for name, ratio in (("euler", 2), ("dpm1", 2), ("dpm2", 4)):
        errors = [error(name, steps) for steps in (64, 128, 256)]
        assert [a / b for a, b in itertools.pairwise(errors)] == pytest.approx([ratio] * 2, rel=0.1)
    assert error("dpm2", 64) < error("euler", 64) / 20


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("grid", GRIDS)
def test_ddim_keeps_the_marginal(grid, eta):
    """With the true x0 as prediction and x = (1 - s) x0 + s e: x' has mean (1 - s') x0 and variance
    s'^2.
    """
    sigmas = make_sigmas(grid[0], 10, grid[1], 1024)
    before = sigmas[:-1]
    after = sigmas[1:]
    a, b, *earlier, d = solver_table("ddim", sigmas, eta).astype(np.float64).T
    assert not np.any(earlier)
    np.testing.assert_allclose(a * (1 - before) + b, 1 - after, atol=1e-7)
    np.testing.assert_allclose((a * before) ** 2 + d**2, after**2, atol=1e-7)
    # with eta 1, x is x' after forgetting: cov(x', x | x0) = alpha / alpha' s'^2, all of what the
    # forward process keeps
    covariance = a * before**2
    forward = (1 - before) / (1 - after) * after**2
    if eta == 1.0:
        np.testing.assert_allclose(covariance, forward, atol=1e-7)
        assert (d[:-1] > 1e-3).all()
    else:
        assert (covariance - forward)[:-1].min() > 1e-3 * (1 - eta) * after[:-1].min()
    np.testing.assert_allclose(d, eta * solver_table("ddim", sigmas, 1.0)[:, 4], atol=1e-7)


def test_an_unknown_solver_and_noise_where_there_is_none_are_refused():
    sigmas = make_sigmas("linear", 4, 1.0, 1024)
    with pytest.raises(
        ValueError, match=r"rollout\.solver='heun': must be one of euler, .*, dance_sde, cps$"
    ):
        solver_table("heun", sigmas)
    for name in ("euler", "dpm1", "dpm2"):
        with pytest.raises(
            ValueError,
            match=rf"rollout\.noise_level=0\.5: the solver '{name}' is deterministic;"
            " only ddim, flow_sde, dance_sde, cps add noise",
        ):
            solver_table(name, sigmas, 0.5)


# --- the SDEs ---


def flow_grpo_step(x, v, s, t, level, second):
    """Mean and deviation as in the released code of Flow-GRPO."""
    dt = t - s
    g = level * np.sqrt(s / (1 - (second if s == 1 else s)))
    return x * (1 + g**2 / (2 * s) * dt) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt, g * np.sqrt(-dt)


def dance_grpo_step(x, v, s, t, eta, second):
    """Mean and deviation as in the released code of DanceGRPO."""
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + (t - s) * v - 0.5 * eta**2 * score * (t - s), eta * np.sqrt(s - t)


def cps_step(x, v, s, t, level, second):
    """Mean and deviation as in the released code of Flow-CPS."""
    std = t * np.sin(level * np.pi / 2)
    image = x - s * v
    noise = x + (1 - s) * v
    return (1 - t) * image + np.sqrt(t**2 - std**2) * noise, std


SDES = {"flow_sde": (flow_grpo_step, 0.7), "dance_sde": (dance_grpo_step, 0.3)}
STEPS = SDES | {"cps": (cps_step, 0.8)}


@pytest.mark.parametrize("steps", [2, 6, 10, 28])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", STEPS)
def test_the_mean_and_the_deviation_of_a_stochastic_step_are_the_papers(name, grid, steps):
    formula, level = STEPS[name]
    sigmas = make_sigmas(grid[0], steps, grid[1], 1024)
    rows = solver_table(name, sigmas, level).astype(np.float64)
    for (a, b, c, d, e), s, t in zip(rows[:-1], sigmas, sigmas[1:], strict=False):
        v = velocity(START, s)
        mean, std = formula(START, v, s, t, level, sigmas[1])
        np.testing.assert_allclose(a * START + b * (START - s * v), mean, rtol=1e-6, atol=1e-6)
        assert (c, d, e) == (0, 0, pytest.approx(std, rel=1e-6))
    np.testing.assert_allclose(
        solver_table(name, sigmas, 0.0), solver_table("euler", sigmas), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("name", SDES)
def test_an_sde_keeps_the_marginals_of_the_flow(name):
    """Gaussian data, whose best prediction is linear: mean and variance after every step, at first
    order in the step.
    """
    mean = 0.7
    spread = 0.4
    level = SDES[name][1]

    def deviation(sigma):
        return np.sqrt((1 - sigma) ** 2 * spread**2 + sigma**2)

    def errors(steps):
        sigmas = np.append(np.linspace(0.9, 0.1, steps + 1), 0.0)
        m = (1 - 0.9) * mean
        variance = deviation(0.9) ** 2
        worst = 0.0
        for (a, b, *_, e), s, t in zip(
            solver_table(name, sigmas, level).astype(np.float64), sigmas, sigmas[1:-1], strict=False
        ):
            slope = (
                spread**2 * (1 - s) / deviation(s) ** 2
            )  # x0_hat = mean + slope (x - (1 - s) mean)
            m = a * m + b * (mean + slope * (m - (1 - s) * mean))
            variance = (a + b * slope) ** 2 * variance + e**2
            worst = max(worst, abs(m - (1 - t) * mean), abs(np.sqrt(variance) - deviation(t)))
        return worst

    wrong = [errors(steps) for steps in (50, 100, 200)]
    assert [a / b for a, b in itertools.pairwise(wrong)] == pytest.approx([2, 2], rel=0.15)
    assert wrong[-1] < 5e-3


def test_a_level_for_each_step_is_an_ode_where_it_is_zero():
    sigmas = make_sigmas("linear", 10, 1.0, 1024)
    levels = np.array([0, 0, 0.7, 0.7, 0, 0, 0, 0, 0, 0.7])
    mixed, ode, sde = (solver_table("flow_sde", sigmas, level) for level in (levels, 0.0, 0.7))
    np.testing.assert_array_equal(mixed[2:4], sde[2:4])
    np.testing.assert_array_equal(
        mixed[[0, 1, 4, 5, 6, 7, 8, 9]], ode[[0, 1, 4, 5, 6, 7, 8, 9]]
    )  # the last takes none


def test_overlaps_add_up_to_both_schedules():
    coarse = make_sigmas("linear", 6, 3.0, 1024)
    full = make_sigmas("linear", 10, 3.0, 1024)
    shared = overlap(coarse, full)
    np.testing.assert_allclose(shared.sum(1), -np.diff(coarse), atol=1e-12)
    np.testing.assert_allclose(shared.sum(0), -np.diff(full), atol=1e-12)


def test_fewer_steps_share_the_brownian_path():
    """Two full steps in one: the sum of what they add, to variance 1. On the full schedule each
    step has its own draw.
    """
    full = make_sigmas("linear", 10, 1.0, 1024)
    std = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0])
    np.testing.assert_array_equal(
        shared_noise(full, full, std), np.diag(std > 0).astype(np.float32)
    )
    halved = shared_noise(full[::2], full, std)
    for i in range(4):
        expected = np.zeros(10)
        expected[2 * i : 2 * i + 2] = std[2 * i : 2 * i + 2] / np.hypot(*std[2 * i : 2 * i + 2])
        np.testing.assert_allclose(halved[i], expected, atol=1e-6)
    uneven = shared_noise(make_sigmas("linear", 6, 1.0, 1024), full, std)
    np.testing.assert_allclose((uneven**2).sum(1), 1, atol=1e-6)
    assert ((uneven > 0).sum(1) <= 3).all()
