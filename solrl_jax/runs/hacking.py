"""Detects reward hacking: the trained reward rises while a watched score falls or stops rising."""

import math
from collections.abc import Mapping, Sequence

TRAINED = "eval/reward"
# A row of the record of a run, see `metrics.read`.
Row = Mapping[str, float | int | None]


def hacking_alarms(rows: Sequence[Row], now: Row, watched: Sequence[str]) -> list[str]:
    """Warns of reward hacking: the trained reward rises, and a watched score does not follow it.

    There are two kinds of warning, and a score gets at most one of them:

    * it fell from the first evaluation with a finite value of the score ("eval/NAME") and of the
        trained reward ("eval/reward") to `now`, while the trained reward rose;
    * it rose from that first evaluation to the one before `now` where it was highest, and from then
        to `now` it did not increase at all, while the trained reward rose.

    A score "rose" or "fell" if the change is larger than its standard error, which combines those
    of the two evaluations ("eval/NAME/standard_error"). The second kind was tried on the
    evaluations of the 16 runs of `benchmarks/study-learning.json`, with the same standard errors
    for all: 0.0055 for the reward and 0.0185 for `shapes`. It appears in 4 of the 8 runs whose
    objective follows the gradient of the reward (opsd, draft), and in none of the others (nft,
    awm).

    Args:
        rows: The earlier rows of the run's `metrics.jsonl`, in order, from `metrics.read`. Rows
            without an evaluation may be among them.
        now: The newest evaluation: the values by name, as in a row.
        watched: The names, without "eval/", of the watched scores: those that are evaluated but not
            trained on.

    Returns:
        One line of warning for each such score, in the order of `watched`. Comparisons with an
        unknown or non-finite value or standard error give no warning.
    """
    alarms = []
    for name in watched:
        key = f"eval/{name}"
        earlier = [row for row in rows if math.isfinite(_value(row, TRAINED) + _value(row, key))]
        known = math.isfinite(_value(now, key) + _value(now, f"{key}/standard_error"))
        if not earlier or not known:
            continue
        first = earlier[0]
        highest = max(earlier, key=lambda row: _value(row, key))
        if (
            _change_in_standard_errors(first, now, TRAINED) > 1
            and _change_in_standard_errors(first, now, key) < -1
        ):
            alarms.append(
                f"reward hacking? since the evaluation after iteration {first['iteration']} the "
                f"trained reward rose from {first[TRAINED]:.3f} to {now[TRAINED]:.3f}, the watched "
                f"'{name}' fell from {first[key]:.3f} to {now[key]:.3f}"
            )
        elif (
            _change_in_standard_errors(first, highest, key) > 1
            and _change_in_standard_errors(highest, now, key) <= 0
            and _change_in_standard_errors(highest, now, TRAINED) > 1
        ):
            alarms.append(
                f"reward hacking? since the evaluation after iteration {highest['iteration']} the "
                f"trained reward rose from {highest[TRAINED]:.3f} to {now[TRAINED]:.3f}, the "
                f"watched '{name}' no longer rises: {highest[key]:.3f}, now {now[key]:.3f}"
            )
    return alarms


def _value(row: Row, key: str) -> float:
    """Returns the value that a row of metrics has under `key`; NaN if it is missing or None."""
    value = row.get(key)
    return math.nan if value is None else float(value)


def _change_in_standard_errors(first: Row, now: Row, key: str) -> float:
    """Returns the change of a score between two evaluations, in units of its standard error.

    Args:
        first: The earlier evaluation: values by name, with the score under `key` and its standard
            error under "KEY/standard_error".
        now: The later evaluation, in the same form.
        key: The name of the score, e.g. "eval/reward".

    Returns:
        The change (positive if the score has risen) divided by the square root of the sum of both
        squared standard errors; infinite with its sign if both errors are 0. 0 if there is no
        change, or if a score or standard error is missing or not finite.
    """
    values = [_value(row, name) for row in (first, now) for name in (key, f"{key}/standard_error")]
    if not all(map(math.isfinite, values)):
        return 0.0
    before, error_before, after, error_after = values
    error = math.hypot(error_before, error_after)
    change = after - before
    if error:
        return change / error
    return math.copysign(math.inf, change) if change else 0.0
