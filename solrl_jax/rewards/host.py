"""Runs rewards outside JAX: functions that score pictures in other processes, called workers, while the devices work.

Pictures are passed on a chunk at a time, while the devices make the next chunk. A function that raises, hangs or ends its
process costs one line here. The next call then runs in a new process.
"""

import atexit
import collections
import concurrent.futures
import contextlib
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
from typing import Any

import numpy as np
from jaxtyping import Float
from pebble import ProcessExpired, ProcessPool
from tqdm import tqdm

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import RunError, in_words, one_line
from solrl_jax.parallel import hosts
from solrl_jax.rewards.protocol import Host, HostReward, finite

GRACE = 10.0  # seconds, within which the system has ended a process whose time is up
ENDED = 99  # exit code of a worker whose function ended it with 0
MOST_FAILURES = 32  # calls of one reward in a row after which also a run that skips failures stops
Images = Float[np.ndarray, "n H W 3"]
Answer = dict[str, Float[np.ndarray, " n"]]  # scores by name
Wait = Callable[[], Answer]  # waits for the scores of one call; raises Failure


class RewardError(RunError):
    """A reward outside JAX failed, and the run stops."""


class Failure(Exception):
    """Why a call gave no scores, in one line."""


class Workers:
    """`count` processes that do not use an accelerator. They start with the first call and end with `close` or the program."""

    def __init__(self, count: int, timeout: float) -> None:
        """timeout: seconds for one call. Then its process is killed."""
        self.count = count
        self.timeout = timeout
        self.in_a_row: collections.Counter[str] = (
            collections.Counter()
        )  # failed calls since the last answer, by reward
        self._pool: ProcessPool | None = None

    def start(self, reward: HostReward, images: Images, prompts: Sequence[Prompt]) -> Wait:
        """Starts one call of the reward's function."""
        texts = [str(prompt) for prompt in prompts]
        metadata = [prompt.metadata for prompt in prompts]
        arguments = (reward.target, dict(reward.options), images, texts, metadata)
        first = self._schedule(arguments)

        def wait() -> Answer:
            # a process that ends between two calls breaks the whole pool: then the call is repeated, once
            answer = self._wait(*first) or self._wait(*self._schedule(arguments))
            if isinstance(answer, str | None):
                raise Failure(
                    answer or "the processes that score do not start, or end by themselves"
                )
            return answer

        return wait

    def close(self) -> None:
        """Ends the processes and drops their calls. The next call starts new processes."""
        if self._pool is not None:
            pool = self._pool
            self._pool = None
            atexit.unregister(self.close)
            pool.stop()
            pool.join()

    def _schedule(
        self, arguments: tuple[Any, ...]
    ) -> tuple[ProcessPool, concurrent.futures.Future[Answer | str]]:
        if self._pool is None or not self._pool.active:
            self.close()
            memory = hosts.memory() // (self.count + 1)  # some is left to the run itself
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(
                self.count, initializer=_set_up, initargs=[memory], context=spawn
            )
            atexit.register(self.close)
        return self._pool, self._pool.schedule(_call, (self.timeout, *arguments))

    def _wait(
        self, pool: ProcessPool, future: concurrent.futures.Future[Answer | str]
    ) -> Answer | str | None:
        """The scores, or what went wrong; None if the pool broke, which does not always end its futures."""
        end = math.inf
        while not future.done():
            if not pool.active and not future.done():
                return None
            if future.running() and end == math.inf:
                end = time.monotonic() + self.timeout + GRACE
            if time.monotonic() > end:
                self.close()  # pebble does not tell of a process that ended as if all were well
                return f"its process ended, and gave no answer within reward.timeout={self.timeout:g} seconds"
            concurrent.futures.wait([future], timeout=1)
        match future.exception():
            case None:
                return future.result()
            case ProcessExpired(exitcode=code) if code == -signal.SIGALRM:
                return f"no answer within reward.timeout={self.timeout:g} seconds"
            case ProcessExpired() as expired:
                code = expired.exitcode if expired.exitcode != ENDED else 0
                return "its process " + (
                    f"ended with exit code {code}"
                    if code >= 0
                    else f"got {signal.Signals(-code).name}"
                )
            case BrokenProcessPool():
                return None
            case error:  # metadata that cannot be pickled
                return in_words(error)


@functools.cache
def workers(count: int, timeout: float) -> Workers:
    """The program's workers for these settings. They are shared, because processes take seconds to start."""
    return Workers(count, timeout)


