"""Every program of an iteration of the released models, compiled for absent GPUs: an H200, a B200,
and eight H200.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from solrl_jax.models.layers.attention_fp8 import attention_fp8
from solrl_jax.parallel.sharding import AXES, jit, rows
from solrl_jax.planning import plan, topology
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import kernels
from solrl_jax.planning.targets import TARGETS
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.explore.quantized_layers import report
from tests.targets.conftest import (
    ATTENTIONS,
    PRESETS,
    SAMPLE,
    UPDATE,
    config,
    figures,
    plan_of,
    rows_near_their_record,
)

PRODUCT = {"h200": "__cublas$lt$matmul$f8 f8e4m3fn", "b200": "__cudnn$blockScaledDot f4e2m1fn"}
PROGRAMS = [
    "encode: encode_chunk",
    "sync: quantize_policy",
    *SAMPLE,
    "score: decode_chunk",
    "score: score_images",
    UPDATE,
]
FLOAT32 = 1e-5  # of all operations: the time is embedded in float32


# `pytest -m ''` plans it too. Its kinds of kernels are those of the other two models on an H200.
EXHAUSTIVE = ("sd3", "h200")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (model, device),
            id=f"{model}-{device}",
            marks=[pytest.mark.exhaustive] if (model, device) == EXHAUSTIVE else [],
        )
        for model in PRESETS
        for device in PRODUCT
    ],
)
def planned(request):
    return plan_of(*request.param)


def flash(planned, name):
    """How often flash attention runs in a program, forwards and backwards."""
    native = planned.program(name)["roofline"]["native"]
    counts = {kernel: count for kernel, count in native.items() if "__cudnn$fmha" in kernel}
    backwards = sum(count for kernel, count in counts.items() if "Backward" in kernel)
    return sum(counts.values()) - backwards, backwards


def test_every_program_compiles_and_fits(planned):
    assert [f"{phase}: {row['name']}" for phase, row in plan.rows(planned.plan)] == PROGRAMS
    assert planned.plan["fits"]


def test_every_quantized_linear_is_a_native_product_of_exploration_alone(planned):
    """On an H200, XLA makes one product of two that read the same input. There, operations are
    counted.
    """
    settings = config(planned.model)
    transformer = open_configurations(settings.model.path).transformer
    form = FORMATS[
        "nvfp4"
    ]  # which linears are quantized depends on the model's rule, not on the format
    linears = report(transformer.abstract_params(jnp.bfloat16), settings.model.quantization, form)
    count = (
        sum(linear.layers for linear in linears if not linear.reason_kept)
        * settings.rollout.explore.num_steps
    )
    products = {
        f"{phase}: {row['name']}": row["roofline"]["native"].get(PRODUCT[planned.device], 0)
        for phase, row in plan.rows(planned.plan)
    }
    sample_count = products.pop(SAMPLE[0])
    assert set(products.values()) == {0}
    if planned.device == "b200":
        assert sample_count == count > 0
        return
    assert 0.7 * count < sample_count <= count
    ours, other = (
        plan_of(planned.model, d).program(SAMPLE[0])["roofline"]["operations"]
        for d in ("h200", "b200")
    )
    assert ours["bf16"] == pytest.approx(other["bf16"], rel=1e-6)  # none is expanded to BF16
    assert ours["fp8"] == pytest.approx(
        other["fp4"], rel=0.02
    )  # NVFP4 fills widths up to a multiple of 128


# an exploring step against a BF16 step: the paper's rules
STEP = {
    ("flux1", "b200"): 2.78,
    ("flux1", "h200"): 1.8,
    ("sd3", "b200"): 1.3,
    ("sana", "b200"): 1.2,
    ("sana", "h200"): 1.2,
}


def test_what_a_product_reads_is_written_in_one_pass_and_an_exploring_step_is_so_much_faster(
    planned,
):
    kernels = {
        f"{phase}: {row['name']}": row["roofline"]["native"]
        for phase, row in plan.rows(planned.plan)
    }
    linear_attention = (SAMPLE[1], UPDATE) if planned.model == "sana" else ()
    assert [name for name, native in kernels.items() if "__gpu$xla.gpu.triton" in native] == [
        SAMPLE[0],
        *linear_attention,
    ]
    rollout = config(planned.model).rollout
    steps = rollout.explore.num_steps, rollout.num_steps
    explored, exact = (
        planned.program(name)["roofline"]["seconds"] / n
        for name, n in zip(SAMPLE, steps, strict=True)
    )
    assert exact / explored > STEP.get((planned.model, planned.device), 1.0)


def test_the_transformer_attends_in_flash_attention(planned):
    """Forwards once an attention and a step; backwards in the update."""
    settings = config(planned.model)
    count = ATTENTIONS[planned.model]
    assert flash(planned, SAMPLE[0]) == (count * settings.rollout.explore.num_steps, 0)
    assert flash(planned, SAMPLE[1]) == (count * settings.rollout.num_steps, 0)
    forwards, backwards = flash(planned, UPDATE)
    assert backwards > 0
    assert backwards % count == 0
    again = {"matmuls": 0, "blocks": 1}[planned.plan["gradient_checkpointing"]]  # for the gradient
    assert forwards == (3 + again) * backwards  # old, reference, trained


@pytest.mark.parametrize("device", PRODUCT)
@pytest.mark.parametrize(
    ("length", "heads", "head"), [(4301, 38, 64), (1152, 24, 128)]
)  # of SD3.5 and of FLUX.1
def test_attention_in_fp8_is_one_kernel_of_fp8(device, length, heads, head):
    target = TARGETS[device]
    codes = jnp.dtype(jnp.float8_e4m3fn)
    mesh = Mesh(np.array(topology.devices(target, 1, 1)).reshape([1] * len(AXES)), AXES)
    operand = jax.ShapeDtypeStruct((4, length, heads, head), codes, sharding=rows(mesh))
    with jax.set_mesh(mesh):
        text = topology.compiled(
            topology.lowered(jit(attention_fp8), (operand,) * 3), target
        ).as_text()
    (kernel,) = kernels(parse(text))
    assert (kernel.name, kernel.kind, kernel.unit) == ("__cudnn$fmhaSoftmaxF8", "attention", "fp8")
    assert kernel.operations == 2 * 2 * 4 * heads * length**2 * head
    assert kernel.moved == pytest.approx(
        4 * 4 * length * heads * head, rel=1e-5
    )  # three operands and the result, a byte each


def test_no_product_is_in_float32(planned):
    for name in (*SAMPLE, UPDATE):
        operations = planned.program(name)["roofline"]["operations"]
        assert operations.get("fp32", 0) < FLOAT32 * sum(operations.values()), name


def test_pictures_are_decoded_and_scored_in_sixteen_bits(planned):
    """But for attention to the text, resizing, and what surrounds the layers of a reward's
    network.
    """
    for name in ("score: decode_chunk", "score: score_images"):
        operations = planned.program(name)["roofline"]["operations"]
        assert operations.get("fp32", 0) < 0.03 * operations["bf16"], name


def test_the_update_takes_the_memory_of_its_state(planned):
    """Trainable and moments are donated. Only metrics are new."""
    memory = planned.program(UPDATE)["memory"]
    assert memory["aliased"] > 0
    assert memory["outputs"] - memory["aliased"] < 2000


def test_memory_is_explained_to_the_byte(planned):
    for _, row in plan.rows(planned.plan):
        m = row["memory"]
        assert m["padded"] == 0
        assert m["arguments"] == m["held"] + m["repeated"] - m["unread"]
        assert m["peak"] == m["held"] + m["temporaries"] + m["outputs"] - m["aliased"] + m[
            "code"
        ] + sum(m["resident"].values())


def test_memory_is_near_what_is_recorded(planned):
    rows_near_their_record(planned)


def test_the_update_waits_for_no_message_that_could_overlap():
    """SANA divided over eight devices. A micro-batch waits for its first weights, because nothing
    can run before them.

    Of the bytes that are gathered, less than 2e-3 are waited for. All that is waited for takes less
    than 2e-4 of the time.
    """
    update = figures("update", "model.gradient_checkpointing=blocks", "mesh.fsdp=8", devices=8)[
        "update"
    ]["roofline"]
    traffic = {True: 0.0, False: 0.0}
    for row in update["collectives"]:
        traffic[row["overlaps"]] += row["sent"] * (row["kind"] == "all-gather")
    whole = plan_of("sana", "h200").plan["parts"]["base"]
    assert traffic[True] > whole
    assert traffic[False] < 2e-3 * traffic[True]
    assert (
        sum(row["seconds"] for row in update["collectives"] if not row["overlaps"])
        < 2e-4 * update["seconds"]
    )


@pytest.mark.parametrize("phase", ["explore", "update"])  # regenerating is exploring without codes
def test_mixing_sixteen_blocks_takes_hardly_longer(phase):
    """MHLA in place of SANA's attention: less than 5 % (`benchmarks/mhla-tiny.json` has a B200,
    too).
    """
    keeps = ("model.gradient_checkpointing=matmuls",)  # what `auto` is on one H200
    default, mixed = (
        {
            name: row["roofline"]
            for name, row in figures(phase, *keeps, f"model.attention={name}").items()
        }
        for name in ("default", "mhla")
    )
    for name, row in mixed.items():
        assert default[name]["seconds"] < row["seconds"] < 1.05 * default[name]["seconds"]
        assert row["native"] == default[name]["native"]  # the same kernels
