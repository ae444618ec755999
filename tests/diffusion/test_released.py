"""A released scheduler_config.json read as a schedule and a solver, against the diffusers scheduler
that it configures.
"""

import json
import re

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from solrl_jax.diffusion.released import DPM, EULER, FLUX_MU, UNIPC, read_scheduler
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import solver_table, unipc_table
from solrl_jax.models.flux2.pipeline import empirical_mu

STEPS = (1, 2, 6, 10, 20, 28, 40)
TOKENS = 1024
MU = 0.63

# as released: SD3.5-Large, FLUX.1-dev, SANA (only what the file sets)
SD3 = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
FLUX = SD3 | {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "use_dynamic_shifting": True,
}
WAN = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 3.0,
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
}
SANA = {
    "_class_name": "DPMSolverMultistepScheduler",
    "algorithm_type": "dpmsolver++",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "dynamic_thresholding_ratio": 0.995,
    "euler_at_final": False,
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lambda_min_clipped": -np.inf,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_type": "midpoint",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
    "use_lu_lambdas": False,
    "variance_type": None,
}


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", STEPS)
def test_flow_match_euler_equals_diffusers(steps, shift):
    theirs = FlowMatchEulerDiscreteScheduler.from_config(SD3 | {"shift": shift})
    theirs.set_timesteps(steps)
    sigmas, times, table = read_scheduler(SD3 | {"shift": shift}, steps, TOKENS)
    np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    np.testing.assert_allclose(times, theirs.timesteps, atol=1e-3, rtol=0)
    np.testing.assert_array_equal(table, solver_table("euler", sigmas))


@pytest.mark.parametrize("steps", STEPS)
def test_dynamic_shifting_equals_diffusers(steps):
    theirs = FlowMatchEulerDiscreteScheduler.from_config(FLUX)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=MU)
    sigmas, times, table = read_scheduler(FLUX, steps, TOKENS, pipeline_sigmas=True)
    np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    np.testing.assert_allclose(times, theirs.timesteps, atol=1e-3, rtol=0)
    np.testing.assert_array_equal(table, solver_table("euler", sigmas))
    if steps > 2:
        assert (
            np.abs(sigmas - read_scheduler(FLUX, steps, 4 * TOKENS, pipeline_sigmas=True)[0]).max()
            > 0.01
        )
        assert np.abs(sigmas - read_scheduler(SD3, steps, TOKENS)[0]).max() > 0.01


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4300, 4301, 8192])
@pytest.mark.parametrize("steps", STEPS)
def test_a_pipelines_own_shift_equals_diffusers(steps, tokens):
    theirs = FlowMatchEulerDiscreteScheduler.from_config(FLUX)
    theirs.set_timesteps(
        sigmas=np.linspace(1, 1 / steps, steps), mu=compute_empirical_mu(tokens, steps)
    )
    sigmas, times, _ = read_scheduler(FLUX, steps, tokens, pipeline_sigmas=True, mu=empirical_mu)
    np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    np.testing.assert_allclose(times, theirs.timesteps, atol=1e-3, rtol=0)
    np.testing.assert_array_equal(make_sigmas("flux", steps, 3.0, tokens, empirical_mu), sigmas)
    if steps > 2 and tokens <= 4300:
        assert (
            np.abs(sigmas - read_scheduler(FLUX, steps, tokens, pipeline_sigmas=True)[0]).max()
            > 0.01
        )


# as released: Qwen-Image
QWEN = FLUX | {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02, "shift": 1.0}


def qwen_mu(steps, tokens):
    return calculate_shift(tokens, 256, 8192, 0.5, 0.9)


@pytest.mark.parametrize("tokens", [256, 1024, 6889])
@pytest.mark.parametrize("steps", STEPS[1:])
def test_a_terminal_sigma_equals_diffusers(steps, tokens):
    theirs = FlowMatchEulerDiscreteScheduler.from_config(QWEN)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=qwen_mu(steps, tokens))
    sigmas, times, _ = read_scheduler(QWEN, steps, tokens, pipeline_sigmas=True, mu=qwen_mu)
    np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    np.testing.assert_allclose(times, theirs.timesteps, atol=1e-3, rtol=0)
    np.testing.assert_array_equal(make_sigmas("flux", steps, 1.0, tokens, qwen_mu, 0.02), sigmas)
    assert sigmas[-2] == pytest.approx(0.02)


def test_a_single_step_has_no_terminal_sigma():
    """In diffusers it is NaN."""
    sigmas, _, _ = read_scheduler(QWEN, 1, TOKENS, pipeline_sigmas=True, mu=qwen_mu)
    np.testing.assert_array_equal(sigmas, [1.0, 0.0])


@pytest.mark.parametrize("value", [1.0, -0.1, "x", True])
def test_a_terminal_sigma_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=f"shift_terminal={value!r}; must be None or a number"):
        read_scheduler(QWEN | {"shift_terminal": value}, 6, TOKENS, True, qwen_mu)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", STEPS)
