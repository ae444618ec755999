"""What the person at the terminal sees: one bar over iterations, with the stage, the reward and the time left."""

import signal
import sys
import threading
from typing import Any

import jax
from tqdm import tqdm

from solrl_jax.parallel import hosts


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; carries the last whole state and how many iterations it has behind it."""

    def __init__(self, state: Any, done: int) -> None:
        super().__init__(f"after iteration {done}")
        self.state, self.done = state, done


class Reporter:
    """Bars and lines on standard error; standard output is left to results. As a context manager it also handles signals."""

    def __init__(self, *, bars: bool = True) -> None:
        self.speaks = hosts.first()
        self._bars = bars and self.speaks and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._stage, self._rows, self._of = "", 0, 0
        self._reward = ""
        self._stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Reporter":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.stop()

    def _interrupt(self, number: int, frame: Any) -> None:
        # Only noted: the state is being replaced somewhere below, and a save needs a whole one. A second time means now.
        if self._stopping:
            raise SystemExit(1)
        self._stopping = True
        self.line("stopping after the chunk under way (again to stop at once, without saving)")

    def start(self, iterations: int, done: int) -> None:
        self._bar = tqdm(total=iterations, initial=done, unit="it", disable=not self._bars, file=sys.stderr)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def stage(self, name: str, rows: int, done: int) -> None:
        """`done` more of `rows` rows of a stage. Raises KeyboardInterrupt here, between chunks, when asked to stop.

        Several hosts stop together, between stages.
        """
        if self._asked(between_stages=not done):
            raise KeyboardInterrupt
        self._rows = self._rows + done if name == self._stage and done else 0
        self._stage, self._of = name, rows
        self._show()

    def iteration(self, done: int, metrics: dict[str, float]) -> None:
        reward = metrics.get("kept/reward", float("nan"))
        self._reward = f" reward {reward:.3f}"
        if self._bar is not None:
            self._bar.update(1)
        if not self._bars:
            fidelity, seconds = metrics.get("fidelity/spearman", float("nan")), metrics.get("seconds", float("nan"))
            pool = metrics.get("pool/reward", float("nan"))
            self.line(f"iteration {done}: pool {pool:.3f}, kept {reward:.3f}, spearman {fidelity:.2f}, {seconds:.1f} s")
        if self._asked(between_stages=True):
            raise KeyboardInterrupt

    def _asked(self, *, between_stages: bool) -> bool:
        if jax.process_count() == 1:
            return self._stopping
        return between_stages and hosts.anywhere([self._stopping])[0]

    def line(self, text: str) -> None:
        """One line that stays."""
        if not self.speaks:
            return
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._stage} {self._rows}/{self._of}{self._reward}")
