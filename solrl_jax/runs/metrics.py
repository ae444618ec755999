"""The record of a run: `metrics.jsonl`, repeated by TensorBoard and Weights & Biases if configured.

    metrics.jsonl     one JSON object per line: {"iteration": 12, "reward": 0.61, ...}; values that
                      were not finite are null
    tensorboard/      the same values as TensorBoard scalars

Each line is on the disk when `log` returns, so no checkpoint is newer than the record. In an object
store, which cannot append to a file, `log` writes the files anew. A resumed run drops the lines
after its checkpoint, so its record equals that of a run that was never interrupted.
"""

import contextlib
import io
import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from solrl_jax.config.values import MAX_NUMBER
from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.files import (
    STAGING,
    atomic_write,
    check_owner,
    disk_errors_as_run_errors,
    move,
    upload_directory,
)
from solrl_jax.storage.readers import parse_json, read_bytes, read_text, to_strict_json
from solrl_jax.storage.stores import RunPath, StorePath, run_path

# A function (iteration, values by name) that writes a row to one output.
Log = Callable[[int, dict[str, float]], Any]
# The largest record that is read, in bytes and rows: at least 40 000 iterations of 6 kB.
MAX_BYTES = 2**28
MAX_ROWS = 2**18
MAX_LINE_BYTES = 2**16
_JSONL = "metrics.jsonl"
_TENSORBOARD = "tensorboard"
_WANDB_ID = "wandb-id.txt"


def read(run_dir: RunPath) -> list[dict[str, Any]]:
    """Reads the rows of a run's `metrics.jsonl`, in order.

    Damaged lines are left out, and so is an incomplete last line, which the run may be writing. A
    file that cannot be read counts as one without rows.

    Args:
        run_dir: The run directory.

    Returns:
        One dict per row: "iteration" (an int) and the recorded numbers by name, None where a value
        was not finite. An iteration may have several rows. [] if there is no file.

    Raises:
        InputError: If the file is larger than `MAX_BYTES` (256 MiB) or has more than `MAX_ROWS`
            (2**18) lines.
    """
    rows, _ = _read(run_path(run_dir) / _JSONL)
    return rows


def by_iteration(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Merges the rows of each iteration.

    An iteration has several rows if the run stopped before its evaluation, which a later start then
    recorded in a row of its own.

    Args:
        rows: Rows in the order in which they were recorded, each with "iteration" and values by
            name.

    Returns:
        One new row per iteration by its number, in the order of their first rows, with "iteration".
        If a name has several values, the last one counts, even if it is None.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["iteration"], {}).update(row)
    return merged


def _read(path: RunPath) -> tuple[list[dict[str, Any]], bool]:
    """Reads the rows of a file `metrics.jsonl`, and notices damage.

    A line is readable if it is a JSON object of at most `MAX_LINE_BYTES` (64 KiB) with an integer
    "iteration" and otherwise numbers within float32 and nulls.

    Args:
        path: The file. If it is missing, there are no rows and no damage.

    Returns:
        A tuple: the rows of the readable lines in order, and whether the file is damaged. It is
        damaged if it cannot be read (there are no rows then), or if a line before the last one is
        unreadable.

    Raises:
        InputError: If the file is larger than `MAX_BYTES` (256 MiB) or has more than `MAX_ROWS`
            (2**18) lines.
    """
    too_large = InputError(
        f"{path}: has more than {MAX_BYTES >> 20} MiB or {MAX_ROWS} rows, the most that are read; "
        "move it to another directory, and the run continues without its older rows"
    )
    try:
        data = read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        return [], False
    except OSError:
        return [], True
    except ValueError:  # larger, or not a file
        if path.is_file():
            raise too_large from None
        return [], True
    if data.count(b"\n") > MAX_ROWS:
        raise too_large
    rows = []
    num_bad = 0
    last_is_bad = False
    # One line at a time, because a list of all lines would take many times their bytes.
    for line in filter(bytes.strip, io.BytesIO(data)):
        last_is_bad = False
        try:
            row = parse_json(line[:MAX_LINE_BYTES])  # a longer line is no JSON then
            known = [value for value in row.values() if value is not None]
            if type(row["iteration"]) is not int or not all(
                type(value) in (int, float) and abs(value) <= MAX_NUMBER for value in known
            ):
                raise ValueError
            rows.append(row)
        except (ValueError, TypeError, KeyError, AttributeError):
            num_bad += 1
            last_is_bad = True
    return rows, num_bad > last_is_bad


