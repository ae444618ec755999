"""Every case of the tables: the exit code and the line that it asks for, within its limits."""

import hashlib
import shlex
from pathlib import Path

import pytest

from tests.hostile import (
    cases_commands,
    cases_configuration,
    cases_models,
    cases_numbers,
    cases_rewards,
    cases_runs,
)
from tests.hostile.harness import Case, call, fill, prepare
from tests.small import SMALL

pytestmark = pytest.mark.slow

CASES = [
    *cases_commands.CASES,
    *cases_configuration.CASES,
    *cases_models.CASES,
    *cases_numbers.CASES,
    *cases_rewards.CASES,
    *cases_runs.CASES,
]


def content(path: Path) -> dict[str, str]:
    """What is at a path: a hash of every file."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}


def test_names_are_distinct():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


# these take seconds, for they go on to the end
WHOLE = [
    case for case in CASES if case.code == 0 and case.arguments.startswith(("train", "generate"))
]
QUICK = ("run.json is deep", "metrics.jsonl has infinity")
PARAMETERS = [
    pytest.param(
        case,
        id=case.name,
        marks=[pytest.mark.exhaustive]
        if case.repeats or (case in WHOLE and case.name not in QUICK)
        else [],
    )
    for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_case(case: Case, run, tmp_path, monkeypatch):
    names = prepare(case, tmp_path, run)
    monkeypatch.chdir(names["dir"])
    arguments = [
        fill(part, names) for part in shlex.split(case.arguments.replace("SMALL", " ".join(SMALL)))
    ]
    before = {name: content(Path(fill(name, names))) for name in case.kept}
    outcome = call(arguments, case.seconds)
    assert outcome.problem(case.seconds) is None, outcome.problem(case.seconds)
    assert fill(case.message, names) in outcome.error + outcome.out
    assert outcome.code == case.code, outcome.error
    assert {name: content(Path(fill(name, names))) for name in case.kept} == before
