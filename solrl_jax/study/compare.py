"""Compares the arms of a study: means and standard errors over seeds, at equal iterations, equal
cost and equal progress.

Arms that are compared share their seeds, hence their prompts and noise, and all are evaluated on
the same images, so differences are taken seed by seed. Standard errors are over seeds alone: they
do not say how other images would score.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from solrl_jax.errors import InputError
from solrl_jax.rl.fidelity import mean_true_rank
from solrl_jax.runs import ledger
from solrl_jax.runs.metrics import by_iteration, read
from solrl_jax.study.cost import Prices, evaluations
from solrl_jax.study.plan import Run

# The parts of the other arm's gain, in per cent, at which speed-ups are given.
PROGRESS = (25, 50, 75, 100)
# A mean and its standard error. NaN stands for an unknown value.
Estimate: TypeAlias = tuple[float, float]
Evaluated: TypeAlias = Float[np.ndarray, " e"]


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a finished run, at its e evaluations and in its i iterations.

    Attributes:
        seed: The seed of the run.
        iterations: The iteration of each evaluation, ascending: 0, every `eval.every` iterations,
            and the last one.
        cost: The counted seconds of all iterations up to each evaluation; 0 at the first. NaN where
            the format of an iteration has no price.
        scores: The held-out scores at each evaluation by name, "reward" first. NaN where a score
            was not finite.
        network_evaluations: The number of network evaluations of exploration and regeneration in
            all iterations.
        fidelity: Rank fidelity of each iteration by name: "spearman", the rank correlation of proxy
            and regenerated rewards; and "best" and "worst", the mean true ranks, among the kept
            candidates, of the proxy's best and worst half of them (1 is the best rank). Empty for a
            run that does not regenerate.
    """

    seed: int
    iterations: Int[np.ndarray, " e"]
    cost: Evaluated
    scores: Mapping[str, Evaluated]
    network_evaluations: int
    fidelity: Mapping[str, Float[np.ndarray, " i"]]

    @property
    def reward(self) -> Evaluated:
        """The held-out reward at each evaluation, `scores["reward"]`."""
        return self.scores["reward"]


def read_course(run: Run, prices: Prices) -> Course:
    """Reads the course of a finished run from its record (`metrics.jsonl`) and its ledger.

    An iteration is priced by the exploration format and the number of exploring steps in the first
    row of its ledger. Rows of the record with the same iteration are merged; later ones win.

    Args:
        run: The run, trained and evaluated to the end.
        prices: The seconds of each kind of work.

    Returns:
        The scores and costs at the run's evaluations, and the rank fidelity of its iterations.

    Raises:
        InputError: If the record has no finite held-out reward at an evaluation, or if the ledger
            of an iteration is missing, cannot be read or has another number of rows than
            `train.num_prompts` times `rollout.candidates`.
    """
    last = run.config.train.iterations
    every = run.config.eval.every or last
    rows = by_iteration(read(run.folder))
    evaluated = sorted({0, last, *range(0, last, every)})
    for iteration in evaluated:
        if rows.get(iteration, {}).get("eval/reward") is None:
            raise InputError(
                f"{run.folder}: has no held-out reward after iteration {iteration}; remove the "
                "directory, and the run is trained again"
            )
    scores = {
        name: np.array([rows[i].get(f"eval/{name}") for i in evaluated], float)
        for name in _score_names(rows[last], run)
    }
    costs = [0.0]
    network_evaluations = 0
    ranks = []
    for iteration in range(1, last + 1):
        table = ledger.read(run.folder / "ledger", iteration)
        if len(table) != run.config.train.num_prompts * run.config.rollout.candidates:
            raise InputError(
                f"{run.folder}: its ledger has {len(table)} rows of iteration {iteration}; remove "
                "the directory, and the run is trained again"
            )
        precision = table["precision"][0].as_py()
        steps = table["steps"][0].as_py()
        costs.append(costs[-1] + prices.of_iteration(run.config, precision, steps))
        network_evaluations += evaluations(run.config, steps)
        ranks.append(true_ranks(table, run.config.rollout.candidates, run.config.rollout.kept))
    fidelity = {}
    if run.config.rollout.regenerate:
        spearman = [rows.get(i, {}).get("fidelity/spearman") for i in range(1, last + 1)]
        fidelity = {
            "spearman": np.array(spearman, float),
            "best": np.array(ranks)[:, 0],
            "worst": np.array(ranks)[:, 1],
        }
    return Course(
        seed=run.config.seed,
        iterations=np.array(evaluated),
        cost=np.array(costs)[evaluated],
        scores=scores,
        network_evaluations=network_evaluations,
        fidelity=fidelity,
    )


