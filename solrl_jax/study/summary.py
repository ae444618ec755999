"""Summarises a study for `study.json`: its arms, its setting, and its comparisons."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from solrl_jax.runs.report import read_facts
from solrl_jax.study.compare import Course, compare, read_course
from solrl_jax.study.cost import Prices
from solrl_jax.study.plan import Plan, Run
from solrl_jax.study.runs import finished


def summarise(
    name: str, plan: Plan, runs: Sequence[Run], prices: Prices, failed: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, list[Course]]]:
    """Summarises the finished runs of a study.

    Args:
        name: The name of the plan.
        plan: The plan.
        runs: All runs.
        prices: The seconds of each kind of work.
        failed: Why runs failed, by their names.

    Returns:
        The content of `study.json`, and the courses of the finished runs by arm.
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
        done: The finished runs. Different descriptions are joined by semicolons.
        prices: The seconds of each kind of work.
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
            f"{f['devices']}, jax {f.get('packages', {}).get('jax')}, Python {f['python']}"
            for f in facts
        ),
    }


def sweeps(plan: Plan, runs: Sequence[Run]) -> dict[str, list[tuple[Any, str]]]:
    """Returns the values of the settings that a plan sweeps.

    Args:
        plan: The plan.
        runs: All runs.

    Returns:
        For each setting in `plan.sweeps`, pairs of its value in an arm and the arm.
    """
    configs = {run.arm: run.config for run in runs}

    def value(setting: str, arm: str) -> Any:
        return functools.reduce(getattr, setting.split("."), configs[arm])

    return {
        setting: [(value(setting, arm), arm) for arm in arms]
        for setting, arms in plan.sweeps.items()
    }