class Scoring:
    """Scores a series of pictures: `add` passes them on in order, a chunk at a time, and `finish` returns all scores."""

    def __init__(self, host: Host, prompts: Sequence[Prompt]) -> None:
        """prompts: one for each picture, in order."""
        self._host = host
        self._prompts = prompts
        self._given = 0
        self._workers = workers(host.workers, host.timeout)
        self._waiting: list[list[tuple[HostReward, slice, Wait]]] = []
        self._scores: Answer = {}
        self._failures: dict[str, str] = {}  # the first of each reward
        self.failed: dict[str, int] = {
            reward.name: 0 for reward in host.rewards
        }  # pictures without a score
        for reward in host.rewards:
            for score in (
                reward.name,
                *(f"{reward.name}/{other}" for other in reward.others or ()),
            ):
                self._column(score)

    def add(self, images: Images) -> None:
        """Passes on the next pictures. Pictures beyond the last prompt are padding.

        At most two chunks are scored at once, to bound the memory: if there are two, this waits for the first.
        """
        images = np.asarray(images[: len(self._prompts) - self._given], np.float32)
        if len(self._waiting) > 1:
            self._gather(self._waiting.pop(0))
        chunk = []
        for reward in self._host.rewards:
            size = min(reward.batch, -(-len(images) // self._workers.count)) or 1
            for start in range(0, len(images), size):
                part = images[start : start + size]
                rows = slice(self._given + start, self._given + start + len(part))
                chunk.append((reward, rows, self._workers.start(reward, part, self._prompts[rows])))
        self._waiting.append(chunk)
        self._given += len(images)

    def finish(self) -> Answer:
        """All scores by name, NaN for pictures without one. Raises RewardError if a failure stops the run."""
        for chunk in self._waiting:
            self._gather(chunk)
        for name, text in self._failures.items():
            count = f"{self.failed[name]} of {len(self._prompts)} pictures"
            tqdm.write(f"skipped {count}, which have no score: {one_line(text)}", file=sys.stderr)
        return self._scores

    def _gather(self, chunk: list[tuple[HostReward, slice, Wait]]) -> None:
        for reward, rows, wait in chunk:
            try:
                answer = wait()
                if absent := [repr(name) for name in reward.others or () if name not in answer]:
                    raise Failure(f"returned no {', '.join(absent)}")
            except Failure as failure:
                self._workers.in_a_row[reward.name] += 1
                self._fail(reward, rows, str(failure))
            else:
                self._workers.in_a_row[reward.name] = 0
                for name, values in answer.items():
                    self._column(reward.name if name == "reward" else f"{reward.name}/{name}")[
                        rows
                    ] = values

    def _fail(self, reward: HostReward, rows: slice, what: str) -> None:
        head = f"reward '{reward.name}': "
        count = rows.stop - rows.start
        of = brief_repr(self._prompts[rows][0]) + (f" and {count - 1} more" if count > 1 else "")
        text = f"{head}{what.replace(head, '')} (prompt {of})"
        if not self._host.skip:
            raise RewardError(text)
        if self._workers.in_a_row[reward.name] >= MOST_FAILURES:
            raise RewardError(f"{text}; {MOST_FAILURES} calls in a row failed")
        self.failed[reward.name] += count
        self._failures.setdefault(reward.name, text)

    def _column(self, name: str) -> Float[np.ndarray, " n"]:
        return self._scores.setdefault(name, np.full(len(self._prompts), np.nan, np.float32))


@contextlib.contextmanager
def scoring(host: Host, prompts: Sequence[Prompt]) -> Iterator[Scoring]:
    """A `Scoring`. If the body raises, the calls that have not returned are dropped, and their processes end."""
    try:
        yield Scoring(host, prompts)
    except BaseException:
        workers(host.workers, host.timeout).close()
        raise


def trial(host: Host, prompts: Sequence[Prompt], size: tuple[int, int]) -> None:
    """Scores a grey picture [height, width] for each prompt, so that a reward that always fails is found at once."""
    with scoring(host, prompts) as attempt:
        attempt.add(np.full((len(prompts), *size, 3), 0.5, np.float32))
        attempt.finish()


@functools.cache
def imported(target: str) -> Any:
    """What "module:function" names."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, path.split("."), found)


# what follows runs in a worker


def _set_up(memory: int) -> None:
    """Leaves the accelerator and the terminal to the run, before anything else is imported. A worker ends with the run.

    memory: bytes that the worker may take. Beyond them it gets a MemoryError, and the host's other processes get none.
    """
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (memory if most == resource.RLIM_INFINITY else min(memory, most), most),
    )
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    if "jax" in sys.modules:  # then JAX has read its environment already
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    leave, os._exit = (
        os._exit,
        lambda status: leave(status or ENDED),
    )  # pebble would wait for a process that ends with 0
    os.setsid()  # Ctrl-C, and signals to the run's process group, do not reach a worker
    os.dup2(2, 1)  # standard output is for results
    _end_with(multiprocessing.parent_process())


def _end_with(parent: Any) -> None:
    """Ends this process when its parent has ended, also while a function in C holds the interpreter's lock."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    if (
        sys.platform == "linux"
    ):  # the system kills it when the parent's end of the pipe between them is closed
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC
        )


def _call(
    timeout: float,
    target: str,
    options: dict[str, Any],
    images: Images,
    prompts: list[str],
    metadata: list[Any],
) -> Answer | str:
    """The scores, or in one line why there are none: not every exception can be pickled.

    timeout: seconds after which the system ends this process. It counts them by a clock that nobody sets, and also while the
    function does not return to Python.
    """
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        answer = checked(imported(target)(images, prompts, metadata, **options), len(images))
    except Failure as failure:
        return str(failure)
    except MemoryError:
        return f"out of memory: a worker may take {resource.getrlimit(resource.RLIMIT_DATA)[0] / 1e9:.1f} GB"
    except (Exception, SystemExit) as error:
        return in_words(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for values in answer.values():
        values[~finite(images)] = np.nan
    return answer


def checked(returned: Any, count: int) -> Answer:
    """What a function returned, as float32 [count] by name. Raises Failure if it is something else."""
    scores = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in scores:
        raise Failure(f"returned {brief_repr(sorted(map(str, scores)))} without 'reward'")
    answer = {}
    for name, values in scores.items():
        what = "" if name == "reward" else f" as {name!r}"
        try:
            array = np.asarray(values)
            if array.dtype.kind in "OSUcmM" or np.ma.isMaskedArray(values):
                raise TypeError
            with np.errstate(over="ignore"):
                answer[str(name)] = array.astype(np.float32)
        except (TypeError, ValueError):
            raise Failure(f"returned {brief_repr(values)}{what}: no numbers") from None
        if array.shape != (count,):
            raise Failure(f"returned shape {array.shape}{what} for {count} pictures")
    return answer
