"""Compares the arms of a study: means and standard errors over seeds, at equal iterations, equal
cost and equal progress.

Arms that are compared share their seeds, hence their prompts and noise, and all are evaluated on
the same images, so differences are taken seed by seed. Standard errors are over seeds alone: they
do not say how other images would score.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from solrl_jax.errors import InputError
from solrl_jax.rl.fidelity import mean_true_rank
from solrl_jax.rl.means import finite_mean
from solrl_jax.runs import ledger
from solrl_jax.runs.directory import read_run
from solrl_jax.runs.metrics import by_iteration, read
from solrl_jax.study.cost import Prices, count_network_evaluations
from solrl_jax.study.plan import Run

# The parts of the other arm's gain, in per cent, at which speed-ups are given.
PROGRESS = (25, 50, 75, 100)
# A mean and its standard error. NaN stands for an unknown value.
Estimate: TypeAlias = tuple[float, float]
EvaluationSeries: TypeAlias = Float[np.ndarray, " e"]


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a finished run: its e evaluations, and its i training iterations.

    Attributes:
        seed: The seed of the run.
        iterations: The iteration after which each evaluation was made, ascending: 0 (before
            training), every `eval.every` iterations, and the last one.
        cost: The cost of the run up to each evaluation, in seconds of counted work: the roofline
            prices of its network evaluations, scored images, training terms and the like
            (`study.cost`). 0 at the first evaluation, NaN at all after an iteration whose number
            format has no price.
        scores: The held-out scores at each evaluation, float [e], by name, "reward" first. NaN
            where a score was not finite.
        network_evaluations: The number of network evaluations for exploration and regeneration in
            the whole run.
        fidelity: How well the cheap (explored) reward ranks the kept candidates of a prompt, for
            each iteration, by the name of the measure. "spearman": its rank correlation with the
            regenerated reward. "best" and "worst": the mean rank by the regenerated reward (1 is
            the best) of the better and the worse half by the explored one (`mean_true_ranks`).
            Empty for a run that does not regenerate.
        watched: The names of the scores that `reward.eval_only` lists, as far as `scores` has them.
            They are not trained on.
        trained: The held-out scores that the run trains on, at each evaluation, float [e], by name;
            NaN where a score is unknown. If there are several, `scores` has them under the same
            names too; if there is one, `scores` has it under the name "reward" alone.
    """

    seed: int
    iterations: Int[np.ndarray, " e"]
    cost: EvaluationSeries
    scores: Mapping[str, EvaluationSeries]
    network_evaluations: int
    fidelity: Mapping[str, Float[np.ndarray, " i"]]
    watched: Sequence[str] = ()
    trained: Mapping[str, EvaluationSeries] = dataclasses.field(default_factory=dict)

    @property
    def reward(self) -> EvaluationSeries:
        """The held-out reward at each evaluation, `scores["reward"]`.

        It is a float array [e], NaN where the reward is unknown.
        """
        return self.scores["reward"]

    def score(self, name: str) -> EvaluationSeries | None:
        """Returns a held-out score at each evaluation, whether it is trained on or watched.

        Args:
            name: The name of the score, e.g. "shapes", or "reward".

        Returns:
            The scores, float [e], NaN where one is unknown; None if the name is in neither `scores`
            nor `trained`.
        """
        return self.scores.get(name, self.trained.get(name))


