"""`rollout.explore.attention=fp8`: softmax attention in eight bits (`models/layers/attention_fp8.py`), where linears are quantised.

GPUs from Hopper on multiply eight bits twice as fast as BF16, and queries, keys, values and results take half of the memory.
"""

import dataclasses

from solrl_jax.config.schema import Explore
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore.option import ExplorationOption
from solrl_jax.rl.sampler import Segment


class Attention(ExplorationOption):
    """Marks the exploring segments."""

    def active(self, explore: Explore) -> bool:
        return explore.attention == "fp8"

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        return tuple(dataclasses.replace(segment, fp8_attention=True) for segment in segments)
