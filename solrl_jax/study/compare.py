"""What a study finds: means and standard errors over seeds, at equal iterations, at equal cost, and at equal progress.

Arms that are compared share their seeds, hence their prompts and noise, and all are evaluated on the same pictures. So
differences are taken seed by seed. Standard errors are over seeds alone: they do not say how other pictures would score.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from solrl_jax.errors import InputError
from solrl_jax.rl.fidelity import mean_true_rank
from solrl_jax.runs import ledger
from solrl_jax.runs.metrics import read
from solrl_jax.study.cost import Prices, evaluations
from solrl_jax.study.plan import Run

PROGRESS = (25, 50, 75, 100)  # per cent of what the other arm gains
Estimate: TypeAlias = tuple[
    float, float
]  # a mean and its standard error; NaN where it cannot be told
Evaluated: TypeAlias = Float[np.ndarray, " e"]


@dataclasses.dataclass(frozen=True)
class Course:
    """What a finished run did: at its e evaluations, and in its i iterations."""

    seed: int
    iterations: Int[np.ndarray, " e"]
    cost: Evaluated  # counted seconds up to there
    scores: Mapping[str, Evaluated]  # held-out, by name; "reward" is among them
    network_evaluations: int  # of exploration and regeneration, in all
    fidelity: Mapping[str, Float[np.ndarray, " i"]]  # of a run that regenerates, by name

    @property
    def reward(self) -> Evaluated:
        return self.scores["reward"]


def read_course(run: Run, prices: Prices) -> Course:
    """From the run's record and ledger. Raises InputError for what is missing there, or cannot be read."""
    last = run.config.train.iterations
    every = run.config.eval.every
    trained = run.config.reward.weights
    rows: dict[int, dict[str, Any]] = {}
    for row in read(run.folder):
        rows.setdefault(row["iteration"], {}).update(row)
    at = sorted({0, last, *range(0, last, every or last)})
    if lost := [i for i in at if rows.get(i, {}).get("eval/reward") is None]:
        raise InputError(
            f"{run.folder}: has no held-out reward after iteration {lost[0]}; remove it, and it is trained again"
        )
    names = [
        key[5:-15]
        for key in rows[last]
        if key.startswith("eval/") and key.endswith("/standard_error")
    ]
    names = [
        "reward",
        *(name for name in names if name != "reward" and (name not in trained or len(trained) > 1)),
    ]
    scores = {name: np.array([rows[i].get(f"eval/{name}") for i in at], float) for name in names}
    costs = [0.0]
    count = 0
    ranks = []
    for iteration in range(1, last + 1):
        table = ledger.read(run.folder / "ledger", iteration)
        if len(table) != run.config.train.num_prompts * run.config.rollout.candidates:
            cut = f"its ledger has {len(table)} rows of iteration {iteration}"
            raise InputError(f"{run.folder}: {cut}; remove it, and it is trained again")
        precision = table["precision"][0].as_py()
        steps = table["steps"][0].as_py()
        costs.append(costs[-1] + prices.of_iteration(run.config, precision, steps))
        count += evaluations(run.config, steps)
        ranks.append(true_ranks(table, run.config.rollout.candidates, run.config.rollout.kept))
    fidelity = {}
    if run.config.rollout.regenerate:
        spearman = [rows.get(i, {}).get("fidelity/spearman") for i in range(1, len(ranks) + 1)]
        fidelity = {
            "spearman": np.array(spearman, float),
            "best": np.array(ranks)[:, 0],
            "worst": np.array(ranks)[:, 1],
        }
    return Course(run.config.seed, np.array(at), np.array(costs)[at], scores, count, fidelity)


