"""The scan over a solver's table: exact where the path is straight, and noise that depends on seeds
alone.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.diffusion.sampler import interpolate, trajectory
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import candidate_seeds, normal
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import solver_table

SHAPE = (4, 4, 2)
ROWS = 3
SOLVERS = {
    "euler": ("euler", 0.0),
    "dpm2": ("dpm2", 0.0),
    "ddim": ("ddim", 0.0),
    "stochastic ddim": ("ddim", 1.0),
}
SDES = {"flow_sde": 0.7, "dance_sde": 0.3, "ddim": 1.0, "cps": 0.8}
TOLERANCE = 1e-5


def make_seeds(run_seed, count=ROWS):
    return candidate_seeds(
        np.int32(run_seed), "candidate", np.int32(0), np.array([7], np.uint32), np.arange(count)
    )[0]


SEEDS = make_seeds(0)
NOISE = normal(SEEDS, "initial", SHAPE)


def grid_of(sigmas, table, times=None):
    return Schedule.from_sigmas(
        sigmas, table, embedded_guidance=1.0, guidance_scale=1.0, timesteps=times
    )


@partial(jax.jit, static_argnums=0)
def compiled(velocities, grids, noise, seeds):
    return trajectory(list(zip(velocities, grids, strict=True)), noise, seeds, 0)[0]


def run(velocity, solver="euler", steps=6, noise=NOISE, seeds=SEEDS, schedule="linear"):
    sigmas = make_sigmas(schedule, steps, 3.0, 1024)
    return compiled(
        (velocity,),
        (grid_of(sigmas, solver_table(SOLVERS[solver][0], sigmas, SOLVERS[solver][1])),),
        noise,
        seeds,
    )


def curved(x, time):
    return jnp.tanh(1.5 * x + time / 1000) - 0.7 * jnp.cos(3e-3 * time) * x


def target(x, time):
    """Straight lines to one picture: the velocity is (x - picture) / sigma."""
    return (x - 0.5) / (time / 1000)


def largest(x):
    return float(np.abs(np.asarray(x)).max())


@pytest.mark.parametrize("solver", ["euler", "dpm2", "ddim"])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_constant_velocity_is_followed_exactly(solver, steps):
    got = run(lambda x, time: jnp.full_like(x, 0.7), solver, steps)
    np.testing.assert_allclose(got, NOISE - 0.7, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("schedule", ["linear", "sd3", "flux"])
def test_straight_lines_end_where_they_lead(solver, schedule):
    np.testing.assert_allclose(
        run(target, solver, schedule=schedule), np.full_like(NOISE, 0.5), atol=TOLERANCE, rtol=0
    )


SIGMAS = make_sigmas("linear", 6, 3.0, 1024)
TABLES = {
    "euler": solver_table("euler", SIGMAS),
    "dpm2": solver_table("dpm2", SIGMAS),
    "all predictions": solver_table("dpm2", SIGMAS) + np.float32([0.0, 0.3, 0.2, -0.5, 0.0]),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_scan_is_the_loop_over_the_table(name):
    x = np.asarray(NOISE, np.float64)
    previous = np.zeros_like(NOISE, np.float64)
    before = np.zeros_like(NOISE, np.float64)
    for (a, b, c, d, _), sigma in zip(TABLES[name].astype(np.float64), SIGMAS, strict=False):
        x0 = x - sigma * (np.tanh(1.5 * x + sigma) - 0.7 * np.cos(3 * sigma) * x)
        x, previous, before = a * x + b * x0 + c * previous + d * before, x0, previous
    got = {
        other: compiled((curved,), (grid_of(SIGMAS, table),), NOISE, SEEDS)
        for other, table in TABLES.items()
    }
    np.testing.assert_allclose(got[name], x, atol=TOLERANCE, rtol=0)
    assert all(
        largest(got[name] - got[other]) > 1e3 * TOLERANCE for other in TABLES if other != name
    )


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_first_steps_may_be_another_velocitys(count):
    """Two segments equal the loop that asks the one velocity, then the other; with a step more or
    less it ends elsewhere.
    """
    starts = SIGMAS[:-1].astype(np.float32)
    grid = grid_of(SIGMAS, TABLES["all predictions"])

    def loop(count):
        x = NOISE
        previous = jnp.zeros_like(NOISE)
        before = jnp.zeros_like(NOISE)
        for i, (a, b, c, d, _) in enumerate(grid.table):
            x0 = x - starts[i] * (target if i < count else curved)(x, 1000 * starts[i])
            x, previous, before = a * x + b * x0 + c * previous + d * before, x0, previous
        return x

    got = compiled(
        (target, curved), (grid.slice_steps(0, count), grid.slice_steps(count)), NOISE, SEEDS
    )
    np.testing.assert_allclose(got, loop(count), atol=TOLERANCE, rtol=0)
    assert all(largest(got - loop(other)) > 1e2 * TOLERANCE for other in (count - 1, count + 1))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_where_a_grid_is_cut_into_legs_changes_nothing(solver):
    """Earlier predictions and the numbers of the draws go on from segment to segment."""
    grid = grid_of(SIGMAS, solver_table(SOLVERS[solver][0], SIGMAS, SOLVERS[solver][1]))
    whole = None
    for cuts in ((), (3,), (1, 2, 3, 4, 5)):
        parts = [grid.slice_steps(*ends) for ends in itertools.pairwise((0, *cuts, None))]
        assert sum(part.steps for part in parts) == grid.steps
        got = compiled((curved,) * len(parts), tuple(parts), NOISE, SEEDS)
        whole = got if whole is None else whole
        np.testing.assert_allclose(got, whole, atol=TOLERANCE, rtol=0)
    if (
        solver == "stochastic ddim"
    ):  # a step keeps its draw; the first segment's noise again would be seen
        halfway = compiled((curved,), (grid.slice_steps(0, 3),), NOISE, SEEDS)
        np.testing.assert_allclose(
            compiled((curved,), (grid.slice_steps(3),), halfway, SEEDS),
            whole,
            atol=TOLERANCE,
            rtol=0,
        )
        again = compiled(
            (curved,),
            (dataclasses.replace(grid.slice_steps(3), noise_weights=grid.noise_weights[:3]),),
            halfway,
            SEEDS,
        )
        assert largest(again - whole) > 1e2 * TOLERANCE


def test_the_network_is_told_the_times_of_the_steps():
    sigmas = np.array([1.0, 0.5, 0.0])
    grid = grid_of(sigmas, solver_table("euler", sigmas), np.array([3.0, 5.0], np.float32))
    got = compiled((lambda x, time: jnp.full_like(x, time),), (grid,), NOISE, SEEDS)
    np.testing.assert_allclose(got, NOISE - 0.5 * 3 - 0.5 * 5, atol=TOLERANCE)


def test_latents_stay_float32_when_the_network_computes_in_bfloat16():
    got = run(lambda x, time: curved(x.astype(jnp.bfloat16), time.astype(jnp.bfloat16)))
    assert got.dtype == jnp.float32
    assert TOLERANCE < largest(got - run(curved)) < 0.05
    assert largest(got - got.astype(jnp.bfloat16).astype(jnp.float32)) > 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_same_seeds_give_the_same_bits_in_any_order(solver):
    got = run(curved, solver)
    order = np.array([2, 0, 1])
    np.testing.assert_array_equal(run(curved, solver), got)
    np.testing.assert_array_equal(
        run(curved, solver, noise=NOISE[order], seeds=SEEDS[order]), got[order]
    )
    assert min(largest(got[i] - got[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1


def test_seeds_matter_to_a_stochastic_solver_only():
    others = make_seeds(1)
    for solver in ("euler", "dpm2", "ddim"):
        np.testing.assert_array_equal(run(curved, solver, seeds=others), run(curved, solver))
    assert (
        largest(run(curved, "stochastic ddim", seeds=others) - run(curved, "stochastic ddim")) > 0.1
    )
    # one row's seed is no concern of the other rows
    mixed = jnp.concatenate([others[:1], SEEDS[1:]])
    np.testing.assert_array_equal(
        run(curved, "stochastic ddim", seeds=mixed)[1:], run(curved, "stochastic ddim")[1:]
    )


@pytest.mark.slow
def test_every_step_draws_fresh_standard_normal_noise():
    """A table of x' = x + noise lays the draws bare."""
    many = make_seeds(0, 256)
    initial = normal(many, "initial", SHAPE)
    sums = []
    for steps in (1, 2, 3):
        grid = grid_of(
            np.linspace(1, 0, steps + 1),
            np.tile(np.array([[1, 0, 0, 0, 1]], np.float32), (steps, 1)),
        )
        sums.append(compiled((lambda x, time: x,), (grid,), jnp.zeros_like(initial), many))
    draws = np.stack([initial, sums[0], sums[1] - sums[0], sums[2] - sums[1]]).reshape(4, -1)
    assert draws.std(1) == pytest.approx(np.ones(4), abs=0.03)  # 8192 numbers: 0.008 is one sigma
    assert draws.mean(1) == pytest.approx(np.zeros(4), abs=0.05)
    assert (
        np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.05
    )  # and none is the initial noise again


