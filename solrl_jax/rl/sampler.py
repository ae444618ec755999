"""`Sampler`: what a phase of an iteration samples with.

Exploration, regeneration and evaluation are three values of this class.
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
    """Makes the schedule (sigmas, solver and guidance) that is configured, with any number of
    steps, for a model and a size.

    Args:
        rollout: The configuration of the rollout.
        pipeline: The model, whose shift and embedded guidance some schedules take.
        size: Height and width of the images in pixels, or of clips also the number of frames, from
            which some schedules derive their shift.
        steps: The number of solver steps, at least 1. The full schedule has `rollout.num_steps`.
        noise_start: Where noise is added, if `rollout.noise_level` is above 0: at
            `rollout.sde_window_size` steps of the full schedule from step `noise_start` (counted
            from 0) on; without a window size (None), at all steps from there on. The last step
            never adds noise. None: no step does.

    Returns:
        The schedule, as arrays on the host. In one with fewer steps than the full schedule, the
        noise of a step is the sum of the noise that the same seed has on the full one between the
        same sigmas, scaled to the noise level of the step. Where only a part of the step is to add
        noise, this is `rollout.noise_level` times the square root of that part's share of the step
        (in sigma). One with more steps draws other noise, and `noise_start` counts its own steps.
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
    """A policy, and the consecutive solver steps of a trajectory that it takes.

    A segment is a pytree: the arrays of the policy and the schedule are its leaves.

    Attributes:
        policy: The parameters of the transformer: the tree of the base, in which any leaf may be
            replaced by an array that was trained in full, by a base weight with its LoRA adapter
            (`LowRank`), or by a quantized weight (`Quantized`).
        schedule: The solver steps: sigmas, timesteps, solver coefficients and guidance.
        fp8_attention: Whether softmax attention runs in FP8. Models without it (SANA, Qwen-Image
            and Z-Image) raise ValueError when the program is traced. Static: programs are compiled
            for either value.
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
            with a policy each. Nearly always there is one.
        decoder: Decodes latents to images or clips, for rewards or to be kept.
        shape: Height, width and channels of one latent (`Pipeline.latent_shape`); of clips, the
            number of latent frames comes before them.
        samples_per_device: The number of samples that one device generates at once, at least 1;
            `generate` pads a batch with fewer. Devices along the mesh axes `sequence` and `tensor`
            work on the same samples and count as one.
        recorded: How many steps that add noise are recorded, from the first such step on: the
            latents before and after each are returned with the samples, to be trained on. 0 records
            nothing.
        keep_intermediate: Whether the latents after the first segment are returned with the
            samples.
        query_steps: Consecutive steps, counted from 0 over all segments, one of which is drawn for
            each sample from its seed. The latents before it and the clean latents that are
            predicted there are returned with the samples, to be trained on. None: there are none.
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
        """Returns the sampler of the steps after the first ones.

        It starts at the latents after the first steps, which the caller gives as the noise
        (`SeedBatch.noise`). Solvers that use earlier predictions start without any. `count` is
        subtracted from `query_steps` (None stays None); apart from `segments`, all other fields
        stay. So `recorded`, a number of steps, then counts from the first remaining step that
        adds noise.

        Args:
            count: The number of steps that are left out, at least 0, less than those of the first
                segment, and not more than the first of `query_steps`. It is not checked.
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
        shift: What is added to each index. It may be negative.
    """
    return None if steps is None else range(steps.start + shift, steps.stop + shift)
