"""Runs in an object store: the same state to the bit as on a disk, and one line if it refuses."""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from gcp_storage_emulator.server import create_server
from safetensors.numpy import load_file

from solrl_jax.cli import main
from solrl_jax.errors import InputError, RunError
from solrl_jax.parallel import consensus
from solrl_jax.runs import checkpoint, ledger, metrics, store_writer, trainer
from solrl_jax.runs.directory import find_checkpoint, read_target
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage import files
from solrl_jax.storage.stores import RunPath, run_path
from tests.object_store import BUCKET
from tests.runs.test_resume import arrays, record
from tests.small import SMALL, small_config


def state(value: float) -> dict[str, jax.Array]:
    return {"a": jnp.full((3, 4), value, jnp.float32), "none": jnp.zeros((0, 2))}


def save(root: RunPath, iteration: int, value: float, **options) -> RunPath:
    return store_writer.begin(root, iteration, state(value), {"key": 1}, **options)()


def value_of(path: RunPath) -> float:
    restored, meta = checkpoint.restore(path, state(0))
    assert meta["iteration"] == checkpoint.iteration_of(path)
    return float(restored["a"][2, 3])


def names(paths) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def root(stored):
    """The directory of checkpoints of a run that this process owns."""
    with files.exclusive_lock(stored):
        yield stored / "checkpoints"


@pytest.mark.slow
def test_checkpoints_are_saved_restored_replaced_and_removed(root):
    for iteration in (1, 2, 3):
        path = save(root, iteration, iteration, keep=2)
    assert path == root / "000003"
    assert names(checkpoint.list_checkpoints(root)) == ["000003", "000002"]
    save(root, 3, 30.0)
    assert value_of(path) == 30
    assert names(checkpoint.list_checkpoints(root)) == ["000003", "000002"]
    (path / "arrays" / "_METADATA").write_bytes(b"{}")
    restored = checkpoint.restore_latest(root, state(0), {})
    assert restored is not None
    _, meta, warnings = restored
    assert meta["iteration"] == 2
    assert warnings == [
        f"skipped checkpoint {path}: arrays/_METADATA has 2 bytes, not the number that was written"
    ]


@pytest.mark.slow
def test_a_checkpoint_counts_while_its_manifest_is_there(root, object_store):
    save(root, 1, 1.0)
    first_request = len(object_store.requests)
    save(root, 1, 10.0)

    def describe(method: str, path: str) -> str:
        folder = "copy" if ".replaced/" in path else "original"
        name = "manifest" if path.endswith(f"/{files.MANIFEST}") else "file"
        return f"{method} {name} of the {folder}"

    changes = [
        describe(method, path)
        for method, path in object_store.requests[first_request:]
        if method not in ("GET", "HEAD")
    ]
    assert [change for change, _ in itertools.groupby(changes)] == [
        "PUT file of the copy",
        "PUT manifest of the copy",
        "DELETE manifest of the original",
        "DELETE file of the original",
        "PUT file of the original",
        "PUT manifest of the original",
        "DELETE manifest of the copy",
        "DELETE file of the copy",
    ]
    save(root, 2, 2.0)
    (root / "000002" / files.MANIFEST).unlink()  # a save or a removal was killed
    assert names(checkpoint.list_checkpoints(root)) == ["000001"]
    save(root, 3, 3.0)
    assert not (root / "000002").exists()  # the next save removes what is left


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["copy", "removal", "upload", "end"])
def test_while_a_checkpoint_is_replaced_one_of_the_two_counts(root, killed_in):
    save(root, 1, 1.0)
    old = root / "000001"
    copy = root / "000001.replaced"
    old.copy_all(copy, last=files.MANIFEST)
    if killed_in == "copy":
        (copy / files.MANIFEST).unlink()
    elif killed_in == "removal":
        (old / files.MANIFEST).unlink()
    elif killed_in == "upload":
        files.remove_directory(old)
        (old / "meta.json").write_bytes(b"{}")
    newest = checkpoint.list_checkpoints(root)[0]
    assert value_of(newest) == 1
    save(root, 1, 10.0)
    assert names(checkpoint.list_checkpoints(root)) == ["000001"]
    assert value_of(root / "000001") == 10
    assert not copy.exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["arrays/d/", "manifest.json"])
