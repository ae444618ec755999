"""A small finished run, which cases copy and damage."""

from pathlib import Path

import pytest

from tests.hostile.harness import call
from tests.small import SMALL


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The directory of a finished run of two iterations, made by the command."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    ended = call(["train", "tiny", *SMALL, "train.iterations=2", "eval.grid=0", f"run.dir={folder}"], 300)
    assert ended.code == 0, ended.error
    return folder
