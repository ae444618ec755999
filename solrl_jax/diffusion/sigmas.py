"""The noise levels (sigmas) of each schedule, computed in float64 NumPy on the host
(docs/method.md, section 6).

A sigma lies in [0, 1]: 1 is pure noise and 0 is a clean latent. A sequence of sigmas decreases and
ends with 0. It is an argument of a compiled program, never a constant in it.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Sigmas = Float[np.ndarray, " steps_plus_one"]

# (number of steps, number of image tokens of one latent) -> mu, the logarithm of the shift of a
# resolution-dependent schedule
Mu = Callable[[int, int], float]


def shift_sigmas(sigmas: Float[np.ndarray, " n"], shift: float) -> Float[np.ndarray, " n"]:
    """Shifts sigmas towards noise, as higher resolutions need (SD3, arXiv 2403.03206, eq. 23).

    Args:
        sigmas: Noise levels in [0, 1].
        shift: The factor `k` in `k s / (1 + (k - 1) s)`, above 0. 1 changes nothing, and below 1
            the sigmas are shifted towards clean latents. 0 and 1 stay where they are.

    Returns:
        The shifted sigmas, one for each of `sigmas`, in their order.
    """
    # Sigma 1 stays exactly 1. With a shift below 1, `1 + (shift - 1)` may differ from the shift in
    # its last bits.
    return np.where(sigmas == 1, 1.0, shift * sigmas / (1 + (shift - 1) * sigmas))


def stretch_to_terminal(sigmas: Sigmas, terminal: float | None) -> Sigmas:
    """Scales the distances of sigmas from 1, so that the last one before the final 0 becomes
    `terminal`. The final 0 stays.

    Args:
        sigmas: Noise levels, the first one 1 and the last one 0.
        terminal: The lowest sigma before the final 0, in (0, 1). None and 0 change nothing.

    Returns:
        As many sigmas as before. A single step, from 1 to 0, has nothing to stretch and stays as it
        is.
    """
    if not terminal or len(sigmas) < 3:
        return sigmas
    denoised = 1 - sigmas[:-1]
    return np.append(1 - denoised * (1 - terminal) / denoised[-1], 0.0)


def sd3(steps: int, shift: float, train_timesteps: int = 1000) -> Sigmas:
    """Returns the sigmas of the released SD3 scheduler when it is given only a number of steps.

    It shifts twice (by `k s / (1 + (k - 1) s)`): first 1 and 1 / `train_timesteps`, the ends
    between which the sigmas are evenly spaced, and then all sigmas.

    Args:
        steps: Number of solver steps, at least 1. One step goes from 1 to 0.
        shift: The factor k of the shift, above 0. SD3 was released with 3.
        train_timesteps: Number of timesteps that the scheduler was configured with for training.

    Returns:
        `steps` + 1 sigmas, float64, from 1 down to 0.
    """
    lowest = shift_sigmas(np.array([1 / train_timesteps]), shift)[0]
    return np.append(shift_sigmas(np.linspace(1.0, lowest, steps), shift), 0.0)


def flux_mu(steps: int, tokens: int) -> float:
    """Returns the `mu` of FLUX.1, the logarithm of the shift of its schedule.

    It is linear in the number of image tokens: 0.5 at 256 tokens and 1.15 at 4096, and continues
    with the same slope below and above.

    Args:
        steps: Number of solver steps. FLUX.1 does not depend on it; it is part of the signature
            `Mu`.
        tokens: Number of image tokens of one latent.
    """
    return 0.5 + 0.65 * (tokens - 256) / (4096 - 256)


def flux(steps: int, tokens: int, mu: Mu | None = None, terminal: float | None = None) -> Sigmas:
    """Returns the sigmas of FLUX, whose shift depends on the resolution: a sigma s becomes `e^mu /
    (e^mu + 1/s - 1)`.

    Args:
        steps: Number of solver steps, at least 1. The unshifted sigmas s are `linspace(1, 1/steps,
            steps)`.
        tokens: Number of image tokens of one latent, from which `mu` follows.
        mu: (steps, tokens) -> the logarithm of the shift. None uses the formula of FLUX.1,
            `flux_mu`.
        terminal: The lowest sigma before the final 0, in (0, 1), to which the sigmas above it are
            stretched linearly; 1 stays 1, and a single step is not changed. None and 0: they are
            not stretched.

    Returns:
        `steps` + 1 sigmas, float64, from 1 down to 0.
    """
    shift = math.exp((mu or flux_mu)(steps, tokens))
    unshifted = np.linspace(1.0, 1 / steps, steps)
    shifted = np.append(shift / (shift + (1 / unshifted - 1)), 0.0)
    return stretch_to_terminal(shifted, terminal)


def make_sigmas(
    name: str,
    steps: int,
    shift: float,
    tokens: int,
    mu: Mu | None = None,
    terminal: float | None = None,
) -> Sigmas:
    """Returns the sigmas of the schedule that a configuration names.

    Args:
        name: The value of `rollout.schedule`: "linear" (evenly spaced from 1 to 0, then shifted),
            "sd3" (shifted twice, as the released scheduler of SD3 does) or "flux" (the shift
            depends on the number of tokens).
        steps: Number of solver steps, at least 1.
        shift: The shift of "linear" and "sd3", above 0; 1 changes nothing. "flux" does not read it.
        tokens: Number of image tokens of one latent. Only "flux" reads it.
        mu: (steps, tokens) -> the logarithm of the shift. None uses `flux_mu`. Only "flux" calls
            it.
        terminal: The lowest sigma before the final 0, in (0, 1), to which the sigmas above it are
            stretched linearly; 1 stays 1, and a single step is not changed. None and 0: they are
            not stretched. Only "flux" reads it.

    Returns:
        `steps` + 1 sigmas, float64, from 1 down to 0.

    Raises:
        ValueError: If there is no schedule of that name.
    """
    match name:
        case "linear":  # the SANA recipe uses it with shift 1
            return shift_sigmas(np.linspace(1.0, 0.0, steps + 1), shift)
        case "sd3":
            return sd3(steps, shift)
        case "flux":
            return flux(steps, tokens, mu, terminal)
    raise ValueError(f"rollout.schedule={name!r}: must be one of 'linear', 'sd3', 'flux'")
