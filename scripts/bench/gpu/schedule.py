"""Runs the steps in order, each in its own process, until the time is over.

Each process has all of the device's memory and its own high-water mark. A step that crashes or
hangs does not affect the others. JAX is not imported here, so that the steps can use the device.
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

# Steps for all models, before and after the steps for each model.
FIRST = ("facts", "checks", "kernels", "parity")
LAST = ("products",)
ALL = (*FIRST, *LAST)
EACH = ("steps", "rollout", "update")
# By model: a preset and its overrides.
PRESETS = {
    "sana": ("sana_sol_rl_pickscore",),
    "flux1": ("flux1_sol_rl_pickscore",),
    "sd3": ("sd3_sol_rl_pickscore",),
    "tiny": ("tiny",),
    "tiny-flux": ("tiny", "model=tiny-flux"),
    "tiny-sd3": ("tiny", "model=tiny-sd3"),
    "tiny-wan": ("tiny", "model=tiny-wan"),
}
# Models with trained weights, without which ranks have no meaning.
EMBEDDED = ("tiny", "tiny-flux", "tiny-sd3", "tiny-wan")
QUANTIZED = ("nvfp4", "fp8")  # formats that quantize
CPU = "-cpu"  # suffix of a model whose rewards are computed on the CPU
# Seconds that a step needs to start Python and JAX and to compile a first program.
LEAST = 15.0
# The largest share of the time, so that slow compilation leaves time for the models.
MOST = {"kernels": 0.25, "parity": 0.3, "products": 0.3}
SCRIPTS = Path(__file__).parents[2]
# JAX allocates 75 % of a GPU by default; `solrl plan` assumes this share.
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def tasks(template: Task, steps: Sequence[str]) -> Iterator[Task]:
    """Yields the tasks in the order in which they run: all of one model before the next.

    Args:
        template: A task with the fields that all tasks share.
        steps: The names of the requested steps.
    """
    yield from (replace(template, step=step) for step in FIRST if step in steps)
    yield from (
        replace(template, step=step, model=model)
        for model in template.models
        for step in EACH
        if step in steps
    )
    yield from (replace(template, step=step) for step in LAST if step in steps)


def run(todo: Sequence[Task], seconds: float, after: Callable[[Record], None]) -> None:
    """Runs all tasks for which there is time.

    Args:
        todo: The tasks.
        seconds: The time limit.
        after: Called with the record of each step, after it is written.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as processes:
        if seconds >= LEAST:
            for task in (task for task in todo if task.step == "parity"):
                processes.enter_context(references(task))
        for task in todo:
            remaining = deadline - time.monotonic()
            if remaining < LEAST:
                record = Record(
                    task.name,
                    SKIPPED,
                    f"{max(remaining, 0):.0f} of {seconds:.0f} s left, a step needs {LEAST:.0f}",
                )
            else:
                record = run_one(task, min(remaining, MOST.get(task.step, 1.0) * seconds))
            record.write(task.path)
            after(record)


def embedded(task: Task) -> list[Task]:
    """Returns the tasks that the CPU runs for a task of the step `parity`, one per pipeline.

    The pipelines are those of the task's models that are embedded, or all embedded ones if it has
    none.
    """
    models = [model for model in task.models if model in EMBEDDED] or EMBEDDED
    return [replace(task, step="rewards", model=model + CPU, formats=QUANTIZED) for model in models]


@contextlib.contextmanager
def references(task: Task) -> Iterator[None]:
    """Runs the CPU's processes for a task of the step `parity` while it is entered.

    Older records are deleted.
    """
    with contextlib.ExitStack() as processes:
        for there in embedded(task):
            there.path.unlink(missing_ok=True)
            processes.enter_context(started(there, session=True, JAX_PLATFORMS="cpu"))
        yield


def run_one(task: Task, most: float) -> Record:
    """Runs one step in its own process. The step writes each figure when it has it.

    Args:
        task: The step.
        most: The seconds after which it is stopped.

    Returns:
        Its record.
    """
    began = time.monotonic()
    is_over = False
    task.path.unlink(missing_ok=True)
    with started(task, session=True) as process:
        try:
            process.wait(most)
        except subprocess.TimeoutExpired:
            is_over = True
    record = Record.read(task.path) or Record(task.name)
    if is_over and record.state == RUNNING:
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
    """Starts the process of a step, and kills it on exit if it is still running.

    Args:
        task: The step.
        session: Whether the process gets a session of its own. Processes that it starts are then
            killed too.
        environment: Further environment variables.
    """
    path = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    around = MEMORY | os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, "-m", "bench.gpu.step", task.to_json()]
    process = subprocess.Popen(command, env=around, start_new_session=session)
    try:
        yield process
    finally:
        if session:  # all remaining processes of the session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            process.kill()
        process.wait()
