"""Summarizes a study for `study.json`: its arms, its setting, and its comparisons."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from solrl_jax.runs.report import read_facts
from solrl_jax.study.compare import Course, compare, read_course
from solrl_jax.study.cost import Prices
from solrl_jax.study.plan import Plan, Run
from solrl_jax.study.runs import finished


def summarize(
    name: str, plan: Plan, runs: Sequence[Run], prices: Prices, failed: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, list[Course]]]:
    """Summarizes the finished runs of a study.

    Args:
        name: The name of the study, for "plan" below.
        plan: The plan, whose arms, compared pairs and texts are used.
        runs: All runs of the study, finished or not, at least one of each arm. Their directories
            are read.
        prices: The seconds of each kind of work.
        failed: Why runs failed, by their names ARM-SEED. Entries of finished runs are ignored. The
            reason of an unfinished run without an entry is "not finished".

    Returns:
        A tuple: the content of `study.json`, and for each arm, by its name, a list with one
        `Course` (scores and costs at the evaluations) per finished run. The content is a dict with
        the keys:
          * "plan": a dict with "name", "what", "preset", "arms" (by the name of each, the list of
            all overrides of its runs but those of the seed and the directory) and "seeds" (the
            sorted list of those of `runs`);
          * "setting": texts by name: "evaluation", "cost" and "trained on";
          * "prices": the fields of `prices`;
          * "arms" and "compared": the two results of `compare.compare`: a dict of the estimates of
            each arm by its name, and a list with a dict of estimates for each compared pair;
          * "missing": by the name of each run that is not finished, the reason;
          * "runs": by the name of each finished run, a dict of lists: "iterations", "cost" and each
            name in `Course.scores`, with one number per evaluation, and each measure of fidelity
            ("spearman", "best", "worst"; none without regeneration), with one per iteration.
        Unknown numbers are NaN.

    Raises:
        InputError: If the files of a run or a prompt set cannot be read, or if those of a finished
            run are incomplete.
        ConfigError: If the configuration of an existing run directory is invalid, or as `finished`
            and `compare.read_course` raise it.
    """
    done = [run for run in runs if finished(run)]
    courses = {
        arm: [read_course(run, prices) for run in done if run.arm == arm] for arm in plan.arms
    }
    arms, compared = compare(courses, plan.compared)
    # Without the preset, the seed and the directory.
    overrides = {run.arm: list(run.arguments[1:-2]) for run in runs}
    study = {
        "plan": {
            "name": name,
            "what": plan.what,
            "preset": plan.preset,
            "arms": overrides,
            "seeds": sorted({r.config.seed for r in runs}),
        },
        "setting": _setting(done, prices),
        "prices": dataclasses.asdict(prices),
        "arms": arms,
        "compared": compared,
        "missing": {
            run.name: failed.get(run.name, "not finished") for run in runs if run not in done
        },
        "runs": {
            f"{arm}-{course.seed}": {
                "iterations": course.iterations.tolist(),
                "cost": course.cost.tolist(),
                **{
                    key: values.tolist()
                    for key, values in {**course.scores, **course.fidelity}.items()
                },
            }
            for arm, finished_runs in courses.items()
            for course in finished_runs
        },
    }
    return study, courses


def _setting(done: Sequence[Run], prices: Prices) -> dict[str, str]:
    """Describes how the finished runs were evaluated, priced and trained.

    Args:
        done: The finished runs, whose `run.json` is read.
        prices: The seconds of each kind of work.

    Returns:
        A dict of three texts. "cost": the prices. "evaluation": how held-out rewards were measured.
        "trained on": the devices and the versions of JAX and Python. In "evaluation" and "trained
        on", different texts of several runs are joined by semicolons, "unknown" stands for an entry
        that a run's `run.json` lacks (for every entry if the file is missing), and the whole text
        is "no run is finished" if `done` is empty.

    Raises:
        InputError: If the `run.json` of a run is damaged.
    """
    facts = [
        dict.fromkeys(("evaluation", "devices", "python"), "unknown") | read_facts(run.folder)
        for run in done
    ]

    def distinct(lines: Iterable[Any]) -> str:
        return "; ".join(dict.fromkeys(map(str, lines))) or "no run is finished"

    network = ", ".join(
        f"{1e3 * seconds:.3g} ms in {name}" for name, seconds in prices.network.items()
    )
    return {
        "evaluation": distinct(fact["evaluation"] for fact in facts),
        "cost": (
            f"roofline seconds of {prices.name}: a network evaluation {network}; an image "
            f"{1e3 * prices.scored:.3g} ms, a term of the update {1e3 * prices.trained:.3g} ms, a "
            f"sync {1e3 * prices.synced:.3g} ms"
        ),
        "trained on": distinct(
            f"{fact['devices']}, jax {fact.get('packages', {}).get('jax', 'unknown')}, "
            f"Python {fact['python']}"
            for fact in facts
        ),
    }


def sweeps(plan: Plan, runs: Sequence[Run]) -> dict[str, list[tuple[Any, str]]]:
    """Returns the values of the settings that a study sweeps, i.e. that differ between its arms.

    Args:
        plan: The plan. Its field `sweeps` names the settings, and the arms for each of them.
        runs: All runs of the study, finished or not, at least one of each arm. The values are read
            from their configurations.

    Returns:
        For each setting, by its dotted name, pairs (value of the setting, name of the arm that has
        it), in the order of the arms in the field `sweeps`.
    """
    configs = {run.arm: run.config for run in runs}

    def value(setting: str, arm: str) -> Any:
        return functools.reduce(getattr, setting.split("."), configs[arm])

    return {
        setting: [(value(setting, arm), arm) for arm in arms]
        for setting, arms in plan.sweeps.items()
    }
