"""A reward on latents, inside JAX: nothing is decoded, which is a large part of scoring.

python examples/latent_reward.py [KEY=VALUE]...                    (or, in this folder, reward=latent_reward:calm)

It can be any network on latents. Here it is a formula, so that the example needs no weights.
"""

import sys

import jax.numpy as jnp
import numpy as np

import solrl_jax as solrl


def calm() -> solrl.Reward:
    """How alike neighbouring latents are."""

    def score(params, latents, rows):  # latents: float32 [b, h, w, c]; returns [b]
        down = jnp.diff(latents, axis=1)
        right = jnp.diff(latents, axis=2)
        return {"reward": -jnp.square(down).mean((1, 2, 3)) - jnp.square(right).mean((1, 2, 3))}

    def prepare(prompts):
        return np.zeros(len(prompts), np.float32)  # an array with a row a prompt; not read

    return solrl.Reward(None, prepare, score, inputs="latents")


def main(*overrides: str) -> None:
    experiment = solrl.load(
        "tiny", 'reward.weights={"latent_reward:calm": 1}', "train.iterations=2", *overrides
    )
    state = solrl.fresh_state(experiment)
    for i in range(1, experiment.config.train.iterations + 1):
        state, outcome = solrl.iterate(experiment, state, i)
        print(
            f"{i}: calmness of the pool {outcome.metrics['pool/reward']:.3f}, kept {outcome.metrics['kept/reward']:.3f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
