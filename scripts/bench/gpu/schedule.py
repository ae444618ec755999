"""The steps in order, each in a process of its own, until the minutes are over. JAX is not imported: the device is the steps'.

A process of its own gives a step all of the device's memory, with a high-water mark of its own; a step that crashes or hangs
takes no other one with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu.record import CUT_OFF, FAILED, RUNNING, SKIPPED, Record, Task

FIRST, LAST = (
    ("facts", "kernels", "parity"),
    ("products",),
)  # of all models, before and after those of each
ALL = (*FIRST, *LAST)
EACH = ("steps", "rollout", "update")
PRESETS = {  # of a model: a preset and what is chosen beside it
    "sana": ("sana_sol_rl_pickscore",),
    "flux1": ("flux1_sol_rl_pickscore",),
    "sd3": ("sd3_sol_rl_pickscore",),
    "tiny": ("tiny",),
    "tiny-flux": ("tiny", "model=tiny-flux"),
    "tiny-sd3": ("tiny", "model=tiny-sd3"),
}
EMBEDDED = ("tiny", "tiny-flux", "tiny-sd3")  # have trained weights, so that ranks mean something
QUANTISED = ("nvfp4", "fp8")  # formats that quantise
CPU = "-cpu"  # ends the name of a model whose rewards are computed there
LEAST = 15.0  # seconds that a step needs: to start Python and JAX and to compile a first program
# The largest share of all the time: a CPU that compiles slowly must not take that of the models.
MOST = {"kernels": 0.25, "parity": 0.3, "products": 0.3}
SCRIPTS = Path(__file__).parents[2]
# JAX takes 75% of a GPU by itself; `solrl plan` counts on this much
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def tasks(of: Task, steps: Sequence[str]) -> Iterator[Task]:
    """The steps among `steps`, in their order: all of one model before the next. of: what they share."""
    yield from (replace(of, step=step) for step in FIRST if step in steps)
    yield from (
        replace(of, step=step, model=model) for model in of.models for step in EACH if step in steps
    )
    yield from (replace(of, step=step) for step in LAST if step in steps)


def run(todo: Sequence[Task], seconds: float, after: Callable[[Record], None]) -> None:
    """Runs all of `todo` that `seconds` suffice for. after: called with each step's record, which is written by then."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as processes:
        if seconds >= LEAST:
            for task in (task for task in todo if task.step == "parity"):
                processes.enter_context(references(task))
        for task in todo:
            left = deadline - time.monotonic()
            if left < LEAST:
                record = Record(
                    task.name,
                    SKIPPED,
                    f"{max(left, 0):.0f} of {seconds:.0f} s left, a step needs {LEAST:.0f}",
                )
            else:
                record = run_one(task, min(left, MOST.get(task.step, 1.0) * seconds))
            record.write(task.path)
            after(record)


def embedded(task: Task) -> list[Task]:
    """What the CPU computes for a task of the step `parity`: one task per pipeline.

    The pipelines are those of the task's models that are embedded, or all embedded ones if it has none.
    """
    models = [model for model in task.models if model in EMBEDDED] or EMBEDDED
    return [replace(task, step="rewards", model=model + CPU, formats=QUANTISED) for model in models]


@contextlib.contextmanager
def references(task: Task) -> Iterator[None]:
    """Within it, the CPU's processes of a task of the step `parity` run. Old records are deleted."""
    with contextlib.ExitStack() as processes:
        for there in embedded(task):
            there.path.unlink(missing_ok=True)
            processes.enter_context(started(there, session=True, JAX_PLATFORMS="cpu"))
        yield


def run_one(task: Task, most: float) -> Record:
    """One step in its own process, which is ended after `most` seconds. The step writes its figures as it finds them."""
    began = time.monotonic()
    ended = False
    task.path.unlink(missing_ok=True)
    with started(task, session=True) as process:
        try:
            process.wait(most)
        except subprocess.TimeoutExpired:
            ended = True
    record = Record.read(task.path) or Record(task.name)
    if ended and record.state == RUNNING:
        record.state = CUT_OFF
        record.reason = f"ended after the {most:.0f} s that it had"
    elif record.state == RUNNING:
        record.state = FAILED
        record.reason = (
            f"its process ended with {process.returncode}; a negative number is a signal's"
        )
    record.seconds = round(time.monotonic() - began, 2)
    return record


@contextlib.contextmanager
def started(
    task: Task, session: bool = False, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a step, ended on leaving if it still runs.

    session: with those that it starts, which end with it. Others are in the session of their parent.
    """
    path = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    around = MEMORY | os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, "-m", "bench.gpu.step", task.to_json()]
    process = subprocess.Popen(command, env=around, start_new_session=session)
    try:
        yield process
    finally:
        if session:  # whoever is left of it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            process.kill()
        process.wait()
