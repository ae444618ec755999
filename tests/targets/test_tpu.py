"""SANA's programs of an iteration, compiled for an absent TPU v6e. Its compiler takes minutes a
program.
"""

import math

import pytest

from solrl_jax.planning import hlo, plan
from tests.targets.conftest import (
    ATTENTIONS,
    SAMPLE,
    UPDATE,
    config,
    plan_of,
    rows_near_their_record,
)

PROGRAMS = [
    "encode: encode_chunk",
    "sync: quantize_policy",
    *SAMPLE,
    "score: decode_chunk",
    "score: score_images",
    UPDATE,
]
KERNEL = "tpu_custom_call"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hlo")


@pytest.fixture(scope="module")
def planned(folder):
    return plan_of("sana", "tpu-v6e", folder)


def test_every_program_compiles_and_all_but_decoding_fit(planned):
    """A v6e explores in INT8."""
    assert [f"{phase}: {row['name']}" for phase, row in plan.rows(planned.plan)] == PROGRAMS
    assert planned.plan["too_large"].keys() <= {"score"}


def test_the_transformer_attends_in_flash_attention(planned):
    settings = config("sana")
    count = ATTENTIONS["sana"]

    def kernels(name):
        return planned.program(name)["roofline"]["native"][KERNEL]

    # one kernel per attention, and one for the codes of each input of quantized linear layers
    assert kernels(SAMPLE[0]) > count * settings.rollout.explore.num_steps
    assert kernels(SAMPLE[1]) == count * settings.rollout.num_steps
    assert kernels(UPDATE) % count == 0


def test_no_program_holds_attention_scores(planned, folder):
    """No array, also within kernels, has an image's tokens along one axis and a prompt's, filled up
    or not, along another.
    """
    settings = config("sana").model
    image = settings.height * settings.width // 32**2
    prompt = range(settings.max_tokens, 385)
    for name in (*SAMPLE, UPDATE):
        module = hlo.parse((folder / f"{name.replace(': ', '-')}.hlo").read_text())
        steps = [step for steps in module.computations.values() for step in steps]
        assert any(image in a.shape for step in steps for a in step.arrays)
        scores = [
            step.name
            for step in steps
            for a in step.arrays
            if image in a.shape and not set(prompt).isdisjoint(a.shape)
        ]
        assert scores == []


def test_what_the_mlp_makes_is_written_in_sixteen_bits(planned, folder):
    """It is five times as wide as the network. XLA drops roundings that it may, and so would write
    it in float32.
    """
    settings = config("sana")
    size = settings.rollout.per_device_batch_size * (settings.model.height // 32) ** 2 * 5 * 2240
    for name in SAMPLE:
        module = hlo.parse((folder / f"{name.replace(': ', '-')}.hlo").read_text())
        kinds = {
            a.kind
            for step, _ in module.executed()
            for a in step.arrays
            if math.prod(a.shape) == size
        }
        assert kinds == {"bf16"}, name


def test_memory_is_near_what_is_recorded(planned):
    rows_near_their_record(planned)
