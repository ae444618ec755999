"""The monitor: if exploration ranks too badly, the next iterations explore more faithfully, and return when they can.

Fidelity falls along training: rewards within a prompt come closer together, and the error of a format does not. The monitor
reads what every iteration reports anyway: the Spearman correlation of proxy and regenerated rewards over the kept samples.
These are the extremes of the pool, so the correlation is above that of the whole pool (`solrl rank RUN` measures the latter).

There is no state: the level of an iteration is a function of what the iterations before it reported.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from solrl_jax.quant.formats import FORMATS, Format

WINDOW = 3  # iterations whose median is compared with the floor, so that a single bad one changes nothing
FIRST_RETURN = 10  # iterations after which a lower level is tried again; doubled each time that the lower level fails
FINER = ("fp8",)  # formats between those of four bits and the training precision


@dataclasses.dataclass(frozen=True)
class ExplorationSetting:
    """How an iteration explores."""

    precision: str
    steps: int


def levels(
    form: Format, steps: int, full_steps: int, training: str
) -> tuple[ExplorationSetting, ...]:
    """The ladder: as configured; with all steps; then in finer formats, up to the training precision."""
    finer = [
        name for name in (*FINER, training) if FORMATS[name].bits_per_weight > form.bits_per_weight
    ]
    ladder = [
        ExplorationSetting(form.name, steps),
        ExplorationSetting(form.name, full_steps),
        *(ExplorationSetting(name, full_steps) for name in finer),
    ]
    return tuple(dict.fromkeys(ladder))


def level_after(history: Sequence[tuple[int, float]], floor: float, highest: int) -> int:
    """The level of the next iteration. history: level and correlation of each iteration so far, from the first.

    The level rises by one when the median of the last `WINDOW` correlations at that level is below `floor`. It falls by one, as
    a trial, after `FIRST_RETURN` good iterations. Correlations that are not finite are left out.
    """
    level = 0
    patience = FIRST_RETURN
    tried = -1
    seen = list[float]()
    for at, value in history:
        if at != level:  # the run explored at another level, e.g. because the floor was set later
            level = at
            seen = []
        if not math.isfinite(value):
            continue
        seen.append(value)
        enough = len(seen) >= WINDOW
        good = enough and statistics.median(seen[-WINDOW:]) >= floor
        if enough and not good and level < highest:
            patience = 2 * patience if level == tried else FIRST_RETURN
            level = level + 1
            seen = []
        elif good and level and len(seen) >= patience:
            level, tried, seen = level - 1, level - 1, []
    return min(level, highest)
