"""Rewards outside JAX on several hosts: each host scores the images of its own devices.

Afterwards every host gets all scores. Rewards that compare images need all images of a group. With
n hosts, each then gets the images of all hosts, and scores every n-th group. Rewards of clips get
whole clips. All other rewards get some frames of each clip as images.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from solrl_jax.data.prompts import Prompt
from solrl_jax.parallel import hosts
from solrl_jax.rewards.frames import mean_over_frames, sample_frames_on_mesh
from solrl_jax.rewards.groups import group_slices
from solrl_jax.rewards.host import HostScoring, RewardError, open_scoring
from solrl_jax.rewards.protocol import HostRewards

Scores = dict[str, Float[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a series of images that this process scores, and the object that scores it.

    With several processes, each has up to two shares: one for the rewards that score each image
    alone, and one for those that compare the images of a group. A single process has one for all.

    Attributes:
        scoring: Passes the images of the share to the worker processes of this host. It knows which
            rewards to call.
        rows: The indices of the images of the share in the whole series, ascending.
        gathers: False: all images of the share are on this process's devices. True: some may be on
            the devices of other processes, so every chunk must be gathered from all hosts first.
    """

    scoring: HostScoring
    rows: list[int]
    gathers: bool


class DividedScoring:
    """Scores a series of images with the rewards outside JAX, divided over the hosts of a run.

    Images arrive in chunks, one call of `add` per chunk, in order. Each host scores the rows of a
    chunk that are on its own devices, with its own worker processes. For rewards that compare the
    images of a group, each of n hosts scores every n-th group instead. `finish` returns the scores
    of all hosts to every host. `divided_scoring` makes it.
    """

    def __init__(self, shares: list[Share], count: int) -> None:
        """Keeps the shares. `divided_scoring` calls this, in every process.

        Args:
            shares: One entry for the rewards that score each image alone and one for those that
                compare images; either may be missing. With a single process, one entry for all
                rewards.
            count: The number of images of the series, those of all processes together.
        """
        self._shares = shares
        self._count = count
        self._num_added = 0
        self._error: RewardError | None = None

    def add(self, images: Float[Array, "b ... 3"]) -> None:
        """Starts the scoring of this host's part of the next chunk. Every host must call it.

        It waits until the devices have computed the images, and possibly for the scores of an
        earlier chunk. If a reward compares images and there are several hosts, it also copies the
        whole chunk to every host.

        Args:
            images: The next chunk [chunk, H, W, 3] in [0, 1], of any floating dtype, a global array
                whose rows are divided over the devices of all hosts. Rows beyond the last image of
                the series are padding and are not scored. For rewards of clips, clips [chunk, T, H,
                W, 3].

        Raises:
            RewardError: With a single host, if an earlier call of a reward failed and
                `HostRewards.skip` is false, or if 32 calls of one reward in a row, also those of
                earlier series, gave no score at all. With several hosts the error is kept, the
                images are ignored from then on, and `finish` raises it, so that no host waits for
                one that has stopped.
        """
        first = self._num_added
        self._num_added += len(images)
        for share in self._shares:
            if share.gathers:
                # All hosts take part, also one whose reward has failed.
                all_images = hosts.fetch(images)
                in_chunk = [row - first for row in share.rows if 0 <= row - first < len(images)]
                share_images = all_images[in_chunk]
            else:
                share_images = hosts.local_rows(images)
            if self._error is not None:
                continue
            try:
                share.scoring.add(share_images)
            except RewardError as error:
                if jax.process_count() == 1:
                    raise
                self._error = error

    def finish(self) -> tuple[Scores, dict[str, int], dict[str, float]]:
        """Waits for the scores of all hosts. Every host must call it, once.

        Also prints a line to standard error for each reward with failed calls of this host.

        Returns:
            A tuple of three dicts, the same on every host:
              1. The scores: float32 arrays with one value per image of the series, in order, by
                 "REWARD" and, for further scores of a reward, "REWARD/OTHER"; NaN for images
                 without a score.
              2. By the name of the reward, the number of images without a score because of a failed
                 call; 0 for a reward without failures.
              3. The counters of all calls, as "REWARD/COUNTER", e.g. {"judge/requests": 24.0}, and
                 the seconds that hosts waited, as "REWARD/seconds_waited" (`HostScoring.usage`).
            The second and the third are sums over the hosts.

        Raises:
            RewardError: On every host, if on any host a call failed and `HostRewards.skip` is
                false, or 32 calls of one reward in a row on one host gave no score at all.
            RunError: If another host does not answer within 1800 seconds.
        """
        results: list[dict[str, Any]] = []
        for share in self._shares:
            scores: Scores = {}
            try:
                if self._error is None:
                    scores = share.scoring.finish()
            except RewardError as error:
                self._error = error
            results.append(
                {
                    "rows": share.rows,
                    "failed": share.scoring.failed,
                    "usage": share.scoring.usage,
                    "scores": {name: values.tolist() for name, values in scores.items()},
                }
            )
        message = None if self._error is None else str(self._error)
        part: dict[str, Any] = {"error": message, "results": results}
        answers = hosts.gather_values(part)
        errors = [each["error"] for each in answers if each["error"] is not None]
        if errors:
            raise self._error or RewardError(errors[0])
        all_scores: Scores = {}
        failed: collections.Counter[str] = collections.Counter()
        usage: collections.Counter[str] = collections.Counter()
        for result in (result for each in answers for result in each["results"]):
            failed.update(result["failed"])
            usage.update(result["usage"])
            for name, values in result["scores"].items():
                if name not in all_scores:
                    all_scores[name] = np.full(self._count, np.nan, np.float32)
                all_scores[name][result["rows"]] = values
        return all_scores, dict(failed), dict(usage)


