"""Environment of the tests: eight CPU devices, no network, and caches inside the repository.

The variables are set before JAX is imported. Processes that a test starts inherit them.
"""

import contextlib
import fcntl
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# PyTorch's idle threads spin, which slows down the other test processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Test processes and the commands that they start share compiled programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache/jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# Prompt embeddings are cached there; the user's own cache is left alone.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache/home")

import jax
import pytest
from jaxtyping import install_import_hook

import tests.checker  # noqa: F401 - the import hook finds it by name

# Shapes and dtypes of annotated functions are checked, in the tests only. Modules that name neither
# jaxtyping nor the package's own types of arrays are left alone, because a check takes longer than
# most of their functions.
PACKAGE = Path(__file__).parents[1] / "solrl_jax"
ANNOTATED = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if re.search("from jaxtyping import|PerSample|Latents|Scores", file.read_text())
]
install_import_hook(ANNOTATED, "tests.checker.check")


def pytest_collection_finish():
    """What was imported stays, so that the collections of garbage need not look through it."""
    gc.collect()
    gc.freeze()


def release_compiled_programs():
    """Compiled programs hold memory maps. A process has 65,530 of them, and XLA crashes beyond."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _release_after_a_file():
    yield
    release_compiled_programs()


@pytest.fixture(autouse=True)
def _release_after_an_exhaustive_test(request):
    """Some files have so many of them that one file is too much."""
    yield
    if request.node.get_closest_marker("exhaustive"):
        release_compiled_programs()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, worker_id) -> tuple[Path, dict, str]:
    """A finished run of two iterations of `tiny`, made by the command in a process of its own.

    All processes of the tests share it, so nothing may be written to its directory.

    Returns:
        The directory, the summary that the command printed, and its standard error.
    """
    from tests.small import SMALL, one_run_at_a_time

    root = tmp_path_factory.getbasetemp()
    shared = (root if worker_id == "master" else root.parent) / "tiny-run"
    shared.mkdir(exist_ok=True)
    folder = shared / "cli:seed1"  # pyarrow takes it for a URI
    # The schedule is the one that the model directory itself names, so that both can make the same
    # images.
    options = ("train.iterations=2", "eval.every=1", "run.tensorboard=true")
    options += ("rollout.schedule=sd3", f"run.dir={folder}", "--profile", "2", "--report", "--json")
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context((shared / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "finished.json").exists():
            stack.enter_context(one_run_at_a_time(root))
            process = subprocess.run(
                [sys.executable, "-m", "solrl_jax", "train", "tiny", *SMALL, *options],
                capture_output=True,
                text=True,
                check=False,
            )
            assert process.returncode == 0, process.stderr
            (shared / "finished.json").write_text(json.dumps([process.stdout, process.stderr]))
    out, error = json.loads((shared / "finished.json").read_text())
    return folder, json.loads(out.strip().splitlines()[-1]), error


@pytest.fixture
def toy_model():
    """Lets runs open a toy in place of the configured model, see `tests.toys.toy_model`."""
    from tests import toys

    with toys.toy_model():
        yield


@pytest.fixture(scope="session")
def object_store():
    """An S3 server with one bucket, see `tests.object_store`."""
    from tests.object_store import running  # moto's import takes seconds

    with running() as store:
        yield store


@pytest.fixture
def stored(object_store, request):
    """A directory of a test's own on the S3 server."""
    from solrl_jax.storage.stores import run_path
    from tests.object_store import BUCKET

    name = re.sub(r"\W+", "-", request.node.name)
    return run_path(f"s3://{BUCKET}/{name}")