def test_a_fixed_shift_of_a_pipelines_own_sigmas_equals_diffusers(steps, shift):
    theirs = FlowMatchEulerDiscreteScheduler.from_config(SD3 | {"shift": shift})
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
    sigmas, times, _ = read_scheduler(SD3 | {"shift": shift}, steps, TOKENS, pipeline_sigmas=True)
    np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    np.testing.assert_allclose(times, theirs.timesteps, atol=1e-3, rtol=0)
    if steps > 2:
        assert (
            np.abs(sigmas - read_scheduler(SD3 | {"shift": shift}, steps, TOKENS)[0]).max() > 0.01
        )


def test_dynamic_shifting_of_a_grid_that_is_not_the_pipelines_own_is_refused():
    with pytest.raises(
        ValueError,
        match="FlowMatchEulerDiscreteScheduler: use_dynamic_shifting=True is not supported for"
        " this kind",
    ):
        read_scheduler(FLUX, 6, TOKENS)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("flow_shift", [1.0, 3.0, 6.0])
def test_dpm_solver_equals_diffusers(flow_shift, order):
    config = SANA | {"flow_shift": flow_shift, "solver_order": order}
    theirs = DPMSolverMultistepScheduler.from_config(config)
    fractional = 0
    for steps in (*STEPS, 3, 5, 7, 14, 15, 50, 100):
        theirs.set_timesteps(steps)
        sigmas, times, table = read_scheduler(config, steps, TOKENS)
        np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-7, rtol=0)
        np.testing.assert_array_equal(times, theirs.timesteps)  # whole numbers, cut off
        np.testing.assert_array_equal(table, solver_table(f"dpm{order}", sigmas))
        fractional += int((np.round(1000 * sigmas[:-1]) != times).sum())
    assert fractional > 50  # rounding would not do


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_unipc_equals_diffusers(shift):
    """Steps, sigmas and timesteps, on a field that bends."""
    config = WAN | {"flow_shift": shift}
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((8, 8))
    noise = rng.standard_normal((4, 1, 8)).astype(np.float32)

    def field(x, sigma):
        return np.tanh(x @ weights) + np.sin(3 * sigma)

    for steps in (1, 2, 3, 4, 7, 20, 50):
        theirs = UniPCMultistepScheduler.from_config(config)
        theirs.set_timesteps(steps)
        sigmas, times, table = read_scheduler(config, steps, TOKENS)
        np.testing.assert_allclose(sigmas, theirs.sigmas, atol=1e-7, rtol=0)
        np.testing.assert_array_equal(times, theirs.timesteps)
        want = torch.from_numpy(noise)
        x = noise.astype(np.float64)
        previous = np.zeros_like(x)
        second_previous = np.zeros_like(x)
        for time, sigma, (a, b, c, d, e) in zip(theirs.timesteps, sigmas, table, strict=False):
            v = torch.from_numpy(field(want.numpy(), sigma)).float()
            want = theirs.step(v, time, want, return_dict=False)[0]
            x0 = x - sigma * field(x, sigma)
            x = a * x + b * x0 + c * previous + d * second_previous
            previous, second_previous = x0, previous
            assert e == 0
        assert np.abs(x - want.numpy()).max() < 1e-5
    # correction and slopes matter
    assert np.abs(table - solver_table("dpm2", sigmas)).max() > 0.1


def test_unipc_from_one_is_the_limit_of_unipc_from_below():
    sigmas = np.array([1.0, 0.8, 0.6, 0.3, 0.0])
    almost = np.array([1 - 1e-12, *sigmas[1:]])
    table = unipc_table(sigmas)
    assert np.isfinite(table).all()
    np.testing.assert_allclose(table, unipc_table(almost), atol=0.05)
    # a straight path, whose predictions are all equal, is followed exactly
    weights = table[:, 1:4].sum(1)
    np.testing.assert_allclose(weights, 1 - sigmas[1:] - (1 - sigmas[:-1]) * table[:, 0], atol=1e-6)


def test_a_scheduler_that_diffusers_wrote_is_read():
    classes = (
        FlowMatchEulerDiscreteScheduler,
        FlowMatchEulerDiscreteScheduler,
        DPMSolverMultistepScheduler,
        UniPCMultistepScheduler,
    )
    for config, scheduler in zip((SD3, FLUX, SANA, WAN), classes, strict=True):
        settings = json.loads(
            scheduler.from_config(config).to_json_string()
        )  # all settings, most at their defaults
        assert len(settings) > len(config)
        pipeline_sigmas = config is FLUX
        for got, want in zip(
            read_scheduler(settings, 6, TOKENS, pipeline_sigmas),
            read_scheduler(config, 6, TOKENS, pipeline_sigmas),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)
    defaults = json.loads(FlowMatchEulerDiscreteScheduler().to_json_string())
    np.testing.assert_array_equal(
        read_scheduler(defaults, 6, TOKENS)[0],
        read_scheduler(defaults | {"shift": 1.0}, 6, TOKENS)[0],
    )


