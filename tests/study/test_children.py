"""The processes of a study: all of them stop when the study cannot go on."""

import sys
import threading
import time

import pytest

from solrl_jax.errors import RunError
from solrl_jax.study import runs as study_runs
from solrl_jax.study.plan import runs_of
from tests.study.hand import plan_of

# A run that says that it trains, and saves when it is stopped.
SCRIPT = """#!/bin/sh
trap 'touch saved; exit 0' TERM
echo x >> started
for i in $(seq 1200); do sleep 0.05; done
"""


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists()


def test_a_log_that_cannot_be_written_stops_the_others_also_those_about_to_start(
    tmp_path, monkeypatch
):
    """One run trains, the log of another is a directory, and the last starts after the stop."""
    runs = runs_of(
        plan_of({"trains": (), "broken": (), "late": ()}, seeds=(0,)), tmp_path, False, ()
    )
    (tmp_path / "script").write_text(SCRIPT)
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "broken-0.log").mkdir()
    late_is_about_to_start = threading.Event()

    def log_of(run):
        if run.arm == "late":
            late_is_about_to_start.set()
            wait_for(tmp_path / "saved")
        if run.arm == "broken":
            late_is_about_to_start.wait(60)
            wait_for(tmp_path / "started")
        return run.folder.with_name(f"{run.name}.log")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "script"))
    monkeypatch.setattr(study_runs, "log_of", log_of)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"while writing .*broken-0\.log$"):
        study_runs.train(runs, tmp_path, 3, lambda line: None)
    assert (tmp_path / "started").read_text() == "x\n"
    assert time.monotonic() - began < 50  # a run takes 60 seconds unless it is stopped
