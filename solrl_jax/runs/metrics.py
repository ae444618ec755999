"""What a run reports. `metrics.jsonl` is the record; TensorBoard and Weights & Biases repeat it.

    metrics.jsonl     one JSON object a line: {"iteration": 12, "reward": 0.61, ...}; null for what was not finite
    tensorboard/      TensorBoard scalars, if asked for

Each line is on the disk when `log` returns, so no checkpoint is newer than the record. A resumed run drops the lines after its
checkpoint, so its record is that of a run that was never interrupted.
"""

import contextlib
import io
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from solrl_jax.config.values import MAX_NUMBER
from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.files import atomic_write, writing
from solrl_jax.storage.readers import parse_json, read_bytes, read_text, strict

Log = Callable[[int, dict[str, float]], Any]  # writes the values of an iteration
# of a record: 10 000 iterations of 6 kB
MOST_BYTES = 2**26
MOST_ROWS = 2**16
MOST_LINE = 2**16  # bytes of a row
_JSONL = "metrics.jsonl"
_TENSORBOARD = "tensorboard"
_WANDB_ID = "wandb-id.txt"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's record, in order; none if there is no record.

    A line that is damaged is left out, and an incomplete last one, which the run is writing or could not end.
    """
    return _read(Path(run_dir) / _JSONL)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows that can be read, and whether something else is there beside an incomplete last line."""
    try:
        if (data := read_bytes(path, MOST_BYTES)).count(b"\n") > MOST_ROWS:
            raise ValueError
    except FileNotFoundError:
        return [], False
    except (OSError, ValueError):
        return [], True
    rows = []
    bad = 0
    at_end = False
    for line in filter(
        bytes.strip, io.BytesIO(data)
    ):  # line by line: a list of them all would take many times their bytes
        at_end = False
        try:
            row = parse_json(line[:MOST_LINE])  # what is longer is no JSON then
            known = [value for value in row.values() if value is not None]
            if type(row["iteration"]) is not int or not all(
                type(value) in (int, float) and abs(value) <= MAX_NUMBER for value in known
            ):
                raise ValueError
            rows.append(row)
        except (ValueError, TypeError, KeyError, AttributeError):
            bad = bad + 1
            at_end = True
    return rows, bad > at_end


def import_wandb() -> Any:
    """The client of Weights & Biases. Raises InputError if it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise InputError(
            "run.wandb: Weights & Biases is not installed: pip install 'solrl_jax[wandb]'"
        ) from error
    return wandb


class Metrics:
    """The record of one run; a context manager that opens it. Nothing is read or written before."""

    def __init__(
        self, run_dir: Path, *, tensorboard: bool = False, wandb: bool = False, resume_after: int
    ) -> None:
        """resume_after: rows of later iterations are dropped when the record is opened; -1: all are."""
        self._run_dir = Path(run_dir)
        self._path = Path(run_dir) / _JSONL
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._resume_after = resume_after
        self._closing = contextlib.ExitStack()
        self._logs: list[Log] = []  # one an output, the record first
        self.rows: list[dict[str, Any]] = []  # the record
        self.set_aside: Path | None = None  # where a damaged record was moved to

    def __enter__(self) -> "Metrics":
        """Raises InputError if Weights & Biases is asked for and cannot start, RunError if the disk refuses."""
        rows, damaged = _read(self._path)
        if damaged:
            self.set_aside = self._path.with_name(f"metrics-damaged-{time.time_ns()}.jsonl")
            with writing(self.set_aside):
                os.replace(self._path, self.set_aside)
        rows = [row for row in rows if row["iteration"] <= self._resume_after]
        with contextlib.ExitStack() as opened:
            logs = [opened.enter_context(_record(self._path, rows))]
            if self._tensorboard:
                logs.append(
                    opened.enter_context(
                        _tensorboard(self._run_dir / _TENSORBOARD, self._resume_after + 1)
                    )
                )
            if self._wandb:
                logs.append(opened.enter_context(_weights_and_biases(self._run_dir)))
            self._closing = opened.pop_all()
            self._logs = logs
            self.rows = rows
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def log(self, iteration: int, values: Mapping[str, SupportsFloat]) -> None:
        """Appends one row. A value that is not finite is recorded as null.

        Raises RunError if the disk refuses; the record then ends with the previous row.
        """
        numbers = {name: float(value) for name, value in values.items()}
        for log in self._logs:
            log(int(iteration), numbers)
        self.rows.append({"iteration": int(iteration), **strict(numbers)})


@contextlib.contextmanager
def _record(path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[Log]:
    """Opens the record with these rows in it. A line that cannot be written and synced leaves the file as it was."""
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))

    def log(iteration: int, values: dict[str, float]) -> None:
        line = (json.dumps({"iteration": iteration, **strict(values)}) + "\n").encode()
        with writing(path):
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                while line:
                    line = line[os.write(file, line) :]
                os.fsync(file)
            except OSError:
                os.ftruncate(file, end)
                raise

    with writing(path):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        yield log
    finally:
        os.close(file)


@contextlib.contextmanager
def _tensorboard(folder: Path, purge_step: int) -> Iterator[Log]:
    """Opens a new event file. TensorBoard then hides events of older files from `purge_step` on.

    tensorboardX's SummaryWriter writes in a thread. A full disk kills that thread, and the run hangs at the next event. So its
    event writer is called here, which raises.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    def write(step: int, **content: Any) -> None:
        writer.write_event(Event(wall_time=time.time(), step=step, **content))
        writer.flush()

    def log(iteration: int, values: dict[str, float]) -> None:
        with writing(folder):
            write(
                iteration,
                summary=Summary(
                    value=[Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
                ),
            )

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The writer names a file by the second, so two starts within one second would share it.
        writer = EventsWriter(str(folder / "events"), f".{len(list(folder.iterdir())):04d}")
        writer.flush()
        write(purge_step, session_log=SessionLog(status=SessionLog.START))
    try:
        yield log
    finally:
        with contextlib.suppress(
            OSError
        ):  # all events are on the disk already, so an error now loses nothing
            writer.close()


@contextlib.contextmanager
def _weights_and_biases(run_dir: Path) -> Iterator[Log]:
    """Starts Weights & Biases, or continues the run that `run_dir` started before. Raises InputError if that fails."""
    wandb = import_wandb()
    identity = run_dir / _WANDB_ID
    if not identity.exists():
        atomic_write(identity, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project="solrl_jax",
            name=run_dir.name,
            id=read_text(identity),
            dir=str(run_dir),
            resume="allow",
        )
    except Exception as error:
        raise InputError(f"Weights & Biases did not start: {first_line(error)}") from error
    # The service's own step can only grow, so it would drop the iterations that a resumed run repeats.
    run.define_metric("*", step_metric="iteration")
    try:
        yield lambda iteration, values: run.log({"iteration": iteration, **values})
    finally:
        run.finish()
