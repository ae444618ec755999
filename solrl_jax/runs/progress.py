"""The output in the terminal: one bar over the iterations with phase, reward and remaining time."""

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm

from solrl_jax.errors import one_line
from solrl_jax.parallel import hosts


class TerminalProgress:
    """Shows progress on standard error: a bar in a terminal, otherwise one line per iteration.

    As a context manager, entered in the main thread, it also handles Ctrl-C and SIGTERM. The first
    signal is noted, and the next call of `phase` or `iteration` raises KeyboardInterrupt for it, so
    that nothing stops half-way; the second one ends the process. Leaving the context restores the
    earlier handlers and ends the bar.

    In a run of several processes, all must make the same calls of `phase` and `iteration`, because
    they agree there whether a signal has arrived in any of them.

    Attributes:
        speaks: Whether this process prints, which only the first process of a run does.
    """

    def __init__(self, *, bars: bool = True) -> None:
        """Creates the output without showing anything. Only the first process of a run prints.

        Args:
            bars: Whether a bar is shown if standard error is a terminal. Otherwise one line is
                printed per iteration.
        """
        self.speaks = hosts.is_first()
        self._bars = bars and self.speaks and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._phase = ""
        self._done = 0
        self._total = 0
        self._reward = ""
        self._first = 0
        self._last = 0
        self._began = time.monotonic()
        self._stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "TerminalProgress":
        """Replaces the handlers of SIGINT and SIGTERM, and returns itself. Shows nothing yet.

        In another thread than the main one, the handlers stay as they are.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the handlers of SIGINT and SIGTERM that `__enter__` replaced, and ends the bar
        (`stop`).

        Args:
            *_: The exception of the body, if it raised one. Not read, and not suppressed.
        """
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.stop()

    def _interrupt(self, number: int, frame: Any) -> None:
        """Handles a signal: notes the first one and prints a line.

        It does not raise at once, because the state may be half updated. `phase` or `iteration`
        raises KeyboardInterrupt for it later.

        Args:
            number: The number of the signal. Not read.
            frame: The interrupted stack frame. Not read.

        Raises:
            SystemExit: For the second signal, with code 130.
        """
        if self._stopping:
            raise SystemExit(130)
        self._stopping = True
        with contextlib.suppress(OSError):  # a terminal that was closed
            self.line("stopping after the current batch (again to stop at once, without saving)")

    def start(self, iterations: int, done: int) -> None:
        """Starts the bar over the iterations, and the clock for the remaining time.

        Outside of a terminal no bar is shown. Call it once, before `iteration`.

        Args:
            iterations: The number of iterations of the run.
            done: The number of complete ones.
        """
        self._bar = tqdm(
            total=iterations,
            initial=done,
            bar_format=(
                "iteration {n_fmt} of {total_fmt} |{bar:14}| {elapsed}, {remaining} left{postfix}"
            ),
            # tqdm shows no bar where a terminal does not know its width; this gives 80 then.
            ncols=shutil.get_terminal_size().columns,
            disable=not self._bars,
            file=sys.stderr,
        )
        self._first = done
        self._last = iterations
        self._began = time.monotonic()

    def stop(self) -> None:
        """Ends the bar, if there is one. Its last state stays in the terminal as a line. The
        handlers of signals stay.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def phase(self, name: str, total: int, done: int) -> None:
        """Shows how far a phase of an iteration has come.

        A phase begins with a call with `done` 0; further calls add to its count.

        Args:
            name: The name of the phase, e.g. "explore". Another name than in the last call also
                begins a phase, with the count 0; `done` is then not counted.
            total: The number of samples (for "encode": prompts) of the phase.
            done: The number of them that are done since the last call.

        Raises:
            KeyboardInterrupt: After a signal. If the run has several processes, only in calls with
                `done` 0, so that all stop together.
        """
        if self._is_interrupted(between_phases=not done):
            raise KeyboardInterrupt
        continues = name == self._phase and done
        self._done = self._done + done if continues else 0
        self._phase = name
        self._total = total
        self._show()

    def iteration(self, done: int, metrics: Mapping[str, float]) -> None:
        """Marks an iteration as complete: moves the bar, or prints a line if no bar is shown.

        Args:
            done: The number of the iteration.
            metrics: The metrics of the iteration by name, of which "kept/reward" and, in a line,
                "pool/reward", "fidelity/spearman" and "seconds" are shown; nan stands for one that
                is missing.

        Raises:
            KeyboardInterrupt: After a signal in any process of the run.
        """
        reward = metrics.get("kept/reward", float("nan"))
        self._reward = f" reward {reward:.3f}"
        if self._bar is not None:
            self._bar.update(1)
        if not self._bars:
            fidelity = metrics.get("fidelity/spearman", float("nan"))
            seconds = metrics.get("seconds", float("nan"))
            pool = metrics.get("pool/reward", float("nan"))
            per_iteration = (time.monotonic() - self._began) / max(done - self._first, 1)
            remaining = tqdm.format_interval(max(per_iteration * (self._last - done), 0))
            self.line(
                f"iteration {done}: pool {pool:.3f}, kept {reward:.3f}, spearman {fidelity:.2f}, "
                f"{seconds:.1f} s, about {remaining} left"
            )
        if self._is_interrupted(between_phases=True):
            raise KeyboardInterrupt

    def _is_interrupted(self, *, between_phases: bool) -> bool:
        """Whether a signal has arrived, in any process of the run.

        Args:
            between_phases: Whether every process of the run makes this call at the same point
                (where a phase or iteration begins or ends). If so, the call waits until all
                processes have agreed. If not, the result is False in a run of several processes.
                Not read for a single process.
        """
        if jax.process_count() == 1:
            return self._stopping
        return between_phases and hosts.any_flags([self._stopping])[0]

    def line(self, text: str) -> None:
        """Prints one line on standard error, above the bar if there is one. Only the first process
        prints; in the others, nothing happens.

        Args:
            text: The line. Line feeds in it become spaces, and control characters are escaped.
        """
        if not self.speaks:
            return
        tqdm.write(one_line(text), file=sys.stderr)
        sys.stderr.flush()

    def _show(self) -> None:
        """Shows the phase, its progress and the last reward behind the bar, if there is a bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._phase} {self._done}/{self._total}{self._reward}")
