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
    """The base policy and a few samples of it, on which exploration options measure what they need.

    Nothing is encoded or sampled until an option measures. Measurements depend on the base and the
    configuration alone, so a resumed run repeats those of its start.

    Attributes:
        backbone: The networks with the base parameters, and the mesh.
        sampler: The sampler of the base policy with the steps of the regeneration. Its decoder is
            not used for measurements.
        prompts: The prompts to measure on, usually the first 16 for training.
        encode_prompts: Returns `prompts` with their embeddings. Each call reads the embeddings from
            the cache of prompts, or loads the text encoders, encodes the prompts and writes to the
            cache, so an option calls it once per measurement. Every process of a run must call it.
        seed_batch: The samples to measure on: for each prompt, in order, the index of the prompt
            and one seed.
        micro_batch: The largest number of samples that a device differentiates at once.
    """

    backbone: Backbone
    sampler: Sampler
    prompts: Sequence[Prompt]
    encode_prompts: Callable[[], PromptBatch]
    seed_batch: SeedBatch
    micro_batch: int

    @property
    def schedule(self) -> Schedule:
        """The full schedule, with all steps of the regeneration and without exploration options. If
        `rollout.noise_level` is above 0, its first `rollout.sde_window_size` steps add noise, or
        all but the last without a window size.
        """
        return self.sampler.segments[0].schedule

    def generate(
        self,
        schedule: Schedule,
        prompt_batch: PromptBatch,
        noise: Float[np.ndarray, "b ... c"] | None = None,
    ) -> Float[np.ndarray, "b ... c"]:
        """Generates latents for the prompts and seeds of `seed_batch` with the base policy, in the
        training precision. Every process of a run must call it with the same arguments, and each
        gets all latents.

        Args:
            schedule: The solver steps to take, for instance `self.schedule`, or one step to sigma
                0.
            prompt_batch: The prompts with their embeddings, from `encode_prompts`.
            noise: The latents to start from, one per prompt, float32. None: standard normal noise
                drawn from the seeds of `seed_batch`.

        Returns:
            The latents after the last step, float32, on the host: one per prompt.
        """
        segments = (Segment(self.backbone.transformer, schedule),)
        sampler = dataclasses.replace(self.sampler, segments=segments)
        seed_batch = dataclasses.replace(self.seed_batch, noise=noise)
        return generate(self.backbone, sampler, prompt_batch, seed_batch).latents


class ExplorationOption(abc.ABC):
    """One exploration option: a field of `rollout.explore` that changes how candidates are
    explored.

    An option may change three things: the schedule (sigmas and solver coefficients), the quantizer
    (how a weight is quantized), and the segments (which policy takes which solver steps). There is
    one method for each. It receives the result of the options before this one and returns a new
    one; by default it changes nothing. Options have no state. Except for `active`, their methods
    are called only if `active` returns True.
    """

    @abc.abstractmethod
    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration asks for this option.

        Args:
            explore: The section `rollout.explore` of the configuration. An option looks at its own
                field.

        Returns:
            False if the field has its default, at which the option does nothing.
        """

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Returns whether `schedule` or `quantizer` of this option samples or differentiates the
        base.

        Args:
            explore: The section `rollout.explore` of the configuration, which has the option's own
                field and the number of exploration steps.
            full_steps: The number of steps of the regeneration.
            quantizes: Whether the exploration format quantizes weights.

        Returns:
            True if it does for this configuration. False by default.
        """
        return False

    def schedule(self, explore: Explore, calibration: Calibration, schedule: Schedule) -> Schedule:
        """Returns the schedule to explore on: its sigmas and solver coefficients.

        It may sample from the base (see the method `measures`); every process of a run must then
        call it.

        Args:
            explore: The section `rollout.explore` of the configuration, which has the option's own
                field.
            calibration: The base policy and the samples to measure on.
            schedule: The schedule as the options before this one have left it.

        Returns:
            A schedule with as many steps as `schedule`, or the full schedule (that of the
            regeneration) if that has fewer steps than `schedule`. By default `schedule` itself.
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
        """Returns the quantizer of the policy that explores: how each of its weights is quantized.

        It is called only for formats that quantize. It may sample from the base and differentiate
        it (see the method `measures`); every process of a run must then call it.

        Args:
            explore: The section `rollout.explore` of the configuration, which has the option's own
                field.
            calibration: The base policy and the samples to measure on.
            paths: The paths of the kernels to be quantized, such as
                `transformer_blocks/attn2/to_k/kernel`.
            quantizer: The quantizer of the format, as the options before this one have left it.
            schedule: The exploration schedule, with `explore.num_steps` steps, for measurements.

        Returns:
            The quantizer with this option. By default `quantizer` itself.
        """
        return quantizer

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """Returns the segments to explore in: consecutive solver steps, each with its policy.

        It is called only for formats that quantize.

        Args:
            explore: The section `rollout.explore` of the configuration, which has the option's own
                field.
            segments: The segments as the options before this one have left them, at least one, in
                order.
            exact: The parameters of the same policy, unquantized, with which it regenerates.

        Returns:
            The segments with this option, in the order in which they are sampled. By default
            `segments` itself.
        """
        return segments

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        """Returns the result of the method `quantizer` with a `jax.ShapeDtypeStruct` in place of
        each array that it would measure. For plans and reports; nothing is measured.

        Args:
            explore: The section `rollout.explore` of the configuration, which has the option's own
                field.
            weights: The shape and dtype of each weight to be quantized, [in, out] or [layers, in,
                out], by path.
            quantizer: The quantizer as the options before this one have left it, with shapes too.

        Returns:
            The quantizer with this option. By default `quantizer` itself.
        """
        return quantizer
