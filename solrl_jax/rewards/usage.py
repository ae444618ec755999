"""Usage counters of rewards outside JAX, e.g. the requests and tokens of a judge.

A worker process counts while it runs a function, and the run adds the counts of all calls.
"""

import collections

_counts: collections.Counter[str] = collections.Counter()


def add_count(name: str, amount: float = 1) -> None:
    """Adds to a usage counter of the running call of a reward's function.

    It is for functions that worker processes call. Counting takes no lock, so only one thread may
    count. The counts of a call are returned with its result, and lost if its process ends before.
    Their sum per iteration is the metric "reward_cost/REWARD/NAME", and their sum per evaluation
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