def true_ranks(table: Any, candidates: int, kept: int) -> tuple[float, float]:
    """The mean true rank, among the kept, of the proxy's best K/2 and worst K/2 in an iteration's ledger; rank 1 is the best.

    Perfect are (K/2 + 1) / 2 and (3 K/2 + 1) / 2; a coin has (K + 1) / 2 twice. The ledger has no true reward of the others.
    """

    def of(name):
        return np.array(table[name].to_pylist(), float).reshape(-1, candidates)

    true = of("regenerated_reward")
    proxy = np.where(np.isfinite(true), of("proxy_reward"), np.nan)
    best, worst = (mean_true_rank(proxy, true, kept // 2, end) for end in (True, False))
    return _mean(best), _mean(worst)


def compare(
    courses: Mapping[str, Sequence[Course]], compared: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The arms, and the pairs of `compared`, as tables of estimates. Arms without a finished run are left out."""
    there = {arm: list(of) for arm, of in courses.items() if of}
    equal = min((course.cost[-1] for of in there.values() for course in of), default=float("nan"))
    pairs = [(arm, other) for arm, other in compared if arm in there and other in there]
    return (
        {arm: _arm(of, equal) for arm, of in there.items()},
        [{"arm": arm, "against": other, **_pair(there[arm], there[other])} for arm, other in pairs],
    )


def _arm(courses: Sequence[Course], equal: float) -> dict[str, Any]:
    """equal: the cost that all arms reach."""
    last = {name: estimate([c.scores[name][-1] for c in courses]) for name in courses[0].scores}

    def quarter(values, end):
        return _mean(np.array_split(values, 4)[0 if end == "first" else -1])

    return {
        "seeds": [course.seed for course in courses],
        "iterations": int(courses[0].iterations[-1]),
        "scores": last,
        "gain": estimate([c.reward[-1] - c.reward[0] for c in courses]),
        "cost": estimate([c.cost[-1] for c in courses])[0],
        "network_evaluations": courses[0].network_evaluations,
        "at_equal_cost": {"cost": equal, "reward": estimate([at_cost(c, equal) for c in courses])},
        "fidelity": {
            name: {
                end: estimate([quarter(c.fidelity[name], end) for c in courses])
                for end in ("first", "last")
            }
            for name in courses[0].fidelity
        },
    }


def _pair(courses: Sequence[Course], others: Sequence[Course]) -> dict[str, Any]:
    """An arm less another one, over the seeds that both have."""
    by_seed = {other.seed: other for other in others}
    pairs = [(course, by_seed[course.seed]) for course in courses if course.seed in by_seed]
    equal = min((course.cost[-1] for pair in pairs for course in pair), default=float("nan"))
    final = [a.reward[-1] - b.reward[-1] for a, b in pairs]
    base = _mean([b.reward[-1] for _, b in pairs])
    return {
        "seeds": [a.seed for a, _ in pairs],
        "final": estimate(final),
        "final_share": estimate([x / base for x in final]),  # of the other's reward
        "cost_share": _mean([a.cost[-1] / b.cost[-1] for a, b in pairs]),
        "at_equal_cost": {
            "cost": equal,
            "reward": estimate([at_cost(a, equal) - at_cost(b, equal) for a, b in pairs]),
        },
        "speed_up": {str(part): speed_up(pairs, part / 100) for part in PROGRESS},
    }


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its standard error, which one value does not tell."""
    x = np.asarray(values, float)
    return _mean(x), float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def at_cost(course: Course, cost: float) -> float:
    """The held-out reward at a cost, between evaluations along a line; NaN beyond the run."""
    return float(np.interp(cost, course.cost, course.reward, right=np.nan))


def speed_up(pairs: Sequence[tuple[Course, Course]], part: float) -> Estimate:
    """How many times as much the second of each pair costs to reach a part of its own gain; by the mean curves over seeds.

    The standard error leaves out one seed after another (jackknife). NaN where an arm does not get there.
    """

    def ratio(of: Sequence[tuple[Course, Course]]) -> float:
        def mean(side: Any) -> tuple[Any, Any]:
            return (np.mean([c.cost for c in side], 0), np.mean([c.reward for c in side], 0))

        arm, other = (mean(side) for side in zip(*of, strict=True))
        level = other[1][0] + part * (other[1][-1] - other[1][0])
        return (
            reached(*other, level) / reached(*arm, level)
            if other[1][-1] > other[1][0]
            else float("nan")
        )

    if not pairs:
        return float("nan"), float("nan")
    without = np.array(
        [ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(len(pairs))]
        if len(pairs) > 1
        else [np.nan]
    )
    return ratio(pairs), float(
        np.sqrt((len(without) - 1) / len(without) * np.square(without - without.mean()).sum())
    )


def reached(cost: Evaluated, reward: Evaluated, level: float) -> float:
    """The cost at which a curve of straight lines first reaches a level; NaN if it does not."""
    above = np.flatnonzero(reward >= level)
    if not len(above):
        return float("nan")
    i = above[0]
    if i == 0:
        return float(cost[0])
    return float(
        cost[i - 1]
        + (level - reward[i - 1]) / (reward[i] - reward[i - 1]) * (cost[i] - cost[i - 1])
    )


def _mean(values: Any) -> float:
    """The mean of the numbers among values; NaN if there is none."""
    x = np.asarray(values, float)
    return float(x[~np.isnan(x)].mean()) if (~np.isnan(x)).any() else float("nan")