def _score_names(row: Mapping[str, Any], run: Run) -> list[str]:
    """Returns the names of the scores of an evaluation, "reward" first.

    The others are those that the row also has a standard error of ("eval/NAME/standard_error"), in
    the order of the row. If only one reward is trained on, its own score equals "reward" and is
    left out.

    Args:
        row: The row of the evaluation in the record, values by name.
        run: The run. If its `reward.weights` name a single reward, that name is left out.
    """
    suffix = "/standard_error"
    names = [
        key.removeprefix("eval/").removesuffix(suffix)
        for key in row
        if key.startswith("eval/") and key.endswith(suffix)
    ]
    trained = run.config.reward.weights
    repeated = set(trained) if len(trained) == 1 else set()
    return ["reward", *(name for name in names if name not in repeated | {"reward"})]


def true_ranks(table: Any, candidates: int, kept: int) -> tuple[float, float]:
    """Returns the mean true ranks, among the kept candidates, of the proxy's best and worst K/2.

    Rank 1 is the best. A perfect proxy has (K/2 + 1) / 2 and (3 K/2 + 1) / 2; a random one has (K +
    1) / 2 twice. Candidates that are not kept have no true reward in the ledger, and neither they
    nor candidates with a non-finite reward are counted.

    Args:
        table: The ledger of an iteration, whose rows are grouped by prompt. Its
            "regenerated_reward" is the true reward, and "proxy_reward" that of the explored image.
        candidates: The number of candidates per prompt.
        kept: The number K of kept candidates per prompt. Of an odd number, the half is rounded
            down.

    Returns:
        The mean ranks of the best and of the worst, each averaged over prompts; NaN if no candidate
        was regenerated.
    """

    def column(name: str) -> np.ndarray:
        return np.array(table[name].to_pylist(), float).reshape(-1, candidates)

    true = column("regenerated_reward")
    proxy = np.where(np.isfinite(true), column("proxy_reward"), np.nan)
    best, worst = (mean_true_rank(proxy, true, kept // 2, end) for end in (True, False))
    return _mean(best), _mean(worst)


def compare(
    courses: Mapping[str, Sequence[Course]], compared: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Computes the estimates of a study.

    An estimate is a pair of floats: the mean of one value per seed, and its standard error (NaN for
    one seed).

    Args:
        courses: The finished runs of each arm by its name. Arms without any are left out of the
            result.
        compared: Pairs of an arm and the arm that it is compared with. A pair is left out if one of
            its arms has no finished run.

    Returns:
        Two values; rewards are held-out rewards, costs the counted work in seconds.

        First, a dict per arm, by name in the order of `courses`: "seeds" (a list), "iterations"
        (the last one), "scores" (an estimate of each score at the end, by name), "gain" (the
        estimate of the last reward minus the first), "cost" (the mean), "network_evaluations" (of
        its first run), "at_equal_cost" (a dict: "cost", the smallest of all runs of all arms, and
        "reward", the estimate there) and "fidelity" (how well exploration ranks: by the name of a
        figure, the estimates in the "first" and the "last" quarter of the iterations).

        Second, one dict per pair, in the order of `compared`: "arm", "against", "seeds" (a list of
        those that both have; without any, all figures are NaN), "final" (the estimate of the
        difference of the last rewards), "final_share" (that, divided by the other's mean reward),
        "cost_share" (the mean ratio of the costs), "at_equal_cost" (a dict: "cost", the smallest of
        the pair's runs, and "reward", the estimate of the difference there) and "speed_up" (by
        "25", "50", "75" and "100" per cent of the other's gain, the estimate of how many times the
        arm's cost the other needed to get there).
    """
    finished = {arm: list(runs) for arm, runs in courses.items() if runs}
    costs = [course.cost[-1] for runs in finished.values() for course in runs]
    common_cost = _smallest(costs)
    arms = {arm: _arm_estimates(runs, common_cost) for arm, runs in finished.items()}
    pairs = []
    for arm, other in compared:
        if arm in finished and other in finished:
            estimates = _pair_estimates(finished[arm], finished[other])
            pairs.append({"arm": arm, "against": other, **estimates})
    return arms, pairs


def _arm_estimates(courses: Sequence[Course], common_cost: float) -> dict[str, Any]:
    """Returns the estimates of one arm.

    Args:
        courses: The finished runs of the arm, at least one, evaluated after the same iterations on
            the same scores.
        common_cost: The cost in counted seconds that all arms reach, the smallest whole cost of any
            run.

    Returns:
        "seeds", a list of them; "iterations", the number of the last one; "scores", by name the
        estimate (mean over seeds, standard error) of each held-out score at the end; "gain", the
        estimate of the last reward minus the first; "cost", the mean counted seconds of a run;
        "network_evaluations" of the first run; "at_equal_cost", a dict with "cost" (`common_cost`)
        and "reward", the estimate of the reward there; and "fidelity", for each measure by name
        ("spearman", "best", "worst") a dict with the estimates over the "first" and the "last"
        quarter of the iterations (empty for an arm that does not regenerate; NaN for the last
        quarter of fewer than 4 iterations).
    """

    def quarter(values: np.ndarray, end: str) -> float:
        quarters = np.array_split(values, 4)
        return _mean(quarters[0] if end == "first" else quarters[-1])

    rewards = [at_cost(course, common_cost) for course in courses]
    return {
        "seeds": [course.seed for course in courses],
        "iterations": int(courses[0].iterations[-1]),
        "scores": {
            name: estimate([c.scores[name][-1] for c in courses]) for name in courses[0].scores
        },
        "gain": estimate([c.reward[-1] - c.reward[0] for c in courses]),
        "cost": estimate([c.cost[-1] for c in courses])[0],
        "network_evaluations": courses[0].network_evaluations,
        "at_equal_cost": {"cost": common_cost, "reward": estimate(rewards)},
        "fidelity": {
            name: {
                end: estimate([quarter(c.fidelity[name], end) for c in courses])
                for end in ("first", "last")
            }
            for name in courses[0].fidelity
        },
    }


def _pair_estimates(courses: Sequence[Course], others: Sequence[Course]) -> dict[str, Any]:
    """Returns the differences between an arm and another one, over the seeds that both have.

    Differences are taken seed by seed. Without a common seed all values are NaN.

    Args:
        courses: The finished runs of the arm that is compared, one per seed.
        others: The finished runs of the arm that it is compared with, one per seed.

    Returns:
        "seeds" that both have; "final", the estimate (mean over seeds, standard error) of the arm's
        last held-out reward minus the other's; "final_share", that difference divided by the other
        arm's mean last reward; "cost_share", the mean ratio of the whole costs, the arm's by the
        other's; "at_equal_cost", a dict with "cost", the smallest whole cost of these runs, and
        "reward", the estimate of the difference there; and "speed_up", by "25", "50", "75" and
        "100" per cent of the other arm's gain, how many times the arm's cost the other one needed
        to reach that reward, with its standard error.
    """
    by_seed = {other.seed: other for other in others}
    pairs = [(course, by_seed[course.seed]) for course in courses if course.seed in by_seed]
    common_cost = _smallest([run.cost[-1] for pair in pairs for run in pair])
    final = [a.reward[-1] - b.reward[-1] for a, b in pairs]
    other_reward = _mean([b.reward[-1] for _, b in pairs])
    at_equal_cost = [at_cost(a, common_cost) - at_cost(b, common_cost) for a, b in pairs]
    return {
        "seeds": [a.seed for a, _ in pairs],
        "final": estimate(final),
        "final_share": estimate([x / other_reward for x in final]),
        "cost_share": _mean([a.cost[-1] / b.cost[-1] for a, b in pairs]),
        "at_equal_cost": {"cost": common_cost, "reward": estimate(at_equal_cost)},
        "speed_up": {str(part): speed_up(pairs, part / 100) for part in PROGRESS},
    }


def _smallest(costs: Sequence[float]) -> float:
    """Returns the smallest cost that is known.

    Args:
        costs: Costs in counted seconds, NaN for runs in a format that has no price.

    Returns:
        The smallest one that is not NaN; NaN if there is none.
    """
    return min((cost for cost in costs if not math.isnan(cost)), default=math.nan)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per seed, and its standard error.

    Args:
        values: The values. NaN values are left out of the mean, but make the standard error NaN.

    Returns:
        The mean, NaN if there is no value; and the standard deviation (with n - 1) divided by the
        square root of n, NaN for fewer than two values.
    """
    x = np.asarray(values, float)
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")
    return _mean(x), error


def at_cost(course: Course, cost: float) -> float:
    """Returns the held-out reward of a run at a cost, interpolated linearly between evaluations.

    Args:
        course: The run, of which the costs and rewards at its evaluations are used.
        cost: The cost in counted seconds. Beyond that of the run, the result is NaN.
    """
    return float(np.interp(cost, course.cost, course.reward, right=np.nan))


def speed_up(pairs: Sequence[tuple[Course, Course]], part: float) -> Estimate:
    """Returns the ratio of the costs at which two arms reach the same reward.

    The reward is that of the second arm after a part of its gain, and the curves are means over
    seeds. The standard error is the jackknife's, which leaves out one seed after another.

    Args:
        pairs: Pairs of a run of the first arm and the run of the second arm with that seed. All
            runs of an arm have equal evaluations.
        part: The part of the second arm's gain, in [0, 1].

    Returns:
        The cost of the second arm divided by that of the first (above 1 where the first is faster),
        and its standard error. Both are NaN without pairs; the standard error is NaN for one pair.
        The ratio is NaN if an arm does not reach the reward, or if the second arm gains nothing; if
        that happens with a seed left out, the standard error alone is NaN.
    """

    def mean_curve(courses: Sequence[Course]) -> tuple[Evaluated, Evaluated]:
        cost = np.mean([course.cost for course in courses], 0)
        return cost, np.mean([course.reward for course in courses], 0)

    def ratio(pairs: Sequence[tuple[Course, Course]]) -> float:
        cost, reward = mean_curve([first for first, _ in pairs])
        other_cost, other_reward = mean_curve([second for _, second in pairs])
        gain = other_reward[-1] - other_reward[0]
        if gain <= 0:
            return float("nan")
        level = other_reward[0] + part * gain
        return reached(other_cost, other_reward, level) / reached(cost, reward, level)

    if not pairs:
        return float("nan"), float("nan")
    n = len(pairs)
    if n == 1:
        return ratio(pairs), float("nan")
    without_one = np.array([ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(n)])
    squares = np.square(without_one - without_one.mean()).sum()
    return ratio(pairs), float(np.sqrt((n - 1) / n * squares))


def reached(cost: Evaluated, reward: Evaluated, level: float) -> float:
    """Returns the cost at which a curve first reaches a reward.

    Args:
        cost: The costs of the curve's points in counted seconds, ascending. Straight lines connect
            the points.
        reward: Their rewards.
        level: The reward to reach. A reward that equals it counts as reaching it.

    Returns:
        The interpolated cost in seconds: that of the first point if it is there already, and NaN if
        no point reaches the level.
    """
    above = np.flatnonzero(reward >= level)
    if not len(above):
        return float("nan")
    i = above[0]
    if i == 0:
        return float(cost[0])
    fraction = (level - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(cost[i - 1] + fraction * (cost[i] - cost[i - 1]))


def _mean(values: Any) -> float:
    """Returns the mean of the values that are not NaN; NaN if there are none.

    Args:
        values: An array or a sequence of numbers. Infinite values are not left out.
    """
    x = np.asarray(values, float)
    known = x[~np.isnan(x)]
    return float(known.mean()) if known.size else float("nan")
