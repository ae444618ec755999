"""A reward on latents, inside JAX. It saves the decoding, which takes a large part of scoring.

    python examples/latent_reward.py [KEY=VALUE]...
    solrl train tiny 'reward.weights={"latent_reward:calm": 1}'       (in this folder)

The reward may be any network on latents. Here it is a formula, so that the example needs no
weights.
"""

import sys

import jax.numpy as jnp
import numpy as np

import solrl_jax as solrl


def calm() -> solrl.Reward:
    """Rewards smooth latents: the negative mean squared difference of neighboring latents."""

    def score(params, latents, prepared):
        """Scores latents [b, h, w, c] (float32). Returns the scores [b] by name."""
        down = jnp.diff(latents, axis=1)
        right = jnp.diff(latents, axis=2)
        return {"reward": -jnp.square(down).mean((1, 2, 3)) - jnp.square(right).mean((1, 2, 3))}

    def prepare(prompts):
        """Returns one row per prompt for `score`, which does not use them."""
        return np.zeros(len(prompts), np.float32)

    return solrl.Reward(None, prepare, score, inputs="latents")


def main(*overrides: str) -> None:
    experiment = solrl.load(
        "tiny", 'reward.weights={"latent_reward:calm": 1}', "train.iterations=2", *overrides
    )
    state = solrl.fresh_state(experiment)
    for i in range(1, experiment.config.train.iterations + 1):
        state, outcome = solrl.iterate(experiment, state, i)
        pool = outcome.metrics["pool/reward"]
        kept = outcome.metrics["kept/reward"]
        print(f"{i}: calmness of the pool {pool:.3f}, of the kept candidates {kept:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
