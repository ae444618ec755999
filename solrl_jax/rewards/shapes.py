"""The verifier of the embedded world as a reward."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.data.shapes import scenes, verifier
from solrl_jax.errors import InputError
from solrl_jax.rewards.protocol import Loader, Reward, Scores


def shapes_reward(paths: Mapping[str, str]) -> Loader:
    """Partial credit in [0, 1]. "strict" is 1 if the picture shows exactly what its caption asks, else 0."""

    def prepare(prompts: Sequence[str]) -> verifier.Targets:
        try:
            return verifier.parse_targets(prompts)
        except ValueError as error:
            raise InputError(f"reward 'shapes': {error}") from error

    def score(params: None, images: Float[Array, "b H W 3"], targets: verifier.Targets) -> Scores:
        verdict = verifier.verify(images, targets)
        return {"reward": verdict.score, "strict": verdict.strict.astype(jnp.float32)}

    return lambda mesh, dtype: Reward(None, prepare, score, check=scenes.parse)
