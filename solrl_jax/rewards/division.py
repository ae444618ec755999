"""Rewards outside JAX on several hosts: each host scores the images of its own devices, and then
all hosts share all scores.
"""

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
from solrl_jax.rewards.protocol import HostRewards

Scores = dict[str, Float[np.ndarray, " n"]]


class DividedScoring:
    """Scores a series of images that come from the devices in chunks.

    The rows of each chunk are divided over the devices of all hosts.
    """

    def __init__(self, local: Scoring, rows: list[int], count: int) -> None:
        """Every host makes one.

        Args:
            local: Scores the images of this host.
            rows: The indices of these images among those of all hosts.
            count: The number of images of all hosts.
        """
        self._local = local
        self._rows = rows
        self._count = count
        self._error: RewardError | None = None

    def add(self, images: Float[Array, "b H W 3"]) -> None:
        """Passes on the next chunk.

        Args:
            images: As many images as were given to `divided_scoring`. Those beyond the last prompt
                are padding.

        Raises:
            RewardError: If a call failed, the run stops then, and there is only one host. With
                several hosts, `finish` raises it, because until then the programs of the other
                hosts need this one.
        """
        if self._error is not None:
            return
        try:
            self._local.add(hosts.held(images))
        except RewardError as error:
            if jax.process_count() == 1:
                raise
            self._error = error

    def finish(self) -> tuple[Scores, dict[str, int]]:
        """Waits for the scores of all hosts.

        Returns:
            All scores by name, and the number of images that each reward could not score.

        Raises:
            RewardError: In every host, if a call failed in any host and the run stops then.
        """
        scores: Scores = {}
        try:
            if self._error is None:
                scores = self._local.finish()
        except RewardError as error:
            self._error = error
        part: dict[str, Any] = {
            "rows": self._rows,
            "failed": self._local.failed,
            "error": None if self._error is None else str(self._error),
            "scores": {name: values.tolist() for name, values in scores.items()},
        }
        parts = hosts.everyones(part)
        errors = [part["error"] for part in parts if part["error"] is not None]
        if errors:
            raise self._error or RewardError(errors[0])
        all_scores: Scores = {}
        for part in parts:
            for name, values in part["scores"].items():
                if name not in all_scores:
                    all_scores[name] = np.full(self._count, np.nan, np.float32)
                all_scores[name][part["rows"]] = values
        failed = {name: sum(part["failed"][name] for part in parts) for name in self._local.failed}
        return all_scores, failed


@contextlib.contextmanager
def divided_scoring(
    host: HostRewards, prompts: Sequence[Prompt], chunk: int, placement: NamedSharding
) -> Iterator[DividedScoring]:
    """Yields a `DividedScoring` for a series of images.

    Args:
        host: The rewards outside JAX.
        prompts: The prompt of each image, in order.
        chunk: The number of images that come at once.
        placement: How the rows of a chunk are divided over the devices.
    """
    local_rows = hosts.rows_held(placement, chunk)
    rows = [
        start + row
        for start in range(0, len(prompts), chunk)
        for row in local_rows
        if start + row < len(prompts)
    ]
    with scoring(host, [prompts[row] for row in rows]) as local:
        yield DividedScoring(local, rows, len(prompts))
