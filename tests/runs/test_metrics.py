"""The record of a run, and the writing to a run directory that all of its files rest on."""

import errno
import json
import math
import os
import struct
import subprocess
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.event_file_writer import EventsWriter

from solrl_jax.errors import InputError, RunError
from solrl_jax.runs import metrics
from solrl_jax.runs.metrics import Metrics
from solrl_jax.storage.files import (
    atomic,
    atomic_directory,
    atomic_write,
    exclusive_lock,
    remove_directory,
    writable_directory,
)


def report(run_dir, iterations, **options):
    with Metrics(run_dir, **{"resume_after": 99, **options}) as record:
        for iteration in iterations:
            record.log(iteration, {"reward": iteration / 3, "loss": np.float32(0.1)})
            if iteration % 2 == 0:
                record.log(iteration, {"eval": jnp.float32(iteration)})


def test_a_row_is_on_the_disk_when_log_returns(tmp_path):
    with Metrics(tmp_path, resume_after=99) as record:
        record.log(
            4, {"a": 1, "bad": math.nan, "worse": -math.inf, "b": jnp.bfloat16(0.5), "large": 1e39}
        )
        line = (tmp_path / "metrics.jsonl").read_text()
    row = {"iteration": 4, "a": 1.0, "bad": None, "worse": None, "b": 0.5, "large": None}
    assert line == json.dumps(row) + "\n"
    assert metrics.read(tmp_path) == record.rows == [row]
    assert metrics.read(tmp_path / "absent") == []


def test_rows_of_an_iteration_are_merged():
    rows = [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 3.0}, {"iteration": 1, "eval": 2.0}]
    assert metrics.by_iteration(rows) == {
        1: {"iteration": 1, "a": 1.0, "eval": 2.0},
        2: {"iteration": 2, "a": 3.0},
    }


@pytest.mark.parametrize(
    "torn", [b"", b'{"iteration": 7, "rew', b"{", b'{"iteration": "\xc3', b"\n"]
)
def test_a_resumed_run_leaves_the_same_files(tmp_path, torn):
    report(tmp_path / "whole", range(10))
    report(tmp_path / "resumed", range(7))
    with (tmp_path / "resumed" / "metrics.jsonl").open("ab") as stream:
        stream.write(torn)
    assert [row["iteration"] for row in metrics.read(tmp_path / "resumed")][-1] == 6
    report(tmp_path / "resumed", range(5, 10), resume_after=4)
    assert (tmp_path / "resumed" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()
    assert os.listdir(tmp_path / "resumed") == ["metrics.jsonl"]


BAD_LINES = (
    "{}",
    "[1]",
    "nonsense",
    '{"iteration": null}',
    '{"iteration": 1e9}',
    '{"iteration": 1, "a": [2]}',
    "[" * 10**5,
)


@pytest.mark.parametrize("bad", [*BAD_LINES, '{"iteration": 1, "a": Infinity}', None])
def test_a_damaged_record_is_set_aside_and_goes_on_with_the_rows_that_can_be_read(bad, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if bad is None:
        path.mkdir()
    else:
        path.write_text(f'{{"iteration": 0, "a": 0.5}}\n{bad}\n{{"iteration": 1}}\n')
    rows = [] if bad is None else [{"iteration": 0, "a": 0.5}, {"iteration": 1}]
    assert metrics.read(tmp_path) == rows
    with Metrics(tmp_path, resume_after=99) as record:
        assert record.rows == rows
        assert record.set_aside.is_dir() if bad is None else bad in record.set_aside.read_text()
        record.log(2, {"a": float("nan")})
        assert record.rows == metrics.read(tmp_path) == [*rows, {"iteration": 2, "a": None}]
    with Metrics(tmp_path, resume_after=99) as again:
        assert again.set_aside is None


LONG = b'{"iteration": 1, "a": [' + 10**6 * b"[]," + b"1]}"


@pytest.mark.parametrize("limit", ["MAX_ROWS", "MAX_BYTES"])
def test_a_record_that_would_fill_the_memory_is_refused_and_stays(limit, tmp_path, monkeypatch):
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"iteration": 1}\n' * 30)
    monkeypatch.setattr(metrics, limit, 20)
    for read in (metrics.read, lambda folder: Metrics(folder, resume_after=99).__enter__()):
        with pytest.raises(InputError, match=r"metrics\.jsonl: has more than .* rows, the most"):
            read(tmp_path)
    assert record.read_text() == '{"iteration": 1}\n' * 30
    assert list(tmp_path.iterdir()) == [record]


def test_a_row_that_would_fill_the_memory_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_bytes(LONG + b"\n")
    parsed = []
    monkeypatch.setattr(metrics, "parse_json", lambda line: parsed.append(line) or json.loads(line))
    assert metrics.read(tmp_path) == []
    assert len(b"".join(parsed)) <= metrics.MAX_LINE_BYTES


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "no room")


