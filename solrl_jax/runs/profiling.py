"""Traces of iterations, for TensorBoard and Perfetto.

    run.dir/profile/iteration-000003/plugins/profile/TIME/
        *.xplane.pb                 for TensorBoard
        perfetto_trace.json.gz      for ui.perfetto.dev

A trace names the phases of the iteration (`rl.phase_timer.PhaseTimer`). If there are several
processes, only the first writes one, of itself.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.profiler import stop_trace

from solrl_jax.errors import InputError, first_line
from solrl_jax.runs import checkpoint
from solrl_jax.storage import files
from solrl_jax.storage.stores import RunPath


def check_traced_iterations(profile: Collection[int], folder: RunPath, iterations: int) -> None:
    """Checks that iterations can be traced: that the run has them and has not done them yet.

    Args:
        profile: The numbers of the iterations to trace, from 1. If it is empty, nothing is checked.
        folder: The run directory. Its newest intact checkpoint tells which iterations are done.
        iterations: The number of iterations of the run.

    Raises:
        InputError: If a number is not in 1..`iterations`, or not after the newest checkpoint.
        RunError: If the directory of checkpoints cannot be read.
    """

    def join(numbers: Collection[int]) -> str:
        return ",".join(map(str, numbers))

    if outside := sorted(i for i in profile if not 1 <= i <= iterations):
        raise InputError(f"profile={join(outside)}: must be in 1..{iterations} (train.iterations)")
    newest = next(checkpoint.iterate_intact(folder / "checkpoints"), None) if profile else None
    if newest is not None and (
        done := sorted(i for i in profile if i <= (checkpoint.iteration_of(newest) or 0))
    ):
        raise InputError(
            f"profile={join(done)}: done already, see {newest}; name later ones or another run.dir"
        )


@contextlib.contextmanager
def traced(
    folder: RunPath, iteration: int, profile: Collection[int], report: Callable[[str], None]
) -> Iterator[None]:
    """A context manager that writes a JAX profiler trace of its body, if the body does not raise.

    Only the first process of a run writes a trace, of its own work. A trace that cannot be written
    is reported and does not stop the run: the other processes would wait for this one.

    Args:
        folder: The run directory. The trace is the directory `profile/iteration-NNNNNN` in it,
            which TensorBoard and Perfetto read; an older trace of the iteration is replaced.
        iteration: The number of the iteration that the body runs.
        profile: The numbers of the iterations to trace. If `iteration` is not among them, the body
            runs without a trace.
        report: Called with one line if the trace cannot be written. If the profiler fails to stop
            at the end of the body, it may stay in use, so that later iterations have no trace
            either.
    """
    if iteration not in profile or jax.process_index() > 0:
        yield
        return
    target = folder / "profile" / f"iteration-{iteration:06d}"

    def attempt(step: Callable[[], Any]) -> None:
        try:
            step()
        except Exception as error:  # JAX raises many kinds
            report(f"no trace of iteration {iteration}: {first_line(error)}")

    trace = contextlib.ExitStack()
    attempt(lambda: trace.enter_context(_trace_to(target)))
    try:
        with jax.profiler.StepTraceAnnotation("iteration", step_num=iteration):
            yield
    except BaseException:
        attempt(lambda: trace.__exit__(*sys.exc_info()))
        raise
    attempt(trace.close)


@contextlib.contextmanager
def _trace_to(target: RunPath) -> Iterator[None]:
    """A context manager that traces its body to a directory, which appears when it is complete.

    Args:
        target: The directory of the trace. An existing one is replaced, unless the body raises.

    Raises:
        RunError: If the disk refuses.
        RuntimeError: If JAX's profiler is in use, or cannot write for another reason.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace of every Python call would be large and slow
    with files.atomic_directory(target) as partial:
        jax.profiler.start_trace(partial, create_perfetto_trace=True, profiler_options=options)
        try:
            yield
        finally:
            with files.disk_errors_as_run_errors(target):
                stop_trace()