def test_interpolate_is_clean_at_zero_and_noise_at_one():
    x0 = jnp.ones((3, 2, 2, 1))
    noise = jnp.full((3, 2, 2, 1), 5.0)
    got = interpolate(x0, noise, jnp.array([0.0, 0.25, 1.0]))
    np.testing.assert_array_equal(got[:, 0, 0, 0], [1, 2, 5])
    assert got.shape == x0.shape


recording = jax.jit(
    lambda grids, noise, seeds, recorded: trajectory(
        [(curved, grid) for grid in grids], noise, seeds, recorded
    ),
    static_argnums=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, 1, 4])
@pytest.mark.parametrize("solver", SDES)
def test_recorded_states_are_the_steps_that_were_drawn(solver, cut):
    """In float64: each state is the mean of the step before, and the seed's draw of that number
    times its deviation.
    """
    grid = grid_of(SIGMAS, solver_table(solver, SIGMAS, SDES[solver]))
    segments = (grid,) if cut is None else (grid.slice_steps(0, cut), grid.slice_steps(cut))
    end, states, _ = recording(segments, NOISE, SEEDS, 5)
    assert states.shape == (ROWS, 6, *SHAPE)
    np.testing.assert_array_equal(states[:, 0], NOISE)
    np.testing.assert_allclose(
        end, compiled((curved,), (grid,), NOISE, SEEDS), atol=TOLERANCE, rtol=0
    )
    for i, (a, b, *_, std) in enumerate(grid.table[:5].astype(np.float64)):
        x = np.asarray(states[:, i], np.float64)
        mean = a * x + b * (
            x - SIGMAS[i] * np.asarray(curved(states[:, i], 1000 * SIGMAS[i]), np.float64)
        )
        drawn = np.asarray(normal(SEEDS, "solver", SHAPE, i), np.float64)
        np.testing.assert_allclose(states[:, i + 1], mean + std * drawn, atol=TOLERANCE, rtol=0)
        assert std > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 2, 3])
