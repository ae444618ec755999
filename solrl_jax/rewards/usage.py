"""Counters of what the rewards outside JAX cost, e.g. requests and tokens of a judge.

A worker process counts while it runs a function, and the run adds the counts of all calls.
"""

import collections

_counts: collections.Counter[str] = collections.Counter()


def add_count(name: str, amount: float = 1) -> None:
    """Adds to a counter of what the running call of a reward's function costs.

    For functions that worker processes call; counting takes no lock, so only one thread may count.
    The counts of a call are returned with its scores (those of a call whose process is ended are
    lost), and summed per iteration as the metric "reward_cost/REWARD/NAME", or per evaluation as
    "eval/reward_cost/REWARD/NAME". Outside of worker processes nothing reads or resets them.

    Args:
        name: The name of the counter, e.g. "requests".
        amount: The number to add. 0 makes the counter appear in the metrics.
    """
    _counts[name] += amount  # type: ignore[assignment]  # a Counter also sums floats


def pop_counts() -> dict[str, float]:
    """Returns the sums of the counters of this process since the last call of this function, and
    resets them.

    Returns:
        The sum of each counter by its name; {} if nothing was counted.
    """
    counts = {name: float(amount) for name, amount in _counts.items()}
    _counts.clear()
    return counts
