"""The watch over exploration: where the proxy ranks too badly, the next iterations explore more faithfully, until it may do.

Fidelity falls along training: rewards within a prompt come closer, and the error of a format does not. What is watched is what
every iteration has anyway, the rank correlation of proxy and regenerated rewards over the kept samples (the extremes of the
pool, so it is above that of the whole pool; `rollout.explore.audit_every` measures the latter).

There is no state: the level of an iteration is a function of what the iterations before it reported.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from solrl_jax.numerics.formats import FORMATS, Format

WINDOW = 3  # iterations whose median is compared with the floor: a single bad one is no reason
FIRST_RETURN = 10  # iterations after which a lower level is tried again; twice as many after each time that it did not do
FINER = ("fp8",)  # between the formats of four bits and the training precision


@dataclasses.dataclass(frozen=True)
class Level:
    """How an iteration explores."""

    precision: str
    steps: int


def levels(form: Format, steps: int, full_steps: int, training: str) -> tuple[Level, ...]:
    """As configured; with more steps, all of them; then in finer formats, up to the precision that is trained in."""
    finer = [name for name in (*FINER, training) if FORMATS[name].bits > form.bits]
    ladder = [Level(form.name, steps), Level(form.name, full_steps), *(Level(name, full_steps) for name in finer)]
    return tuple(dict.fromkeys(ladder))


def level_after(history: Sequence[tuple[int, float]], floor: float, highest: int) -> int:
    """The level, from 0, of the iteration after those of `history`: the level and the correlation of each, from the first on.

    It rises by one when the median of the last `WINDOW` correlations at a level is below `floor`, and falls by one, to see
    whether that does again, after `FIRST_RETURN` iterations that were not. A correlation that is not finite says nothing.
    """
    level, patience, tried, seen = 0, FIRST_RETURN, -1, list[float]()
    for at, value in history:
        if at != level:  # explored otherwise than this would have had it: as when the floor was set later
            level, seen = at, []
        if not math.isfinite(value):
            continue
        seen.append(value)
        enough = len(seen) >= WINDOW
        good = enough and statistics.median(seen[-WINDOW:]) >= floor
        if enough and not good and level < highest:
            patience = 2 * patience if level == tried else FIRST_RETURN
            level, seen = level + 1, []
        elif good and level and len(seen) >= patience:
            level, tried, seen = level - 1, level - 1, []
    return min(level, highest)
