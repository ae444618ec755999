"""Wall time by stage, and how much of it was compilation."""

import contextlib
import functools
import time

import jax

from solrl_jax.rl.generate import Samples


class PhaseTimer:
    """Seconds by stage. A trace that is being written shows the stages by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._compiled = _compilations()
        self._before = len(_compilations())
        self._stage = ""
        self._began = 0.0
        self._shown = contextlib.ExitStack()

    def start(self, stage: str) -> None:
        """Ends the stage before, if there was one."""
        self.stop()
        self._shown.enter_context(jax.profiler.TraceAnnotation(stage))
        self._stage = stage
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends the stage."""
        if self._stage:
            self.seconds[self._stage], self._stage = time.perf_counter() - self._began, ""
        self._shown.close()

    def report(self, pool: Samples, kept: Samples | None) -> dict[str, float]:
        """Seconds by stage and in all, and pictures a second of the two rollouts."""
        rates = {"images_per_second/explore": len(pool.reward) / self.seconds["explore"]}
        if kept is not None:
            rates["images_per_second/regenerate"] = len(kept.reward) / self.seconds["regenerate"]
        total = {
            "seconds": sum(self.seconds.values()),
            "seconds/compile": sum(self._compiled[self._before :]),
        }
        return {f"seconds/{stage}": s for stage, s in self.seconds.items()} | rates | total


@functools.cache
def _compilations() -> list[float]:
    """Seconds of every compilation since the first call, in order. JAX adds to it; reading from JAX's cache counts too."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
