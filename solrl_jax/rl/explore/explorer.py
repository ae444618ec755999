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
    """Exploration as `config.Explore` describes it, with its options applied.

    An option measures the base when its measurement is first needed, and once per object. The
    schedules and quantizers that were asked for are kept.

    Attributes:
        explore: The section `rollout.explore` of the configuration: the number of steps and the
            fields of the options. `precision` may still be "auto".
        format: The configured format, with "auto" replaced by the one for the devices of the run.
        quantized: The paths of the kernels that a low-precision format quantizes, sorted, such as
            `transformer_blocks/attn2/to_k/kernel`.
        scale: The scale of the adapters, alpha / rank.
        training_precision: The precision of regeneration, "bf16" or "fp32".
        make_schedule: (number of steps, first step of the full schedule that adds noise) -> the
            configured schedule without options.
        calibration: The base policy and the prompts that options are measured on.
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
        """The settings that the monitor chooses from, in the order in which exploration gets more
        faithful. Index 0 is the configured format and number of steps. Then come that format with
        all steps of the regeneration, and with all steps FP8 and the training precision, each if it
        has more bits per weight than the configured format. Equal settings are listed once.
        """
        return setting_ladder(
            self.format,
            self.explore.num_steps,
            self.calibration.schedule.steps,
            self.training_precision,
        )

    @property
    def calibrates(self) -> bool:
        """Whether an active option measures anything on the base for the configured setting."""
        steps = self.calibration.schedule.steps
        quantizes = self.format.quantize is not None
        return any(
            option.measures(self.explore, steps, quantizes)
            for option in active_options(self.explore)
        )

    def schedule(self, steps: int, noise_start: int = 0) -> Schedule:
        """Returns the schedule to explore on.

        The first call with some arguments lets the active options change the configured schedule,
        which may sample from the base. The result is kept.

        Args:
            steps: The number of solver steps, at least 1.
            noise_start: The first step of the full schedule, counted from 0, that adds noise, if
                `rollout.noise_level` is above 0.

        Returns:
            A schedule of that many steps; if `explore.sigmas` is "first" and it has not fewer steps
            than the regeneration, the full schedule. Equal arguments give one and the same object.

        Raises:
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
                (`Experiment.encode_prompts`).
        """
        if (steps, noise_start) not in self._schedules:
            schedule = self.make_schedule(steps, noise_start)
            for option in active_options(self.explore):
                schedule = option.schedule(self.explore, self.calibration, schedule)
            self._schedules[steps, noise_start] = schedule
        return self._schedules[steps, noise_start]

    def quantizer(self, precision: str) -> Quantizer | None:
        """Returns how linear layers are quantized.

        The first call with a format lets the active options change the quantizer, which may measure
        on the base. They measure on the schedule of the configured number of steps, whatever the
        setting. The result is kept.

        Args:
            precision: The name of a format, a key of `quant.formats.FORMATS`.

        Returns:
            How a weight is quantized in the format, with the active options; one and the same
            object per format. None for a format that quantizes nothing.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`; "auto" is none.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
                (`Experiment.encode_prompts`).
        """
        if precision not in self._quantizers:
            self._quantizers[precision] = self._make_quantizer(precision)
        return self._quantizers[precision]

    def _make_quantizer(self, precision: str) -> Quantizer | None:
        """Applies the active options, in the order of the registry, to the quantizer of a format.

        Args:
            precision: The name of a format, a key of `quant.formats.FORMATS`.

        Returns:
            How a weight is quantized in the format, with the active options. None for a format that
            quantizes nothing.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`; "auto" is none.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
                (`Experiment.encode_prompts`).
        """
        quantize = FORMATS[precision].quantize
        if quantize is None:
            return None
        quantizer = Quantizer(quantize)
        schedule = self.schedule(self.explore.num_steps)
        for option in active_options(self.explore):
            quantizer = option.quantizer(
                self.explore, self.calibration, self.quantized, quantizer, schedule
            )
        return quantizer

    def calibrate(self) -> None:
        """Measures everything that the configured setting needs, and waits for it.

        The results are kept in this object for `schedule` and `quantizer`. Encodes the calibration
        prompts and samples from the base, unless `calibrates` is False.

        Raises:
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
                (`Experiment.encode_prompts`).
        """
        self.schedule(self.explore.num_steps)
        jax.block_until_ready(self.quantizer(self.format.name))

    def policy(self, adapters: Trainable, precision: str) -> Params:
        """Returns the parameters of the policy that explores ("sync" in the paper).

        The first call with a format lets the active options measure on the base what its quantizer
        needs, for which the base is sampled from. The results are kept.

        Args:
            adapters: The trainable parameters by path of the policy that explores, usually the old
                one.
            precision: The name of a format, a key of `quant.formats.FORMATS`.

        Returns:
            A tree of the structure of the base. If the format quantizes, the linear layers of
            `quantized` are new `Quantized` leaves of the trained weights: with the adapter merged
            in, or of the array that is trained in full. All other parameters, and all parameters
            for formats that do not quantize, stay in the training precision: an adapted one is a
            `LowRank` leaf around the base's array, one that is trained in full is the trained array
            in the dtype of the base, and one that is not trained is the base's array itself.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`, or the base has no parameter of a path
                in `adapters`.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
                (`Experiment.encode_prompts`).
        """
        backbone = self.calibration.backbone
        quantizer = self.quantizer(precision)
        if quantizer is None:
            return attach(backbone.transformer, adapters, self.scale)
        return sync_policy(backbone, adapters, self.scale, self.quantized, quantizer)

    def sampler(
        self, adapters: Trainable, setting: ExplorationSetting, noise_start: int = 0
    ) -> Sampler:
        """Returns the sampler that candidates are explored with.

        Also allocates the quantized policy on the devices, which is freed with the sampler.

        Args:
            adapters: The trainable parameters by path of the policy that explores, usually the old
                one.
            setting: The format and the number of steps. Its recipe plays no part: this explorer
                applies its own options.
            noise_start: The first step of the full schedule, counted from 0, that adds noise, if
                `rollout.noise_level` is above 0.

        Returns:
            The sampler of the calibration (its decoder, latent shape and chunk size) with the name
            "explore" and the segments of this policy. It records no steps.

        Raises:
            KeyError: If the format of the setting is no key of `FORMATS`, or the base has no
                parameter of a path in `adapters`.
            numpy.linalg.LinAlgError: If an option measures values that are not finite.
            InputError, RunError: If the prompts that are measured on cannot be encoded
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
        """Returns the segments that candidates are explored in.

        Args:
            segment: The policy that explores, with all steps of the schedule.
            exact: The parameters of the policy that regenerates, in the training precision.
            precision: The name of the format of `segment`. Options change the segments only if it
                quantizes.

        Returns:
            At least one segment, in the order in which they are followed. Together they have the
            steps of `segment`. Without active options, `segment` alone.

        Raises:
            KeyError: If `precision` is no key of `FORMATS`.
        """
        segments: tuple[Segment, ...] = (segment,)
        if FORMATS[precision].quantize is not None:
            for option in active_options(self.explore):
                segments = option.segments(self.explore, segments, exact)
        return segments