def test_a_store_that_refuses_in_the_middle_of_a_save(root, object_store, part):
    save(root, 1, 1.0)

    def refuses(method: str, path: str) -> bool:
        return method in ("PUT", "POST") and f"/000002/{part}" in path

    with (
        object_store.refusing(refuses),
        pytest.raises(
            RunError,
            match=rf"^permission denied \(Access Denied\) while writing {root}/000002; "
            rf"the last checkpoint is {root}/000001$",
        ),
    ):
        save(root, 2, 2.0)
    assert not (root / "000002").exists()
    assert value_of(root / "000001") == 1
    with (
        object_store.refusing(lambda method, path: True),
        pytest.raises(RunError, match=r"permission denied"),
    ):
        save(root, 1, 10.0)
    assert value_of(root / "000001") == 1  # a save that could not begin has removed nothing
    save(root, 2, 2.0)
    assert names(checkpoint.list_checkpoints(root)) == ["000002", "000001"]


WORKER = """
import contextlib
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from solrl_jax.runs import checkpoint, store_writer
from solrl_jax.storage import files
from solrl_jax.storage.stores import run_path
root = run_path(sys.argv[3])
sharding = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
values = np.arange(8, dtype=np.float32)
array = jax.make_array_from_callback((8,), sharding, lambda index: values[index])
with files.exclusive_lock(root.parent) if jax.process_index() == 0 else contextlib.nullcontext():
    path = store_writer.begin(root, 1, {"a": array}, {})()
shape = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
restored, meta = checkpoint.restore(path, {"a": shape})
assert meta["iteration"] == 1
for shard in restored["a"].addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index])
download = files.download_directory
def damage_a_file(source, copy):
    download(source, copy)
    if jax.process_index():
        paths = [path for path in copy.rglob("arrays/**/*") if path.is_file()]
        largest = max(paths, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[::-1])
files.download_directory = damage_a_file
try:
    checkpoint.restore(path, {"a": shape})
    raise AssertionError("the second process has restored a damaged copy")
except checkpoint.CheckpointError as error:
    assert str(error).startswith(str(path)) and str(error).endswith("was altered"), error
"""


