"""Rewards outside JAX: functions that score pictures in processes of their own, beside the device's work.

Pictures are handed over a chunk at a time, when they have arrived on the host and while the device makes the next ones. What
goes wrong stays in a worker: a function that raises, hangs or ends its process is one line here, and the next piece of work
finds a new process.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from jaxtyping import Float
from pebble import ProcessExpired, ProcessPool
from tqdm import tqdm

from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.config.schema import shown
from solrl_jax.rewards.outside import finite
from solrl_jax.storage.errors import RunError

BATCH = 16  # pictures that a function is given at most: a timeout counts for these
Images = Float[np.ndarray, "n H W 3"]
Answer = dict[str, Float[np.ndarray, " n"]]  # scores by name
Wait = Callable[[], Answer]


class RewardError(RunError):
    """A reward outside JAX failed, and the run is to stop then."""


class Failure(Exception):
    """What a piece of work came to instead of scores, in one line."""


@dataclasses.dataclass(frozen=True)
class HostReward:
    """f(images float32 [n, H, W, 3] in [0, 1], prompts [n], metadata [n], **options) -> scores [n], or several by name.

    Of several, the reward itself is named "reward"; `others` are the rest, None where they are not known before the first
    answer. No picture's score may depend on another's: how many there are at once depends on chunks and workers.
    """

    name: str
    target: str  # where f is: "module:function", which a worker imports
    options: Mapping[str, Any]
    others: tuple[str, ...] | None
    batch: int = BATCH


class Workers:
    """`count` processes without an accelerator. They are made when there is work, and end with `close` or with the program."""

    def __init__(self, count: int, timeout: float) -> None:
        """timeout: seconds a piece of work may take, after which its process is killed."""
        self.count, self.timeout = count, timeout
        self._pool: ProcessPool | None = None

    def start(self, reward: HostReward, images: Images, prompts: Sequence[Prompt]) -> Wait:
        """Hands over a piece of work. What is returned waits for its scores; it raises Failure."""
        texts, metadata = [str(prompt) for prompt in prompts], [prompt.metadata for prompt in prompts]
        arguments = (reward.target, dict(reward.options), images, texts, metadata)
        first = self._schedule(arguments)

        def wait() -> Answer:
            # a process that ends while it has nothing to do takes all the others' work with it: that is begun anew, once
            answer = self._wait(*first) or self._wait(*self._schedule(arguments))
            if isinstance(answer, str | None):
                raise Failure(answer or "the processes that score do not start, or end by themselves")
            return answer

        return wait

    def close(self) -> None:
        """Ends the processes and drops their work. More work makes new ones."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            atexit.unregister(self.close)
            pool.stop()
            pool.join()

    def _schedule(self, arguments: tuple[Any, ...]) -> tuple[ProcessPool, concurrent.futures.Future[Answer | str]]:
        if self._pool is None or not self._pool.active:
            self.close()
            self._pool = ProcessPool(self.count, initializer=_set_up, context=multiprocessing.get_context("spawn"))
            atexit.register(self.close)
        return self._pool, self._pool.schedule(_call, arguments, timeout=self.timeout)

    def _wait(self, pool: ProcessPool, future: concurrent.futures.Future[Answer | str]) -> Answer | str | None:
        """The scores, or what went wrong; None when the pool broke, whose work is not always told."""
        while not future.done():
            if not pool.active and not future.done():
                return None
            concurrent.futures.wait([future], timeout=1)
        match future.exception():
            case None:
                return future.result()
            case TimeoutError():
                return f"no answer within reward.timeout={self.timeout:g} seconds"
            case ProcessExpired() as expired:
                code = expired.exitcode
                return "its process " + (f"ended with exit code {code}" if code >= 0 else f"got {signal.Signals(-code).name}")
            case BrokenProcessPool():
                return None
            case error:  # metadata that cannot be handed over
                return _in_words(error)


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """What is scored outside JAX for a `Reward`, and what it weighs in the sum."""

    rewards: tuple[HostReward, ...]
    weights: Mapping[str, float]  # of scores: "ocr", "geneval/strict"
    wanted: Mapping[str, Sequence[str]]  # of each reward, which others must come
    workers: Workers
    skip: bool  # true: pictures whose scoring fails have no score; false: the run stops


