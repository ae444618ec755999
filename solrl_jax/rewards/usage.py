"""Counters of what the rewards outside JAX cost, e.g. requests and tokens of a judge.

A worker process counts while it runs a function, and the run adds the counts of all calls.
"""

import collections

_counts: collections.Counter[str] = collections.Counter()


def count(name: str, amount: float = 1) -> None:
    """Adds to a counter of the running call.

    Args:
        name: The name of the counter, e.g. "requests". The metrics of a run have it as
            "reward_cost/REWARD/NAME".
        amount: The number to add.
    """
    _counts[name] += amount  # type: ignore[assignment]  # a Counter also sums floats


def take() -> dict[str, float]:
    """Returns the counters since the last call of this function, and resets them."""
    counts = {name: float(amount) for name, amount in _counts.items()}
    _counts.clear()
    return counts
