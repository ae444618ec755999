"""`rollout.explore.exact_steps=COUNT`: the first steps of exploration use the unquantized policy.

The content of a sample is decided at high noise, so quantization errors affect the ranking most in
the first step. The policy that regenerates is in memory anyway, and the two policies share all
leaves that are equal. The option applies only if the exploration format quantizes weights.
"""

import dataclasses

from solrl_jax.config.schema import Explore
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore.option import ExplorationOption
from solrl_jax.rl.sampler import Segment


class ExactSteps(ExplorationOption):
    """Lets the first `rollout.explore.exact_steps` steps of exploration use the unquantized policy,
    and the others the quantized one.

    There must be fewer exact steps than exploration steps. 0, the default, disables the option. It
    has no effect for a format that quantizes nothing.
    """

    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration `explore` has `exact_steps` above 0."""
        return explore.exact_steps > 0

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """Splits the first segment: its first steps get the unquantized policy.

        Args:
            explore: The section `rollout.explore` of the configuration. `exact_steps` is the number
                of exact steps.
            segments: The consecutive solver steps with their policies, as the options before this
                one have left them. The first segment has more steps than `exact_steps`, which the
                configuration is checked for.
            exact: The unquantized parameters of the policy, for the exact steps.

        Returns:
            One segment more than `segments`: the exact steps, with attention in the training
            precision; the remaining steps of the first segment with its policy; and all later
            segments unchanged.
        """
        count = explore.exact_steps
        first, *others = segments
        return (
            Segment(exact, first.schedule.slice_steps(0, count)),
            dataclasses.replace(first, schedule=first.schedule.slice_steps(count)),
            *others,
        )
