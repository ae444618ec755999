"""`PhaseTimer`: the wall time of the phases of an iteration, and of compilation."""

import contextlib
import functools
import time
from typing import Any

import jax


class PhaseTimer:
    """Measures the wall time of phases that follow each other: `start` begins one and ends the one
    before it, and `stop` ends the last.

    The phases also appear by name in a profiler trace that is being recorded. The first timer of a
    process registers a listener with JAX, which counts the seconds of all later compilations
    (`report` returns them).

    Attributes:
        seconds: The wall time in seconds of each phase that has ended, by name, in the order in
            which the phases ended. A name that is used again keeps its place and gets the later
            time.
    """

    def __init__(self) -> None:
        """Makes a timer without a running phase, which counts compilations from here on."""
        self.seconds: dict[str, float] = {}
        self._compiled = _compilations()
        self._before = len(_compilations())
        self._phase = ""
        self._began = 0.0
        self._annotation = contextlib.ExitStack()

    def start(self, phase: str) -> None:
        """Starts a phase. Also ends the phase before it, if one is running, and stores its time
        (`stop`).

        Args:
            phase: The name of the phase, which is not empty. If an earlier phase had the same name,
                its time is replaced by that of this phase.
        """
        self.stop()
        self._annotation.enter_context(jax.profiler.TraceAnnotation(phase))
        self._phase = phase
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends the running phase and stores its wall time in `seconds`, in place of an earlier time
        of the same name.

        It does not wait for the devices (the method `wait` does), and does nothing if no phase is
        running.
        """
        if self._phase:
            self.seconds[self._phase] = time.perf_counter() - self._began
            self._phase = ""
        self._annotation.close()

    def wait(self, arrays: Any) -> None:
        """Waits until arrays are computed, so that their time counts for the running phase.

        Args:
            arrays: A tree of arrays of JAX; leaves of other kinds are ignored.
        """
        jax.block_until_ready(arrays)

    def report(self, num_explored: int, num_regenerated: int | None) -> dict[str, float]:
        """Returns the metrics of an iteration that are times or images per second.

        Args:
            num_explored: The number of candidates (images or clips) that were explored.
            num_regenerated: The number of samples that were regenerated. None if nothing was
                regenerated (`rollout.regenerate` is False).

        Returns:
            Floats by name:

            * "seconds/PHASE": the wall time of each phase that has ended; "seconds": their sum. A
                running phase is left out and goes on.
            * "seconds/compile": the time of all compilations in this process since the timer was
                made. The times of the phases include it.
            * "images_per_second/explore": `num_explored` divided by the seconds of the phase
                "explore".
            * "images_per_second/regenerate": `num_regenerated` divided by the seconds of the phase
                "regenerate". Left out if `num_regenerated` is None.

        Raises:
            KeyError: If no phase "explore" has ended, or `num_regenerated` is given and no phase
                "regenerate" has.
        """
        rates = {"images_per_second/explore": num_explored / self.seconds["explore"]}
        if num_regenerated is not None:
            rates["images_per_second/regenerate"] = num_regenerated / self.seconds["regenerate"]
        total = {
            "seconds": sum(self.seconds.values()),
            "seconds/compile": sum(self._compiled[self._before :]),
        }
        return {f"seconds/{phase}": s for phase, s in self.seconds.items()} | rates | total


@functools.cache
def _compilations() -> list[float]:
    """Returns the seconds of every compilation in this process since the first call, in order.

    All callers share the list, which keeps growing: the first call registers a listener with JAX
    that appends to it. Reading a program from JAX's compilation cache counts as a compilation.
    """
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
