"""From rewards to optimality probabilities (docs/method.md, section 3; DiffusionNFT, arXiv 2509.16117, section 3.2).

Only regenerated rewards come here: nothing computed in low precision enters the loss.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.rewards.protocol import LARGEST

MODES: dict[str, Callable[[Array], Array]] = {
    "all": lambda a: a,
    "positive_only": lambda a: jnp.maximum(a, 0.0),
    "negative_only": lambda a: jnp.minimum(a, 0.0),
    "one_only": lambda a: jnp.where(a > 0, 1.0, 0.0),
    "binary": jnp.sign,
}
STD_FLOOR = 1e-4
TIE = 4e-6  # float32 keeps 6e-8 of a number, and a mean of 24 adds as much up to 24 times
LEVELS = 4096  # an optimality probability is a multiple of 1 / LEVELS


def advantages(
    rewards: Float[Array | np.ndarray, "p k"], *, clip: float, global_std: bool, mode: str
) -> Float[Array, "p k"]:
    """`A = (r - mean of its prompt) / (std + 1e-4)`, clipped to +-`clip`.

    The standard deviation (population) is over all kept samples of the iteration, or over the prompt's own if not
    `global_std`. A non-finite reward takes no part in the statistics and gets advantage 0. A tied one gets 0 too: it is nearer
    to its prompt's mean than `TIE` of the prompt's largest reward, as far as rounding may have moved it. Modes: `all`;
    `positive_only` and `negative_only` zero the other sign; `one_only` gives 1 where A > 0, else 0; `binary` gives the sign.
    Raises ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"advantage mode {mode!r}: accepted are {', '.join(MODES)}")
    if rewards.ndim != 2 or not clip > 0:
        raise ValueError(
            f"rewards {list(rewards.shape)}, clip={clip}; accepted: [prompts, kept], clip above 0"
        )
    finite = jnp.abs(rewards) <= LARGEST
    r = jnp.where(finite, rewards, 0.0)

    def mean_over(x, axis):
        return x.sum(axis, keepdims=True) / jnp.maximum(finite.sum(axis, keepdims=True), 1)

    centred = r - mean_over(r, 1)
    tied = jnp.abs(centred) <= TIE * jnp.abs(r).max(1, keepdims=True)
    centred = jnp.where(finite & ~tied, centred, 0.0)
    if global_std:
        spread = jnp.sqrt(
            mean_over(jnp.where(finite, (r - mean_over(r, (0, 1))) ** 2, 0.0), (0, 1))
        )
    else:
        spread = jnp.sqrt(mean_over(centred**2, 1))
    return MODES[mode](jnp.clip(centred / (spread + STD_FLOOR), -clip, clip))


def optimality(advantages: Float[Array | np.ndarray, "..."], clip: float) -> Float[Array, "..."]:
    """`q = clip(A / clip / 2 + 1/2, 0, 1)`: the probability that a sample is one to imitate rather than to avoid.

    HalfPrecisionWeight to a 4096th, which is 0.0012 of a standard deviation at a clip of 5. Rewards on different meshes differ in their
    last bits, and these bits must not decide which way a gradient in BF16 is rounded.
    """
    return jnp.round(jnp.clip(advantages / clip / 2 + 0.5, 0.0, 1.0) * LEVELS) / LEVELS
