"""Every program of an iteration of SANA at full size, compiled for an H200 and a B200 that need not be here."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from solrl_jax.config.presets import resolve
from solrl_jax.planning import plan
from solrl_jax.planning.plan import Devices, Planner
from solrl_jax.planning.targets import TARGETS
from solrl_jax.policy.lora import flatten

PRESET = "sana_sol_rl_hpsv2"
QUANTISED = {"h200": "__cublas$lt$matmul$f8 f8e4m3fn", "b200": "__cudnn$blockScaledDot f4e2m1fn"}
FLASH, BACKWARD = "__cudnn$fmha", "Backward"


@pytest.fixture(scope="module", params=QUANTISED)
def planned(request):
    """The device's name, its plan, and how many quantised products exploration has."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)  # a program for another device cannot be read back
    compilation_cache.reset_cache()
    config, where = resolve(PRESET, ("rollout.explore.precision=auto",)), Devices(TARGETS[request.param])
    experiment = Planner(config, where).stages.experiment
    weights = flatten(experiment.backbone.transformer)
    layers = sum(weights[path].shape[0] for path in experiment.recipe.quantized)  # linears of all blocks lie in one array
    yield request.param, plan.plan(config, where), layers * config.rollout.explore.steps
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def test_every_program_compiles_and_fits(planned):
    device, summary, _ = planned
    assert [f"{stage}: {row['name']}" for stage, row in plan.rows(summary)] == [
        "encode: encode_chunk",
        "sync: quantize_policy",
        "explore: sample_chunk",
        "regenerate: sample_chunk",
        "score: decode_chunk",
        "score: score_images",
        "update: update",
    ]
    assert summary["fits"], device


def test_every_quantised_linear_is_a_native_product_of_exploration_alone(planned):
    device, summary, count = planned
    found = {}
    for stage, row in plan.rows(summary):
        native = row["roofline"]["native"]
        found[stage] = found.get(stage, 0) + sum(n for name, n in native.items() if name == QUANTISED[device])
    assert count > 0
    assert found.pop("explore") == count
    assert set(found.values()) == {0}


def test_the_transformer_attends_in_flash_attention(planned):
    """Forwards once a block and a step; backwards in the update."""
    _, summary, _ = planned
    native = {stage: row["roofline"]["native"] for stage, row in plan.rows(summary)}
    steps = {"explore": 6, "regenerate": 10}
    for stage in (*steps, "update"):
        flash = {name: count for name, count in native[stage].items() if FLASH in name}
        backwards = sum(count for name, count in flash.items() if BACKWARD in name)
        forwards = sum(flash.values()) - backwards
        assert (backwards > 0) == (stage == "update")
        assert forwards == 20 * steps[stage] if stage in steps else forwards >= backwards


def test_memory_is_explained_to_the_byte(planned):
    _, summary, _ = planned
    for _, row in plan.rows(summary):
        m = row["memory"]
        assert m["unread"] >= 0
        assert m["arguments"] == m["held"] + m["repeated"] - m["unread"]
        assert m["peak"] == m["held"] + m["temporaries"] + m["outputs"] - m["aliased"] + m["code"] + sum(m["resident"].values())
