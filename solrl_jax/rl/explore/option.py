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

    Measurements depend on the base and the configuration alone, so a resumed run repeats those that
    it began with.

    Attributes:
        backbone: The networks and the mesh.
        sampler: The regeneration sampler of the base policy.
        prompts: The prompts that are measured on.
        prompt_batch: Returns the encoded prompts. Called only when something is measured.
        seed_batch: One sample per prompt, in the order of the prompts.
        micro_batch: The largest number of samples that a device differentiates at once.
    """

    backbone: Backbone
    sampler: Sampler
    prompts: Sequence[Prompt]
    prompt_batch: Callable[[], PromptBatch]
    seed_batch: SeedBatch
    micro_batch: int

    @property
    def schedule(self) -> Schedule:
        """The full schedule: that of the regeneration."""
        return self.sampler.segments[0].schedule

    def generate(
        self, schedule: Schedule, noise: Float[np.ndarray, "b h w c"] | None = None
    ) -> Float[np.ndarray, "b h w c"]:
        """Samples the latents of `seed_batch` with the base policy, in the training precision.

        Args:
            schedule: The steps to take.
            noise: The initial latents, float32. None: those of the seeds.

        Returns:
            The latents after the last step, float32, on the host: one per prompt.

        Raises:
            InputError, RunError: If the prompts cannot be encoded, which the first call does
                (`Experiment.encode_prompts`).
        """
        segments = (Segment(self.backbone.transformer, schedule),)
        sampler = dataclasses.replace(self.sampler, segments=segments)
        seed_batch = dataclasses.replace(self.seed_batch, noise=noise)
        return generate(self.backbone, sampler, self.prompt_batch(), seed_batch).latents


class ExplorationOption(abc.ABC):
    """Changes the schedule, the quantizer or the segments of exploration.

    Every method but `active` has a default that changes nothing. Options have no state. They are
    called only if `active` returns True for the configuration.
    """

    @abc.abstractmethod
    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration asks for this option.

        Args:
            explore: The configuration of exploration, of which the option reads its own field.

        Returns:
            False if the field has its default, at which the option does nothing.
        """

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Returns whether the option needs a measurement on the base policy.

        Args:
            explore: The configuration of exploration.
            full_steps: The number of steps of the regeneration.
            quantizes: Whether the exploration format quantizes weights.

        Returns:
            False unless an option overrides it.
        """
        return False

    def schedule(self, explore: Explore, calibration: Calibration, schedule: Schedule) -> Schedule:
        """Returns the schedule to explore on.

        Args:
            explore: The configuration of exploration.
            calibration: The base policy and the samples to measure on.
            schedule: The schedule without this option.

        Returns:
            A schedule with as many steps. By default `schedule` itself.
        """
        return schedule

    def quantizer(
        self,
        explore: Explore,
        calibration: Calibration,
        paths: tuple[str, ...],
        quantizer: Quantizer,
        schedule: Schedule,
    ) -> Quantizer:
        """Returns the quantizer of the exploration policy. It is called only for formats that
        quantize.

        Args:
            explore: The configuration of exploration.
            calibration: The base policy and the samples to measure on.
            paths: The parameter paths of the quantized linear layers.
            quantizer: The quantizer without this option.
            schedule: The schedule that is explored on, with the configured number of steps.

        Returns:
            The quantizer with this option. By default `quantizer` itself.
        """
        return quantizer

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """Returns the segments to explore in. It is called only for formats that quantize.

        Args:
            explore: The configuration of exploration.
            segments: The segments without this option, at least one.
            exact: The parameters of the unquantized policy that regenerates.

        Returns:
            The segments with this option, in the order in which they are followed. By default
            `segments` itself.
        """
        return segments

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        """Returns the quantizer with shapes in the place of arrays, for plans and reports.

        Nothing is measured.

        Args:
            explore: The configuration of exploration.
            weights: The shapes of the quantized weights by parameter path.
            quantizer: The quantizer without this option.

        Returns:
            The quantizer with this option. By default `quantizer` itself.
        """
        return quantizer
