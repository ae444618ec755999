"""What a run reports. `metrics.jsonl` is the record; the other files repeat it.

    metrics.jsonl     one JSON object a line: {"iteration": 12, "reward": 0.61, ...}; null for what was not finite
    metrics.csv       a table, made from metrics.jsonl
    tensorboard/      TensorBoard scalars, if asked for

Each line is on the disk when `log` returns, so no checkpoint is newer than the record. A resumed run drops the lines after its
checkpoint, so its record is that of a run that was never interrupted.
"""

import contextlib
import csv
import io
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from solrl_jax.storage.errors import InputError, first_line
from solrl_jax.storage.files import atomic_write, disk_reason, writing

_JSONL, _CSV, _TENSORBOARD, _WANDB_ID = "metrics.jsonl", "metrics.csv", "tensorboard", "wandb-id.txt"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's record, in order; none if there is no record.

    An incomplete last line is left out: the run is writing it, or was killed. Raises InputError for any other bad line.
    """
    path = Path(run_dir) / _JSONL
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {disk_reason(error)}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["iteration"] = int(row["iteration"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise InputError(f"{path}: line {number} is not a line of metrics") from error
        rows.append(row)
    return rows


class Metrics:
    """The open record of one run. Use as a context manager, or `open` and `close` it."""

    def __init__(
        self, run_dir: Path, *, tensorboard: bool = False, wandb: bool = False, resume_after: int | None = None
    ) -> None:
        """Nothing is read or written before `open`.

        resume_after: rows of later iterations are dropped at `open`; None: all complete rows are kept.
        """
        self._run_dir = Path(run_dir)
        self._path = self._run_dir / _JSONL
        self._wants = {"tensorboard": tensorboard, "wandb": wandb}
        self._resume_after = resume_after
        self._closing = contextlib.ExitStack()
        self._file: int | None = None
        self._tensorboard: _TensorBoard | None = None
        self._wandb: Any = None

    def open(self) -> "Metrics":
        """Drops the rows that a resumed run reports again, and opens every output.

        Raises InputError if Weights & Biases is asked for and cannot start, RunError if the disk refuses.
        """
        rows = read(self._run_dir)
        if self._resume_after is not None:
            rows = [row for row in rows if row["iteration"] <= self._resume_after]
        with contextlib.ExitStack() as opened:
            atomic_write(self._path, "".join(json.dumps(row) + "\n" for row in rows))
            with writing(self._path):
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            opened.callback(os.close, self._file)
            if self._wants["tensorboard"]:
                purge = None if self._resume_after is None else self._resume_after + 1
                self._tensorboard = _TensorBoard(self._run_dir / _TENSORBOARD, purge)
                opened.callback(self._tensorboard.close)
            if self._wants["wandb"]:
                self._wandb = _start_wandb(self._run_dir)
                opened.callback(self._wandb.finish)
            self._closing = opened.pop_all()
        return self

    def close(self) -> None:
        """Closes every output. Closing twice is harmless."""
        self._closing.close()
        self._file = self._tensorboard = self._wandb = None

    def __enter__(self) -> "Metrics":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, iteration: int, values: Mapping[str, SupportsFloat]) -> None:
        """Appends one row. A value that is not finite is recorded as null.

        Raises RunError if the disk refuses; the record then ends with the previous row.
        """
        if self._file is None:
            raise RuntimeError("these metrics are not open")
        if "iteration" in values:
            raise ValueError('"iteration" is not a name for a metric')
        numbers = {name: float(value) for name, value in values.items()}
        row = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        with writing(self._path):
            _append(self._file, (json.dumps({"iteration": int(iteration), **row}) + "\n").encode())
        if self._tensorboard is not None:
            self._tensorboard.log(iteration, numbers)
        if self._wandb is not None:
            self._wandb.log({"iteration": int(iteration), **numbers})

    def write_csv(self) -> Path:
        """Makes `metrics.csv` from the record: a column for every name, empty where a row has no value."""
        rows = read(self._run_dir)
        names = dict.fromkeys(name for row in [{"iteration": 0}, *rows] for name in row)
        text = io.StringIO()
        table = csv.DictWriter(text, list(names), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        atomic_write(self._run_dir / _CSV, text.getvalue())
        return self._run_dir / _CSV


def _append(descriptor: int, line: bytes) -> None:
    """Appends a line and syncs it to the disk. If that fails, leaves the file as it was and raises OSError."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        written = 0
        while written < len(line):
            written += os.write(descriptor, line[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


class _TensorBoard:
    """TensorBoard scalars, each on the disk when `log` returns.

    tensorboardX's SummaryWriter writes in a thread. A full disk kills that thread, and the run hangs at the next event. So its
    event writer is called here, which raises.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Opens a new event file. TensorBoard then hides events of older files from `purge_step` on."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._folder, self._event, self._summary = folder, event_pb2.Event, summary_pb2.Summary
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The writer names a file by the second, so two starts within one second would share it.
            suffix = f".{len(list(folder.iterdir())):04d}"
            self._writer = EventsWriter(str(folder / "events"), suffix)
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._writer.write_event(self._event(wall_time=time.time(), step=purge_step, session_log=start))
            self._writer.flush()

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Writes one event with all values."""
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=v) for name, v in values.items()])
        with writing(self._folder):
            self._writer.write_event(self._event(wall_time=time.time(), step=iteration, summary=summary))
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file. All events are on the disk already, so an error now loses nothing."""
        with contextlib.suppress(OSError):
            self._writer.close()


def _start_wandb(run_dir: Path) -> Any:
    """Starts Weights & Biases, or continues the run that `run_dir` started before. Raises InputError if that fails."""
    try:
        import wandb
    except ImportError as error:
        raise InputError("Weights & Biases is not installed: pip install 'solrl_jax[wandb]'") from error
    identity = run_dir / _WANDB_ID
    if not identity.exists():
        atomic_write(identity, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(project="solrl_jax", name=run_dir.name, id=identity.read_text(), dir=str(run_dir), resume="allow")
    except Exception as error:
        raise InputError(f"Weights & Biases did not start: {first_line(error)}") from error
    # The service's own step can only grow, so it would drop the iterations that a resumed run repeats.
    run.define_metric("*", step_metric="iteration")
    return run
