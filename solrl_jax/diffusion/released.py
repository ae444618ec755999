"""The scheduler that a released model directory names, read as a schedule and a solver: what diffusers would do with it.

Two kinds are released with flow models: `FlowMatchEulerDiscreteScheduler` and `DPMSolverMultistepScheduler` with flow
sigmas. A setting that would change the samples and is not known here is refused.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.diffusion.sigmas import Mu, flux, sd3, shift_sigmas
from solrl_jax.diffusion.solver import Table, solver_table

SMALLEST_SHIFT = 1e-6  # float64 divides by 1 + (shift - 1)
# settings whose values must be these, by scheduler; what is absent from a file has the first value
EULER = {
    "num_train_timesteps": (1000,), "invert_sigmas": (False,), "shift_terminal": (None, 0), "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,), "use_beta_sigmas": (False,), "time_shift_type": ("exponential",),
    "stochastic_sampling": (False,), "base_shift": (0.5,), "max_shift": (1.15,), "base_image_seq_len": (256,),
    "max_image_seq_len": (4096,), "prediction_type": ("flow_prediction",),
}  # fmt: skip
DPM = {
    "num_train_timesteps": (1000,), "use_flow_sigmas": (True,), "prediction_type": ("flow_prediction",),
    "algorithm_type": ("dpmsolver++",), "solver_type": ("midpoint",), "final_sigmas_type": ("zero",),
    "thresholding": (False,), "use_karras_sigmas": (False,), "use_lu_lambdas": (False,), "use_dynamic_shifting": (False,),
    "use_exponential_sigmas": (False,), "use_beta_sigmas": (False,), "variance_type": (None,),
}  # fmt: skip


def read_scheduler(
    config: dict[str, Any], steps: int, tokens: int, own_sigmas: bool = False, mu: Mu | None = None
) -> tuple[Float[np.ndarray, " n"], np.ndarray, Table]:
    """Sigmas [steps + 1], times [steps] as the network is told them, and the solver's table, from a scheduler_config.json.

    tokens: image tokens of one latent, for a schedule that depends on the resolution, by `mu` (None: FLUX.1's). own_sigmas: the
    pipeline gives its scheduler `linspace(1, 1/n, n)` to shift (FLUX) instead of asking it for a grid. Raises ValueError naming
    a setting that is not supported, its value and what is accepted.
    """
    kind = config.get("_class_name")
    match kind:
        case "FlowMatchEulerDiscreteScheduler":
            _accept(kind, config, EULER)
            shift = _positive(kind, config, "shift")
            if config.get("use_dynamic_shifting", False):
                if not own_sigmas:  # diffusers would shift another grid, or have no shift to give
                    raise ValueError(
                        f"{kind}: use_dynamic_shifting=True; accepted for this kind of pipeline: False"
                    )
                sigmas = flux(steps, tokens, mu)
            elif own_sigmas:
                sigmas = np.append(shift_sigmas(np.linspace(1.0, 1 / steps, steps), shift), 0.0)
            else:
                sigmas = sd3(steps, shift)
            return sigmas, 1000 * sigmas[:-1], solver_table("euler", sigmas)
        case "DPMSolverMultistepScheduler":
            _accept(kind, config, DPM)
            order = config.get("solver_order", 2)
            if order not in (1, 2):
                raise ValueError(f"{kind}: solver_order={order}; accepted: 1, 2")
            # the lowest of its thousand training levels is where its grid would end; sampling goes on to 0 from the one before
            grid = shift_sigmas(
                1 - np.linspace(1, 1 / 1000, steps + 1), _positive(kind, config, "flow_shift")
            )[::-1]
            sigmas = np.append(grid[:-1], 0.0)
            # the network is told whole numbers: this scheduler casts its timesteps to integers
            return (
                sigmas,
                np.trunc(1000 * sigmas[:-1]),
                solver_table("dpm2" if order == 2 else "dpm1", sigmas),
            )
    raise ValueError(
        f"scheduler {kind!r} (_class_name); accepted: FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler"
    )


def _positive(kind: str, config: dict[str, Any], name: str) -> float:
    """A number above 0, 1 if it is absent."""
    value = config.get(name, 1.0)
    if type(value) not in (int, float) or not SMALLEST_SHIFT <= value < math.inf:
        raise ValueError(
            f"{kind}: {name}={value!r}; accepted: a number above 0, {SMALLEST_SHIFT} or more"
        )
    return value


def _accept(kind: str, config: dict[str, Any], settings: dict[str, tuple]) -> None:
    for name, accepted in settings.items():
        if name in config and config[name] not in accepted:
            raise ValueError(
                f"{kind}: {name}={config[name]!r}; accepted: {', '.join(map(repr, accepted))}"
            )
    for name in ("use_flow_sigmas", "prediction_type"):  # their defaults are another family's
        if settings is DPM and name not in config:
            raise ValueError(f"{kind}: {name} is not set; accepted: {settings[name][0]!r}")
