"""`ExplorationOption`: one departure from the paper's exploration. Each lever is a file in `rl/explore/options/`.

A lever reads its own field of `config.Explore`. Deleting the file and the field deletes the lever.
"""

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache

import jax
import numpy as np
from jaxtyping import Float

from solrl_jax.config.schema import Explore
from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.rl.explore import options as folder
from solrl_jax.rl.explore.sync import Quantizer
from solrl_jax.rl.generate import PromptBatch, SeedBatch, generate
from solrl_jax.rl.sampler import Sampler, Segment


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """The base policy with a few prompts: what levers measure on, once, before the first iteration.

    Measurements depend on the base and the configuration alone. So a run that is resumed finds those that it began with.
    """

    backbone: Backbone
    sampler: Sampler  # of the base, as it regenerates
    prompts: Sequence[Prompt]
    prompt_batch: Callable[[], PromptBatch]  # encodes the prompts, when something is measured
    rows: SeedBatch  # a sample a prompt
    micro_batch: int  # rows that a device differentiates at once, at most

    @property
    def schedule(self) -> Schedule:
        """The grid of the regeneration."""
        return self.sampler.segments[0].schedule

    def generate(
        self, grid: Schedule, noise: Float[np.ndarray, "b h w c"] | None = None
    ) -> Float[np.ndarray, "b h w c"]:
        """Latents of all rows by the base on `grid`; noise: what they start from, in place of the seeds' own."""
        stage = dataclasses.replace(
            self.sampler, segments=(Segment(self.backbone.transformer, grid),)
        )
        return generate(
            self.backbone, stage, self.prompt_batch(), dataclasses.replace(self.rows, noise=noise)
        ).latents


class ExplorationOption(abc.ABC):
    """A lever says when it is active. The default of each other method changes nothing."""

    @abc.abstractmethod
    def active(self, explore: Explore) -> bool:
        """Whether the configuration asks for this lever."""

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Whether it measures anything on the base. full_steps: of the regeneration; quantizes: whether the format does."""
        return False

    def schedule(self, explore: Explore, calibration: Calibration, grid: Schedule) -> Schedule:
        """The grid to explore on, in place of `grid`, which is the schedule's own with as many steps."""
        return grid

    def quantizer(
        self,
        explore: Explore,
        calibration: Calibration,
        paths: tuple[str, ...],
        quantizer: Quantizer,
        grid: Schedule,
    ) -> Quantizer:
        """How to quantise the linears at `paths`, in place of `quantizer`. grid: the one that is explored on."""
        return quantizer

    def segments(
        self, explore: Explore, segments: tuple[Segment, ...], exact: Params
    ) -> tuple[Segment, ...]:
        """The segments to explore in, in place of `segments`. exact: the policy that regenerates."""
        return segments

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        """`quantizer` with shapes for arrays, from the shapes of the weights: nothing is measured. For plans and reports."""
        return quantizer


def shaped_quantizer(
    explore: Explore, quantizer: Quantizer, weights: dict[str, jax.ShapeDtypeStruct]
) -> Quantizer:
    """`quantizer` with the levers that a configuration asks for, with shapes for arrays: nothing is measured."""
    for lever in active_levers(explore):
        quantizer = lever.abstract_quantizer(explore, weights, quantizer)
    return quantizer


@cache
def levers() -> tuple[ExplorationOption, ...]:
    """Every lever in `rl/explore/options/`, by name."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
    )
    return tuple(importlib.import_module(name).LEVER for name in names)


def active_levers(explore: Explore) -> tuple[ExplorationOption, ...]:
    """The levers that a configuration asks for."""
    return tuple(lever for lever in levers() if lever.active(explore))