class SampleScoring:
    """Scores a series of samples, images or clips, with the rewards outside JAX.

    Rewards of clips get whole clips. The others get some equally spaced frames of each clip as
    images, and the score of the clip is the mean over them. `sample_scoring` makes it.

    For every chunk of samples, in order, the caller passes the result of `select` to `add`. It then
    calls `finish` once, which returns the scores, the numbers of failures and the usage counters.
    Every host must make the same calls. They raise RewardError if a reward fails and its failures
    are not skipped.
    """

    def __init__(self, parts: list[tuple[DividedScoring, int | None]]) -> None:
        """Keeps the parts.

        Args:
            parts: One pair per kind of rewards (of images, of whole clips): their scoring, and the
                number of frames of each sample that they get as images. The number is 1 if the
                samples are images, and None for rewards of whole clips.
        """
        self._parts = parts

    def select(self, samples: Float[Array, "b ... 3"]) -> list[Float[Array, "_ ... 3"]]:
        """Returns the inputs of each kind of rewards for a chunk, on the devices, without waiting.

        There are rewards of images and rewards of whole clips.

        Args:
            samples: The next chunk of images [chunk, H, W, 3] or clips [chunk, T, H, W, 3] in
                [0, 1], on the ambient mesh.

        Returns:
            The argument of `add`, a list with one array per kind of rewards. For rewards of images,
            it is the frames [chunk * frames, H, W, 3], those of the first sample first (`frames` is
            that of `sample_scoring`), or `samples` itself if they are images. For rewards of clips,
            it is `samples` itself. With both kinds, the array for rewards of images comes first.
        """
        return [
            samples
            if frames is None or samples.ndim == 4
            else sample_frames_on_mesh(samples, frames)
            for _, frames in self._parts
        ]

    def add(self, selected: list[Float[Array, "_ ... 3"]]) -> None:
        """Starts the scoring of this host's part of the next chunk. Every host must call it.

        Args:
            selected: The result of `select` for the chunk.

        Raises:
            RewardError: As `DividedScoring.add` does: only with a single host, for an earlier call
                that failed. With several hosts, `finish` raises it.
        """
        for (part, _), images in zip(self._parts, selected, strict=True):
            part.add(images)

    def finish(self) -> tuple[Scores, dict[str, int], dict[str, float]]:
        """Waits for the scores of all hosts. Every host must call it, once.

        Returns:
            A tuple of three dicts, like those of `DividedScoring.finish`: the scores by "REWARD" or
            "REWARD/OTHER", one per sample; the numbers of images without a score because of a
            failed call, by reward; and the usage counters. A score is NaN if one of the sample's
            frames has none. For rewards that get frames of clips, the second dict counts frames,
            not samples.

        Raises:
            RewardError: As `DividedScoring.finish` does.
            RunError: If another host does not answer within 1800 seconds.
        """
        scores: Scores = {}
        failed: dict[str, int] = {}
        usage: dict[str, float] = {}
        for part, frames in self._parts:
            part_scores, part_failed, part_usage = part.finish()
            scores |= mean_over_frames(part_scores, frames or 1)
            failed |= part_failed
            usage |= part_usage
        return scores, failed, usage


