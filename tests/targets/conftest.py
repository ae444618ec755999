"""These tests need the compilers of devices (`make test-targets`). Without those wheels, none is collected."""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from solrl_jax.config.presets import resolve
from solrl_jax.planning import plan
from solrl_jax.planning.targets import TARGETS
from solrl_jax.planning.topology import WHEELS

collect_ignore_glob = [] if any(map(importlib.util.find_spec, WHEELS["gpu"])) else ["test_*.py"]
PRESETS = {"sana": "sana_sol_rl_hpsv2", "flux1": "flux1_sol_rl_hpsv2", "sd3": "sd3_sol_rl_pickscore"}


class Planned(NamedTuple):
    """A model, a device's name, and the plan of an iteration."""

    model: str
    device: str
    plan: dict[str, Any]

    def program(self, name: str) -> dict[str, Any]:
        """The figures of a program, by "STAGE: FUNCTION"."""
        return next(row for stage, row in plan.rows(self.plan) if f"{stage}: {row['name']}" == name)


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
def plan_of(model, device):
    """The plan for one device."""
    return Planned(model, device, plan.plan(config(model), plan.Devices(TARGETS[device])))