@pytest.mark.slow
def test_two_processes_without_a_shared_disk_save_and_restore(stored, tmp_path):
    root = stored / "checkpoints"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    started = []
    for index in range(2):
        temporary = tmp_path / f"host{index}"
        temporary.mkdir()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(port), str(index), str(root)],
                env=environment | {"TMPDIR": str(temporary)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    checkpoint.verify(root / "000001")
    restored, _ = checkpoint.restore(root / "000001", {"a": jnp.zeros(8)})  # by one process
    np.testing.assert_array_equal(restored["a"], np.arange(8))
    assert not list(tmp_path.glob("host*/solrl-*"))


def test_a_start_that_was_replaced_writes_nothing_more(root):
    run = root.parent
    with metrics.Metrics(run, resume_after=-1) as opened:
        opened.log(1, {"reward": 0.5})
        save(root, 1, 1.0)
        (run / ".lock").write_bytes(b"process 7 on elsewhere")
        before = run.file_sizes()
        for write in (lambda: opened.log(2, {"reward": 0.5}), lambda: save(root, 1, 10.0)):
            with pytest.raises(RunError, match=rf"^another .* {run}: process 7 on elsewhere$"):
                write()
        assert run.file_sizes() == before
    assert value_of(root / "000001") == 1


def test_a_start_whose_lock_is_gone_writes_nothing_more(root):
    save(root, 1, 1.0)
    (root.parent / ".lock").unlink()
    with pytest.raises(RunError, match=r"/\.lock is gone: another process has used the run "):
        save(root, 2, 2.0)
    assert names(checkpoint.list_checkpoints(root)) == ["000001"]


def test_a_complete_checkpoint_stays_if_another_process_is_lost(root, monkeypatch):
    from_first = consensus.from_first

    def lost(name, f):
        from_first(name, f)
        if name == "save/publish":
            raise RunError("process 1 gives no answer")

    with monkeypatch.context() as patch:
        patch.setattr(consensus, "from_first", lost)
        with pytest.raises(RunError, match=r"^process 1 gives no answer$"):
            save(root, 1, 1.0)
    assert value_of(root / "000001") == 1


def test_a_start_that_is_replaced_during_a_save_leaves_the_checkpoint_of_the_other(root):
    run = root.parent
    save(root, 1, 1.0)
    finish = store_writer.begin(root, 2, state(2.0), {}, keep=1)
    (root / "000001").copy_all(root / "000002", last=files.MANIFEST)
    (run / ".lock").write_bytes(b"process 7 on elsewhere")
    before = run.file_sizes()
    with pytest.raises(RunError, match=rf"^another .* {run}: process 7 on elsewhere$"):
        finish()
    assert run.file_sizes() == before


def test_the_record_is_written_anew_with_each_row(stored, object_store):
    with (
        files.exclusive_lock(stored),
        metrics.Metrics(stored, tensorboard=True, resume_after=-1) as opened,
    ):
        opened.log(1, {"reward": 0.5})
        with object_store.refusing(lambda method, path: method == "PUT"):
            for _ in range(2):
                with pytest.raises(RunError, match=r"permission denied .*metrics\.jsonl$"):
                    opened.log(2, {"reward": 0.6})
        opened.log(2, {"reward": float("nan")})
    assert metrics.read(stored) == [
        {"iteration": 1, "reward": 0.5},
        {"iteration": 2, "reward": None},
    ]
    (size,) = (stored / "tensorboard").file_sizes().values()  # one start, one file
    assert size > 100
    with (
        files.exclusive_lock(stored),
        metrics.Metrics(stored, tensorboard=True, resume_after=1) as opened,
    ):
        opened.log(2, {"reward": 0.7})
    # TensorBoard hides repeated iterations only within one directory.
    names = list((stored / "tensorboard").file_sizes())
    assert [name[-5:] for name in names] == [".0000", ".0001"]
    assert not any("/" in name for name in names)
    (stored / "metrics.jsonl").write_bytes(b'bad\n{"iteration": 1}\n')
    with metrics.Metrics(stored, resume_after=1) as opened:
        assert opened.set_aside is not None
        assert opened.set_aside.exists()
    assert metrics.read(stored) == [{"iteration": 1}]


@pytest.mark.slow
def test_wrong_credentials_are_one_line(object_store, monkeypatch):
    keys = {"AWS_ACCESS_KEY_ID": "unknown"}
    outcome = subprocess.run(
        [sys.executable, "-m", "solrl_jax", "train", "tiny", f"run.dir=s3://{BUCKET}/wrong"],
        env=os.environ | keys,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 2
    assert outcome.stderr.splitlines()[-1] == (
        f"solrl: the run directory s3://{BUCKET}/wrong cannot be written: permission denied (The "
        "access key does not exist.)"
    )
    assert "Traceback" not in outcome.stderr


def test_a_path_that_must_be_on_this_machine_is_refused_in_one_line():
    result = CliRunner().invoke(main.cli, ["export", "runs/x", "--out", "s3://bucket/x"])
    assert result.exit_code == 2
    assert "s3://bucket/x: must be on this machine; only a run may be in a store" in result.stderr


@pytest.mark.slow
def test_google_cloud_storage_holds_checkpoints(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    run = run_path("gs://bucket/run")
    root = run / "checkpoints"
    try:
        assert files.writable_directory(run) == run
        with files.exclusive_lock(run):
            for iteration in (1, 2, 3):
                save(root, iteration, iteration, keep=2)
            save(root, 3, 30.0)
        assert names(checkpoint.list_checkpoints(root)) == ["000003", "000002"]
        assert value_of(root / "000003") == 30
        with pytest.raises(InputError, match=r"cannot be written: there is no bucket missing$"):
            files.writable_directory(run_path("gs://missing/run"))
    finally:
        server.stop()


def train(run_dir: RunPath, iterations: int) -> dict:
    with TerminalProgress(bars=False) as report:
        config = small_config(str(run_dir), f"train.iterations={iterations}", "eval.every=1")
        return trainer.run(config, report, html_report=True)


def assert_same_run(ours: RunPath, theirs: RunPath, iterations: int) -> None:
    states = [arrays(folder) for folder in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        np.testing.assert_array_equal(states[0][key], value, err_msg=key)
    assert record(ours) == record(theirs)
    for iteration in range(1, iterations + 1):
        table = ledger.read(ours / "ledger", iteration)
        assert table.equals(ledger.read(theirs / "ledger", iteration))


@pytest.mark.exhaustive  # three trainings; two_processes and the tests of files go through a store
def test_a_run_in_a_store_is_resumed_reported_and_exported(stored, tmp_path):
    train(tmp_path / "disk", 2)
    train(stored, 1)
    summary = train(stored, 2)
    assert (summary["run"], summary["iterations"]) == (str(stored), 2)
    assert_same_run(stored, tmp_path / "disk", 2)
    assert read_target(str(stored), (), None, trust=False)[1] == stored  # as of `solrl eval`
    assert find_checkpoint(str(stored), "2") == stored / "checkpoints" / "000002"
    pictures = names((stored / "pictures").iterdir())
    assert pictures == names(sorted((tmp_path / "disk" / "pictures").iterdir()))
    assert not (stored / ".lock").exists()

    out = tmp_path / "page.html"
    result = CliRunner().invoke(main.cli, ["report", str(stored), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "<title>solrl report</title>" in out.read_text()[:1000]
    assert (stored / "report.html").size() > 10_000
    adapters = tmp_path / "adapters.safetensors"
    result = CliRunner().invoke(main.cli, ["export", str(stored), "--out", str(adapters), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["iteration"] == 2
    assert load_file(adapters)


@pytest.mark.exhaustive
def test_a_run_that_is_killed_six_times_ends_as_on_a_disk_to_the_bit(
    stored, object_store, tmp_path, capsys
):
    """Three kills are within the upload of a checkpoint, after the request of one of its first
    files. Three are at any moment of the iteration after the first that was reported.
    """
    iterations = 10
    began = time.monotonic()
    reference = tmp_path / "disk"
    keeping = f"model.prompt_cache_dir={tmp_path / 'cache'}"
    with TerminalProgress(bars=False) as report:
        trainer.run(small_config(reference, f"train.iterations={iterations}", keeping), report)
    seconds = float(np.median([row["seconds"] for row in metrics.read(reference)[1:]]))

    options = [*SMALL, f"train.iterations={iterations}", f"run.dir={stored}", keeping]
    command = [sys.executable, "-m", "solrl_jax", "train", "tiny", *options]
    rng = random.Random(0)
    log = tmp_path / "log"

    def reported() -> int:
        """The last iteration that the running process has printed; 0: none."""
        numbers = re.findall(r"^iteration (\d+):", log.read_text(), re.MULTILINE)
        return int(numbers[-1]) if numbers else 0

    def uploads(first_request: int) -> int:
        """The number of files of checkpoints that were sent since a request."""
        later = object_store.requests[first_request:]
        return sum(method == "PUT" and "/checkpoints/0" in path for method, path in later)

    kills = []
    for number in range(6):
        first_request = len(object_store.requests)
        with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
            if number % 2 == 0:
                kill = {"after_uploads": (1, 3, 6)[number // 2]}
                while uploads(first_request) < kill["after_uploads"]:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.001)
            else:
                kill = {"seconds_after_a_report": round(rng.uniform(0, seconds), 2)}
                while not reported():
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.01)
                time.sleep(kill["seconds_after_a_report"])
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        complete = checkpoint.list_checkpoints(stored / "checkpoints")
        for path in complete:
            checkpoint.verify(path)
        unfinished = set((stored / "checkpoints").iterdir()) - set(complete)
        kill["last_checkpoint"] = int(complete[0].name) if complete else 0
        kill["files_without_a_manifest"] = sum(len(path.file_sizes()) for path in unfinished)
        # run.checkpoint_every=1: an iteration that was reported is never lost.
        assert kill["last_checkpoint"] >= reported()
        kills.append(kill)
    assert any(kill["files_without_a_manifest"] for kill in kills)
    last = subprocess.run(command, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert f"resuming after iteration {kills[-1]['last_checkpoint']}" in last.stderr
    assert_same_run(stored, reference, iterations)
    assert names((stored / "checkpoints").iterdir()) == names(
        sorted((reference / "checkpoints").iterdir())
    )
    figures = {
        "iterations": iterations,
        "kills": kills,
        "arrays_that_differ": 0,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
