"""`ExplorationOption`: one departure from the paper's exploration.

Each option is a file in `rl/explore/options/` and a line in `options/registry.py`. It reads its own
field of `config.Explore`. An option is removed with its file, its line and its field.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float

from solrl_jax.config.schema import Explore
from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore.sync import Quantizer
from solrl_jax.rl.generate import PromptBatch, SeedBatch, generate
from solrl_jax.rl.sampler import Sampler, Segment


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """The base policy and a few prompts, on which options are measured before the first iteration.

    Measurements depend on the base and the configuration alone, so a resumed run repeats those that it
    began with.

    Attributes:
      backbone: the loaded pipeline.
      sampler: the regeneration sampler of the base policy.
      prompts: the prompts that are measured on.
      prompt_batch: returns the encoded prompts. Called only when something is measured.
      rows: one sample per prompt.
      micro_batch: the largest number of samples that a device differentiates at once.
    """

    backbone: Backbone
    sampler: Sampler
    prompts: Sequence[Prompt]
    prompt_batch: Callable[[], PromptBatch]
    rows: SeedBatch
    micro_batch: int

    @property
    def schedule(self) -> Schedule:
        """The schedule of the regeneration."""
        return self.sampler.segments[0].schedule

    def generate(
        self, schedule: Schedule, noise: Float[np.ndarray, "b h w c"] | None = None
    ) -> Float[np.ndarray, "b h w c"]:
        """Samples the latents of all rows with the base policy.

        Args:
          schedule: the steps to take.
          noise: the initial latents. None: those of the rows' seeds.

        Returns:
          The clean latents, float32.
        """
        segments = (Segment(self.backbone.transformer, schedule),)
        sampler = dataclasses.replace(self.sampler, segments=segments)
        rows = dataclasses.replace(self.rows, noise=noise)
        return generate(self.backbone, sampler, self.prompt_batch(), rows).latents


class ExplorationOption(abc.ABC):
    """Changes the schedule, the quantizer or the segments of exploration.

    Every method but `active` has a default that changes nothing.
    """

    @abc.abstractmethod
    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration asks for this option."""

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Returns whether the option needs a measurement on the base policy.

        Args:
          explore: the configuration of exploration.
          full_steps: number of steps of the regeneration.
          quantizes: whether the exploration format quantizes weights.
        """
        return False

    def schedule(self, explore: Explore, calibration: Calibration, grid: Schedule) -> Schedule:
        """Returns the schedule to explore on.

        Args:
          explore: the configuration of exploration.
          calibration: what to measure on.
          grid: the configured schedule with as many steps.
        """
        return grid

    def quantizer(
        self,
        explore: Explore,
        calibration: Calibration,
        paths: tuple[str, ...],
        quantizer: Quantizer,
        grid: Schedule,
    ) -> Quantizer:
        """Returns the quantizer of the exploration policy.

        Args:
          explore: the configuration of exploration.
          calibration: what to measure on.
          paths: parameter paths of the quantized linear layers.
          quantizer: the quantizer without this option.
          grid: the schedule that is explored on.
        """
        return quantizer

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """Returns the segments to explore in.

        Args:
          explore: the configuration of exploration.
          segments: the segments without this option.
          exact: the unquantized policy that regenerates.
        """
        return segments

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        """Returns the quantizer with shapes in the place of arrays, for plans and reports.

        Nothing is measured.

        Args:
          explore: the configuration of exploration.
          weights: shapes of the quantized weights by parameter path.
          quantizer: the quantizer without this option.
        """
        return quantizer
