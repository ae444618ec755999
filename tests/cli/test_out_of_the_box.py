"""`solrl train PRESET` as a new user calls it: in an empty folder, with an empty cache of the Hub and
no prompt file.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import serve

pytestmark = pytest.mark.exhaustive

PRESET = "sana_sol_rl_pickscore"
PICKSCORE = "yuvalkirstain/PickScore_v1"


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `solrl train` in the empty folder `folder / "empty"`."""
    here = folder / "empty"
    here.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "solrl_jax", "train", PRESET, *overrides],
        cwd=here,
        env=os.environ
        | {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(Path(__file__).parents[2])}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("online", [True, False])
def test_only_the_download_is_missing(online, tmp_path):
    """The Hub that is asked has no repositories."""
    with serve({}) as (_, environment):
        done = train(tmp_path, **(environment if online else {"HF_HUB_OFFLINE": "1"}))
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("solrl: "))
    assert error.startswith(f"solrl: reward 'pickscore': {PICKSCORE}: ")
    assert "cannot be had from the hub" in error
    assert error.endswith(f"of https://huggingface.co/{PICKSCORE}")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("empty/**/*.yaml"))
