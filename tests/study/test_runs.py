"""`solrl study` with processes: what is finished is not repeated, what stopped goes on, what fails
stops no other.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solrl_jax.runs import ledger
from tests.small import SMALL

PLAN = {
    "what": "Two arms, one of which cannot be run.",
    "preset": "tiny",
    "overrides": [*SMALL, "eval.num_grid_images=0"],
    "arms": {"good": [], "bad": ["prompts.train=none.txt"]},
    "seeds": [3],
    "compared": [["good", "bad"]],
    "sweeps": {},
    "quick": {"seeds": [3], "overrides": ["train.iterations=1"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "plan.yaml").write_text(json.dumps(PLAN))
    return folder


@pytest.fixture(scope="module")
def first_study(folder) -> tuple[int, list[dict], str]:
    """What the first quick study ended with, said and printed; its runs are in `folder`."""
    return study(folder, "--quick", "--processes", "1")


def command(folder: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "solrl_jax",
        "study",
        "plan.yaml",
        *arguments,
        "--out",
        "out",
        "--json",
    ]


def study(folder: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """The exit code, the lines of standard output, and standard error."""
    process = subprocess.run(
        command(folder, *arguments), cwd=folder, capture_output=True, text=True, check=False
    )
    return (
        process.returncode,
        [json.loads(line) for line in process.stdout.splitlines()],
        process.stderr,
    )


@pytest.mark.slow
def test_a_failed_arm_is_reported_and_stops_no_other(folder, first_study):
    code, (summary,), errors = first_study
    assert (code, summary["exit_code"]) == (1, 1)
    assert summary["error"].startswith("1 of 2 runs failed, e.g. bad-3: prompts.train='none.txt'")
    assert errors.splitlines()[-1] == f"solrl: {summary['error']}"
    assert "1/2 good-3: held-out reward" in errors
    assert "2/2 bad-3: prompts.train='none.txt'" in errors
    assert summary["arms"]["good"]["seeds"] == [3]
    assert list(summary["missing"]) == ["bad-3"]
    assert summary["compared"] == []
    assert json.loads((folder / "out" / "study.json").read_text())["missing"] == summary["missing"]
    assert "prompts (sha256" in summary["setting"]["evaluation"]


@pytest.mark.slow
@pytest.mark.usefixtures("first_study")
def test_what_is_finished_is_not_repeated(folder):
    before = (folder / "out" / "good-3" / "run.json").stat().st_mtime_ns
    code, _, errors = study(folder, "--quick")
    assert code == 1
    assert "1 of 2 runs are finished" in errors
    assert "1/1 bad-3: " in errors
    assert (folder / "out" / "good-3" / "run.json").stat().st_mtime_ns == before
    code, (summary,), errors = study(folder, "--quick", "--compare-only")
    assert (code, errors) == (0, "")
    assert summary["missing"] == {"bad-3": "not finished"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contents", "code"),
    [
        ('{"packages": 5}', 2),
        pytest.param('{"packages": "jax"}', 2, marks=pytest.mark.exhaustive),
        pytest.param(
            '{"evaluation": [3], "devices": null, "python": {"a": 1}}',
            0,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.usefixtures("first_study")
def test_a_run_json_of_other_types_is_one_line_at_worst(folder, contents, code):
    path = folder / "out" / "good-3" / "run.json"
    before = path.read_text()
    path.write_text(contents)
    exit_code, (summary,), errors = study(folder, "--quick", "--compare-only")
    path.write_text(before)
    assert (exit_code, errors.count("\n")) == (code, min(code, 1)), errors
    assert "run.json: cannot be read" in summary.get("error", "run.json: cannot be read")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("first_study")
def test_a_longer_study_goes_on_and_one_that_is_stopped_saves(folder):
    first = ledger.path_of(folder / "out" / "good-3" / "ledger", 1)
    before = first.stat().st_mtime_ns
    child = subprocess.Popen(
        command(folder, "train.iterations=500"), cwd=folder, stderr=subprocess.PIPE, text=True
    )
    log = folder / "out" / "good-3.log"
    deadline = time.monotonic() + 300
    while "iteration 2:" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    errors = child.communicate(timeout=120)[1]
    assert child.returncode == 130
    assert errors.strip().splitlines()[-1] == "solrl: interrupted"
    assert "stopping after the current batch" in log.read_text()
    assert first.stat().st_mtime_ns == before  # it went on
    last = max(ledger.iterations_in(first.parent))
    assert (folder / "out" / "good-3" / "checkpoints" / f"{last:06d}").is_dir()
    assert f"after iteration {last}" in log.read_text()


@pytest.mark.exhaustive
def test_one_study_at_a_time(folder):
    import fcntl

    with (folder / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, (error,), _ = study(folder, "--quick")
        assert code == 2
        assert "another process is using" in error["error"]
        assert study(folder, "--quick", "--compare-only")[0] == 0
