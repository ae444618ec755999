"""Reads the scheduler of a released model directory as sigmas and a solver, to sample as diffusers
would.

Flow models are released with three kinds: `FlowMatchEulerDiscreteScheduler`, and
`DPMSolverMultistepScheduler` and `UniPCMultistepScheduler` with flow sigmas. A setting that would
change the samples and is not supported here is refused.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.diffusion.sigmas import Mu, flux, sd3, shift_sigmas, stretch_to_terminal
from solrl_jax.diffusion.solver import Table, solver_table, unipc_table

# The smallest accepted shift. A much smaller one would divide by almost 0 in `shift_sigmas`.
SMALLEST_SHIFT = 1e-6
# The accepted values of the settings of each scheduler. A setting that is absent from the file has
# the first value.
EULER = {
    "num_train_timesteps": (1000,),
    "invert_sigmas": (False,),
    "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "time_shift_type": ("exponential",),
    "stochastic_sampling": (False,),
    "prediction_type": ("flow_prediction",),
}
# Further settings of the same scheduler, with the values of FLUX.1. They are checked unless the
# pipeline has its own formula for the shift.
FLUX_MU = {
    "base_shift": (0.5,),
    "max_shift": (1.15,),
    "base_image_seq_len": (256,),
    "max_image_seq_len": (4096,),
}
DPM = {
    "num_train_timesteps": (1000,),
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "algorithm_type": ("dpmsolver++",),
    "solver_type": ("midpoint",),
    "final_sigmas_type": ("zero",),
    "thresholding": (False,),
    "use_karras_sigmas": (False,),
    "use_lu_lambdas": (False,),
    "use_dynamic_shifting": (False,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "variance_type": (None,),
}

UNIPC = {
    "num_train_timesteps": (1000,),
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "solver_order": (2,),
    "solver_type": ("bh2",),
    "predict_x0": (True,),
    "lower_order_final": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
    "thresholding": (False,),
    "final_sigmas_type": ("zero",),
    "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_dynamic_shifting": (False,),
    "shift_terminal": (None,),
}
NEARLY_ONE = 1 - 1e-6  # where UniPC begins in place of 1


def read_scheduler(
    config: dict[str, Any],
    steps: int,
    tokens: int,
    pipeline_sigmas: bool = False,
    mu: Mu | None = None,
) -> tuple[Float[np.ndarray, " n"], np.ndarray, Table]:
    """Converts a scheduler configuration of diffusers to sigmas, timesteps and solver coefficients.

    Supported are FlowMatchEulerDiscreteScheduler (solver "euler"), DPMSolverMultistepScheduler with
    flow sigmas (solver "dpm1" or "dpm2", by `solver_order`, which is 2 if it is absent), and
    UniPCMultistepScheduler of second order with flow sigmas (`solver.unipc_table`). A setting that
    would change the samples and is not supported is refused.

    Args:
        config: The contents of `scheduler_config.json`. `_class_name` names the scheduler. Settings
            that are absent have the defaults of diffusers, with the exceptions under "Raises".
        steps: Number of solver steps, at least 1.
        tokens: Number of image tokens of one latent, from which `mu` follows. Read only for
            `use_dynamic_shifting`.
        pipeline_sigmas: Whether the pipeline passes sigmas to its Euler scheduler. True, as for
            FLUX: it passes `linspace(1, 1/steps, steps)`, which are then shifted. False: it passes
            only the number of steps, from which the scheduler computes the sigmas (`sigmas.sd3`).
            Other schedulers ignore it.
        mu: (steps, tokens) -> the logarithm of the shift of the sigmas, in place of `shift` in
            configurations with `use_dynamic_shifting`. None: the formula of FLUX.1
            (`sigmas.flux_mu`), and a configuration with other constants of that formula is refused.
            With a function, these constants are not read.

    Returns:
        A tuple of three arrays:

        * The `steps` + 1 sigmas, float64, decreasing from 1 (for the multistep schedulers from just
          below) to 0. For the Euler scheduler they are stretched so that the last one before 0 is
          `shift_terminal`, if that is above 0 and there are at least two steps.
        * The timestep that the network is given at each step, float64 [steps]: 1000 times the
          sigma, rounded down to an integer except for FlowMatchEulerDiscreteScheduler.
        * The coefficients (a, b, c, d, e) of each step, float32 [steps, 5], in `x_next = a x + b
          x0[i] + c x0[i - 1] + d x0[i - 2] + e noise`, where x0[i] is the data prediction at step
          i; e is 0.

    Raises:
        ValueError: If the scheduler or the value of a setting is not supported. `EULER`, `FLUX_MU`,
            `DPM` and `UNIPC` list the accepted values, `shift_terminal` must be None or in [0, 1),
            and `shift` and `flow_shift` finite numbers of at least 1e-6. Also if `use_flow_sigmas`
            or `prediction_type` of a multistep scheduler is absent, or if the Euler scheduler has
            `use_dynamic_shifting` without `pipeline_sigmas`. The message names the setting, its
            value and the accepted values.
    """
    kind = config.get("_class_name")
    match kind:
        case "FlowMatchEulerDiscreteScheduler":
            _check_settings(kind, config, EULER if mu is not None else EULER | FLUX_MU)
            shift = _read_shift(kind, config, "shift")
            terminal = config.get("shift_terminal")
            if terminal is not None and (
                type(terminal) not in (int, float) or not 0 <= terminal < 1
            ):
                raise ValueError(
                    f"{kind}: shift_terminal={terminal!r}; must be None or a number from 0 to less "
                    "than 1"
                )
            if config.get("use_dynamic_shifting", False):
                if not pipeline_sigmas:  # diffusers would shift other sigmas, or fail without a mu
                    raise ValueError(
                        f"{kind}: use_dynamic_shifting=True is not supported for this kind of "
                        "pipeline; must be False"
                    )
                sigmas = flux(steps, tokens, mu)
            elif pipeline_sigmas:
                sigmas = np.append(shift_sigmas(np.linspace(1.0, 1 / steps, steps), shift), 0.0)
            else:
                sigmas = sd3(steps, shift)
            sigmas = stretch_to_terminal(sigmas, terminal)
            return sigmas, 1000 * sigmas[:-1], solver_table("euler", sigmas)
        case "DPMSolverMultistepScheduler":
            _check_settings(kind, config, DPM)
            order = config.get("solver_order", 2)
            if order not in (1, 2):
                raise ValueError(f"{kind}: solver_order={order}; must be one of 1, 2")
            # The schedule would end at the lowest of the thousand training sigmas. Sampling leaves
            # that one out and goes on to 0 from the sigma before it.
            shift = _read_shift(kind, config, "flow_shift")
            shifted = shift_sigmas(1 - np.linspace(1, 1 / 1000, steps + 1), shift)[::-1]
            sigmas = np.append(shifted[:-1], 0.0)
            # This scheduler casts its timesteps to integers.
            timesteps = np.trunc(1000 * sigmas[:-1])
            return sigmas, timesteps, solver_table("dpm2" if order == 2 else "dpm1", sigmas)
        case "UniPCMultistepScheduler":
            _check_settings(kind, config, UNIPC)
            shift = _read_shift(kind, config, "flow_shift")
            shifted = shift_sigmas(np.linspace(1, 1 / 1000, steps + 1)[:-1], shift)
            shifted[0] = NEARLY_ONE
            timesteps = np.trunc(1000 * shifted)
            # diffusers rounds to float32, which matters to lambda next to 1.
            sigmas = np.append(shifted, 0.0).astype(np.float32).astype(np.float64)
            return sigmas, timesteps, unipc_table(sigmas)
    raise ValueError(
        f"scheduler {kind!r} (_class_name) is not supported; must be one of "
        "FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler"
    )


def _read_shift(kind: str, config: dict[str, Any], name: str) -> float:
    """Returns a positive setting of a scheduler, as the int or float that the file has.

    Args:
        kind: The name of the scheduler's class, for the message.
        config: The contents of `scheduler_config.json`.
        name: The name of the setting, "shift" or "flow_shift". If it is absent, the result is 1.0.

    Raises:
        ValueError: If it is not a finite int or float of at least `SMALLEST_SHIFT` (1e-6). A bool
            is refused.
    """
    value = config.get(name, 1.0)
    if type(value) not in (int, float) or not SMALLEST_SHIFT <= value < math.inf:
        raise ValueError(f"{kind}: {name}={value!r}; must be a number of at least {SMALLEST_SHIFT}")
    return value


def _check_settings(kind: str, config: dict[str, Any], settings: dict[str, tuple]) -> None:
    """Checks the settings of a scheduler against the values that this package supports.

    An absent setting has its default and is accepted. The exceptions are `use_flow_sigmas` and
    `prediction_type` of the two multistep schedulers, whose defaults are not for flow models; these
    are the schedulers with `use_flow_sigmas` in `settings` (`DPM` and `UNIPC`). Other settings of
    the file are not checked here.

    Args:
        kind: The name of the scheduler's class, for the message.
        config: The contents of `scheduler_config.json`.
        settings: The accepted values of each setting by its name: `EULER`, `EULER | FLUX_MU`, `DPM`
            or `UNIPC`.

    Raises:
        ValueError: For the first setting whose value is not accepted, or that is absent and must
            not be.
    """
    for name, accepted in settings.items():
        if name in config and config[name] not in accepted:
            values = ", ".join(map(repr, accepted))
            raise ValueError(f"{kind}: {name}={config[name]!r}; must be one of {values}")
    # By default, multistep schedulers are those of diffusion models, not of flow models.
    for name in ("use_flow_sigmas", "prediction_type"):
        if "use_flow_sigmas" in settings and name not in config:
            raise ValueError(f"{kind}: {name} is not set; must be {settings[name][0]!r}")
