"""Noise levels: which sigmas a sampler visits (docs/method.md, section 6). `sigma` in [0, 1]; 1 is pure noise; the last is 0.

Everything here is float64 NumPy on the host. A schedule is an argument of the compiled program, not part of it.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Sigmas = Float[np.ndarray, " steps_plus_one"]
Mu = Callable[[int, int], float]  # from steps and image tokens to the logarithm of a shift


def shift_sigmas(sigmas: Float[np.ndarray, " n"], shift: float) -> Float[np.ndarray, " n"]:
    """Moves noise levels up for higher resolutions: `s' = k s / (1 + (k - 1) s)` (SD3, arXiv 2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def sd3(steps: int, shift: float, train_timesteps: int = 1000) -> Sigmas:
    """The released SD3 scheduler's default grid: evenly spaced between *shifted* ends, then shifted a second time."""
    lowest = shift_sigmas(np.array([1 / train_timesteps]), shift)[0]
    return np.append(shift_sigmas(np.linspace(1.0, lowest, steps), shift), 0.0)


def flux_mu(steps: int, tokens: int) -> float:
    """FLUX.1's: linear in the number of image tokens (256: 0.5, 4096: 1.15)."""
    return 0.5 + 0.65 * (tokens - 256) / (4096 - 256)


def flux(steps: int, tokens: int, mu: Mu | None = None) -> Sigmas:
    """FLUX's dynamic shift: `e^mu / (e^mu + 1/s - 1)`. mu: None is `flux_mu`."""
    shift = math.exp((mu or flux_mu)(steps, tokens))
    grid = np.linspace(1.0, 1 / steps, steps)
    return np.append(shift / (shift + (1 / grid - 1)), 0.0)


def make_sigmas(name: str, steps: int, shift: float, tokens: int, mu: Mu | None = None) -> Sigmas:
    """The schedule a configuration names: `linear`, `sd3` or `flux`. tokens: image tokens of one latent. mu: of `flux`."""
    match name:
        case "linear":
            return shift_sigmas(
                np.linspace(1.0, 0.0, steps + 1), shift
            )  # SANA's in the recipe, with shift 1
        case "sd3":
            return sd3(steps, shift)
        case "flux":
            return flux(steps, tokens, mu)
    raise ValueError(f"rollout.schedule={name!r}: accepted are 'linear', 'sd3', 'flux'")
