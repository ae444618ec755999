"""`Explorer`: how candidates are explored. The policy, the grid and the format of the exploring stage, options applied."""

import dataclasses
from collections.abc import Callable
from functools import cache, cached_property

import jax

from solrl_jax.config.schema import Explore
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.loading.weights import Params
from solrl_jax.quant.formats import FORMATS, Format
from solrl_jax.rl.explore.monitor import ExplorationSetting, levels
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.explore.options.registry import active_options
from solrl_jax.rl.explore.sync import Quantizer, merged
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.trainable import Trainable, attach


@dataclasses.dataclass(frozen=True, eq=False)
class Explorer:
    """Exploration as `config.Explore` describes it. What options measure is measured when first needed, once."""

    explore: Explore
    format: Format  # the format that `explore.precision` means on these devices
    quantized: tuple[str, ...]  # paths of the linears that a format quantises
    scale: float  # of the adapters: alpha / rank
    training_precision: str
    make_schedule: Callable[
        ..., Schedule
    ]  # the schedule's own grid with so many steps, the first that adds noise, by number
    calibration: Calibration

    @cached_property
    def settings(self) -> tuple[ExplorationSetting, ...]:
        """How exploration may be done, from what is configured (level 0) to the most faithful."""
        return levels(
            self.format,
            self.explore.num_steps,
            self.calibration.schedule.steps,
            self.training_precision,
        )

    @property
    def calibrates(self) -> bool:
        """Whether anything is measured on the base."""
        steps = self.calibration.schedule.steps
        quantizes = self.format.quantize is not None
        return any(
            option.measures(self.explore, steps, quantizes)
            for option in active_options(self.explore)
        )

    @cached_property
    def schedule(self) -> Callable[..., Schedule]:
        """The grid to explore on with so many steps. start: of the full schedule, the first step that adds noise."""

        @cache
        def made(steps: int, start: int) -> Schedule:
            grid = self.make_schedule(steps, start)
            for option in active_options(self.explore):
                grid = option.schedule(self.explore, self.calibration, grid)
            return grid

        return lambda steps, start=0: made(steps, start)

    @cached_property
    def quantizer(self) -> Callable[[str], Quantizer | None]:
        """How the linears are quantised in the format of that name; None for a format that quantises nothing."""

        @cache
        def of(precision: str) -> Quantizer | None:
            if (quantize := FORMATS[precision].quantize) is None:
                return None
            quantizer = Quantizer(quantize)
            grid = self.schedule(self.explore.num_steps)
            for option in active_options(self.explore):
                quantizer = option.quantizer(
                    self.explore, self.calibration, self.quantized, quantizer, grid
                )
            return quantizer

        return of

    def calibrate(self) -> None:
        """Measures what level 0 explores with."""
        self.schedule(self.explore.num_steps)
        jax.block_until_ready(self.quantizer(self.format.name))

    def policy(self, adapters: Trainable, precision: str) -> Params:
        """The policy that explores: linears merged with their adapters and quantised ("sync" in the paper)."""
        backbone = self.calibration.backbone
        if (quantizer := self.quantizer(precision)) is None:
            return attach(backbone.transformer, adapters, self.scale)
        return merged(backbone, adapters, self.scale, self.quantized, quantizer)

    def sampler(self, adapters: Trainable, level: ExplorationSetting, start: int = 0) -> Sampler:
        """What candidates of the policy with these adapters are explored with. start: as of `grid`."""
        segment = Segment(self.policy(adapters, level.precision), self.schedule(level.steps, start))
        exact = attach(self.calibration.backbone.transformer, adapters, self.scale)
        return dataclasses.replace(
            self.calibration.sampler,
            name="explore",
            segments=self.segments(segment, exact, level.precision),
        )

    def segments(self, segment: Segment, exact: Params, precision: str) -> tuple[Segment, ...]:
        """The segments that a policy in the format `precision` explores in; exact: the policy that regenerates."""
        if FORMATS[precision].quantize is None:
            return (segment,)
        segments: tuple[Segment, ...] = (segment,)
        for option in active_options(self.explore):
            segments = option.segments(self.explore, segments, exact)
        return segments
