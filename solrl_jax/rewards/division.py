"""Rewards outside JAX, divided over hosts: each scores the pictures that its own devices made, and all learn all scores."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.parallel import hosts
from solrl_jax.rewards.host import Host, RewardError, Scoring, scoring

Scores = dict[str, Float[np.ndarray, " n"]]


class DividedScoring:
    """`Scoring` of a series of pictures that come from the devices in chunks, each split over them."""

    def __init__(self, mine: Scoring, rows: list[int], count: int) -> None:
        """mine: of this process's pictures, which are `rows` of the `count` there are."""
        self._mine, self._rows, self._count = mine, rows, count
        self._error: RewardError | None = None

    def add(self, images: Float[Array, "b H W 3"]) -> None:
        """Hands over the next chunk, of the size the series was said to have; what goes beyond the last picture is padding."""
        if self._error is not None:
            return
        try:
            self._mine.add(hosts.held(images))
        except RewardError as error:
            if jax.process_count() == 1:
                raise
            self._error = error  # the others have programs to run that need this process: they are told at the end

    def finish(self) -> tuple[Scores, dict[str, int]]:
        """All scores [count] by name, and how many pictures each reward could not score. Raises RewardError everywhere."""
        scores: Scores = {}
        try:
            if self._error is None:
                scores = self._mine.finish()
        except RewardError as error:
            self._error = error
        mine: dict[str, Any] = {
            "rows": self._rows, "failed": self._mine.failed, "error": None if self._error is None else str(self._error),
            "scores": {name: values.tolist() for name, values in scores.items()},
        }  # fmt: skip
        parts = hosts.everyones(mine)
        if errors := [part["error"] for part in parts if part["error"] is not None]:
            raise self._error or RewardError(errors[0])
        whole: Scores = {}
        for part in parts:
            for name, values in part["scores"].items():
                whole.setdefault(name, np.full(self._count, np.nan, np.float32))[part["rows"]] = values
        return whole, {name: sum(part["failed"][name] for part in parts) for name in self._mine.failed}


@contextlib.contextmanager
def divided_scoring(host: Host, prompts: Sequence[Prompt], chunk: int, where: NamedSharding) -> Iterator[DividedScoring]:
    """A `DividedScoring` of a picture a prompt, `chunk` of them at once, split as `where` says; see `scoring`."""
    held = hosts.rows_held(where, chunk)
    rows = [start + row for start in range(0, len(prompts), chunk) for row in held if start + row < len(prompts)]
    with scoring(host, [prompts[row] for row in rows]) as mine:
        yield DividedScoring(mine, rows, len(prompts))
