"""`Explorer`: the policy, the schedule and the format that candidates are explored with."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import jax

from solrl_jax.config.schema import Explore
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.loading.weights import Params
from solrl_jax.quant.formats import FORMATS, Format
from solrl_jax.rl.explore.monitor import setting_ladder
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.explore.options.registry import active_options
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.explore.sync import Quantizer, sync_policy
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.trainable import Trainable, attach


@dataclasses.dataclass(frozen=True, eq=False)
class Explorer:
    """Makes the schedule, the quantized policy and the sampler of exploration.

    The options of `rollout.explore` change the configured schedule, the quantizer and the segments
    (which policy takes which solver steps). Some measure the base policy (the model before
    training) first, for example the inputs of its layers. The measurement is taken when a method
    first needs the result, which the object keeps. The calibration prompts are encoded before the
    measurement, which may load text encoders and write to the cache of prompts.

    Attributes:
        explore: The section `rollout.explore` of the configuration: the number of steps and the
            fields of the options. `precision` may still be "auto".
        format: The configured format, with "auto" replaced by the one for the devices of the run.
        quantized: The paths of the kernels that a low-precision format quantizes (also if `format`
            is not one), sorted, such as `transformer_blocks/attn2/to_k/kernel`.
        scale: The scale of the adapters, alpha / rank.
        training_precision: The precision of regeneration, "bf16" or "fp32".
        make_schedule: (number of steps, first step of the full schedule that adds noise) -> the
            configured schedule without options. With fewer steps than the full schedule, each step
            adds the noise of the full steps that it covers.
        calibration: The base policy and the samples that options measure on.
    """

    explore: Explore
    format: Format
    quantized: tuple[str, ...]
    scale: float
    training_precision: str
    make_schedule: Callable[[int, int], Schedule]
    calibration: Calibration
    _schedules: dict[tuple[int, int], Schedule] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _quantizers: dict[str, Quantizer | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def settings(self) -> tuple[ExplorationSetting, ...]:
        """The settings that the monitor (`rl.explore.monitor`) chooses from, by how well
        exploration ranks candidates. Each is more faithful than the one before: the configured
        format and number of steps (index 0); the same format with all steps of the regeneration;
        FP8 with all steps; the training precision with all steps. A setting is left out if it
        equals an earlier one, and FP8 and the training precision also if they have no more bits per
        weight than the configured format. The training precision takes the place of a configured
        format that quantizes nothing.
        """
        return setting_ladder(
            self.format,
            self.explore.num_steps,
            self.calibration.schedule.steps,
            self.training_precision,
        )

    @property
    def calibrates(self) -> bool:
        """Whether an active option measures anything on the base for the configured format and
        number of steps.
        """
        steps = self.calibration.schedule.steps
        quantizes = self.format.quantize is not None
        return any(
            option.measures(self.explore, steps, quantizes)
            for option in active_options(self.explore)
        )

    def schedule(self, steps: int, noise_start: int = 0) -> Schedule:
        """Returns the schedule to explore on: the configured one, changed by the active options.

        The first call with given arguments may sample from the base, for options that measure;
        every process of a run must then call it. The result is kept.

        Args:
            steps: The number of solver steps, at least 1.
            noise_start: Where noise is added, if `rollout.noise_level` is above 0: at
                `rollout.sde_window_size` steps of the full schedule (that of the regeneration) from
                step `noise_start` (counted from 0) on; without a window size, at all steps from
                there on. A schedule with fewer steps adds noise between the same sigmas. The last
                step never adds noise.

        Returns:
            A schedule of `steps` steps; equal arguments give the same object. With `explore.sigmas`
            "first", the schedule has no noise, and it is the full schedule if `steps` is at least
            `rollout.num_steps`.

        Raises:
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, OSError, RunError: If the calibration prompts cannot be encoded
                (`Experiment.encode_prompts`).
        """
        if (steps, noise_start) not in self._schedules:
            schedule = self.make_schedule(steps, noise_start)
            for option in active_options(self.explore):
                schedule = option.schedule(self.explore, self.calibration, schedule)
            self._schedules[steps, noise_start] = schedule
        return self._schedules[steps, noise_start]

    def quantizer(self, precision: str) -> Quantizer | None:
        """Returns how linear layers are quantized: the quantizer of a format, changed by the active
        options, one after another in the order of their registry.

        The first call with a format that quantizes may sample from the base and differentiate it,
        for options that measure. They measure on the schedule with `explore.num_steps` steps,
        whatever the format. If there is no such schedule yet, this also makes it (`schedule`).
        Every process of a run must then call it. The result is kept.

        Args:
            precision: The name of a format, a key of `quant.formats.FORMATS`.

        Returns:
            The function that quantizes a weight, and the arrays that options add to it; the same
            object for the same format. None for a format that quantizes nothing.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`; "auto" is none.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, OSError, RunError: If the calibration prompts cannot be encoded
                (`Experiment.encode_prompts`).
        """
        if precision in self._quantizers:
            return self._quantizers[precision]
        quantize = FORMATS[precision].quantize
        quantizer = None
        if quantize is not None:
            quantizer = Quantizer(quantize)
            schedule = self.schedule(self.explore.num_steps)
            for option in active_options(self.explore):
                quantizer = option.quantizer(
                    self.explore, self.calibration, self.quantized, quantizer, schedule
                )
        self._quantizers[precision] = quantizer
        return quantizer

    def calibrate(self) -> None:
        """Measures everything that the configured setting needs, and waits for it.

        The results are kept in this object for `schedule` (with `noise_start` 0) and `quantizer`.
        Encodes the calibration prompts and samples from the base, unless `calibrates` is False.
        Every process of a run must call it.

        Raises:
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, OSError, RunError: If the calibration prompts cannot be encoded
                (`Experiment.encode_prompts`).
        """
        self.schedule(self.explore.num_steps)
        jax.block_until_ready(self.quantizer(self.format.name))

    def policy(self, adapters: Trainable, precision: str) -> Params:
        """Returns the parameters with which a policy explores ("sync" in the paper). If the format
        quantizes, the adapters of quantized weights are merged into them; all other adapters stay
        unmerged.

        The first call with a format may sample from the base, for options that measure
        (`quantizer`). Every process of a run must call it.

        Args:
            adapters: The trainable parameters by path (LoRA adapters or whole arrays) of the policy
                that explores, usually the old one.
            precision: The name of a format, a key of `quant.formats.FORMATS`.

        Returns:
            The parameters of the policy, a tree of the structure of the base:

            * At the paths in `self.quantized`, if the format quantizes: new `Quantized` leaves,
                made from the base with its adapter merged, or from the array that is trained in
                full.
            * At other trained paths: `LowRank` leaves (the base's array and the float32 adapter,
                unmerged), or the arrays that are trained in full, in the dtype of the base.
            * Elsewhere: the arrays of the base.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`, or the base has no parameter of a path
                in `adapters`.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, OSError, RunError: If the calibration prompts cannot be encoded
                (`Experiment.encode_prompts`).
        """
        backbone = self.calibration.backbone
        quantizer = self.quantizer(precision)
        return sync_policy(backbone, adapters, self.scale, self.quantized, quantizer)

    def sampler(
        self, adapters: Trainable, setting: ExplorationSetting, noise_start: int = 0
    ) -> Sampler:
        """Returns the sampler that candidates are explored with.

        This allocates the quantized policy on the devices, which is freed with the sampler. The
        first call with a setting may sample from the base, for options that measure (`quantizer`,
        `schedule`). Every process of a run must call it.

        Args:
            adapters: The trainable parameters by path (LoRA adapters or whole arrays) of the policy
                that explores, usually the old one.
            setting: Its `precision` and `steps` are the format and the number of solver steps. Its
                `option_set` is ignored: the options are those of this explorer.
            noise_start: Where noise is added, if `rollout.noise_level` is above 0: at
                `rollout.sde_window_size` steps of the full schedule from step `noise_start`
                (counted from 0) on; without a window size, at all steps from there on. The last
                step never adds noise.

        Returns:
            A sampler named "explore" with this policy and its schedule. Decoder, latent shape and
            number of samples per device are those of `calibration.sampler`, the sampler of the base
            in the training precision. It records no states and keeps no intermediate latents.

        Raises:
            KeyError: If the format of the setting is no key of `FORMATS`, or the base has no
                parameter of a path in `adapters`.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, OSError, RunError: If the calibration prompts cannot be encoded
                (`Experiment.encode_prompts`).
        """
        segment = Segment(
            self.policy(adapters, setting.precision), self.schedule(setting.steps, noise_start)
        )
        exact = attach(self.calibration.backbone.transformer, adapters, self.scale)
        return dataclasses.replace(
            self.calibration.sampler,
            name="explore",
            segments=self.segments(segment, exact, setting.precision),
        )

    def segments(self, segment: Segment, exact: Params, precision: str) -> tuple[Segment, ...]:
        """Divides the solver steps of exploration into segments, as the active options ask.

        A segment is a policy and the consecutive solver steps that it takes. An option may add a
        segment, for example the first steps with the unquantized policy. An option is active if its
        field of `rollout.explore` does not have the default value.

        Args:
            segment: The policy that explores, with all steps of the schedule.
            exact: The parameters of the same policy in the training precision, for options that use
                them.
            precision: The name of the format of `segment`. Options are applied only if it
                quantizes.

        Returns:
            At least one segment, in the order in which they are sampled. Together they have the
            steps of `segment`. `segment` alone if no option is active or the format quantizes
            nothing.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`.
        """
        segments: tuple[Segment, ...] = (segment,)
        if FORMATS[precision].quantize is not None:
            for option in active_options(self.explore):
                segments = option.segments(self.explore, segments, exact)
        return segments
