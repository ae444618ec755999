"""The verifier of the embedded world as a reward."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.rewards.protocol import Reward, Scores
from solrl_jax.shapes import verifier
from solrl_jax.storage.errors import InputError


def shapes_reward() -> Reward:
    """Partial credit in [0, 1], strict success beside it."""

    def score(params: None, images: Array, targets: verifier.Targets) -> Scores:
        verdict = verifier.verify(images, targets)
        return {"reward": verdict.score, "strict": verdict.strict.astype(jnp.float32)}

    def prepare(prompts: Sequence[str]) -> verifier.Targets:
        try:
            return verifier.targets(prompts)
        except ValueError as error:
            raise InputError(f"reward 'shapes': {error}") from error

    return Reward(None, prepare, score, others=("strict",))