@contextlib.contextmanager
def sample_scoring(
    host: HostRewards, prompts: Sequence[Prompt], chunk: int, frames: int, placement: NamedSharding
) -> Iterator[SampleScoring]:
    """A context manager that yields a `SampleScoring` for one series of samples.

    Every host of the run must enter it. If the body raises, the running calls of this host are
    dropped and its worker processes end.

    Args:
        host: The rewards outside JAX, and how their worker processes run.
        prompts: The prompt of each sample of the whole series, in order, the same on every host. If
            a reward compares samples, those of one prompt must be adjacent.
        chunk: The number of samples per call of `SampleScoring.add`, a multiple of the parts that
            `placement` divides rows into. The last chunk is padded to it by the caller.
        frames: The number of frames of each sample that rewards of images get, at most the number
            that a sample has. It must be 1 for images, and if a reward of images compares samples
            (not checked here).
        placement: The sharding of a chunk, which divides its rows over the devices of all hosts.

    Yields:
        The scoring. For every chunk, in order, the body passes the result of its method `select` to
        its `add`. Then the body calls `finish`.
    """
    parts: list[tuple[DividedScoring, int | None]] = []
    with contextlib.ExitStack() as stack:
        image_rewards = host.select(clips=False)
        if image_rewards is not None:
            repeated = [prompt for prompt in prompts for _ in range(frames)]
            scoring = divided_scoring(image_rewards, repeated, chunk * frames, placement)
            parts.append((stack.enter_context(scoring), frames))
        clip_rewards = host.select(clips=True)
        if clip_rewards is not None:
            scoring = divided_scoring(clip_rewards, prompts, chunk, placement)
            parts.append((stack.enter_context(scoring), None))
        yield SampleScoring(parts)


@contextlib.contextmanager
def divided_scoring(
    host: HostRewards, prompts: Sequence[Prompt], chunk: int, placement: NamedSharding
) -> Iterator[DividedScoring]:
    """A context manager that yields a `DividedScoring` for one series of images.

    Every host of the run must enter it. If the body raises, the running calls of this host are
    dropped and its worker processes end.

    Args:
        host: The rewards outside JAX ("host rewards"), all of images or all of clips
            (`HostRewards.select`), and how their worker processes run.
        prompts: The prompt of each image of the whole series, in order, the same on every host. For
            rewards that compare images, neighbors with equal prompts form the groups, so the images
            of a prompt must be adjacent; with such rewards, each of several hosts gets all images.
        chunk: The number of images per call of `DividedScoring.add`, a multiple of the parts that
            `placement` divides rows into. The last chunk is padded to it by the caller.
        placement: The sharding of a chunk, which divides its rows over the devices of all hosts.

    Yields:
        The scoring. The body passes every chunk to `add`, in order, and then calls `finish`.
    """
    indices = hosts.local_row_indices(placement, chunk)
    rows = [
        start + row
        for start in range(0, len(prompts), chunk)
        for row in indices
        if start + row < len(prompts)
    ]
    in_groups = tuple(reward for reward in host.rewards if reward.compares)
    alone = tuple(reward for reward in host.rewards if not reward.compares)
    shares = []
    with contextlib.ExitStack() as stack:
        if jax.process_count() == 1 or not in_groups:
            local = open_scoring(host, [prompts[row] for row in rows])
            shares.append(Share(stack.enter_context(local), rows, gathers=False))
        else:
            if alone:
                local = open_scoring(
                    dataclasses.replace(host, rewards=alone), [prompts[row] for row in rows]
                )
                shares.append(Share(stack.enter_context(local), rows, gathers=False))
            # Every process takes every n-th group.
            groups = group_slices(prompts, host.group_size)
            groups = groups[jax.process_index() :: jax.process_count()]
            group_rows = [row for group in groups for row in range(group.start, group.stop)]
            local = open_scoring(
                dataclasses.replace(host, rewards=in_groups),
                [prompts[row] for row in group_rows],
                _renumber(groups),
            )
            shares.append(Share(stack.enter_context(local), group_rows, gathers=True))
        yield DividedScoring(shares, len(prompts))


def _renumber(groups: Sequence[slice]) -> list[slice]:
    """Returns ranges of the same lengths that follow each other from 0.

    Args:
        groups: The ranges of images, e.g. slice(4, 6) and slice(8, 11): this process's groups among
            the images of all processes.

    Returns:
        The ranges of these groups among the images of this process, in the same order, e.g.
        slice(0, 2) and slice(2, 5). Empty without groups.
    """
    slices = []
    start = 0
    for group in groups:
        stop = start + group.stop - group.start
        slices.append(slice(start, stop))
        start = stop
    return slices
