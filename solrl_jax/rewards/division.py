"""Rewards outside JAX on several hosts: each host scores the pictures of its own devices, then all hosts share all scores."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from solrl_jax.data.prompts import Prompt
from solrl_jax.parallel import hosts
from solrl_jax.rewards.host import RewardError, Scoring, scoring
from solrl_jax.rewards.protocol import Host

Scores = dict[str, Float[np.ndarray, " n"]]


class DividedScoring:
    """Scores a series of pictures that come from the devices in chunks. The rows of each chunk are split over the devices."""

    def __init__(self, mine: Scoring, rows: list[int], count: int) -> None:
        """mine: scores the pictures of this process. rows: their indices among all `count` pictures."""
        self._mine = mine
        self._rows = rows
        self._count = count
        self._error: RewardError | None = None

    def add(self, images: Float[Array, "b H W 3"]) -> None:
        """Passes on the next chunk, of the size given to `divided_scoring`. Pictures beyond the last prompt are padding."""
        if self._error is not None:
            return
        try:
            self._mine.add(hosts.held(images))
        except RewardError as error:
            if jax.process_count() == 1:
                raise
            self._error = error  # raised at the end: until then, the programs of the other processes need this process

    def finish(self) -> tuple[Scores, dict[str, int]]:
        """All scores [count] by name, and the number of pictures that each reward could not score.

        Raises RewardError in every process if one process failed.
        """
        scores: Scores = {}
        try:
            if self._error is None:
                scores = self._mine.finish()
        except RewardError as error:
            self._error = error
        mine: dict[str, Any] = {
            "rows": self._rows,
            "failed": self._mine.failed,
            "error": None if self._error is None else str(self._error),
            "scores": {name: values.tolist() for name, values in scores.items()},
        }
        parts = hosts.everyones(mine)
        if errors := [part["error"] for part in parts if part["error"] is not None]:
            raise self._error or RewardError(errors[0])
        whole: Scores = {}
        for part in parts:
            for name, values in part["scores"].items():
                whole.setdefault(name, np.full(self._count, np.nan, np.float32))[part["rows"]] = (
                    values
                )
        return whole, {
            name: sum(part["failed"][name] for part in parts) for name in self._mine.failed
        }


@contextlib.contextmanager
def divided_scoring(
    host: Host, prompts: Sequence[Prompt], chunk: int, where: NamedSharding
) -> Iterator[DividedScoring]:
    """A `DividedScoring` with one picture for each prompt. `chunk` pictures come at once, split over devices as in `where`."""
    held = hosts.rows_held(where, chunk)
    rows = [
        start + row
        for start in range(0, len(prompts), chunk)
        for row in held
        if start + row < len(prompts)
    ]
    with scoring(host, [prompts[row] for row in rows]) as mine:
        yield DividedScoring(mine, rows, len(prompts))
