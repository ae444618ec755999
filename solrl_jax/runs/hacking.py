"""Detects reward hacking: the trained reward rises while a watched score falls."""

import math
from collections.abc import Mapping, Sequence

TRAINED = "eval/reward"
# A row of the record of a run, see `metrics.read`.
Row = Mapping[str, float | int | None]


def hacking_alarms(rows: Sequence[Row], now: Row, watched: Sequence[str]) -> list[str]:
    """Warns of reward hacking: a watched score has fallen while the trained reward has risen.

    The newest evaluation is compared with the first one that has both scores. A change counts if it
    is larger than its standard error, which combines those of the two evaluations.

    Args:
        rows: The earlier rows of the run's `metrics.jsonl`, in order, from `metrics.read`. Rows
            without an evaluation may be among them.
        now: The newest evaluation: the values by name, as in a row.
        watched: The names, without "eval/", of the watched scores: those that are evaluated but not
            trained on.

    Returns:
        One line of warning for each such score, in the order of `watched`. A score whose value or
        standard error is unknown or not finite gives none.
    """
    alarms = []
    for name in watched:
        key = f"eval/{name}"
        both = [row for row in rows if row.get(TRAINED) is not None and row.get(key) is not None]
        if not both:
            continue
        first = both[0]
        if _standard_errors(first, now, TRAINED) > 1 and _standard_errors(first, now, key) < -1:
            alarms.append(
                f"reward hacking? since the evaluation after iteration {first['iteration']} the "
                f"trained reward rose from {first[TRAINED]:.3f} to {now[TRAINED]:.3f}, the watched "
                f"'{name}' fell from {first[key]:.3f} to {now[key]:.3f}"
            )
    return alarms


def _standard_errors(first: Row, now: Row, key: str) -> float:
    """Returns the change of a score between two evaluations, in units of its standard error.

    Args:
        first: The earlier evaluation: values by name, with the score under `key` and its standard
            error under "KEY/standard_error".
        now: The later evaluation, in the same form.
        key: The name of the score, e.g. "eval/reward".

    Returns:
        The change (positive if the score has risen) divided by the root of the sum of both squared
        standard errors; infinite with its sign if both are 0. 0 if there is no change, or if a
        value is missing or not finite.
    """
    values = [row.get(name) for row in (first, now) for name in (key, f"{key}/standard_error")]
    if any(value is None or not math.isfinite(value) for value in values):
        return 0.0
    before, error_before, after, error_after = (float(value or 0) for value in values)
    error = math.hypot(error_before, error_after)
    change = after - before
    if error:
        return change / error
    return math.copysign(math.inf, change) if change else 0.0