def read_course(run: Run, prices: Prices) -> Course:
    """Reads the course of a finished run from its metrics (`metrics.jsonl`) and its ledger.

    The cost of an iteration is computed from the number format and the number of steps of its
    exploration, which the ledger records. The cost also depends on the attribute `trains_on` of an
    objective `module:function`, which is imported.

    Args:
        run: The run, trained and evaluated to the end. Its settings are read from the `config.yaml`
            in its directory and not from `run.config`, because a run reduces its numbers of prompts
            to the sizes of its prompt sets.
        prices: The seconds of each kind of work.

    Returns:
        The scores and costs at the run's evaluations, and the rank fidelity of its iterations.

    Raises:
        InputError: If the metrics have no held-out reward at an evaluation, if the ledger of an
            iteration is missing, cannot be read or has another number of rows than
            `train.num_prompts` times `rollout.candidates`, or if the `config.yaml` is missing or
            cannot be read.
        ConfigError: If the `config.yaml` is not a valid configuration, or the attribute `trains_on`
            of such an objective has an unknown value.
    """
    config = read_run(run.folder)
    last = config.train.iterations
    every = config.eval.every or last
    rows = by_iteration(read(run.folder))
    evaluated = sorted({0, last, *range(0, last, every)})
    for iteration in evaluated:
        if "eval/reward" not in rows.get(iteration, {}):
            raise InputError(
                f"{run.folder}: has no held-out reward after iteration {iteration}; remove the "
                "directory, and the run is trained again"
            )

    def read_scores(names: Iterable[str]) -> dict[str, EvaluationSeries]:
        return {
            name: np.array([rows[i].get(f"eval/{name}") for i in evaluated], float)
            for name in names
        }

    scores = read_scores(_score_names(rows[last], config.reward.weights))
    costs = [0.0]
    network_evaluations = 0
    ranks = []
    for iteration in range(1, last + 1):
        table = ledger.read(run.folder / "ledger", iteration)
        if len(table) != config.train.num_prompts * config.rollout.candidates:
            raise InputError(
                f"{run.folder}: its ledger has {len(table)} rows of iteration {iteration}; remove "
                "the directory, and the run is trained again"
            )
        precision = table["precision"][0].as_py()
        steps = table["steps"][0].as_py()
        continued = rows.get(iteration, {}).get("continued_steps")
        if continued is not None:  # runs of older versions did not record it
            continued = int(continued)
        costs.append(costs[-1] + prices.iteration_seconds(config, precision, steps, continued))
        network_evaluations += count_network_evaluations(config, precision, steps, continued)
        ranks.append(mean_true_ranks(table, config.rollout.candidates, config.rollout.kept))
    fidelity = {}
    if config.rollout.regenerate:
        spearman = [rows.get(i, {}).get("fidelity/spearman") for i in range(1, last + 1)]
        fidelity = {
            "spearman": np.array(spearman, float),
            "best": np.array(ranks)[:, 0],
            "worst": np.array(ranks)[:, 1],
        }
    return Course(
        seed=config.seed,
        iterations=np.array(evaluated),
        cost=np.array(costs)[evaluated],
        scores=scores,
        network_evaluations=network_evaluations,
        fidelity=fidelity,
        watched=[name for name in config.reward.eval_only if name in scores],
        trained=read_scores(config.reward.weights),
    )


def _score_names(row: Mapping[str, Any], trained: Collection[str]) -> list[str]:
    """Returns "reward" and the names of the other scores that an evaluation recorded.

    Args:
        row: The metrics of the evaluation by name. A score NAME is recorded if there is a key
            "eval/NAME/standard_error".
        trained: The names of the scores that the run trains on. If there is a single one, it is
            left out, because it equals "reward".

    Returns:
        The names: "reward" (also if `row` lacks it), then the others in the order of `row`.
    """
    suffix = "/standard_error"
    names = [
        key.removeprefix("eval/").removesuffix(suffix)
        for key in row
        if key.startswith("eval/") and key.endswith(suffix)
    ]
    repeated = set(trained) if len(trained) == 1 else set()
    return ["reward", *(name for name in names if name not in repeated | {"reward"})]


