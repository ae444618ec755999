"""What a run shows while it goes on, and what it ends with."""

import io
import sys

import pytest

from solrl_jax.cli import train
from solrl_jax.runs import progress

ROW = {"kept/reward": 0.5, "pool/reward": 0.25, "fidelity/spearman": 0.8, "seconds": 2.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when the test says so, for the bar too."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_the_time_left_of_what_is_left_to_do(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.TerminalProgress() as report:
        report.start(20, 4)  # resumed: the four before took no time of this start
        report.phase("explore", 12, 0)
        for iteration in (5, 6):
            clock[0] += 30
            report.iteration(iteration, ROW)
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0] == "iteration 5: pool 0.250, kept 0.500, spearman 0.80, 2.0 s, about 07:30 left"
    assert lines[1].endswith("about 07:00 left")


def test_a_terminal_shows_phase_reward_and_time_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.TerminalProgress() as report:
        report.start(20, 0)
        report.iteration(1, ROW)
        report.phase("explore", 12, 0)
        report.phase("explore", 12, 3)
    last = sys.stderr.getvalue().split("\r")[-1]
    assert last.startswith("iteration 1 of 20 |")
    assert " left" in last
    assert "explore 3/12 reward 0.500" in last


def test_a_run_ends_with_what_was_gained_the_report_and_what_to_try_next(monkeypatch):
    # the reward comes first, also where another score is recorded before it
    before = {
        "eval/shapes/strict": 0.1,
        "eval/shapes": 0.3,
        "eval/reward": 0.3,
        "eval/reward/standard_error": 0.03,
    }
    after = before | {
        "eval/reward": 0.5,
        "eval/reward/standard_error": 0.04,
        "eval/shapes/strict": 0.25,
    }
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/solrl", "train", "tiny"])
    summary = {"run": "runs/demo", "trained_in_full": 0, "before": before, "after": after}
    gained, *rest = train.closing_lines(summary, html_report=True).splitlines()
    assert gained.startswith(
        "gained: held-out reward +0.200 (0.300 ± 0.030 -> 0.500 ± 0.040),"
        " strict success +0.150 (0.100 "
    )
    assert rest == [
        "report: open runs/demo/report.html in a browser",
        "next:   .venv/bin/solrl generate runs/demo --prompts FILE --out images;"
        " .venv/bin/solrl export runs/demo --out lora.safetensors",
    ]
    monkeypatch.setattr(train.shutil, "which", lambda name: "/usr/bin/solrl")
    assert (
        train.closing_lines(summary, html_report=False).splitlines()[1]
        == "report: solrl report runs/demo"
    )
    whole = train.closing_lines(summary | {"trained_in_full": 3}, html_report=False)
    assert whole.endswith("; solrl export runs/demo --out DIRECTORY")  # a LoRA file cannot hold it


def test_a_gain_within_two_standard_errors_is_not_claimed():
    def row(value):
        return {"eval/reward": value, "eval/reward/standard_error": 0.03}

    assert "chance" not in train.describe_gain(row(0.5), row(0.59))
    assert "which may be chance" in train.describe_gain(row(0.5), row(0.58))
    assert "which may be chance" in train.describe_gain(row(0.5), row(0.42))
    one_image = {"eval/reward": 0.5, "eval/reward/standard_error": None}
    assert train.describe_gain(one_image, row(0.9)) == (
        "held-out reward +0.400 (0.500 ± nan -> 0.900 ± 0.030, which may be chance)"
    )
    for before in ({}, {"eval/reward": None}):
        assert (
            train.describe_gain(before, row(0.5))
            == "unknown, because nothing was evaluated before and after"
        )
