"""`study.json`: a study's arms, its setting, and what `compare` finds."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from solrl_jax.runs.report import read_facts
from solrl_jax.study.compare import Course, compare, read_course
from solrl_jax.study.cost import Prices
from solrl_jax.study.plan import Plan, Run
from solrl_jax.study.runs import finished


def summarise(
    name: str, plan: Plan, runs: Sequence[Run], prices: Prices, failed: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, list[Course]]]:
    """What `study.json` holds, and what the finished runs did, by arm. failed: why runs failed, by their names."""
    done = [run for run in runs if finished(run)]
    courses = {
        arm: [read_course(run, prices) for run in done if run.arm == arm] for arm in plan.arms
    }
    arms, compared = compare(courses, plan.compared)
    own = {run.arm: list(run.arguments[1:-2]) for run in runs}  # without the seed and the directory
    study = {
        "plan": {
            "name": name,
            "what": plan.what,
            "preset": plan.preset,
            "arms": own,
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
            for arm, of in courses.items()
            for course in of
        },
    }
    return study, courses


def _setting(done: Sequence[Run], prices: Prices) -> dict[str, str]:
    """How the finished runs were evaluated and where they ran; one line each if they differ in neither."""
    facts = [
        dict.fromkeys(("evaluation", "devices", "python"), "unknown") | read_facts(run.folder)
        for run in done
    ]

    def distinct(lines):
        return "; ".join(dict.fromkeys(map(str, lines))) or "no run is finished"

    network = ", ".join(
        f"{1e3 * seconds:.3g} ms in {name}" for name, seconds in prices.network.items()
    )
    return {
        "evaluation": distinct(fact["evaluation"] for fact in facts),
        "cost": (
            f"roofline seconds of {prices.name}: a network evaluation {network}; a picture {1e3 * prices.scored:.3g} ms, "
            f"a term of the update {1e3 * prices.trained:.3g} ms, a sync {1e3 * prices.synced:.3g} ms"
        ),
        "trained on": distinct(
            f"{f['devices']}, jax {f.get('packages', {}).get('jax')}, Python {f['python']}"
            for f in facts
        ),
    }


def sweeps(plan: Plan, runs: Sequence[Run]) -> dict[str, list[tuple[Any, str]]]:
    """By the setting of each of the plan's sweeps: its value in an arm, and the arm."""
    configs = {run.arm: run.config for run in runs}

    def value(setting, arm):
        return functools.reduce(getattr, setting.split("."), configs[arm])

    return {
        setting: [(value(setting, arm), arm) for arm in arms]
        for setting, arms in plan.sweeps.items()
    }
