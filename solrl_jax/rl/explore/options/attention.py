"""`rollout.explore.attention=fp8`: softmax attention in eight bits (`models/layers/attention_fp8.py`), where linears are quantised.

GPUs from Hopper on multiply eight bits twice as fast as BF16, and queries, keys, values and results take half of the memory.
"""

import dataclasses

from solrl_jax.config.schema import Explore
from solrl_jax.models.backbone import Params
from solrl_jax.rl.explore.option import Lever
from solrl_jax.rl.sampler import Leg


class Attention(Lever):
    """Marks the exploring legs."""

    def active(self, explore: Explore) -> bool:
        return explore.attention == "fp8"

    def legs(self, explore: Explore, legs: tuple[Leg, ...], exact: Params) -> tuple[Leg, ...]:
        return tuple(dataclasses.replace(leg, in_fp8=True) for leg in legs)


LEVER = Attention()