def test_only_the_window_is_recorded_wherever_it_is(start):
    levels = 0.7 * ((np.arange(6) >= start) & (np.arange(6) < start + 2))
    grid = grid_of(SIGMAS, solver_table("flow_sde", SIGMAS, levels))
    _, states, _ = recording((grid,), NOISE, SEEDS, 2)
    assert states.shape == (ROWS, 3, *SHAPE)
    _, everything, _ = recording(
        (dataclasses.replace(grid, table=grid.table.clip(min=[-9, -9, -9, -9, 1e-30])),),
        NOISE,
        SEEDS,
        5,
    )
    np.testing.assert_allclose(states, everything[:, start : start + 3], atol=TOLERANCE, rtol=0)
    assert recording((grid,), NOISE, SEEDS, 0)[1] is None


def test_a_step_of_several_draws_adds_them_up_by_weight():
    weights = np.float32([[0.6, 0.0, 0.8]])
    grid = dataclasses.replace(
        grid_of(np.array([1.0, 0.0]), np.array([[0, 0, 0, 0, 2.0]], np.float32)),
        noise_weights=weights,
    )
    got = compiled((lambda x, time: x,), (grid,), NOISE, SEEDS)

    def draw(i):
        return np.asarray(normal(SEEDS, "solver", SHAPE, i))

    np.testing.assert_allclose(got, 2 * (0.6 * draw(0) + 0.8 * draw(2)), atol=TOLERANCE)