def mean_true_ranks(table: Any, candidates: int, kept: int) -> tuple[float, float]:
    """Returns how the better and the worse half of the kept candidates by proxy reward truly rank.

    The proxy reward is that of the cheaply explored image, the true reward that of the regenerated
    one. If K candidates of each prompt are regenerated, true rank 1 is the best and K the worst. A
    perfect proxy then gives (K/2 + 1) / 2 and (3 K/2 + 1) / 2; a random one gives (K + 1) / 2
    twice.

    Args:
        table: The ledger of an iteration (a pyarrow table), whose rows are grouped by prompt, with
            the columns "proxy_reward" and "regenerated_reward". True ranks count all rows with a
            finite regenerated reward. The halves are the K/2 best and the K/2 worst of the rows
            where both rewards are finite, and overlap if these are fewer than K.
        candidates: The number of candidates per prompt.
        kept: The number K of kept candidates per prompt. If it is odd, the halves are rounded down.

    Returns:
        The mean true rank of the better half and that of the worse half, each averaged over the
        prompts that have one; NaN without any (no candidate was regenerated, or K is 1).
    """

    def column(name: str) -> np.ndarray:
        return np.array(table[name].to_pylist(), float).reshape(-1, candidates)

    true = column("regenerated_reward")
    proxy = np.where(np.isfinite(true), column("proxy_reward"), np.nan)
    best, worst = (mean_true_rank(proxy, true, kept // 2, end) for end in (True, False))
    return finite_mean(best), finite_mean(worst)


def compare(
    courses: Mapping[str, Sequence[Course]], compared: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Computes the estimates of a study: of each arm, and of the differences of compared arms.

    An estimate is a pair of floats: the mean of one value per seed, and its standard error (NaN for
    one seed). Rewards are held-out rewards; costs are seconds of counted work: the roofline prices
    of network evaluations, scored images, training terms and the like (`study.cost`).

    Args:
        courses: The finished runs of each arm by its name. Arms without any are left out of the
            result.
        compared: Pairs (arm, the other arm that it is compared with). A pair is left out if one of
            its arms has no finished run.

    Returns:
        A tuple of a dict by the name of the arm, whose values are dicts with the keys

        * "seeds": the list of seeds;
        * "iterations": the number of the last iteration;
        * "scores": by name, the estimate of each score at the end;
        * "gain": the estimate of the last reward minus the first;
        * "cost": the mean cost of a run, a float;
        * "network_evaluations": the number of them in the first run;
        * "at_equal_cost": a dict: "cost", that of the cheapest run of all arms, and "reward", the
          estimate of the reward at that cost;
        * "fidelity": by the name of a measure of `Course.fidelity` ("spearman", "best", "worst"), a
          dict of the estimates over the "first" and the "last" quarter of the iterations ("last" is
          NaN for fewer than 4 iterations); {} for an arm that does not regenerate;

        and of a list with one dict per pair, with the keys

        * "arm" and "against": the names of the arm and of the other arm;
        * "seeds": the list of seeds that both have; without any, all figures are NaN;
        * "final": the estimate of the arm's last reward minus the other's;
        * "final_share": the estimate of the same differences, each divided by the magnitude of
          the other's mean last reward over these seeds (whose own error is not counted);
        * "cost_share": the mean over seeds of the arm's cost divided by the other's, a float;
        * "at_equal_cost": a dict: "cost", that of the cheapest run of both with these seeds, and
          "reward", the estimate of the arm's reward minus the other's at that cost;
        * "speed_up": by "25", "50", "75" and "100" per cent of the other's gain, the result of the
          function `speed_up`: the other's cost to reach that reward divided by the arm's, for the
          mean curves over seeds (NaN if the arm does not reach it), and the standard error of this
          ratio.
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

    An estimate is a pair of floats: the mean of one value per seed, and its standard error (NaN for
    one seed).

    Args:
        courses: The finished runs of the arm, at least one, evaluated after the same iterations on
            the same scores.
        common_cost: The cost at which all arms of the study are compared, in seconds of counted
            work: that of the cheapest run.

    Returns:
        A dict with the keys:
          * "seeds": the list of seeds;
          * "iterations": the number of the last iteration;
          * "scores": by name, the estimate of each held-out score at the end;
          * "gain": the estimate of the last reward minus the first;
          * "cost": the mean cost of a run in seconds of counted work, a float;
          * "network_evaluations": the number of them in the first run;
          * "at_equal_cost": {"cost": `common_cost`, "reward": the estimate of the reward there};
          * "fidelity": by the name of a measure ("spearman", "best", "worst"), {"first": ...,
            "last": ...}, the estimates over the first and the last quarter of the iterations
            ("last" is NaN for fewer than 4 iterations). {} for an arm that does not regenerate.
    """

    def quarter(values: np.ndarray, end: str) -> float:
        quarters = np.array_split(values, 4)
        return finite_mean(quarters[0] if end == "first" else quarters[-1])

    rewards = [reward_at_cost(course, common_cost) for course in courses]
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
    """Returns the estimates of the differences between an arm and another one.

    Differences are taken seed by seed, over the seeds that both have; without any, all figures are
    NaN. An estimate is a pair of floats: the mean of one value per seed, and its standard error
    (NaN for one seed). Costs are in seconds of counted work.

    Args:
        courses: The finished runs of the arm that is compared, one per seed.
        others: The finished runs of the other arm, one per seed.

    Returns:
        A dict with the keys:
          * "seeds": the list of common seeds;
          * "final": the estimate of the arm's last held-out reward minus the other's;
          * "final_share": the estimate of the same differences, each divided by the
            magnitude of the other's mean last reward over these seeds (whose own error is not
            counted);
          * "cost_share": the mean over seeds of the arm's cost divided by the other's, a float;
          * "at_equal_cost": {"cost": the cost of the cheapest run of both arms with these seeds,
            "reward": the estimate of the arm's reward minus the other's at that cost};
          * "speed_up": by "25", "50", "75" and "100" per cent of the other's gain, the result of
            the function `speed_up`: the other's cost to reach that reward divided by the arm's, for
            the mean curves over seeds, and the standard error of this ratio.
    """
    by_seed = {other.seed: other for other in others}
    pairs = [(course, by_seed[course.seed]) for course in courses if course.seed in by_seed]
    common_cost = _smallest([run.cost[-1] for pair in pairs for run in pair])
    final = [a.reward[-1] - b.reward[-1] for a, b in pairs]
    other_reward = finite_mean([b.reward[-1] for _, b in pairs])
    at_equal_cost = [
        reward_at_cost(a, common_cost) - reward_at_cost(b, common_cost) for a, b in pairs
    ]
    return {
        "seeds": [a.seed for a, _ in pairs],
        "final": estimate(final),
        "final_share": estimate([x / abs(other_reward) for x in final]),
        "cost_share": finite_mean([a.cost[-1] / b.cost[-1] for a, b in pairs]),
        "at_equal_cost": {"cost": common_cost, "reward": estimate(at_equal_cost)},
        "speed_up": {str(part): speed_up(pairs, part / 100) for part in PROGRESS},
    }


def _smallest(costs: Sequence[float]) -> float:
    """Returns the smallest cost that is known.

    Args:
        costs: Costs in seconds of counted work, NaN for runs in a number format that has no price.

    Returns:
        The smallest one that is not NaN; NaN if there is none.
    """
    return min((cost for cost in costs if not math.isnan(cost)), default=math.nan)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per seed, and its standard error.

    Args:
        values: The values. Non-finite ones are left out of the mean, but make the standard error
            NaN.

    Returns:
        A pair of floats: the mean, NaN if there is no finite value; and the standard deviation
        (with n - 1) divided by the square root of n, NaN for fewer than two values.
    """
    x = np.asarray(values, float)
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")
    return finite_mean(x), error


def reward_at_cost(course: Course, cost: float) -> float:
    """Returns the held-out reward that a run had reached at a cost.

    Args:
        course: The run. Its reward is interpolated linearly between the costs of its evaluations
            (the first of which is 0). The result is NaN at an evaluation with an unknown reward,
            and between it and the evaluations before and after it.
        cost: The cost in seconds of counted work. Beyond the last known cost of the run, or if
            it is NaN, the result is NaN.
    """
    known = np.isfinite(course.cost)
    return float(np.interp(cost, course.cost[known], course.reward[known], right=np.nan))


def speed_up(pairs: Sequence[tuple[Course, Course]], part: float) -> Estimate:
    """Returns how many times faster one arm reaches a reward than another one.

    The reward to reach is the second arm's first held-out reward plus `part` of its gain (the last
    reward minus the first). Rewards and costs are those of the mean curves over seeds (reward over
    cost). The standard error is the jackknife's, which leaves out one seed after another.

    Args:
        pairs: Pairs of a run of the first arm and the run of the second arm with the same seed. All
            runs of an arm have equal evaluations.
        part: The fraction of the second arm's gain, in [0, 1].

    Returns:
        A tuple: the cost of the second arm divided by that of the first (above 1 where the first is
        faster), and its standard error. The ratio is NaN without pairs, if the first arm does not
        reach the reward, if the second arm gains nothing, or if a reward or cost that it depends on
        is unknown. It is infinite if the first arm starts at or above the reward. The standard
        error is NaN for fewer than two pairs, or if the ratio is not finite with some seed left
        out.
    """

    def mean_curve(courses: Sequence[Course]) -> tuple[EvaluationSeries, EvaluationSeries]:
        cost = np.mean([course.cost for course in courses], 0)
        return cost, np.mean([course.reward for course in courses], 0)

    def ratio(pairs: Sequence[tuple[Course, Course]]) -> float:
        cost, reward = mean_curve([first for first, _ in pairs])
        other_cost, other_reward = mean_curve([second for _, second in pairs])
        gain = other_reward[-1] - other_reward[0]
        if not gain > 0:  # also if a reward is NaN
            return float("nan")
        # The minimum, because rounding could put the whole gain above the last reward.
        level = min(other_reward[0] + part * gain, other_reward[-1])
        first_cost = cost_to_reach(cost, reward, level)
        if first_cost == 0:
            return float("inf")
        return cost_to_reach(other_cost, other_reward, level) / first_cost

    if not pairs:
        return float("nan"), float("nan")
    n = len(pairs)
    if n == 1:
        return ratio(pairs), float("nan")
    without_one = np.array([ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(n)])
    if not np.isfinite(without_one).all():
        return ratio(pairs), float("nan")
    squares = np.square(without_one - without_one.mean()).sum()
    return ratio(pairs), float(np.sqrt((n - 1) / n * squares))


def cost_to_reach(cost: EvaluationSeries, reward: EvaluationSeries, level: float) -> float:
    """Returns the cost at which a curve of reward over cost first reaches a reward.

    Args:
        cost: The costs of the points of the curve, ascending, in seconds of counted work. Straight
            lines connect the points.
        reward: The rewards of the points. A NaN counts as below `level`.
        level: The reward to reach.

    Returns:
        The interpolated cost in seconds, or the first cost if the first point is not below `level`.
        NaN if the curve stays below `level`, or if the reward is NaN at the point just before the
        first one that is not below.
    """
    above = np.flatnonzero(reward >= level)
    if not len(above):
        return float("nan")
    i = above[0]
    if i == 0:
        return float(cost[0])
    fraction = (level - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(cost[i - 1] + fraction * (cost[i] - cost[i - 1]))