UNSUPPORTED = {
    "num_train_timesteps": 500,
    "invert_sigmas": True,
    "use_karras_sigmas": True,
    "use_exponential_sigmas": True,
    "use_beta_sigmas": True,
    "time_shift_type": "linear",
    "stochastic_sampling": True,
    "base_shift": 0.4,
    "max_shift": 1.0,
    "base_image_seq_len": 128,
    "max_image_seq_len": 2048,
    "use_flow_sigmas": False,
    "prediction_type": "epsilon",
    "algorithm_type": "sde-dpmsolver++",
    "solver_type": "heun",
    "final_sigmas_type": "sigma_min",
    "thresholding": True,
    "use_lu_lambdas": True,
    "use_dynamic_shifting": True,
    "variance_type": "learned",
    "solver_order": 3,
    "predict_x0": False,
    "lower_order_final": False,
    "disable_corrector": [0],
    "solver_p": "DDIMScheduler",
    "shift_terminal": 0.1,
}


@pytest.mark.parametrize(
    ("config", "setting"),
    [(FLUX, s) for s in EULER | FLUX_MU] + [(SANA, s) for s in DPM] + [(WAN, s) for s in UNIPC],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(config, setting):
    value = UNSUPPORTED[setting]
    with pytest.raises(
        ValueError,
        match=re.escape(f"{config['_class_name']}: {setting}={value!r}; must be one of "),
    ):
        read_scheduler(config | {setting: value}, 6, TOKENS)


def test_every_setting_that_diffusers_knows_is_read_or_refused_or_changes_nothing():
    """Another release of diffusers with a new setting fails here, to be looked at."""
    read = {"FlowMatchEulerDiscreteScheduler": {"shift", "use_dynamic_shifting", "shift_terminal"}}
    read["DPMSolverMultistepScheduler"] = {"solver_order", "flow_shift"}
    read["UniPCMultistepScheduler"] = {"flow_shift"}
    # with flow sigmas and a last sigma of zero, these have no part in the steps
    without_effect = {
        "beta_start": 0.1,
        "beta_end": 0.5,
        "beta_schedule": "scaled_linear",
        "trained_betas": [0.01] * 1000,
        "dynamic_thresholding_ratio": 0.5,
        "sample_max_value": 2.0,
        "lower_order_final": False,
        "euler_at_final": True,
        "lambda_min_clipped": -5.1,
        "timestep_spacing": "trailing",
        "steps_offset": 1,
        "rescale_betas_zero_snr": True,
        "time_shift_type": "exponential",
    }
    of_karras_sigmas = {"sigma_min", "sigma_max"}  # UniPC, which refuses those
    for config, scheduler, refused in (
        (SD3, FlowMatchEulerDiscreteScheduler, EULER | FLUX_MU),
        (SANA, DPMSolverMultistepScheduler, DPM),
        (WAN, UniPCMultistepScheduler, UNIPC),
    ):
        known = {k for k in scheduler().config if not k.startswith("_")}
        others = known - set(refused) - read[config["_class_name"]]
        assert others <= set(without_effect) | of_karras_sigmas

    def follow(config, steps):
        scheduler = DPMSolverMultistepScheduler.from_config(config)
        scheduler.set_timesteps(steps)
        x = torch.linspace(-2, 2, 8)
        for t in scheduler.timesteps:
            x = scheduler.step(torch.tanh(1.5 * x + t / 1000), t, x, return_dict=False)[0]
        return torch.cat([scheduler.sigmas, scheduler.timesteps.float(), x]).numpy()

    for steps in (6, 20):
        for setting, value in without_effect.items():
            np.testing.assert_array_equal(
                follow(SANA | {setting: value}, steps), follow(SANA, steps)
            )
        assert (
            np.abs(follow(SANA | {"solver_type": "heun"}, steps) - follow(SANA, steps))[-8:].max()
            > 1e-4
        )


@pytest.mark.parametrize("setting", ["use_flow_sigmas", "prediction_type"])
def test_a_setting_whose_default_is_another_familys_must_be_there(setting):
    config = {k: v for k, v in SANA.items() if k != setting}
    with pytest.raises(ValueError, match=f"{setting} is not set; must be {DPM[setting][0]!r}"):
        read_scheduler(config, 6, TOKENS)


def test_another_order_and_another_scheduler_are_refused_by_name():
    with pytest.raises(
        ValueError, match="DPMSolverMultistepScheduler: solver_order=3; must be one of 1, 2"
    ):
        read_scheduler(SANA | {"solver_order": 3}, 6, TOKENS)
    for config in ({"_class_name": "DDIMScheduler"}, {}):
        with pytest.raises(
            ValueError,
            match=rf"scheduler {config.get('_class_name')!r} \(_class_name\) is not supported;"
            " must be one of FlowMatchEuler",
        ):
            read_scheduler(config, 6, TOKENS)