class Scoring:
    """The scores of one series of pictures: handed over in order, a chunk at a time, and gathered at the end."""

    def __init__(self, host: Host, prompts: Sequence[Prompt]) -> None:
        """prompts: of all pictures, in order."""
        self._host, self._prompts, self._given = host, prompts, 0
        self._waiting: list[list[tuple[HostReward, slice, Wait]]] = []
        self._scores: Answer = {}
        self._failures: dict[str, str] = {}  # the first of each reward
        self.failed: dict[str, int] = {reward.name: 0 for reward in host.rewards}  # pictures without a score
        for reward in host.rewards:
            self._column(reward.name)
            for other in (*(reward.others or ()), *host.wanted[reward.name]):
                self._column(f"{reward.name}/{other}")

    def add(self, images: Images) -> None:
        """Hands over the next pictures; what goes beyond the last one is padding.

        Two chunks at most are being scored: it waits for the one before these, so that memory is known beforehand.
        """
        images = np.asarray(images[: len(self._prompts) - self._given], np.float32)
        if len(self._waiting) > 1:
            self._gather(self._waiting.pop(0))
        chunk = []
        for reward in self._host.rewards:
            size = min(reward.batch, -(-len(images) // self._host.workers.count)) or 1
            for start in range(0, len(images), size):
                part = images[start : start + size]
                rows = slice(self._given + start, self._given + start + len(part))
                chunk.append((reward, rows, self._host.workers.start(reward, part, self._prompts[rows])))
        self._waiting.append(chunk)
        self._given += len(images)

    def finish(self) -> Answer:
        """All scores by name, NaN where there is none. Raises RewardError where a failure stops the run."""
        for chunk in self._waiting:
            self._gather(chunk)
        for name, text in self._failures.items():
            count = f"{self.failed[name]} of {len(self._prompts)} pictures"
            tqdm.write(f"skipped {count}, which have no score: {text}", file=sys.stderr)
        return self._scores

    def _gather(self, chunk: list[tuple[HostReward, slice, Wait]]) -> None:
        for reward, rows, wait in chunk:
            try:
                answer = wait()
                if absent := [repr(name) for name in self._host.wanted[reward.name] if name not in answer]:
                    raise Failure(f"returned no {', '.join(absent)}")
            except Failure as failure:
                self._fail(reward, rows, str(failure))
            else:
                for name, values in answer.items():
                    self._column(reward.name if name == "reward" else f"{reward.name}/{name}")[rows] = values

    def _fail(self, reward: HostReward, rows: slice, what: str) -> None:
        head, count = f"reward '{reward.name}': ", rows.stop - rows.start
        of = shown(self._prompts[rows][0]) + (f" and {count - 1} more" if count > 1 else "")
        text = f"{head}{what.replace(head, '')} (prompt {of})"
        if not self._host.skip:
            raise RewardError(text)
        self.failed[reward.name] += count
        self._failures.setdefault(reward.name, text)

    def _column(self, name: str) -> Float[np.ndarray, " n"]:
        return self._scores.setdefault(name, np.full(len(self._prompts), np.nan, np.float32))


@contextlib.contextmanager
def scoring(host: Host, prompts: Sequence[Prompt]) -> Iterator[Scoring]:
    """A `Scoring`; work that is left when the body fails is dropped, with the processes that do it."""
    try:
        yield Scoring(host, prompts)
    except BaseException:
        host.workers.close()
        raise


def total(host: Host, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`scores` with what the host's weigh added to "reward" (0 where nothing was scored in JAX), in float32."""
    start = np.float32(0) if "reward" not in scores else scores["reward"]
    terms = (np.float32(weight) * scores[name] for name, weight in host.weights.items())
    return dict(scores) | {"reward": np.asarray(sum(terms, start), np.float32)}


def trial(host: Host, prompts: Sequence[Prompt], size: tuple[int, int]) -> None:
    """Scores a grey picture [height, width] of each prompt: what fails on any picture does so before anything is loaded."""
    with scoring(host, prompts) as attempt:
        attempt.add(np.full((len(prompts), *size, 3), 0.5, np.float32))
        attempt.finish()


@functools.cache
def load(target: str) -> Callable[..., Any]:
    """What "module:function" names."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, path.split("."), found)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


# What follows runs in a worker.


def _set_up() -> None:
    """Before anything else is imported: the accelerator and the terminal are the run's, and a worker ends with it."""
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    if "jax" in sys.modules:  # it has read its environment
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    os.setsid()  # Ctrl-C and signals to a group are the run's to handle
    os.dup2(2, 1)  # standard output is left to results
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _call(target: str, options: dict[str, Any], images: Images, prompts: list[str], metadata: list[Any]) -> Answer | str:
    """The scores, or in one line why there are none: an exception might not survive the way back."""
    try:
        answer = checked(load(target)(images, prompts, metadata, **options), len(images))
    except Failure as failure:
        return str(failure)
    except (Exception, SystemExit) as error:
        return _in_words(error)
    for values in answer.values():
        values[~finite(images)] = np.nan  # a picture that is none
    return answer


def checked(returned: Any, count: int) -> Answer:
    """What a function returned, as float32 [count] by name. Raises Failure."""
    scores = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in scores:
        raise Failure(f"returned {shown(sorted(map(str, scores)))} without 'reward'")
    answer = {}
    for name, values in scores.items():
        what = "" if name == "reward" else f" as {name!r}"
        try:
            array = np.asarray(values)
            if array.dtype.kind in "OSUcmM":
                raise TypeError
            with np.errstate(over="ignore"):
                answer[str(name)] = array.astype(np.float32)
        except (TypeError, ValueError):
            raise Failure(f"returned {shown(values)}{what}: no numbers") from None
        if array.shape != (count,):
            raise Failure(f"returned shape {array.shape}{what} for {count} pictures")
    return answer
