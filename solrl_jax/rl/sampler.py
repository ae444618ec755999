"""`Sampler`: the policy, the schedule and the decoder of one sampling phase.

Exploration, regeneration and evaluation each have an instance of this class.
"""

import dataclasses

import jax

from solrl_jax.config.schema import Rollout
from solrl_jax.config.values import Size
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Pipeline


def make_schedule(
    rollout: Rollout, pipeline: Pipeline, size: Size, steps: int, noise_start: int | None
) -> Schedule:
    """Makes the configured schedule (sigmas, solver and guidance), with any number of steps, for a
    model and a size.

    Args:
        rollout: The configuration of the rollout.
        pipeline: The model, whose shift and embedded guidance some schedules take.
        size: Height and width of the images in pixels; for clips, followed by the number of frames.
            Some schedules derive their shift from it.
        steps: The number of solver steps, at least 1. The full schedule has `rollout.num_steps`.
        noise_start: The first step of the full schedule that adds noise, counted from 0, if
            `rollout.noise_level` is above 0. `rollout.sde_window_size` steps from there on add
            noise, or all if that is None, but never the last step. None: no step adds noise.

    Returns:
        The schedule, as arrays on the host. If it has fewer steps than the full schedule, the noise
        of a step is the sum of the noise that the same seed has on the full schedule between the
        same sigmas, scaled to the noise level of the step. That level is
        `rollout.noise_level * sqrt(share)`, where share is the fraction of the sigma interval of
        the step that the full steps selected by `noise_start` cover. If the schedule has more steps
        than the full one, it draws other noise, and `noise_start` and the window are counted in
        steps of the schedule itself.

    Raises:
        ValueError: If the configured schedule or solver does not exist, or if the solver is
            deterministic but a step is to add noise.
    """
    return Schedule.from_config(
        rollout,
        steps,
        pipeline.image_tokens(*size),
        pipeline.embedded_guidance,
        noise_start,
        pipeline.shift_formula,
        pipeline.shift_terminal,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A policy, and the consecutive solver steps of a trajectory that are taken with it.

    A segment is a pytree: the arrays of the policy and the schedule are its leaves.

    Attributes:
        policy: The parameters of the transformer: the tree of the base, in which any leaf may be
            replaced by an array that was trained in full, by a base weight with its LoRA adapter
            (`LowRank`), or by a quantized weight (`Quantized`).
        schedule: The solver steps: sigmas, timesteps, solver coefficients and guidance.
        fp8_attention: Whether softmax attention runs in FP8. Models that do not support it (SANA,
            Qwen-Image and Z-Image) raise ValueError when the program is traced. Static: each value
            has a compiled program of its own.
    """

    policy: Params
    schedule: Schedule
    fp8_attention: bool = dataclasses.field(default=False, kw_only=True, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The policy, the schedule and the decoder that a phase samples with.

    Attributes:
        name: The name of the phase as progress reports it, e.g. "explore", "regenerate" or
            "evaluate".
        segments: The solver steps from noise to clean latents, divided into consecutive segments
            with a policy each. Nearly always there is one segment.
        decoder: Decodes latents to images or clips, for rewards or for the result.
        shape: Height, width and channels of one latent (`Pipeline.latent_shape`); for clips,
            preceded by the number of latent frames.
        samples_per_device: The number of samples that one device generates at once, at least 1;
            `generate` pads a batch with fewer. Devices along the mesh axes `sequence` and `tensor`
            work on the same samples and count as one.
        recorded: How many consecutive steps are recorded for training, from the first step that
            adds noise on: the latents before and after each of them are returned with the samples.
            All of them must add noise. 0 records nothing.
        keep_intermediate: Whether the latents after the first segment are returned with the
            samples.
        query_steps: Consecutive steps, counted from 0 over all segments. One of them is drawn for
            each sample from its seed. The latents before this step and the clean latents that are
            predicted there are returned with the samples, for training. `recorded` is then ignored.
            None: no step is drawn.
    """

    name: str
    segments: tuple[Segment, ...]
    decoder: Decoder
    shape: tuple[int, ...]
    samples_per_device: int
    recorded: int = 0
    keep_intermediate: bool = False
    query_steps: range | None = None

    def skip_steps(self, count: int) -> "Sampler":
        """Returns a sampler without the first steps.

        It starts at the latents after the skipped steps, which the caller passes as the noise
        (`SeedBatch.noise`). Solvers that use earlier predictions start without any. `count` is
        subtracted from `query_steps`, the steps of which one is drawn for training (None stays
        None). The first segment is shortened, and all other fields are kept. `recorded` steps then
        start at the first remaining step that adds noise.

        Args:
            count: The number of steps to skip, at least 0, less than the number of steps of the
                first segment, and at most the first index in `query_steps`. It is not checked.
        """
        first, *others = self.segments
        first = dataclasses.replace(first, schedule=first.schedule.slice_steps(count))
        query_steps = shift_steps(self.query_steps, -count)
        return dataclasses.replace(self, segments=(first, *others), query_steps=query_steps)

    @property
    def frames(self) -> int:
        """The number of frames of a decoded sample, 1 for images."""
        if len(self.shape) == 3:
            return 1
        return 1 + (self.shape[0] - 1) * (self.decoder.pipeline.temporal_compression or 1)


def shift_steps(steps: range | None, shift: int) -> range | None:
    """Returns the steps with `shift` added to each index.

    Args:
        steps: Consecutive steps. None gives None.
        shift: The number that is added to each index. It may be negative.
    """
    return None if steps is None else range(steps.start + shift, steps.stop + shift)