def import_wandb() -> Any:
    """Imports and returns the module `wandb` of Weights & Biases.

    Raises:
        InputError: If it is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise InputError(
            "run.wandb: Weights & Biases is not installed: pip install 'solrl_jax[wandb]'"
        ) from error
    return wandb


class Metrics:
    """Writes the metrics of one run to `metrics.jsonl` and, if configured, to TensorBoard and W&B.

    It is a context manager, which only one process of a run enters. Entering it opens the outputs
    and reads the rows of an earlier start; leaving it closes the outputs. Rows after the iteration
    from which the run resumes are dropped, also from the file. TensorBoard hides them, and W&B
    keeps them.

    Attributes:
        rows: All rows up to now, in order: dicts of "iteration" and the values by name, None where
            one was not finite. Empty before the context is entered.
        set_aside: The path, in the run directory, to which a damaged `metrics.jsonl` was moved on
            entering. None if it was not damaged.
    """

    def __init__(
        self, run_dir: RunPath, *, tensorboard: bool = False, wandb: bool = False, resume_after: int
    ) -> None:
        """Creates the record without opening it.

        Args:
            run_dir: The run directory.
            tensorboard: Whether the values are also written for TensorBoard.
            wandb: Whether they are also sent to Weights & Biases.
            resume_after: The last iteration whose rows are kept when the record is opened. 0 keeps
                only the rows from before training. -1: no rows are kept.
        """
        self._run_dir = run_path(run_dir)
        self._path = self._run_dir / _JSONL
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._resume_after = resume_after
        self._closing = contextlib.ExitStack()
        self._logs: list[Log] = []  # one per output, the record first
        self.rows: list[dict[str, Any]] = []
        self.set_aside: RunPath | None = None

    def __enter__(self) -> "Metrics":
        """Opens the record and all other outputs.

        The file is written anew without the rows after the iteration `resume_after`. A damaged file
        is moved aside first, to the path `set_aside`, and its readable rows are kept.

        Returns:
            The record itself. Its `rows` are the kept rows.

        Raises:
            InputError: If `metrics.jsonl` is too large to be read, or if Weights & Biases is
                configured and cannot start.
            RunError: If the disk refuses. Outputs that were opened are closed again.
        """
        rows, damaged = _read(self._path)
        if damaged:
            self.set_aside = self._path.with_name(f"metrics-damaged-{time.time_ns()}.jsonl")
            move(self._path, self.set_aside)
        rows = [row for row in rows if row["iteration"] <= self._resume_after]
        with contextlib.ExitStack() as opened:
            outputs = [
                _stored_record(self._path, rows)
                if isinstance(self._path, StorePath)
                else _open_jsonl(self._path, rows)
            ]
            if self._tensorboard:
                folder = self._run_dir / _TENSORBOARD
                purge_step = self._resume_after + 1
                outputs.append(
                    _stored_tensorboard(folder, purge_step)
                    if isinstance(folder, StorePath)
                    else _tensorboard(folder, purge_step)
                )
            if self._wandb:
                outputs.append(_weights_and_biases(self._run_dir))
            logs = [opened.enter_context(output) for output in outputs]
            self._closing = opened.pop_all()
            self._logs = logs
            self.rows = rows
        return self

    def __exit__(self, *_: object) -> None:
        """Closes all outputs. An error of Weights & Biases at the end of its run propagates.

        Args:
            *_: The exception of the body, if it raised one. Not read, and not suppressed.
        """
        self._closing.close()

    def log(self, iteration: int, values: Mapping[str, SupportsFloat]) -> None:
        """Appends one row to every output, and to `rows`. Call it within the context only.

        When it returns, the row is on the disk or in the store.

        Args:
            iteration: The number of the iteration; 0 before training.
            values: The values by name, e.g. "kept/reward", each a number or a scalar array. A value
                that is not finite in float32 becomes null in `metrics.jsonl` and None in `rows`.

        Raises:
            RunError: If the disk or the store refuses, or if another start has taken over a run
                directory in a store. `rows` then lacks the row, and so does `metrics.jsonl` if it
                was the file that could not be written.
            Exception: Any error of Weights & Biases, unchanged. `rows` then lacks the row, but
                `metrics.jsonl` has it.
        """
        numbers = {name: _in_float32_range(float(value)) for name, value in values.items()}
        for log in self._logs:
            log(int(iteration), numbers)
        self.rows.append({"iteration": int(iteration), **to_strict_json(numbers)})


def _in_float32_range(value: float) -> float:
    """Returns `value`, or infinity with its sign if it is beyond float32 (`MAX_NUMBER`), which no
    reader of the record accepts."""
    return math.copysign(math.inf, value) if abs(value) > MAX_NUMBER else value


@contextlib.contextmanager
def _open_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[Log]:
    """Opens `metrics.jsonl` for appending, as a context manager.

    Args:
        path: The file. An existing one is replaced when the context is entered.
        rows: The rows that the new file begins with, dicts of "iteration" and values by name.

    Yields:
        A function (iteration, values by name) that appends a row and waits until it is on the disk.
        Values that are not finite are written as null. It raises RunError if the disk refuses, and
        then leaves the file as it was.

    Raises:
        RunError: If the disk refuses.
    """
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))

    def log(iteration: int, values: dict[str, float]) -> None:
        line = (json.dumps({"iteration": iteration, **to_strict_json(values)}) + "\n").encode()
        with disk_errors_as_run_errors(path):
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                while line:
                    line = line[os.write(file, line) :]
                os.fsync(file)
            except OSError:
                os.ftruncate(file, end)
                raise

    with disk_errors_as_run_errors(path):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        yield log
    finally:
        os.close(file)


@contextlib.contextmanager
def _tensorboard(folder: Path, purge_step: int, older: int | None = None) -> Iterator[Log]:
    """Opens a new event file of TensorBoard, as a context manager.

    Args:
        folder: The directory of the event file. It is created if necessary.
        purge_step: The first iteration that this start of the run writes. From this iteration on,
            TensorBoard hides the events of older files in the same directory.
        older: The number of event files of earlier starts. The name of the new file ends in this
            number, so that no two names are equal. None: the number of entries in `folder`.

    Yields:
        A function (iteration, values by name) that writes a row, also values that are not finite,
        and flushes it. It raises RunError if the disk refuses.

    Raises:
        RunError: If the disk refuses.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    def write(step: int, **content: Any) -> None:
        writer.write_event(Event(wall_time=time.time(), step=step, **content))
        writer.flush()

    def log(iteration: int, values: dict[str, float]) -> None:
        with disk_errors_as_run_errors(folder):
            write(
                iteration,
                summary=Summary(
                    value=[Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
                ),
            )

    with disk_errors_as_run_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The writer names a file by the second, so two starts within one second would share it.
        number = len(list(folder.iterdir())) if older is None else older
        writer = EventsWriter(str(folder / "events"), f".{number:04d}")
        writer.flush()
        write(purge_step, session_log=SessionLog(status=SessionLog.START))
    try:
        yield log
    finally:
        # All events are on the disk already, so an error in `close` loses nothing.
        with contextlib.suppress(OSError):
            writer.close()


@contextlib.contextmanager
def _stored_record(path: StorePath, rows: Sequence[Mapping[str, Any]]) -> Iterator[Log]:
    """Opens `metrics.jsonl` in an object store (gs://, s3://), as a context manager.

    Args:
        path: The file, in a run directory that this process has taken over
            (`files.exclusive_lock`). An existing one is replaced when the context is entered.
        rows: The rows that the new file begins with, dicts of "iteration" and values by name.

    Yields:
        A function (iteration, values by name) that adds a row. A store cannot append, so it writes
        the whole file anew. Values that are not finite are written as null. It raises RunError if
        the store refuses, or if another start has taken over the run directory.

    Raises:
        RunError: If the store refuses.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows)
    atomic_write(path, text)

    def log(iteration: int, values: dict[str, float]) -> None:
        nonlocal text
        check_owner(path.parent)
        longer = text + json.dumps({"iteration": iteration, **to_strict_json(values)}) + "\n"
        atomic_write(path, longer)
        text = longer

    yield log


@contextlib.contextmanager
def _stored_tensorboard(folder: StorePath, purge_step: int) -> Iterator[Log]:
    """Opens a new event file of TensorBoard in an object store, as a context manager.

    The file is written to a temporary directory, and uploaded anew after every row.

    Args:
        folder: The directory in the store that has one event file per start of the run.
        purge_step: The first iteration that this start of the run writes. From this iteration on,
            TensorBoard hides the events of older files.

    Yields:
        A function (iteration, values by name) that adds a row, also values that are not finite, and
        uploads the file. It raises RunError if the disk or the store refuses.

    Raises:
        RunError: If the disk or the store refuses.
    """
    with contextlib.ExitStack() as stack:
        with disk_errors_as_run_errors(folder):
            older = len(folder.file_sizes())
            events = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=STAGING)))
        log_here = stack.enter_context(_tensorboard(events, purge_step, older))

        def log(iteration: int, values: dict[str, float]) -> None:
            log_here(iteration, values)
            with disk_errors_as_run_errors(folder):
                upload_directory(events, folder)

        yield log


@contextlib.contextmanager
def _weights_and_biases(run_dir: RunPath) -> Iterator[Log]:
    """Starts a run of Weights & Biases, as a context manager that also ends it.

    The project is "solrl_jax", and the run has the name of the directory. If the directory has the
    id of an earlier start, that run is continued; otherwise a new id is written to it. Errors of
    `run.log` and `run.finish` propagate unchanged.

    Args:
        run_dir: The run directory, which has the id of the run in `wandb-id.txt` and the files of
            Weights & Biases in `wandb`. If it is in a store, the directory `wandb` is in the
            working directory.

    Yields:
        A function (iteration, values by name) that hands over a row, which is sent later. The
        horizontal axis of its curves is "iteration" and not the service's own step, so a resumed
        run may repeat iterations; the earlier rows stay.

    Raises:
        InputError: If Weights & Biases is not installed or cannot start.
        RunError: If the id cannot be written.
    """
    wandb = import_wandb()
    identity = run_dir / _WANDB_ID
    if not identity.exists():
        atomic_write(identity, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project="solrl_jax",
            name=run_dir.name,
            id=read_text(identity),
            dir=None if isinstance(run_dir, StorePath) else str(run_dir),
            resume="allow",
        )
    except Exception as error:
        raise InputError(f"Weights & Biases did not start: {first_line(error)}") from error
    # The service's own step can only grow, and would drop iterations that a resumed run repeats.
    run.define_metric("*", step_metric="iteration")
    try:
        yield lambda iteration, values: run.log({"iteration": iteration, **values})
    finally:
        run.finish()
