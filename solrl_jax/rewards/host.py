"""Runs rewards outside JAX in worker processes, while the devices generate the next images.

Images are passed on one chunk at a time. A call that raises, hangs or ends its process fails. It
stops the run or, if failures are skipped (`HostRewards.skip`), its images have no score, and the
terminal gets one line per reward and series of images. A process that ended is replaced for the
next call.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import importlib
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float
from pebble import ProcessExpired, ProcessPool
from tqdm import tqdm

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import RunError, one_line, type_and_message
from solrl_jax.parallel import hosts
from solrl_jax.rewards import usage
from solrl_jax.rewards.groups import group_slices, ordered_pairs, win_rates
from solrl_jax.rewards.protocol import HostReward, HostRewards, finite_images

# Seconds after the timeout of a call within which the system has ended its process.
GRACE = 10.0
# The exit code of a worker whose function ended the process with exit code 0.
ENDED = 99
# Seconds that a call may take outside of a worker process.
DEFAULT_SECONDS = 120.0
# A run that skips failures stops after this many failed calls of one reward in a row.
MAX_FAILURES_IN_A_ROW = 32

# Images [n, H, W, 3], or clips [n, T, H, W, 3] for rewards of whole clips.
Images = Float[np.ndarray, "n ... 3"]
# Scores by name.
Scores = dict[str, Float[np.ndarray, " n"]]


class RewardError(RunError):
    """A reward outside JAX failed, and the run stops.

    `HostScoring` raises it in the process of the run (with several hosts, `DividedScoring.finish`
    on all of them). The message is one line with the name of the reward, the reason and a prompt of
    the failed call.
    """


class ScoringFailure(Exception):
    """A call of a reward's function returned no scores, or not all of them.

    `ScoringFailure(message, scores=None)` is raised in a worker process, by the function (such as
    `http` or a judge's) or by the checks of what it returned, and `_call` turns it into a
    `CallResult`. The message says why in one line.

    Attributes:
        scores: The scores of those images (or pairs) that have one, with NaN for the others: n
            numbers, or a mapping of names to n numbers with "reward" among them. None: no image has
            a score.
    """

    def __init__(self, message: str, scores: Any = None) -> None:
        """Makes the failure.

        Args:
            message: Why there are no scores, in one line.
            scores: The scores of those images that have one, with NaN for the others: n numbers, or
                a mapping of names to n numbers with "reward" among them. None: no image has a
                score.
        """
        super().__init__(message)
        self.scores = scores


@dataclasses.dataclass(frozen=True)
class CallResult:
    """The result of a call in a worker process.

    Attributes:
        answer: Float32 arrays [n] by the name of the score, "reward" among them; None if the call
            has no scores.
        problem: Why the call failed, or why it has no score for some images, in one line. None
            after a call that succeeded.
        usage: The usage counters that the function increased (`rewards.usage.add_count`): sums by
            the name of the counter, e.g. {"requests": 3.0}. Empty if nothing was counted.
    """

    answer: Scores | None
    problem: str | None
    usage: Mapping[str, float]


# Waits for the result of one call.
Wait = Callable[[], CallResult]


class Workers:
    """A pool of worker processes that call the functions of rewards, on the CPU only.

    `Workers(count, timeout)` starts none: they start with the first call, and end with `close` or
    with the program. A process that dies is replaced for the next call.

    Attributes:
        count: The number of processes, at least 1.
        timeout: Seconds that one call may take, counted from when a process begins it. A process
            that takes longer is killed, and the call has a `CallResult.problem`.
    """

    def __init__(self, count: int, timeout: float) -> None:
        """Starts no process yet.

        Args:
            count: The number of processes, at least 1.
            timeout: Seconds that one call may take, counted from when a process begins it. A
                process that takes longer is killed.
        """
        self.count = count
        self.timeout = timeout
        self._pool: ProcessPool | None = None

    def start(self, reward: HostReward, images: Images, prompts: Sequence[Prompt]) -> Wait:
        """Starts one call of a reward's function, and does not wait for it.

        Also starts the processes if none run. The call waits in a queue until a process is free.

        Args:
            reward: The reward. Its function `target` is called with its `options`.
            images: The images, float32 [n, H, W, 3] in [0, 1], or clips [n, T, H, W, 3] if the
                reward gets whole clips. If the reward compares images, exactly one group: the
                candidates of one prompt, or a part of them.
            prompts: The prompt of each image, with its metadata.

        Returns:
            A function without arguments that waits for the call and returns its `CallResult`. It
            does not raise. The result has a `problem` and no `answer` if the call raised, returned
            no scores, took longer than `Workers.timeout`, exceeded the memory limit of a process
            (the host's physical memory divided by `Workers.count` + 1), or if its process ended. It
            has both if the call raised a `ScoringFailure` with some scores. If the pool of all
            processes broke or was closed, the call is repeated once, in new processes.
        """
        texts = [str(prompt) for prompt in prompts]
        metadata = [prompt.metadata for prompt in prompts]
        pairs_at_once = reward.batch if reward.pairwise else 0
        options = dict(reward.options)
        arguments = (reward.target, options, images, texts, metadata, pairs_at_once)
        first = self._schedule(arguments)

        def wait() -> CallResult:
            result = self._wait(*first)
            if result is None:
                # A process that ends between two calls breaks the pool. The call is repeated once.
                result = self._wait(*self._schedule(arguments))
            if result is None:
                result = (
                    "the processes that score do not start, or end by themselves (a script of "
                    'yours that starts the run needs `if __name__ == "__main__":`)'
                )
            return CallResult(None, result, {}) if isinstance(result, str) else result

        return wait

    def close(self) -> None:
        """Ends the processes; calls without a result are lost. Does nothing if none have started.

        The next call starts new processes. So does waiting for a lost call, which is then repeated
        once.
        """
        if self._pool is not None:
            pool = self._pool
            self._pool = None
            atexit.unregister(self.close)
            pool.stop()
            pool.join()

    def _schedule(
        self, arguments: tuple[Any, ...]
    ) -> tuple[ProcessPool, concurrent.futures.Future[CallResult]]:
        """Queues one run of `_call` in the pool of processes.

        Also creates the pool if there is none, or replaces one that no longer works. Each process
        of a new pool may take the host's physical memory divided by (number of processes + 1).

        Args:
            arguments: The arguments of `_call` without its first (the timeout), in this order: the
                function as "module:function", its options, the images, the texts of the prompts,
                their metadata, and the most pairs in one call.

        Returns:
            The pool, and the future of the result of `_call`.
        """
        if self._pool is None or not self._pool.active:
            self.close()
            memory = hosts.host_memory() // (self.count + 1)  # some is left to the run itself
            self._pool = ProcessPool(
                self.count,
                initializer=_set_up,
                initargs=[memory],
                context=multiprocessing.get_context("spawn"),
            )
            atexit.register(self.close)
        return self._pool, self._pool.schedule(_call, (self.timeout, *arguments))

    def _wait(
        self, pool: ProcessPool, future: concurrent.futures.Future[CallResult]
    ) -> CallResult | str | None:
        """Waits for a call.

        If the call has no answer 10 seconds (`GRACE`) after `Workers.timeout`, counted from when it
        is first seen running, its process has ended without the pool's notice. Then this also
        closes the pool, and returns a text. The time in the queue is not limited.

        Args:
            pool: The process pool that runs the call.
            future: The future of the result of `_call` in this pool.

        Returns:
            The result of the call. If it has none: a text of one line that says why, such as the
            timeout, the signal or exit code of the process, or arguments that cannot be pickled.
            None if the whole pool broke or was closed, so that the call may be tried in a new one.
        """
        end = math.inf
        while not future.done():
            if not pool.active and not future.done():
                return None
            if future.running() and end == math.inf:
                end = time.monotonic() + self.timeout + GRACE
            if time.monotonic() > end:
                self.close()  # pebble does not report a process that ended with exit code 0
                return (
                    "its process ended, and gave no answer within "
                    f"reward.timeout={self.timeout:g} seconds"
                )
            concurrent.futures.wait([future], timeout=1)
        match future.exception():
            case None:
                return future.result()
            case ProcessExpired(exitcode=code) if code == -signal.SIGALRM:
                return f"no answer within reward.timeout={self.timeout:g} seconds"
            case ProcessExpired(exitcode=code) if code < 0:
                return f"its process got {signal.Signals(-code).name}"
            case ProcessExpired(exitcode=code):
                return f"its process ended with exit code {0 if code == ENDED else code}"
            case BrokenProcessPool():
                return None
            case error:  # metadata that cannot be pickled
                return type_and_message(error)


@functools.cache
def shared_workers(count: int, timeout: float) -> Workers:
    """Returns the pool of worker processes of this program for these settings.

    The pool is created by the first call with these settings and shared from then on, because
    processes take seconds to start. No process starts here.

    Args:
        count: The number of worker processes, at least 1.
        timeout: Seconds that a call of a reward's function may take; a process that takes longer is
            killed.
    """
    return Workers(count, timeout)


class HostScoring:
    """Scores a series of images with the rewards outside JAX, while the caller generates more.

    `add` passes images on in order, one chunk at a time, and `finish`, called once after the last
    image, returns all scores. The constructor gets the prompts of all images of the series, and
    optionally the ranges of images that are compared with each other. Each reward scores every
    image.

    Use `open_scoring` to create one. If the caller raises, it drops the running calls and ends the
    worker processes.

    Attributes:
        failed: By the name of every reward, the number of images without a score in its failed
            calls so far; 0 without failures. It stays 0 where a failed call ends the run.
        usage: Sums of the counters that the functions increased so far (`rewards.usage.add_count`),
            as "REWARD/COUNTER", e.g. {"judge/requests": 24.0}. A reward that counts something also
            has "REWARD/seconds_waited", the seconds that the run waited for its scores.
    """

    def __init__(
        self,
        host: HostRewards,
        prompts: Sequence[Prompt],
        groups: Sequence[slice] | None = None,
    ) -> None:
        """Starts no call yet.

        The arrays of all scores whose names are known exist and hold NaN: "NAME" for each reward,
        and "NAME/OTHER" for its `HostReward.others`. Results add arrays for further scores.

        Args:
            host: The rewards outside JAX, all of images or all of clips, and the settings of their
                worker processes.
            prompts: The prompt of each image, in order.
            groups: The ranges of the images that are compared with each other, which follow each
                other from 0 and cover all images. None: the images of a prompt that directly follow
                each other, divided into groups of at most `host.group_size`.
        """
        self.failed: dict[str, int] = {reward.name: 0 for reward in host.rewards}
        self.usage: dict[str, float] = {}
        self._host = host
        self._prompts = prompts
        self._num_added = 0
        self._workers = shared_workers(host.workers, host.timeout)
        self._groups = group_slices(prompts, host.group_size) if groups is None else list(groups)
        # Images of the group that is not complete yet.
        self._pending: list[Images] = []
        self._running_chunks: list[list[tuple[HostReward, slice, Wait]]] = []
        self._scores: Scores = {}
        self._first_failures: dict[str, str] = {}  # the message for each reward
        for reward in host.rewards:
            self._column(reward.name)
            for other in reward.others or ():
                self._column(f"{reward.name}/{other}")

    def add(self, images: Images) -> None:
        """Passes on the next chunk of images, and starts the calls that score it.

        If two chunks are still being scored, it first waits for the older one and stores its
        scores, which bounds the memory. A reward that scores images alone gets the chunk split
        evenly over the worker processes, in calls of at most `HostReward.batch` images. A reward
        that compares images gets each group that is complete now in one call; the images of an
        incomplete group are kept.

        Args:
            images: The images [b, H, W, 3] in [0, 1], or clips [b, T, H, W, 3] if the rewards get
                whole clips; they are cast to float32. Those beyond the last prompt are padding and
                are not scored.

        Raises:
            RewardError: If a call of the older chunk failed and `HostRewards.skip` is false, or 32
                calls of one reward in a row gave no score at all.
        """
        images = np.asarray(images[: len(self._prompts) - self._num_added], np.float32)
        if len(self._running_chunks) > 1:
            self._gather(self._running_chunks.pop(0))
        calls = []
        for reward in self._host.rewards:
            if reward.compares:
                continue
            share = math.ceil(len(images) / self._workers.count)
            size = max(min(reward.batch, share), 1)
            for start in range(0, len(images), size):
                part = images[start : start + size]
                first = self._num_added + start
                rows = slice(first, first + len(part))
                calls.append((reward, rows, self._workers.start(reward, part, self._prompts[rows])))
        self._num_added += len(images)
        calls += self._start_groups(images)
        self._running_chunks.append(calls)

    def _start_groups(self, images: Images) -> list[tuple[HostReward, slice, Wait]]:
        """Starts the calls of rewards that compare images, for the groups that are complete now.

        Also keeps the images of an incomplete group until its last image comes.

        Args:
            images: The next images or clips, without padding, float32, which `add` has counted
                already.

        Returns:
            For each call: the reward, the range of the group among all images, and the function
            that waits for the result. There is one call per group and reward.
        """
        rewards = [reward for reward in self._host.rewards if reward.compares]
        if not rewards:
            return []
        calls = []
        self._pending.append(images)
        while self._groups and self._groups[0].stop <= self._num_added:
            rows = self._groups.pop(0)
            pending = np.concatenate(self._pending)
            count = rows.stop - rows.start
            group = pending[:count]
            self._pending = [pending[count:]]
            for reward in rewards:
                calls.append(
                    (reward, rows, self._workers.start(reward, group, self._prompts[rows]))
                )
        return calls

    def finish(self) -> Scores:
        """Waits for all calls.

        Also prints a line to standard error for each reward with failed calls: the number of images
        without a score, and the first error.

        Returns:
            The scores by name, float32 arrays with one value per image: "NAME" for each reward,
            "NAME/OTHER" for each of its `HostReward.others` (both also if all calls failed), and
            any further scores that it returned. NaN for images without one.

        Raises:
            RewardError: If a call failed and `HostRewards.skip` is false, or 32 calls of one reward
                in a row gave no score at all.
        """
        for calls in self._running_chunks:
            self._gather(calls)
        for name, message in self._first_failures.items():
            skipped = f"{self.failed[name]} of {len(self._prompts)} images"
            tqdm.write(
                f"skipped {skipped}, which have no score: {one_line(message)}", file=sys.stderr
            )
        return self._scores

    def _gather(self, calls: list[tuple[HostReward, slice, Wait]]) -> None:
        """Waits for calls, and stores their scores.

        Scores beyond `HostReward.others` are stored too. A successful call whose answer lacks a
        score of `others` counts as failed, and none of its scores is stored. A partial failure (a
        call with both scores and a problem) counts as failed, but its scores are stored, even if
        one of `others` is missing. Also updates `HostRewards.failures_in_a_row`, which outlives
        this object: a failed call that leaves all of its images without a score of the reward adds
        1, and every other call resets it to 0.

        Args:
            calls: For each call: the reward, the range of its images among all, and the function
                that waits for its result.

        Raises:
            RewardError: If a call failed and `HostRewards.skip` is false, or 32 calls of one reward
                in a row gave no score at all. The calls after it are not waited for.
        """
        for reward, rows, wait in calls:
            began = time.monotonic()
            result = wait()
            self._count(reward.name, result.usage, time.monotonic() - began)
            answer = result.answer or {}
            problem = result.problem
            missing = [repr(name) for name in reward.others or () if name not in answer]
            if problem is None and missing:
                problem = f"returned no {', '.join(missing)}"
                answer = {}
            for name, values in answer.items():
                full_name = reward.name if name == "reward" else f"{reward.name}/{name}"
                self._column(full_name)[rows] = values
            if problem is not None:
                self._note_failure(reward, rows, problem, answer)
            else:
                self._host.failures_in_a_row[reward.name] = 0

    def _count(self, name: str, counts: Mapping[str, float], seconds: float) -> None:
        """Adds the counters of a call to `usage`.

        Args:
            name: The name of the reward.
            counts: The sums of the call's counters by name, e.g. {"requests": 3.0}. If empty,
                nothing is added, `seconds` included.
            seconds: How long the run waited for the call, which is added as "seconds_waited". The
                call itself may have taken longer, because it ran beside the generation.
        """
        if not counts:
            return
        for key, amount in (*counts.items(), ("seconds_waited", seconds)):
            full_name = f"{name}/{key}"
            self.usage[full_name] = self.usage.get(full_name, 0.0) + amount

    def _note_failure(self, reward: HostReward, rows: slice, problem: str, answer: Scores) -> None:
        """Counts the images of a failed call that have no score, or ends the run.

        Also updates `HostRewards.failures_in_a_row` (plus 1 if the call has no score at all, else
        reset to 0), and keeps the message for `finish` if it is the first one of the reward.

        Args:
            reward: The reward whose call failed.
            rows: The range of the images of the call among all, not empty.
            problem: Why the call failed, in one line.
            answer: The scores of the call by name, "reward" among them, with NaN for the images
                without one; {} if the call has none.

        Raises:
            RewardError: If failed calls are not skipped (`HostRewards.skip` is false), or if this
                is the 32nd call of the reward in a row without any score (`MAX_FAILURES_IN_A_ROW`).
        """
        count = rows.stop - rows.start
        num_failed = int(np.isnan(answer["reward"]).sum()) if answer else count
        prompts = brief_repr(self._prompts[rows][0])
        if count > 1:
            prompts += f" and {count - 1} more"
        prefix = f"reward '{reward.name}': "
        message = f"{prefix}{problem.replace(prefix, '')} (prompt {prompts})"
        if not self._host.skip:
            raise RewardError(message)
        in_a_row = self._host.failures_in_a_row
        in_a_row[reward.name] = in_a_row[reward.name] + 1 if num_failed == count else 0
        if in_a_row[reward.name] >= MAX_FAILURES_IN_A_ROW:
            raise RewardError(f"{message}; {MAX_FAILURES_IN_A_ROW} calls in a row failed")
        self.failed[reward.name] += num_failed
        self._first_failures.setdefault(reward.name, message)

    def _column(self, name: str) -> Float[np.ndarray, " n"]:
        """Returns the array of a score for all images.

        Also stores a new one, full of NaN, if there is none yet.

        Args:
            name: The name of the score, e.g. "geneval/strict".

        Returns:
            The stored array itself, float32 with one value per image.
        """
        return self._scores.setdefault(name, np.full(len(self._prompts), np.nan, np.float32))


@contextlib.contextmanager
def open_scoring(
    host: HostRewards, prompts: Sequence[Prompt], groups: Sequence[slice] | None = None
) -> Iterator[HostScoring]:
    """A context manager that yields a `HostScoring` for one series of images.

    All series with the same number of worker processes and the same timeout share the processes. If
    the body raises, the processes end, and their calls are dropped. Otherwise they stay for the
    next series.

    Args:
        host: The rewards outside JAX, all of images or all of clips, and the settings of their
            worker processes.
        prompts: The prompt of each image, in order.
        groups: For rewards that compare images: the ranges of the images that are compared with
            each other, which follow each other from 0. None: neighboring images of the same prompt,
            in groups of at most `host.group_size`.

    Yields:
        The scoring, to which the body passes the images.
    """
    try:
        yield HostScoring(host, prompts, groups)
    except BaseException:
        shared_workers(host.workers, host.timeout).close()
        raise


def score_gray_images(host: HostRewards, prompts: Sequence[Prompt], size: Sequence[int]) -> None:
    """Scores gray images once, so that a reward that always fails is noticed early.

    The scores are dropped. These are real calls: services and judges get requests. Also starts the
    worker processes, which stay. If failures are skipped (`HostRewards.skip`), a line per failed
    reward is printed to standard error.

    Args:
        host: The rewards outside JAX, and the settings of their worker processes.
        prompts: The prompts. Each gets one gray image or clip (all values 0.5), or two if any
            reward compares images. All images are in memory at once.
        size: (height, width) of the images in pixels, or (height, width, number of frames) of
            clips, which rewards of whole clips need. The other rewards get single images.

    Raises:
        RewardError: If a call failed and failures are not skipped, or if 32 calls of one reward in
            a row gave no score at all.
    """
    if any(reward.compares for reward in host.rewards):
        prompts = [prompt for prompt in prompts for _ in range(2)]
    for clips, shape in ((False, size[:2]), (True, (*size[2:], *size[:2]))):
        part = host.select(clips=clips)
        if part is None:
            continue
        with open_scoring(part, prompts) as attempt:
            attempt.add(np.full((len(prompts), *shape, 3), 0.5, np.float32))
            attempt.finish()


@functools.cache
def import_object(target: str) -> Any:
    """Imports an object. Cached for each text, so that a module is imported once.

    Args:
        target: "module:name". The name may have dots, for attributes of attributes.

    Returns:
        The object, whatever its type.

    Raises:
        ImportError: If there is no such module. An error that the module itself raises is raised as
            it is.
        AttributeError: If the module has no such object, or `target` has no name or no colon.
        ValueError: If `target` has no module.
    """
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


# The rest of this file runs in worker processes.


def _set_up(memory: int) -> None:
    """Prepares a worker process, before a reward is imported in it.

    JAX uses the CPU only (JAX_PLATFORMS), and CUDA_VISIBLE_DEVICES="" hides NVIDIA GPUs from every
    library, PyTorch included. Standard output goes to standard error. The process gets a session of
    its own, so that Ctrl-C does not reach it, and it ends when the run ends. If a reward ends the
    process by `os._exit(0)`, the exit code becomes 99 (`ENDED`), so that the pool notices it.

    Args:
        memory: The most bytes of data (RLIMIT_DATA) that the worker may take, or the hard limit of
            the system if that is lower. Beyond it, allocations raise MemoryError.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    allowed = memory if limit == resource.RLIM_INFINITY else min(memory, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, limit))
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    if "jax" in sys.modules:  # then JAX has read its environment already
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    exit_now = os._exit

    def exit_visibly(status: int) -> NoReturn:
        exit_now(status or ENDED)

    os._exit = exit_visibly  # pebble would wait for a process that ends with exit code 0
    os.setsid()  # Ctrl-C, and signals to the process group of the run, do not reach a worker
    os.dup2(2, 1)  # standard output is for results
    _end_with_parent(multiprocessing.parent_process())


def _end_with_parent(parent: Any) -> None:
    """Ends this process when its parent has ended, also while C code holds the interpreter lock.

    Starts a thread that waits for the parent and exits with code 1. On Linux the system also sends
    SIGKILL when the parent's end of the pipe between both processes is closed.

    Args:
        parent: The process that started this one: the result of `multiprocessing.parent_process()`.
    """

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    if sys.platform == "linux":
        # The system kills this process when the parent's end of the pipe between them is closed.
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _call(
    timeout: float,
    target: str,
    options: dict[str, Any],
    images: Images,
    prompts: list[str],
    metadata: list[Any],
    pairs_at_once: int = 0,
) -> CallResult:
    """Calls the function of a reward, in a worker process. The first call imports it.

    Args:
        timeout: Seconds after which the system kills this process with SIGALRM, even inside C code.
        target: The function, as "module:function".
        options: The keyword arguments of the function, by name.
        images: The images, float32 [n, H, W, 3] in [0, 1], or clips [n, T, H, W, 3].
        prompts: The text of the prompt of each image.
        metadata: The metadata of the prompt of each image.
        pairs_at_once: 0: the function scores images. Above 0: it compares pairs; the images are one
            group, and this is the most pairs in one call of the function.

    Returns:
        A `CallResult`. Its `answer` has float32 arrays [n] by name, with NaN for images that have a
        non-finite value (the function gets them too, unless it compares pairs). `answer` is None,
        and `problem` says why in one line, if the import or the function raised, memory ran out, or
        the returned value is neither n numbers nor a mapping of names to n numbers with "reward".
        If the function raised a `ScoringFailure` with the scores of some images, `answer` and
        `problem` are both set. `usage` has the counters that the function increased
        (`rewards.usage.add_count`) in all cases.

    Raises:
        ScoringFailure: If the function raised a `ScoringFailure` whose `scores` have the wrong
            form. `Workers._wait` returns its message.
    """
    signal.setitimer(signal.ITIMER_REAL, timeout)
    usage.pop_counts()
    answer = None
    problem = None
    try:
        function = functools.partial(import_object(target), **options)
        if pairs_at_once:
            returned = _compare_pairs(function, images, prompts, metadata, pairs_at_once)
        else:
            returned = function(images, prompts, metadata)
        answer = to_scores(returned, len(images))
    except ScoringFailure as failure:
        problem = str(failure)
        if failure.scores is not None:
            answer = to_scores(failure.scores, len(images))
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        problem = f"out of memory: a worker may take {limit / 1e9:.1f} GB"
    except (Exception, SystemExit) as error:
        problem = type_and_message(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for values in (answer or {}).values():
        values[~finite_images(images)] = np.nan
    return CallResult(answer, problem, usage.pop_counts())


def _compare_pairs(
    function: Callable[..., Any],
    images: Images,
    prompts: list[str],
    metadata: list[Any],
    pairs_at_once: int,
) -> Float[np.ndarray, " n"]:
    """Compares all images of a group with each other in both orders.

    Args:
        function: The user's function with its options bound: (first, second, prompts, metadata) ->
            one preference in [0, 1] per pair for the image of `first`, or a mapping with these as
            "reward", whose other entries are ignored.
        images: The images of the group, float32 [n, H, W, 3], or its clips [n, T, H, W, 3]. One
            with a non-finite value is not compared.
        prompts: The prompt of each image, which are equal.
        metadata: The metadata of the prompt of each image.
        pairs_at_once: The most pairs in one call, at least 1.

    Returns:
        The win rates of the images, float32 [n]: the mean preference over the other images, both
        orders averaged. NaN for an image that was not compared, 0.5 for the only image with finite
        values. Pairs whose preference is NaN in either order are left out.

    Raises:
        ScoringFailure: If a call of the function raised a ScoringFailure. The remaining calls are
            still made after one with some preferences, but not after one without any. The raised
            error has the message of the first one, and its scores are {"reward": the win rates} if
            the known preferences give any image a win rate, else None. Also, at once and without
            scores, if the function returned values that `to_scores` refuses or that are outside of
            [0, 1].
    """
    # An image with a non-finite value is not compared, so that it costs the others nothing.
    finite = np.flatnonzero(finite_images(images))
    rates = np.full(len(images), np.nan, np.float32)
    preferences = np.full((len(finite), len(finite)), np.nan, np.float32)
    pairs = ordered_pairs(len(finite))
    failure = None
    for start in range(0, len(pairs), pairs_at_once):
        first, second = pairs[start : start + pairs_at_once].T
        partial_failure = None
        try:
            returned = function(
                images[finite[first]],
                images[finite[second]],
                [prompts[i] for i in finite[first]],
                [metadata[i] for i in finite[first]],
            )
        except ScoringFailure as error:
            failure = failure or error
            if error.scores is None:
                break
            partial_failure = error
            returned = error.scores
        if isinstance(returned, Mapping) and "reward" in returned:
            returned = returned["reward"]  # other entries are ignored
        values = to_scores(returned, len(first))["reward"]
        if partial_failure is not None and np.isnan(values).all():
            break
        if ((values < 0) | (values > 1)).any():
            outside = values[(values < 0) | (values > 1)][0]
            raise ScoringFailure(
                f"returned {outside:g} as a preference: expected numbers in [0, 1]"
            )
        preferences[first, second] = values
    rates[finite] = win_rates(preferences)
    if failure is not None:
        any_rate = np.isfinite(rates).any()
        raise ScoringFailure(str(failure), {"reward": rates} if any_rate else None)
    return rates


def seconds_left() -> float:
    """Returns the seconds until this process is ended by the timeout of the running call.

    In a worker process this is the rest of `reward.timeout`. It is 120 (`DEFAULT_SECONDS`) in a
    process without a running timer, such as one that calls a reward's function directly.
    """
    return signal.getitimer(signal.ITIMER_REAL)[0] or DEFAULT_SECONDS


def to_scores(returned: Any, count: int) -> Scores:
    """Converts the value that a function returned to scores.

    Integers and Booleans are numbers too. Values are not checked: NaN and infinities pass, and a
    number too large for float32 becomes an infinity.

    Args:
        returned: `count` numbers, or a mapping of names to `count` numbers that has the name
            "reward". The numbers may be any array or sequence.
        count: The number of images, or of pairs that were compared.

    Returns:
        New float32 arrays [count] by the name of the score, the names as text. The name is "reward"
        for numbers without a mapping.

    Raises:
        ScoringFailure: If a mapping has no "reward"; if values are text, dates, complex numbers,
            None or other objects, masked, or ragged; or if their shape is not [count].
    """
    scores = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in scores:
        raise ScoringFailure(f"returned {brief_repr(sorted(map(str, scores)))} without 'reward'")
    answer = {}
    for name, values in scores.items():
        which = "" if name == "reward" else f" as {name!r}"
        try:
            array = np.asarray(values)
            if array.dtype.kind in "OSUcmM" or np.ma.isMaskedArray(values):
                raise TypeError
            with np.errstate(over="ignore"):
                answer[str(name)] = array.astype(np.float32)
        except (TypeError, ValueError):
            raise ScoringFailure(f"returned {brief_repr(values)}{which}: no numbers") from None
        if array.shape != (count,):
            raise ScoringFailure(f"returned shape {array.shape}{which} for {count} images")
    return answer
