"""What a plan advises, followed: SANA on an H200 compiled again with each setting turned."""

import pytest

from solrl_jax.planning import plan
from solrl_jax.planning.plan import SETTINGS
from solrl_jax.planning.targets import TARGETS
from tests.targets.conftest import config, figures

# as turned here: overrides and devices
TURNED = {
    "rollout.chunk": (("rollout.chunk=8",), 1),
    "model.tile": (("model.tile=512",), 1),
    "model.cache=''": (("model.cache=''",), 1),
    "model.remat=blocks": (("model.remat=blocks",), 1),
    "optimizer.micro_batch": (("optimizer.micro_batch=8",), 1),
    "mesh.fsdp": (("mesh.fsdp=8",), 8),
}
# `regenerate` runs the function of `explore`; an encoder that is not in memory is one in no stage
ADVICE = [
    (stage, setting)
    for stage in ("explore", "score", "update")
    for setting in SETTINGS[stage]
    if stage == "explore" or setting != "model.cache=''"
]


def peak(stage, *overrides, devices=1):
    return max(row["memory"]["peak"] for row in figures(stage, *overrides, devices=devices).values())


def seconds(stage, *overrides):
    return sum(row["calls"] * row["roofline"]["seconds"] for row in figures(stage, *overrides).values())


@pytest.mark.parametrize(("stage", "setting"), ADVICE)
def test_a_stage_that_is_too_large_takes_less_memory_with(stage, setting):
    overrides, devices = TURNED[setting]
    before = ("model.remat=products",) if "remat" in setting else ()
    assert peak(stage, *overrides, devices=devices) < 0.97 * peak(stage, *before)


def test_every_stage_has_advice_that_is_turned_here():
    assert SETTINGS.keys() == set(plan.STAGES)
    assert {s for of in SETTINGS.values() for s in of} == {*TURNED, "`solrl encode PRESET` beforehand"}


@pytest.mark.parametrize(
    ("stage", "before", "setting"),
    [
        ("explore", "rollout.explore.precision=nvfp4", "rollout.explore.precision=auto"),
        ("update", "model.remat=blocks", "model.remat=products"),
    ],
)
def test_a_stage_takes_less_time_with(stage, before, setting):
    """At least 5 %, within the memory of an H200. The plan advises it before, and no longer after."""
    planner = lambda *overrides: plan.Planner(config("sana", *overrides), plan.Devices(TARGETS["h200"]))
    left = {"update": planner().usable - peak("update", "model.remat=blocks")}
    assert plan.faster(planner(before), left)[stage] == setting
    assert stage not in plan.faster(planner(setting), left)
    assert seconds(stage, setting) < 0.95 * seconds(stage, before)
    assert peak(stage, setting) < planner().usable


def test_larger_chunks_take_no_less_time():
    assert seconds("explore", "rollout.chunk=8") == pytest.approx(seconds("explore"), rel=0.01)
    assert seconds("update", "optimizer.micro_batch=8") == pytest.approx(seconds("update"), rel=0.01)
