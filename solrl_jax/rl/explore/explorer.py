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

    What the options measure on the base is measured when it is first needed, and once per object.

    Attributes:
        explore: The configuration of exploration.
        format: The format that `explore.precision` means on the devices of the run.
        quantized: The paths of the linear layers that a low-precision format quantizes.
        scale: The factor of the product of LoRA factors, alpha / rank.
        training_precision: "bf16" or "fp32".
        make_schedule: (number of steps, first step of the full schedule that adds noise) -> the
            configured schedule.
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
        """The settings that the monitor chooses from; index 0 is the configured one."""
        return setting_ladder(
            self.format,
            self.explore.num_steps,
            self.calibration.schedule.steps,
            self.training_precision,
        )

    @property
    def calibrates(self) -> bool:
        """Whether the options measure anything on the base."""
        steps = self.calibration.schedule.steps
        quantizes = self.format.quantize is not None
        return any(
            option.measures(self.explore, steps, quantizes)
            for option in active_options(self.explore)
        )

    def schedule(self, steps: int, noise_start: int = 0) -> Schedule:
        """Returns the schedule to explore on; the same object for the same arguments.

        Args:
            steps: The number of solver steps.
            noise_start: The first step of the full schedule that adds noise.
        """
        if (steps, noise_start) not in self._schedules:
            schedule = self.make_schedule(steps, noise_start)
            for option in active_options(self.explore):
                schedule = option.schedule(self.explore, self.calibration, schedule)
            self._schedules[steps, noise_start] = schedule
        return self._schedules[steps, noise_start]

    def quantizer(self, precision: str) -> Quantizer | None:
        """Returns how linear layers are quantized; the same object for the same argument.

        Args:
            precision: The name of a format.

        Returns:
            The quantizer; None for a format that quantizes nothing.
        """
        if precision not in self._quantizers:
            self._quantizers[precision] = self._make_quantizer(precision)
        return self._quantizers[precision]

    def _make_quantizer(self, precision: str) -> Quantizer | None:
        """Applies the options to the quantizer of a format. None if it quantizes nothing."""
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
        """Measures everything that the configured setting needs, and waits for it."""
        self.schedule(self.explore.num_steps)
        jax.block_until_ready(self.quantizer(self.format.name))

    def policy(self, adapters: Trainable, precision: str) -> Params:
        """Returns the parameters of the policy that explores ("sync" in the paper).

        Args:
            adapters: The trainable parameters of the policy.
            precision: The name of a format. If it quantizes, adapters are merged into the quantized
                linear layers.
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

        Args:
            adapters: The trainable parameters of the policy.
            setting: The format and the number of steps. Its recipe is not read: the options are
                those of this explorer.
            noise_start: As in `schedule`.
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
            segment: The policy that explores, on the whole schedule.
            exact: The parameters of the policy that regenerates.
            precision: The name of the format of `segment`. Options apply only if it quantizes.
        """
        segments: tuple[Segment, ...] = (segment,)
        if FORMATS[precision].quantize is not None:
            for option in active_options(self.explore):
                segments = option.segments(self.explore, segments, exact)
        return segments
