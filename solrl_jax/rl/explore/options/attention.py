"""`rollout.explore.attention=fp8`: softmax attention in FP8 (`models/layers/attention_fp8.py`).

GPUs from Hopper on multiply 8-bit numbers twice as fast as BF16. Queries, keys, values and results
take half of the memory. The option applies only if the exploration format quantizes weights.
"""

import dataclasses

from solrl_jax.config.schema import Explore
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore.option import ExplorationOption
from solrl_jax.rl.sampler import Segment


class Attention(ExplorationOption):
    """Makes the network attend in FP8 during exploration, if the format quantizes.

    GPUs from Hopper on run the attention in FP8, for heads with a multiple of 16 features, up to
    128; CPUs emulate it with the same rounding. On all other devices and for other heads, queries,
    keys, values and results are rounded to FP8, and the attention itself runs in BF16. SANA,
    Qwen-Image and Z-Image have linear or masked attention. With this option, a run that opens such
    a model ends with an InputError.
    """

    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration `explore` has "fp8" as `attention`."""
        return explore.attention == "fp8"

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """Switches the attention of all solver steps to FP8.

        Args:
            explore: The section `rollout.explore` of the configuration, which plays no part here.
            segments: The consecutive solver steps with their policies, as the options before this
                one have left them.
            exact: The unquantized parameters of the policy, which play no part here.

        Returns:
            The same segments, with `fp8_attention` set in each.
        """
        return tuple(dataclasses.replace(segment, fp8_attention=True) for segment in segments)
