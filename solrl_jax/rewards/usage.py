"""Counters of what the rewards outside JAX cost, e.g. requests and tokens of a judge.

A worker process counts while it runs a function, and the run adds the counts of all calls.
"""

import collections

_counts: collections.Counter[str] = collections.Counter()


def count(name: str, amount: float = 1) -> None:
    """Adds to a counter of the running call of a reward's function.

    Counters belong to the process. In a process that is no worker nothing resets them.

    Args:
        name: The name of the counter, e.g. "requests". The metrics of a run have the sum over all
            calls of an iteration as "reward_cost/REWARD/NAME", and those of an evaluation as
            "eval/reward_cost/REWARD/NAME".
        amount: The number to add. 0 makes the counter appear in the metrics.
    """
    _counts[name] += amount  # type: ignore[assignment]  # a Counter also sums floats


def take() -> dict[str, float]:
    """Returns the sum of each counter by its name since the last call of `take`. Resets them all.

    The dict is empty if nothing was counted.
    """
    counts = {name: float(amount) for name, amount in _counts.items()}
    _counts.clear()
    return counts
