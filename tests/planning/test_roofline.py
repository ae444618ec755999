"""Seconds at the peaks: `planning.roofline`."""

import dataclasses
import json
import math

import pytest

from solrl_jax.planning.roofline import Roofline, roofline, table
from solrl_jax.planning.targets import TARGETS
from tests.planning.programs import text

H200 = TARGETS["h200"]


def test_a_kernel_takes_the_longer_of_operations_and_memory():
    """The product's operations at FP8's peak, its operands at that of memory; slower memory leaves
    the first as it is.
    """
    estimate = roofline(text("fp8-h200"), H200)
    (kernel,) = [kernel for kernel in estimate.kernels if kernel.kind == "matmuls"]
    computing = 3 * 2 * 128 * 256 * 256 / 1979e12
    moving = 3 * kernel.moved / 4.8e12
    assert computing < moving
    assert estimate.kernel_seconds(kernel) == moving
    assert estimate.peak_seconds(kernel) == computing
    fast = dataclasses.replace(H200, peaks=dataclasses.replace(H200.peaks, memory=1e18))
    assert dataclasses.replace(estimate, target=fast).kernel_seconds(kernel) == computing


@pytest.mark.parametrize(
    ("name", "device"),
    [("nvfp4-b200", "b200"), ("attend-b200", "b200"), ("batched-tpu-v6e", "tpu-v6e")],
)
def test_seconds_are_split_into_what_they_go_into(name, device):
    estimate = roofline(text(name), TARGETS[device])
    split = estimate.split()
    by_hand = {
        kind: sum(estimate.kernel_seconds(k) for k in estimate.kernels if k.kind == kind)
        for kind in split
    }
    assert split == pytest.approx(by_hand, rel=1e-12)  # sums round otherwise from Python 3.12 on
    assert math.isclose(estimate.summary()["seconds"], sum(by_hand.values()))
    assert split["links"] == 0
    assert bool(split["attention"]) == ("attend" in name)


def linked(estimate: Roofline, link: float) -> Roofline:
    """The same on devices with such links."""
    return dataclasses.replace(
        estimate, target=dataclasses.replace(H200, peaks=dataclasses.replace(H200.peaks, link=link))
    )


def test_messages_that_overlap_cost_what_computing_does_not_hide():
    """Those that kernels wait for cost all of their time."""
    estimate = roofline(text("train-h200"), H200, devices_per_host=8)
    computing = sum(map(estimate.kernel_seconds, estimate.kernels))
    bytes_waited_for = 5 * (
        2 * 512 * 512 / 4 / 2 + 2 * 8 * 512 * 3 / 4
    )  # a pair's half of weights, three quarters of rows
    bytes_hidden = 5 * (
        (1 + 2) * 2 * 512 * 512 / 4 / 2 + 2 * 2 * 8 * 512 * 3 / 4
    )  # a sum goes round twice
    fast = linked(estimate, 100 * bytes_hidden / computing)
    assert math.isclose(fast.split()["links"], bytes_waited_for / fast.target.peaks.link)
    slow = linked(estimate, bytes_hidden / computing / 100)
    assert math.isclose(
        slow.split()["links"], bytes_waited_for / slow.target.peaks.link + 99 * computing
    )


def test_what_crosses_hosts_takes_the_network():
    """Four devices a host: pairs are on two hosts, rings of four within one."""
    across = roofline(text("train-h200"), H200, devices_per_host=4, hosts=2)
    waiting = sum(across.link_seconds(c) for c in across.collectives if not c.overlaps)
    assert math.isclose(waiting, 5 * (2 * 512 * 512 / 4 / 2 / 50e9 + 2 * 8 * 512 * 3 / 4 / 450e9))


def test_the_summary_is_json_and_names_the_largest_kernels():
    summary = json.loads(
        json.dumps(roofline(text("train-h200"), H200, devices_per_host=8).summary())
    )
    assert summary["native"] == {"__cublas$lt$matmul bf16": 15}
    assert summary["operations"] == {"bf16": 15 * 2 * 8 * 128 * 512}
    assert summary["kernels"] == 7 + 5 * 16
    assert {(row["kind"], row["overlaps"], row["count"]) for row in summary["collectives"]} == {
        ("all-gather", False, 10),
        ("all-gather", True, 10),
        ("reduce-scatter", True, 5),
        ("all-reduce", True, 5),
    }
    largest = [row["seconds"] for row in summary["largest"]]
    assert largest == sorted(largest, reverse=True)
    output = table(summary)
    assert "15 x __cublas$lt$matmul bf16" in output
    assert "10 x all-gather, synchronous: 0.000358 GB sent" in output
