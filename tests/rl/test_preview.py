"""The preview option: which sigmas it visits, and the fitted steps."""

import dataclasses

import numpy as np
import pytest

from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import SOLVERS, solver_table
from solrl_jax.rl.experiment import build
from solrl_jax.rl.explore.options.preview import first_sigmas, fitted_table
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.sampler import Segment
from tests.diffusion.test_solver import GRIDS, START, follow, velocity
from tests.small import small_config


@pytest.fixture(scope="module")
def experiment():
    """Ten steps and six: two steps, as other tests take, make no picture."""
    steps = (
        "rollout.num_steps=10",
        "rollout.explore.num_steps=6",
        "rollout.explore.sigmas=first",
        "rollout.per_device_batch_size=16",
    )
    return build(small_config("unused", *steps))


@pytest.mark.parametrize("name", ["linear", "sd3", "flux"])
def test_a_preview_visits_the_first_half_of_the_full_schedule_and_then_takes_long_steps(name):
    full = make_sigmas(name, 10, 3.0, 1024)
    for steps, visited in {
        1: [],
        2: [1],
        4: [1, 2, 6],
        5: [1, 2, 5, 7],
        6: [1, 2, 3, 5, 8],
        8: [1, 2, 3, 4, 6, 7, 8],
    }.items():
        np.testing.assert_array_equal(first_sigmas(full, steps), full[[0, *visited, 10]])
    for steps in range(1, 10):
        assert first_sigmas(full, steps).shape == (steps + 1,)
        assert (np.diff(first_sigmas(full, steps)) < 0).all()
    for steps in (10, 11):
        np.testing.assert_array_equal(first_sigmas(full, steps), full)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_fitted_preview_ends_nearer_to_the_full_schedule_than_its_solver_does(grid, name):
    """From noise that it was not fitted on; a nonlinear velocity, not the same for all values of a
    latent.
    """
    full = make_sigmas(grid[0], 10, grid[1], 1024)
    table = solver_table(name, full)
    sigmas = first_sigmas(full, 6)
    fitted_on, other = np.random.default_rng(1).standard_normal((2, 64, 16))

    def field(x, sigma):
        return velocity(x * np.linspace(0.6, 1.4, 16), sigma)

    def predict(x, sigma):
        return x - sigma * field(x, sigma)

    fitted = fitted_table(predict, fitted_on, full, table, sigmas)
    want = follow(table, full, other, field)[-1]

    def distance(table):
        return np.sqrt(np.mean((follow(table, sigmas, other, field)[-1] - want) ** 2))

    assert distance(fitted) < 0.7 * distance(solver_table(name, sigmas))
    np.testing.assert_array_equal(
        fitted[:3], table[:3]
    )  # the steps that the full schedule takes too
    assert fitted.dtype == np.float32
    assert (fitted[:, 4] == 0).all()
    again = fitted_table(
        lambda x, sigma: predict(x, sigma) * (1 + 1e-11), fitted_on, full, table, sigmas
    )
    np.testing.assert_array_equal(again, fitted)  # the last bits of predictions do not show


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["euler", "dpm2"])
def test_a_fitted_preview_is_exact_where_data_predictions_lie_on_parabolas(name, steps):
    """p + q sigma + r sigma^2, other ones for every value: what three predictions tell.

    One tells p, two p and q.
    """
    full = make_sigmas("sd3", 10, 3.0, 1024)
    table = solver_table(name, full)
    sigmas = first_sigmas(full, steps)
    noise, *curves = np.random.default_rng(1).standard_normal((4, 8, 16))

    def x0(sigma):
        return sum(curve * sigma**k for k, curve in enumerate(curves[: steps // 2 + 1]))

    def field(x, sigma):
        return (x - x0(sigma)) / sigma

    fitted = fitted_table(lambda x, sigma: x0(sigma), noise, full, table, sigmas)
    want = follow(table, full, noise, field)[-1]
    np.testing.assert_allclose(follow(fitted, sigmas, noise, field)[-1], want, atol=1e-4)
    if steps > 1:
        unfitted = follow(solver_table("euler", sigmas), sigmas, noise, field)[-1]
        assert np.abs(unfitted - want).max() > 0.05
    if steps > 3:
        fitted[:, 3] = 0  # the look back on two predictions
        assert np.abs(follow(fitted, sigmas, noise, field)[-1] - want).max() > 0.02


@pytest.mark.parametrize("name", SOLVERS)
def test_a_preview_of_all_steps_is_the_full_schedule(name):
    full = make_sigmas("sd3", 10, 3.0, 1024)
    table = solver_table(name, full)

    def predict(x, sigma):
        return x - sigma * velocity(x, sigma)

    np.testing.assert_array_equal(
        fitted_table(predict, START[None], full, table, first_sigmas(full, 10)), table
    )


@pytest.mark.exhaustive
def test_a_preview_is_fitted_to_what_the_base_does_and_the_same_in_every_run(experiment):
    """On prompts and seeds that it was not fitted on, it ends nearer to all ten steps than the
    solver on its sigmas does.
    """
    explorer = experiment.explorer
    full = experiment.schedule(10)
    backbone = experiment.backbone
    grid = explorer.schedule(6)
    np.testing.assert_array_equal(grid.sigmas, full.sigmas[[0, 1, 2, 3, 5, 8]])
    np.testing.assert_array_equal(grid.timesteps, full.timesteps[[0, 1, 2, 3, 5, 8]])
    np.testing.assert_array_equal(grid.table[:3], full.table[:3])
    np.testing.assert_array_equal(dataclasses.replace(explorer).schedule(6).table, grid.table)
    assert explorer.schedule(6) is grid  # worked out once
    unfitted = dataclasses.replace(grid, table=solver_table("euler", np.append(grid.sigmas, 0)))
    prompts = experiment.test_prompts[:8]
    rows = SeedBatch.from_seeds(experiment.seeds("candidate", prompts, 2))
    prompted = experiment.encode_prompts(prompts)

    def end(grid):
        sampler = dataclasses.replace(
            explorer.calibration.sampler, segments=(Segment(backbone.transformer, grid),)
        )
        return generate(backbone, sampler, prompted, rows).latents

    want = end(full)
    distance = {
        name: np.sqrt(np.mean((end(g) - want) ** 2))
        for name, g in (("fitted", grid), ("not", unfitted))
    }
    print(distance)
    assert distance["fitted"] < 0.9 * distance["not"]
    assert distance["not"] < 0.2 * want.std()  # and both are previews of it


@pytest.mark.parametrize("bad_step", [0, 9])
def test_a_base_whose_predictions_are_not_finite_gives_no_coefficients(bad_step):
    """Also where only the last steps of the full schedule are, which the preview leaves out."""
    full = make_sigmas("sd3", 10, 3.0, 1024)
    sigmas = first_sigmas(full, 6)

    def predict(x, sigma):
        return x * (np.nan if sigma == full[bad_step] else 0.5)

    noise = np.random.default_rng(0).standard_normal((2, 4))
    with pytest.raises(np.linalg.LinAlgError):
        fitted_table(predict, noise, full, solver_table("euler", full), sigmas)
