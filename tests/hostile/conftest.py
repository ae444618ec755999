"""A small finished run, which cases copy and damage."""

import fcntl
import shutil
from pathlib import Path

import pytest

from tests.hostile.harness import call
from tests.small import SMALL, one_run_at_a_time


@pytest.fixture(scope="session")
def run(tmp_path_factory, worker_id) -> Path:
    """The directory of a finished run of two iterations. One process of the tests makes it by the
    command; each has a copy.
    """
    root = tmp_path_factory.getbasetemp()
    shared = (root if worker_id == "master" else root.parent) / "hostile-run"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "finished").exists():
            arguments = ["train", "tiny", *SMALL, "train.iterations=2", "eval.num_grid_images=0"]
            with one_run_at_a_time(root):
                outcome = call([*arguments, f"run.dir={shared / 'new'}"], 300)
            assert outcome.code == 0, outcome.error
            (shared / "new").rename(shared / "finished")
    return Path(shutil.copytree(shared / "finished", tmp_path_factory.mktemp("hostile") / "run"))
