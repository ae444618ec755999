"""Advantages and optimality probabilities, from the rewards of the kept samples.

See docs/method.md, section 3, and DiffusionNFT (arXiv 2509.16117), section 3.2. With regeneration,
only regenerated rewards come here: nothing computed in low precision enters the loss.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.rewards.protocol import MAX_REWARD

MODES: dict[str, Callable[[Array], Array]] = {
    "all": lambda a: a,
    "positive_only": lambda a: jnp.maximum(a, 0.0),
    "negative_only": lambda a: jnp.minimum(a, 0.0),
    "one_only": lambda a: jnp.where(a > 0, 1.0, 0.0),
    "binary": jnp.sign,
}
# Added to the standard deviation, to avoid a division by zero.
STD_FLOOR = 1e-4
# Rewards that differ by at most this fraction of the largest one are tied. The rounding error of
# float32 is 6e-8 of a number, and a mean of 24 numbers adds it up to 24 times.
TIE = 4e-6
# Optimality probabilities are rounded to multiples of 1 / LEVELS.
LEVELS = 4096


def advantages(
    rewards: Float[Array | np.ndarray, "p k"], *, clip: float, global_std: bool, mode: str
) -> Float[Array, "p k"]:
    """Computes advantages: `A = clip((r - mean of its prompt) / (std + 1e-4), -clip, clip)`.

    A reward that is NaN, infinite or above 1e18 in magnitude is left out of mean and standard
    deviation and gets advantage 0. A reward that equals the mean of its prompt up to rounding (4e-6
    times the largest magnitude among the prompt's finite rewards) also gets advantage exactly 0.

    Args:
        rewards: The rewards of the K kept samples of each prompt, one row per prompt, K at least 1.
        clip: The largest absolute value of A. Above 0.
        global_std: True divides by the population standard deviation of the rewards of all prompts
            about their common mean, False by that of the rewards of each prompt.
        mode: The function that is applied to A: "all" leaves A unchanged, "positive_only" returns
            max(A, 0), "negative_only" min(A, 0), "one_only" 1 where A is positive and else 0, and
            "binary" the sign of A (-1, 0 or 1).

    Returns:
        One finite advantage per reward, float32, in the shape of `rewards`.

    Raises:
        ValueError: If `mode` is none of these, `rewards` does not have two axes, or `clip` is not
            above 0.
    """
    if mode not in MODES:
        raise ValueError(f"advantage mode {mode!r}: must be one of {', '.join(MODES)}")
    if rewards.ndim != 2 or not clip > 0:
        raise ValueError(
            f"rewards {list(rewards.shape)}, clip={clip}: the shape must be [prompts, kept], and "
            "clip must be above 0"
        )
    finite = jnp.abs(rewards) <= MAX_REWARD
    r = jnp.where(finite, rewards, 0.0)

    def mean_over(x, axis):
        return x.sum(axis, keepdims=True) / jnp.maximum(finite.sum(axis, keepdims=True), 1)

    deviations = r - mean_over(r, 1)
    tied = jnp.abs(deviations) <= TIE * jnp.abs(r).max(1, keepdims=True)
    deviations = jnp.where(finite & ~tied, deviations, 0.0)
    if global_std:
        std = jnp.sqrt(mean_over(jnp.where(finite, (r - mean_over(r, (0, 1))) ** 2, 0.0), (0, 1)))
    else:
        std = jnp.sqrt(mean_over(deviations**2, 1))
    return MODES[mode](jnp.clip(deviations / (std + STD_FLOOR), -clip, clip))


def optimality(advantages: Float[Array | np.ndarray, "..."], clip: float) -> Float[Array, "..."]:
    """Computes the probability that a sample is one to imitate.

        q = clip(A / (2 clip) + 1/2, 0, 1)

    q is rounded to a multiple of 1/4096, so that the last bits of a reward, which differ between
    meshes, do not change the training.

    Args:
        advantages: The advantages A, of any shape. NaN stays NaN.
        clip: The bound to which the advantages were clipped (`algorithm.adv_clip_max`), above 0.
            An advantage of -clip becomes 0, one of 0 becomes 1/2, and one of clip becomes 1.

    Returns:
        The probabilities in [0, 1], float32, in the shape of `advantages`.
    """
    return jnp.round(jnp.clip(advantages / clip / 2 + 0.5, 0.0, 1.0) * LEVELS) / LEVELS
