"""Opens rewards as a configuration does, with defaults for what a test does not say."""

import jax.numpy as jnp

from solrl_jax.config.schema import Reward
from solrl_jax.rewards import registry

DEFAULTS = dict(paths={}, options={}, eval_only=(), workers=2, timeout=120.0, on_failure="stop")


def open_reward(weights, paths=None, dtype=jnp.float32, **settings):
    """`registry.open_rewards` for these fields of `config.schema.Reward`."""
    return registry.open_rewards(
        Reward(weights=weights, **DEFAULTS | {"paths": paths or {}} | settings), dtype
    )
