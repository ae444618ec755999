"""Decisions that all processes of a run share.

Every process learns the answer of each process, and the error that any of them had. Answers travel
as JSON through JAX's coordination service, not through the devices, so a background thread may ask
while a computation runs. `multihost_utils` uses device collectives: those of two threads could
start in a different order in each process, and would then wait for each other forever.
"""

import collections
import json
from collections.abc import Callable
from typing import Any

import jax

# JAX has no public access to the coordination service's key-value store. Orbax also uses this one.
from jax._src import distributed

from solrl_jax.errors import InputError, RunError, first_line

# Seconds to wait for an answer. A process may have gigabytes to write; if it dies, JAX ends the
# others.
PATIENCE = 1800.0
_use_counts: collections.Counter[str] = collections.Counter()


def together(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> list[Any]:
    """Calls a function in every process and returns all results to all of them.

    Every process must call this with the same label. It blocks until all have answered. With one
    process, it only calls `act`: the result is not converted, and errors pass unchanged.

    Args:
        label: Names the exchange, the same in all processes, e.g. "save/write". Only one thread at
            a time may use a label, but may use it any number of times.
        act: The function that this process calls. It returns a JSON value and may raise. With
            several processes the value makes a round trip through JSON, which turns tuples into
            lists. A value that JSON cannot encode counts as an error of `act` then, a TypeError or
            ValueError.
        *kinds: Further exception types that are raised in every process as they are. They are
            recognized by the name of the class and constructed from a message alone.

    Returns:
        The result of each process, in the order of their numbers.

    Raises:
        Exception: The error of the first process whose `act` raised. An InputError, a RunError or
            one of `kinds` keeps its type and the first line of its message. Any other error is a
            RunError "process NUMBER: TYPE: MESSAGE". Only the process itself raises the original
            error.
        RunError: If a process gives no answer within `PATIENCE` (1800) seconds.
        RuntimeError: With several processes, if `jax.distributed` was not initialised.
    """
    if jax.process_count() == 1:
        return [act()]
    error_here: BaseException | None = None
    try:
        encoded = json.dumps({"value": act()})
    except BaseException as error:  # whatever it is, the others must not wait for an answer
        error_here = error
        encoded = json.dumps({"error": type(error).__name__, "message": first_line(error)})
    answers = _exchange(label, encoded)
    for index, answer in enumerate(answers):
        if "error" in answer:
            if index == jax.process_index() and error_here is not None:
                raise error_here
            known: tuple[type[Exception], ...] = (RunError, InputError, *kinds)
            for kind in known:
                if kind.__name__ == answer["error"]:
                    raise kind(answer["message"]) from error_here
            message = f"process {index}: {answer['error']}: {answer['message']}"
            raise RunError(message) from error_here
    return [answer["value"] for answer in answers]


def first(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """Calls a function in the first process and returns its result to all; the others wait.

    Every process must call this with the same label. With one process, it only calls `act`.

    Args:
        label: Names the exchange, the same in all processes, e.g. "restore/judge". Only one thread
            at a time may use a label.
        act: The function that the first process calls. It returns a JSON value and may raise. With
            several processes the value makes a round trip through JSON, which turns tuples into
            lists. A value that JSON cannot encode counts as an error of `act` then, a TypeError or
            ValueError.
        *kinds: Further exception types that the other processes raise with the first line of the
            message, in place of a RunError. They are recognized by the name of the class and
            constructed from a message alone.

    Returns:
        What `act` returned in the first process.

    Raises:
        Exception: What `act` raised in the first process. The other processes raise an error of
            that type, with the first line of its message, if it is InputError, RunError or one of
            `kinds`, and a RunError "process 0: TYPE: MESSAGE" otherwise.
        RunError: If a process gives no answer within `PATIENCE` (1800) seconds.
        RuntimeError: With several processes, if `jax.distributed` was not initialised.
    """
    return together(label, act if jax.process_index() == 0 else lambda: None, *kinds)[0]


def client() -> Any:
    """Returns the client of JAX's coordination service, which stores a string for each key.

    It has the methods `key_value_set`, `blocking_key_value_get` and `key_value_delete`.

    Raises:
        RuntimeError: If `jax.distributed` was not initialised.
    """
    if distributed.global_state.client is None:
        raise RuntimeError("several processes, but jax.distributed was not initialised")
    return distributed.global_state.client


def _exchange(label: str, encoded: str) -> list[dict[str, Any]]:
    """Sends this process's answer and waits for those of all processes. Every process calls this.

    The service keeps the value of a key forever, so each use of a label has its own number, counted
    in `_use_counts`. A process that has all answers knows that every process has read those of the
    previous use, and deletes its own previous answer. So the service, which runs in the first
    process, holds at most two answers per label and process.

    Args:
        label: The name of the exchange, under which every process of the run has a key in the
            service.
        encoded: This process's answer, a JSON text: {"value": result} or {"error": name of the
            type, "message": its first line}.

    Returns:
        The answers of all processes, this one included, in the order of their numbers.

    Raises:
        RunError: If a process gives no answer within `PATIENCE` (1800) seconds, which count for
            each process anew.
        RuntimeError: If `jax.distributed` was not initialised.
    """
    service = client()
    index_here = jax.process_index()
    count = _use_counts[label]
    _use_counts[label] += 1
    key = f"solrl_jax/{label}/{count}"
    service.key_value_set(f"{key}/{index_here}", encoded)
    timeout_ms = int(PATIENCE * 1000)
    answers = []
    for index in range(jax.process_count()):
        try:
            answers.append(json.loads(service.blocking_key_value_get(f"{key}/{index}", timeout_ms)))
        except jax.errors.JaxRuntimeError as error:
            message = f"process {index} gave no answer about {label}: {first_line(error)}"
            raise RunError(message) from error
    if count:
        service.key_value_delete(f"solrl_jax/{label}/{count - 1}/{index_here}")
    return answers
