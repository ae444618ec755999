"""`rollout.explore.exact_steps=COUNT`: the policy that regenerates takes the first steps of a format that quantises.

A sample is decided at high noise, and the later steps follow. So the errors of a format cost the ranking most in the first
step. The policy that regenerates is in memory anyway; the leaves that both policies have are held once.
"""

import dataclasses

from solrl_jax.config.schema import Explore
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore.option import ExplorationOption
from solrl_jax.rl.sampler import Segment


class ExactSteps(ExplorationOption):
    """Splits the exploring segment in two."""

    def active(self, explore: Explore) -> bool:
        return explore.exact_steps > 0

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        count = explore.exact_steps
        (first, *others) = segments
        return (
            Segment(exact, first.schedule.slice_steps(0, count)),
            dataclasses.replace(first, schedule=first.schedule.slice_steps(count)),
            *others,
        )
