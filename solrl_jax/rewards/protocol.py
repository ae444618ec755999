"""What a reward is: how well pictures answer their prompts, as a pure function."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from solrl_jax.parallel import sharding
from solrl_jax.rewards.host import Host

Scores = dict[str, Float[Array, " b"]]


@dataclasses.dataclass(frozen=True, eq=False)
class Reward:
    """prepare(prompts) -> pytree of arrays, a row a prompt; score(params, images [b, H, W, 3] in [0, 1], prepared) -> scores.

    `prepare` works on the host; `score` inside jit and on the mesh, a row at a time (no picture's score may depend on
    another's). It returns the reward itself under "reward" and may add `others` (as "strict", a success or not), to watch or
    to train on as well. What is scored outside JAX is the `host`'s; where that is all, there is no `score`.
    """

    params: Any
    prepare: Callable[[Sequence[str]], Any]
    score: Callable[[Any, Float[Array, "b H W 3"], Any], Scores] | None
    others: tuple[str, ...] = ()
    host: Host | None = None


Loader = Callable[[Mesh | None], Reward]  # reads weights that have been found, onto the mesh if there is one


@partial(sharding.jit, static_argnums=0)
def score_images(reward: Reward, params: Any, images: Float[Array, "b H W 3"], prepared: Any, index: Array) -> Scores:
    """Scores of pictures [b], each against the prompt that `index` [b] names among the prepared ones."""
    assert reward.score is not None
    return reward.score(params, images, jax.tree.map(lambda x: jnp.asarray(x)[index], prepared))
