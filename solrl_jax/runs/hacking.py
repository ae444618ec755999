"""Reward hacking: the trained reward rises while a score that is only watched falls."""

import math
from collections.abc import Mapping, Sequence

TRAINED = "eval/reward"
Row = Mapping[str, float | int | None]  # of `metrics.read`


def hacking_alarms(rows: Sequence[Row], now: Row, watched: Sequence[str]) -> list[str]:
    """A line for each watched score that has fallen while the trained reward has risen.

    Both changes are counted from the first evaluation that has both scores. Each must be larger than its standard error, which
    is the root of the sum of the squares of the standard errors of the two evaluations.

    Args:
      rows: the record of the run, `metrics.read`.
      now: the newest evaluation.
      watched: names of the scores, without "eval/".
    """
    lines = []
    for name in watched:
        key = f"eval/{name}"
        first = next(
            (row for row in rows if row.get(TRAINED) is not None and row.get(key) is not None), None
        )
        if first is not None and _steps(first, now, TRAINED) > 1 and _steps(first, now, key) < -1:

            def change(key, first=first):
                return f"{first[key]:.3f} to {now[key]:.3f}"

            lines.append(
                f"reward hacking? since the evaluation after iteration {first['iteration']} the trained reward rose from"
                f" {change(TRAINED)}, the watched '{name}' fell from {change(key)}"
            )
    return lines


def _steps(first: Row, now: Row, key: str) -> float:
    """The change of a score in standard errors; 0 if one of the two is not known."""
    values = [row.get(name) for row in (first, now) for name in (key, f"{key}/standard_error")]
    if any(value is None or not math.isfinite(value) for value in values):
        return 0.0
    before, error_before, after, error_after = (float(value or 0) for value in values)
    error = math.hypot(error_before, error_after)
    return (
        (after - before) / error
        if error
        else math.copysign(math.inf, after - before)
        if after != before
        else 0.0
    )
