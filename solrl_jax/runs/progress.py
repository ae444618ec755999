"""What the terminal shows: one bar over iterations, with the stage, the reward and the time left."""

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
    """Bars and lines on standard error. As a context manager it also handles Ctrl-C and SIGTERM.

    Standard output is for results alone.
    """

    def __init__(self, *, bars: bool = True) -> None:
        self.speaks = hosts.first()
        self._bars = bars and self.speaks and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._stage = ""
        self._rows = 0
        self._of = 0
        self._reward = ""
        self._first = 0
        self._last = 0
        self._began = time.monotonic()
        self._stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "TerminalProgress":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.stop()

    def _interrupt(self, number: int, frame: Any) -> None:
        # Only noted, because the state may be half updated now and could not be saved. A second signal stops at once.
        if self._stopping:
            raise SystemExit(130)
        self._stopping = True
        with contextlib.suppress(OSError):  # a terminal that was closed
            self.line("stopping after the chunk under way (again to stop at once, without saving)")

    def start(self, iterations: int, done: int) -> None:
        look = "iteration {n_fmt} of {total_fmt} |{bar:14}| {elapsed}, {remaining} left{postfix}"
        wide = (
            shutil.get_terminal_size().columns
        )  # 80 where a terminal does not know: for tqdm that would be no bar at all
        shown = {"bar_format": look, "ncols": wide, "disable": not self._bars, "file": sys.stderr}
        self._bar = tqdm(total=iterations, initial=done, **shown)
        self._first = done
        self._last = iterations
        self._began = time.monotonic()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def stage(self, name: str, rows: int, done: int) -> None:
        """Shows that `done` more of the `rows` rows of a stage are done; 0: the stage begins.

        Raises KeyboardInterrupt after a signal. Several hosts stop together, so only where a stage begins.
        """
        if self._asked(between_stages=not done):
            raise KeyboardInterrupt
        self._rows = self._rows + done if name == self._stage and done else 0
        self._stage = name
        self._of = rows
        self._show()

    def iteration(self, done: int, metrics: Mapping[str, float]) -> None:
        """Shows that iteration `done` is complete. Raises KeyboardInterrupt after a signal."""
        reward = metrics.get("kept/reward", float("nan"))
        self._reward = f" reward {reward:.3f}"
        if self._bar is not None:
            self._bar.update(1)
        if not self._bars:
            fidelity = metrics.get("fidelity/spearman", float("nan"))
            seconds = metrics.get("seconds", float("nan"))
            pool = metrics.get("pool/reward", float("nan"))
            each = (time.monotonic() - self._began) / max(done - self._first, 1)
            left = f"about {tqdm.format_interval(max(each * (self._last - done), 0))} left"
            self.line(
                f"iteration {done}: pool {pool:.3f}, kept {reward:.3f}, spearman {fidelity:.2f}, {seconds:.1f} s, {left}"
            )
        if self._asked(between_stages=True):
            raise KeyboardInterrupt

    def _asked(self, *, between_stages: bool) -> bool:
        if jax.process_count() == 1:
            return self._stopping
        return between_stages and hosts.anywhere([self._stopping])[0]

    def line(self, text: str) -> None:
        """Prints one line, above the bar."""
        if not self.speaks:
            return
        tqdm.write(one_line(text), file=sys.stderr)
        sys.stderr.flush()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._stage} {self._rows}/{self._of}{self._reward}")
