"""The benchmarks run, at the smallest size, and say what they claim to say. Times themselves are no
test's business.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import SMALL

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs a script in this process; returns what it wrote."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(name: str, *arguments: str) -> dict:
        out = tmp_path / f"{name}.json"
        importlib.import_module(name).main(["tiny", *arguments, "--repeat", "1", "--out", str(out)])
        return json.loads(out.read_text())

    return run


@pytest.mark.exhaustive
def test_a_step_and_the_rollout_of_each_format(bench):
    report = bench("bench_rollout", *SMALL, "--formats", "auto,nvfp4", "--rows", "2")
    assert set(report["formats"]) == {"bf16", "nvfp4"}  # on a CPU auto is BF16
    bf16, nvfp4 = (report["formats"][name]["step"] for name in ("bf16", "nvfp4"))

    def count(step):
        return step["tflops"] * step["seconds"]

    # adapters are products of their own, and merged where weights are quantized
    assert (
        count(report["plain_step"]) < count(nvfp4) < count(bf16) < 1.4 * count(report["plain_step"])
    )
    rollout = report["formats"]["nvfp4"]["rollout"]
    assert rollout["seconds"] == pytest.approx(rollout["explore"] + rollout["regenerate"])
    assert rollout["times_naive_scaling"] == pytest.approx(
        report["naive_scaling_seconds"] / rollout["seconds"], abs=2e-3
    )


@pytest.mark.exhaustive
def test_iterations_of_two_families(bench):
    settings = [
        setting for setting in SMALL if ".steps=" not in setting
    ]  # of which each family has its own
    report = bench("bench_iteration", *settings)
    first = report["families"]["sol_rl"]
    other = report["families"]["naive_scaling"]
    assert (first["times_sol_rl"], first["compile_seconds"][-1], other["compile_seconds"][-1]) == (
        1.0,
        0.0,
        0.0,
    )
    assert set(first["phases"]) == {"encode", "sync", "explore", "regenerate", "update"}
    assert 0 < first["sync_share"] < 1


@pytest.mark.exhaustive
def test_the_peer():
    command = [
        sys.executable,
        str(SCRIPTS / "bench_peer_torch.py"),
        "tiny",
        "--rows",
        "1",
        "--repeat",
        "1",
        "--mode",
        "eager",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(process.stdout)["seconds"] > 0