def test_a_full_disk_ends_the_record_with_the_row_before(tmp_path, monkeypatch):
    with Metrics(tmp_path, tensorboard=True, resume_after=99) as record:
        record.log(0, {"a": 0.0})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "write", lambda fd, data: write(fd, data[:5]) if len(data) > 20 else full()
            )
            with pytest.raises(RunError, match=r"^disk full while writing .*metrics.jsonl$"):
                record.log(1, {"a": 1.0})
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        with monkeypatch.context() as patch:
            patch.setattr(EventsWriter, "flush", full)
            with pytest.raises(RunError, match=r"^disk full while writing .*tensorboard$"):
                record.log(2, {"a": 2.0})
        record.log(3, {"a": 3.0})
    assert [row["iteration"] for row in metrics.read(tmp_path)] == [0, 2, 3]


def events(run_dir):
    """(step, {tag: value}, whether it is a start) of every TensorBoard event, file by file."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            scalars = {value.tag: value.simple_value for value in event.summary.value}
            yield event.step, scalars, event.session_log.status == SessionLog.START


def test_tensorboard_gets_every_row_and_hides_what_is_repeated(tmp_path):
    threads = threading.active_count()
    with Metrics(tmp_path, tensorboard=True, resume_after=99) as record:
        for iteration in range(3):
            record.log(iteration, {"reward/mean": iteration / 2})
        assert [(step, scalars) for step, scalars, _ in events(tmp_path) if scalars][-1] == (
            2,
            {"reward/mean": 1.0},
        )
    report(tmp_path, [2], tensorboard=True, resume_after=1)
    assert len(os.listdir(tmp_path / "tensorboard")) == 2
    later = list(events(tmp_path))[5:]
    assert [(step, start) for step, _, start in later] == [
        (0, False),
        (2, True),
        (2, False),
        (2, False),
    ]
    assert threading.active_count() == threads


def test_wandb_is_asked_for_and_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    report(tmp_path, [0])
    with pytest.raises(InputError, match=r"pip install 'solrl_jax\[wandb\]'"):
        report(tmp_path, [], wandb=True)

    calls = []
    run = types.SimpleNamespace(
        log=lambda values: calls.append(values),
        define_metric=lambda *_, **__: None,
        finish=lambda: calls.append("end"),
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options["id"]) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for iteration in (1, 2):
        with Metrics(tmp_path, wandb=True, resume_after=99) as record:
            record.log(iteration, {"a": 0.5})
    assert calls[1:3] == [{"iteration": 1, "a": 0.5}, "end"]
    assert calls[0] == calls[3]

    (tmp_path / "wandb-id.txt").unlink()
    os.mkfifo(tmp_path / "wandb-id.txt")
    with pytest.raises(
        InputError, match=r"did not start: not a regular file$"
    ):  # and is not waited for
        report(tmp_path, [], wandb=True)

    def refuse(**_):
        raise RuntimeError("no key\nsecond line")

    (tmp_path / "wandb-id.txt").unlink()
    fake.init = refuse
    with pytest.raises(InputError, match=r"did not start: no key$"):
        report(tmp_path, [], wandb=True)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "folder" / "note.txt"
    atomic_write(path, "é")
    atomic_write(path, b"second")

    def interrupted():
        with atomic(path) as partial:
            assert partial.suffix == ".txt"
            partial.write_text("half")
            assert path.read_bytes() == b"second"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["note.txt"]
    (path.parent / ".partial-note.txt").write_text("left by a killed process, and longer")
    atomic_write(path, "third")
    assert path.read_text() == "third"
    assert os.listdir(path.parent) == ["note.txt"]


def test_a_link_that_somebody_planted_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".partial-mine").symlink_to(tmp_path / "theirs")
    atomic_write(tmp_path / "mine", "mine")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "theirs": "theirs",
        "mine": "mine",
    }


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "permission denied"),
    ],
)
def test_a_disk_that_refuses_is_one_line(tmp_path, monkeypatch, code, words):
    def refuse(*_):
        raise OSError(code, "whatever")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(RunError, match=rf"^{words} while writing .*note.txt$"):
            atomic_write(tmp_path / "note.txt", "x")
        with pytest.raises(
            InputError, match=rf"^the run directory .*/run cannot be written: {words}$"
        ):
            writable_directory(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(writable_directory(tmp_path / "run")) == []


def test_a_run_directory_must_be_a_directory(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError) as error:
            writable_directory(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(RunError, match="while writing"):
        atomic_write(tmp_path / "file" / "below", "x")
    assert writable_directory(tmp_path / "a" / "b").is_dir()


def test_of_a_link_to_a_directory_the_link_is_removed(tmp_path):
    """Whatever the link names, and wherever a kill or somebody else left one."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").touch()
    for name in ("000001", ".removing-000001", ".removing-new", ".partial-new"):
        (tmp_path / name).symlink_to("theirs")
    remove_directory(tmp_path / "000001")
    with atomic_directory(tmp_path / "new") as folder:
        (folder / "b").touch()
    assert sorted(os.listdir(tmp_path)) == ["new", "theirs"]
    assert os.listdir(tmp_path / "theirs") == ["a"]


def test_one_process_at_a_time(tmp_path):
    code = (
        "import sys; from pathlib import Path; from solrl_jax.storage.files import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])): pass"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def other():
        return subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    with exclusive_lock(tmp_path):
        assert "InputError: another process is using the run directory" in other().stderr
    assert other().returncode == 0
    assert json.dumps(os.listdir(tmp_path)) == '[".lock"]'
