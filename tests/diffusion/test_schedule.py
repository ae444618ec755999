"""`Schedule`: the arrays that a configuration stands for, its parts, and what a compiled program
depends on.
"""

import dataclasses

import jax
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import solver_table

FLUX = resolve("flux1_sol_rl_hpsv2").rollout  # dpm2, a shift by tokens


def test_a_grid_is_the_configured_schedule_and_solver():
    grid = Schedule.from_config(FLUX, 6, 1024, True)
    sigmas = make_sigmas("flux", 6, FLUX.shift, 1024)
    assert grid.steps == 6
    np.testing.assert_array_equal(grid.sigmas, sigmas[:-1].astype(np.float32))
    np.testing.assert_array_equal(grid.timesteps, 1000 * grid.sigmas)
    np.testing.assert_array_equal(grid.table, solver_table("dpm2", sigmas))
    assert np.abs(grid.sigmas - Schedule.from_config(FLUX, 6, 4096, True).sigmas).max() > 0.01
    noisy = Schedule.from_config(
        dataclasses.replace(FLUX, solver="ddim", noise_level=0.5), 6, 1024, True
    )
    np.testing.assert_array_equal(noisy.table, solver_table("ddim", sigmas, 0.5))


@pytest.mark.parametrize(
    ("guidance", "true_guidance", "embedded", "expected"),  # expected: guidance, scale, guided
    [
        (4.5, 1.0, False, (4.5, 4.5, True)),  # classifier-free
        (1.0, 1.0, False, (1.0, 1.0, False)),
        (3.5, 1.0, True, (3.5, 1.0, False)),  # told to the network
        (3.5, 2.0, True, (3.5, 2.0, True)),  # both
    ],
)
def test_guidance_is_told_to_the_network_or_classifier_free(
    guidance, true_guidance, embedded, expected
):
    rollout = dataclasses.replace(FLUX, guidance_scale=guidance, true_cfg_scale=true_guidance)
    grid = Schedule.from_config(rollout, 3, 1024, embedded)
    assert (grid.embedded_guidance, grid.guidance_scale, grid.guided) == expected
    assert grid.embedded_guidance.dtype == grid.guidance_scale.dtype == np.float32


def test_parts_are_slices_and_other_sigmas_keep_the_guidance():
    whole = Schedule.from_config(
        dataclasses.replace(FLUX, guidance_scale=3.5, true_cfg_scale=2.0), 6, 1024, True
    )
    for start, stop in ((0, 2), (2, None), (1, 4)):
        part = whole.slice_steps(start, stop)
        for name in ("sigmas", "timesteps", "table", "noise_weights"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[start:stop])
        assert (part.embedded_guidance, part.guidance_scale, part.guided) == (
            whole.embedded_guidance,
            whole.guidance_scale,
            whole.guided,
        )
    sigmas = np.array([1.0, 0.4, 0.0])
    table = np.ones((2, 5), np.float32)
    other = whole.with_sigmas(sigmas, table)
    np.testing.assert_array_equal(other.sigmas, np.float32([1.0, 0.4]))
    np.testing.assert_array_equal(other.timesteps, 1000 * other.sigmas)
    assert other.table is table
    assert (other.embedded_guidance, other.guidance_scale, other.guided) == (
        whole.embedded_guidance,
        whole.guidance_scale,
        whole.guided,
    )


def test_a_program_depends_on_the_number_of_steps_and_on_whether_there_is_guidance_alone():
    traced = []
    total = jax.jit(
        lambda grid: traced.append(grid.guided) or grid.sigmas.sum() + grid.guidance_scale
    )
    grid = Schedule.from_config(FLUX, 6, 1024, True)
    total(grid)
    for same in (
        Schedule.from_config(FLUX, 6, 4096, True),
        Schedule.from_config(
            dataclasses.replace(FLUX, guidance_scale=2.0, solver="euler"), 6, 256, True
        ),
    ):
        assert total(same) == pytest.approx(same.sigmas.sum() + same.guidance_scale, rel=1e-5)
        assert traced == [False]
    total(Schedule.from_config(dataclasses.replace(FLUX, true_cfg_scale=2.0), 6, 1024, True))
    assert traced == [False, True]
    total(grid.slice_steps(1))
    assert traced == [False, True, False]


SDE = dataclasses.replace(FLUX, solver="flow_sde", noise_level=0.7, schedule="linear", shift=1.0)


def test_a_full_schedule_takes_each_draw_once_and_an_evaluation_none():
    grid = Schedule.from_config(SDE, 10, 1024, True)
    np.testing.assert_array_equal(
        grid.noise_weights, np.eye(10, dtype=np.float32) * (np.arange(10) < 9)
    )
    np.testing.assert_allclose(
        grid.table, solver_table("flow_sde", make_sigmas("linear", 10, 1.0, 1024), 0.7), rtol=1e-6
    )
    quiet = Schedule.from_config(SDE, 28, 1024, True, noise_start=None)
    np.testing.assert_array_equal(
        quiet.table, solver_table("flow_sde", make_sigmas("linear", 28, 1.0, 1024))
    )
    finer = Schedule.from_config(
        SDE, 12, 1024, True
    )  # more steps than the full schedule has: draws of their own
    np.testing.assert_array_equal(
        finer.noise_weights, np.eye(12, dtype=np.float32) * (np.arange(12) < 11)
    )


def test_a_window_is_as_noisy_on_fewer_steps():
    """Full steps 3 to 6 of ten, sigma 0.7 to 0.3; of five steps the second has half of its length
    in it.
    """
    window = dataclasses.replace(SDE, sde_window_size=4)
    full = Schedule.from_config(window, 10, 1024, True, noise_start=3)
    coarse = Schedule.from_config(window, 5, 1024, True, noise_start=3)
    assert (full.table[:, 4] > 0).tolist() == [3 <= i < 7 for i in range(10)]
    assert (coarse.table[:, 4] > 0).tolist() == [False, True, True, True, False]
    whole = solver_table("flow_sde", make_sigmas("linear", 5, 1.0, 1024), 0.7)
    np.testing.assert_allclose(
        coarse.table[:, 4] / whole[:, 4].clip(1e-9), [0, 0.5**0.5, 1, 0.5**0.5, 0], atol=1e-5
    )
    assert [np.flatnonzero(row).tolist() for row in coarse.noise_weights] == [
        [],
        [3],
        [4, 5],
        [6],
        [],
    ]


def test_the_window_moves_on_and_starts_again():
    window = dataclasses.replace(SDE, sde_window_size=4, sde_window_every=2)
    assert [window.window_start(i) for i in range(1, 15)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        0,
        0,
    ]
    assert [SDE.window_start(i) for i in (1, 2, 99)] == [0, 0, 0]
    quiet = dataclasses.replace(window, noise_level=0.0)
    assert [quiet.window_start(i) for i in (1, 3, 99)] == [0, 0, 0]
    assert (window.num_sde_steps, SDE.num_sde_steps, FLUX.num_sde_steps) == (4, 9, 0)
