"""The iteration of each released model, at full size, lowered for CUDA where there is none: which
products are native where.

Cross-platform lowering stops at StableHLO: XLA's custom calls stand in it as they are handed to
cuDNN and cuBLAS.
"""

import functools
import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.models.layers.attention_fp8 import attention_fp8
from solrl_jax.parallel import sharding
from solrl_jax.planning import topology
from solrl_jax.planning.abstract import abstract_experiment, open_configurations
from solrl_jax.planning.phases import PHASES, Phases, Program
from solrl_jax.planning.targets import TARGETS
from solrl_jax.quant import compile_target
from solrl_jax.quant.formats import DeviceInfo
from solrl_jax.rl.experiment import Experiment

PRESETS = (
    "flux1_sol_rl_hpsv2",
    pytest.param("sana_sol_rl_pickscore", marks=pytest.mark.exhaustive),
    *(
        pytest.param(f"{name}_sol_rl_hpsv2", marks=pytest.mark.exhaustive)
        for name in ("sd3", "flux2-klein-4b", "zimage")
    ),
)

pytestmark = [
    pytest.mark.skipif(
        jax.__version_info__ >= (0, 11),
        reason="Pallas asks the devices of the mesh which GPU they are: see tests/targets",
    ),
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, topology.WHEELS["gpu"])),
        reason="no cuDNN, which JAX asks for its version: plan-cuda (make test-targets)",
    ),
]

CUSTOM = "@__op$block_scaled_dot("
PRODUCT = "stablehlo.dot_general"


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    """Programs are traced as on a mesh of GPUs."""
    monkeypatch.setattr(compile_target, "platform", lambda: "gpu")


def of_shapes(
    preset: str, precision: str, device: str, count: int = 1, *more: str
) -> tuple[Experiment, Phases]:
    config = resolve(preset, (f"rollout.explore.precision={precision}", *more))
    pipeline = open_configurations(config.model.path)
    facts = DeviceInfo("gpu", TARGETS[device].kind, TARGETS[device].capability)
    experiment = abstract_experiment(
        config, pipeline, facts, sharding.make_mesh(count, 1, devices=jax.devices()[:count])
    )
    return experiment, Phases(experiment)


def lowered(program: Program) -> str:
    with jax.set_mesh(program.mesh):
        traced = program.function.trace(*program.arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def products(text: str, dtype: str = "") -> int:
    return sum(PRODUCT in line and dtype in line for line in text.splitlines())


@functools.cache
def on_blackwell(preset: str) -> tuple[Experiment, dict[str, list[str]]]:
    """The lowered programs of every phase, exploring in NVFP4."""
    experiment, phases = of_shapes(preset, "nvfp4", "b200")
    return experiment, {
        name: [lowered(program) for program in phases.programs(name, phases.codes())]
        for name in PHASES
        if phases.has(name)
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_an_iteration_lowers_for_blackwell_with_block_scaled_products_in_exploration_alone(preset):
    """As many products fewer than regeneration has as are quantized, and two more where an adapter
    is merged.
    """
    experiment, texts = on_blackwell(preset)
    assert [name for name, of in texts.items() if any(CUSTOM in text for text in of)] == ["explore"]
    (explored,) = texts["explore"]
    (regenerated,) = texts["regenerate"]
    merged = set(experiment.explorer.quantized) & set(experiment.trained_paths.adapted)
    assert len(experiment.explorer.quantized) >= 4
    assert products(regenerated) - products(explored) == len(
        experiment.explorer.quantized
    ) + 2 * len(merged)


def test_the_fast_recipe_attends_in_fp8_and_rounds_nothing_else_for_it():
    """Two stacks of blocks attend. The result of attention is read as it is."""
    _, phases = of_shapes("flux1_sol_rl_hpsv2", "nvfp4", "b200", 1, "explore=fast")
    (program,) = phases.programs("explore", phases.codes())
    text = lowered(program)
    assert re.findall(r"@__cudnn\$fmhaSoftmax(\w*)", text) == ["F8"] * 2
    assert not re.search(r"stablehlo.convert .*xf8E4M3FN>\) -> tensor<\d+x\d+x\d+xbf16>", text)


def precisions(text: str) -> set[str]:
    """The precisions that products and convolutions of float32 ask for."""
    lines = [
        line for line in text.splitlines() if PRODUCT in line or "stablehlo.convolution" in line
    ]
    of_float32 = [line for line in lines if "xf32>" in line.rpartition("->")[0]]
    return {
        precision
        for line in of_float32
        for precision in re.findall("HIGHEST|HIGH|DEFAULT", line) or ["none"]
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_float32_is_multiplied_as_float32(preset):
    """At a GPU's default it would be in TF32."""
    phase_precisions = {
        phase: set().union(*map(precisions, texts))
        for phase, texts in on_blackwell(preset)[1].items()
    }
    assert phase_precisions["score"] == {"HIGHEST"}
    assert set().union(*phase_precisions.values()) == {"HIGHEST"}


def test_a_float32_policy_is_sampled_in_float32():
    _, phases = of_shapes("sd3_sol_rl_pickscore", "nvfp4", "b200", 1, "rollout.precision=fp32")
    (program,) = phases.programs("regenerate", phases.codes())
    assert precisions(lowered(program)) == {"HIGHEST"}


@pytest.mark.parametrize("preset", PRESETS)
def test_an_iteration_explores_in_fp8_products_on_hopper(preset):
    experiment, phases = of_shapes(preset, "fp8", "h200")
    (program,) = phases.programs("explore", phases.codes())
    explored = lowered(program)
    (regenerated,) = on_blackwell(preset)[1]["regenerate"]
    assert (products(explored, "f8E4M3FN"), products(regenerated, "f8E4M3FN")) == (
        len(experiment.explorer.quantized),
        0,
    )
    assert products(explored, "f8E4M3FN") == sum(
        "f8E4M3FN" in line and "DEFAULT" in line for line in explored.splitlines()
    )
    assert CUSTOM not in explored


@pytest.mark.parametrize("preset", PRESETS)
def test_the_transformers_attend_in_cudnns_flash_attention_forwards_and_backwards(preset):
    for name in ("explore", "regenerate", "update"):
        text = "".join(on_blackwell(preset)[1][name])
        assert ("__cudnn$fmha" in text, "SoftmaxBackward" in text) == (True, name == "update")
    _, phases = of_shapes(
        preset, "nvfp4", "h200", count=2
    )  # whose micro-batches are mapped over groups of rows
    (program,) = phases.programs("update", phases.codes())
    assert "CustomSPMDPartitioning" in lowered(program)  # JAX divides the kernel as it is compiled


@pytest.mark.parametrize(("capability", "kernel"), [("8.9", ""), ("9.0", "F8"), ("10.0", "F8")])
def test_gpus_from_hopper_on_take_cudnns_and_others_that_of_bf16(monkeypatch, capability, kernel):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(compile_target, "first_device", lambda: device)
    shapes = [(2, length, 3, 16) for length in (7, 9, 9)]
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in shapes)
    traced = jax.jit(lambda *qkv: attention_fp8(*qkv)).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"@__cudnn\$fmhaSoftmax(\w*)", text) == [kernel]
