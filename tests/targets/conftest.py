"""These tests need the compilers of devices: `make test-targets`, `make test-targets-tpu`. Without
them, none is collected.
"""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from solrl_jax.config.presets import resolve
from solrl_jax.planning import plan, topology
from solrl_jax.planning.targets import TARGETS

HERE = {
    platform: any(map(importlib.util.find_spec, wheels))
    for platform, wheels in topology.WHEELS.items()
}
FILES = {"gpu": ["test_plans.py", "test_settings.py"], "tpu": ["test_tpu.py"]}
collect_ignore = [file for platform, files in FILES.items() if not HERE[platform] for file in files]
RECORDED = Path(__file__).parents[2] / "benchmarks" / "plans.json"
ATTENTIONS = {"sana": 20, "flux1": 19 + 38, "sd3": 38}  # of one evaluation of the network
SAMPLE = ("explore: sample_chunk", "regenerate: sample_chunk")
UPDATE = "update: update"
PRESETS = {
    "sana": "sana_sol_rl_hpsv2",
    "flux1": "flux1_sol_rl_hpsv2",
    "sd3": "sd3_sol_rl_pickscore",
}


class Planned(NamedTuple):
    """A model, a device's name, and the plan of an iteration."""

    model: str
    device: str
    plan: dict[str, Any]

    def program(self, name: str) -> dict[str, Any]:
        """The figures of a program, by "PHASE: FUNCTION"."""
        return next(row for phase, row in plan.rows(self.plan) if f"{phase}: {row['name']}" == name)


@pytest.fixture(autouse=True, scope="session")
def _no_cache():
    """A program for another device cannot be read back."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def config(model, *overrides):
    """A released preset that explores in the device's fastest format."""
    return resolve(PRESETS[model], ("rollout.explore.precision=auto", *overrides))


@functools.cache
def plan_of(model, device, hlo=None):
    """The plan for one device. hlo: a folder for the compiled texts."""
    topology.prepare(TARGETS[device])
    return Planned(model, device, plan.plan(config(model), plan.Devices(TARGETS[device]), hlo))


@functools.cache
def figures(phase, *overrides, devices=1):
    """Of SANA's programs of one phase on H200: by function, memory and roofline."""
    planner = plan.Planner(config("sana", *overrides), plan.Devices(TARGETS["h200"], devices))
    programs = planner.phases.programs(phase, planner.codes)

    def executable(program):
        return topology.compiled(planner.lowered(program), TARGETS["h200"])

    return {
        program.name: planner.measure(phase, program, executable(program)) for program in programs
    }


def rows_near_their_record(planned):
    """Temporaries above it: something has grown. Far below: the record is old;
    `benchmarks/plans.json` says how it is made.
    """
    recorded = json.loads(RECORDED.read_text())["plans"][f"{planned.model}-{planned.device}"]
    for (phase, now), (_, then) in zip(plan.rows(planned.plan), plan.rows(recorded), strict=True):
        size, before = (row["memory"]["temporaries"] for row in (now, then))
        assert size <= 1.15 * before, f"{phase}: {now['name']}"
        assert size >= before / 2, f"{phase}: {now['name']}"
