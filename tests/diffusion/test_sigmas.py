"""Noise levels of each model against diffusers' schedulers."""

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from solrl_jax.diffusion.sigmas import flux, make_sigmas, sd3, shift_sigmas

STEPS = (1, 2, 6, 10, 28, 40)
TOLERANCE = 1e-6  # diffusers' sigmas are float32
FLUX_MU = {256: 0.5, 1024: 0.63, 4096: 1.15}  # image tokens: what its pipeline works out


def diffusers_sigmas(steps, *, sigmas=None, mu=None, **config):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(steps, sigmas=sigmas, mu=mu)
    return scheduler.sigmas.numpy()


@pytest.mark.parametrize("steps", STEPS)
def test_sd3_is_the_released_scheduler_with_its_double_shift(steps):
    got = sd3(steps, 3.0)
    np.testing.assert_allclose(got, diffusers_sigmas(steps, shift=3.0), atol=TOLERANCE, rtol=0)
    if steps > 1:
        once = shift_sigmas(np.append(np.linspace(1.0, 1 / 1000, steps), 0), 3.0)
        assert np.abs(got - once).max() > 1e-3  # one shift would show
        # the recipe's note: the last non-zero level is about 0.0089, not the 0.003 of one shift
        assert got[-2] == pytest.approx(0.0089, abs=1e-4)


@pytest.mark.parametrize("tokens", FLUX_MU)
@pytest.mark.parametrize("steps", STEPS)
def test_flux_is_the_dynamic_shift(steps, tokens):
    def want(mu):
        return diffusers_sigmas(
            steps,
            sigmas=np.linspace(1, 1 / steps, steps),
            mu=mu,
            use_dynamic_shifting=True,
            shift=3.0,
        )

    np.testing.assert_allclose(flux(steps, tokens), want(FLUX_MU[tokens]), atol=TOLERANCE, rtol=0)
    if steps > 1:
        assert np.abs(flux(steps, tokens) - want(FLUX_MU[tokens] + 0.01)).max() > 1e-3


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", STEPS)
def test_linear_is_even_then_shifted_once(steps, shift):
    want = diffusers_sigmas(steps, sigmas=np.linspace(1, 1 / steps, steps), shift=shift)
    np.testing.assert_allclose(make_sigmas("linear", steps, shift, 0), want, atol=TOLERANCE, rtol=0)
    if shift == 1.0:
        np.testing.assert_allclose(
            make_sigmas("linear", steps, shift, 0), np.linspace(1, 0, steps + 1), atol=1e-15
        )


def test_shifting_keeps_the_ends_and_composes():
    grid = np.linspace(0, 1, 11)
    for shift in (0.001, 0.1, 3.0):  # 1 + (0.001 - 1) is not 0.001
        np.testing.assert_array_equal(shift_sigmas(grid, shift)[[0, -1]], [0, 1])
    np.testing.assert_allclose(
        shift_sigmas(shift_sigmas(grid, 3.0), 2.0), shift_sigmas(grid, 6.0), rtol=1e-14
    )
    assert (shift_sigmas(grid, 3.0)[1:-1] > grid[1:-1] + 0.05).all()


@pytest.mark.parametrize("name", ["linear", "sd3", "flux"])
@pytest.mark.parametrize("steps", STEPS)
def test_every_schedule_falls_from_pure_noise_to_none(name, steps):
    sigmas = make_sigmas(name, steps, 3.0, 1024)
    assert sigmas.shape == (steps + 1,)
    assert sigmas.dtype == np.float64
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert (np.diff(sigmas) < 0).all()


def test_make_sigmas_calls_the_schedule_of_that_name():
    np.testing.assert_array_equal(
        make_sigmas("linear", 10, 3.0, 1024), shift_sigmas(np.linspace(1, 0, 11), 3.0)
    )
    np.testing.assert_array_equal(make_sigmas("sd3", 10, 3.0, 1024), sd3(10, 3.0))
    np.testing.assert_array_equal(make_sigmas("flux", 10, 3.0, 1024), flux(10, 1024))
    with pytest.raises(
        ValueError, match=r"rollout\.schedule='cosine': must be one of 'linear', 'sd3', 'flux'"
    ):
        make_sigmas("cosine", 10, 3.0, 1024)
