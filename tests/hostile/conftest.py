"""A small finished run, which cases copy and damage."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run(tiny_run, tmp_path_factory) -> Path:
    """The directory of a finished run of two iterations. Each process of the tests has a copy."""
    return Path(
        shutil.copytree(
            tiny_run[0],
            tmp_path_factory.mktemp("hostile") / "run",
            ignore=shutil.ignore_patterns("profile", "tensorboard", "report.html"),
        )
    )
