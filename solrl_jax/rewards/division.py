"""Rewards outside JAX on several hosts: each host scores the images of its own devices.

Then all hosts share all scores.
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

    The rows of each chunk are divided over the devices of all hosts. Every host passes its part of
    each chunk to its own worker processes, and `finish` gathers the scores of all of them.
    """

    def __init__(self, local: Scoring, rows: list[int], count: int) -> None:
        """Every host makes one. `divided_scoring` does this.

        Args:
            local: Scores the images of this host.
            rows: The indices of these images among those of all hosts, in the order in which
                `local` gets them.
            count: The number of images of all hosts.
        """
        self._local = local
        self._rows = rows
        self._count = count
        self._error: RewardError | None = None

    def add(self, images: Float[Array, "b H W 3"]) -> None:
        """Passes on the rows of the next chunk that this host's devices hold.

        It copies them to this host, and may wait for the scores of an earlier chunk.

        Args:
            images: As many images [b, H, W, 3] as the `chunk` of `divided_scoring`. Those beyond
                the last prompt are padding and are not scored.

        Raises:
            RewardError: If a call failed, the run stops then, and there is only one host. With
                several hosts, the error is kept, further images are ignored and `finish` raises it,
                because until then the programs of the other hosts need this one.
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
        """Waits for the scores of all hosts. Every host must call it, once.

        Returns:
            All scores by name, float32 arrays [count] in the order of the prompts, with NaN for
            images without a score; and the number of images of all hosts that each reward could not
            score, by the name of the reward.

        Raises:
            RewardError: In every host, if a call failed in any host and the run stops then. A host
                without an error of its own raises that of the first host that has one.
            RunError: If another host does not answer.
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
    """A context manager with a `DividedScoring` for a series of images. Every host enters it.

    If the body raises, the calls of this host are dropped and its worker processes end.

    Args:
        host: The rewards outside JAX, and how their worker processes run.
        prompts: The prompt of each image of all hosts, in order.
        chunk: The number of images that come at once. The last chunk is padded to it.
        placement: The sharding of a chunk, which divides its rows over the devices of all hosts.

    Yields:
        The scoring, to which the body passes every chunk in order.
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
