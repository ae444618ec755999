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


def on_every(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> list[Any]:
    """Calls a function in every process of a run, and returns all results to all processes.

    Every process must call this with the same label; it blocks until all have answered. If the
    function fails in any process, all processes raise an error. With one process, it only calls
    `act`.

    Args:
        label: Name of the exchange, the same in all processes, e.g. "save/write". It may be used
            again, but only by one thread at a time.
        act: A function without arguments that returns a JSON value. With several processes the
            value goes through JSON, which turns tuples into lists and numeric keys into strings,
            and a value that is not JSON counts as a TypeError of `act`.
        *kinds: Types of exceptions that keep their type in the other processes, besides InputError
            and RunError. Each must be constructible from a message alone.

    Returns:
        The result of each process, in the order of their numbers.

    Raises:
        BaseException: The exception of `act` (also KeyboardInterrupt or SystemExit), in the first
            process (by number) where it failed. All other processes, also those where `act` failed,
            raise a copy with the first line of its message if its type is exactly InputError,
            RunError or one of `kinds` (no subclass); otherwise a RunError "process NUMBER: TYPE:
            MESSAGE".
        RunError: If a process does not answer within 1800 seconds (`PATIENCE`).
        RuntimeError: If there are several processes, but `jax.distributed` was not initialized.
    """
    if jax.process_count() == 1:
        return [act()]
    error_here: BaseException | None = None
    try:
        encoded = json.dumps({"value": act()})
    except BaseException as error:  # whatever it is, the others must not wait for an answer
        error_here = error
        encoded = json.dumps({"error": type(error).__name__, "message": first_line(error)})
    try:
        answers = _exchange(label, encoded)
    except RunError as no_answer:
        if error_here is None:
            raise
        raise no_answer from error_here
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


def from_first(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """Calls a function in the first process only, and returns its result to all processes.

    Every process must call this with the same label; it blocks until all have called it, also in
    the first process. If the function fails, all processes raise an error. With one process, it
    only calls `act`.

    Args:
        label: Name of the exchange, the same in all processes, e.g. "restore/judge". It may be used
            again, but only by one thread at a time.
        act: A function without arguments that returns a JSON value. With several processes the
            value goes through JSON, which turns tuples into lists and numeric keys into strings,
            and a value that is not JSON counts as a TypeError of `act`.
        *kinds: Types of exceptions that keep their type in the other processes, besides InputError
            and RunError. Each must be constructible from a message alone.

    Returns:
        The result of `act`.

    Raises:
        BaseException: The exception of `act` (also KeyboardInterrupt or SystemExit), in the first
            process. The others raise a copy with the first line of its message if its type is
            exactly InputError, RunError or one of `kinds` (no subclass); otherwise a RunError
            "process 0: TYPE: MESSAGE".
        RunError: If a process does not answer within 1800 seconds (`PATIENCE`).
        RuntimeError: If there are several processes, but `jax.distributed` was not initialized.
    """
    return on_every(label, act if jax.process_index() == 0 else lambda: None, *kinds)[0]


def client() -> Any:
    """Returns the client of JAX's coordination service, a store of strings by key that all
    processes share.

    Its methods are `key_value_set`, `blocking_key_value_get` and `key_value_delete`.

    Raises:
        RuntimeError: If `jax.distributed` was not initialized.
    """
    if distributed.global_state.client is None:
        raise RuntimeError("several processes, but jax.distributed was not initialized")
    return distributed.global_state.client


def _exchange(label: str, encoded: str) -> list[dict[str, Any]]:
    """Sends this process's answer to all processes, and waits for theirs. Every process must call
    this.

    The answers go through JAX's coordination service. Each use of a label has its own keys, with a
    number that each process counts in `_use_counts`. Also deletes this process's key of the
    previous use.

    Args:
        label: Name of the exchange, the same in all processes. Only one thread may use it at a
            time.
        encoded: This process's answer as JSON text: {"value": result}, or {"error": name of the
            exception's type, "message": first line of its message}.

    Returns:
        The decoded answers of all processes, this one included, in the order of their numbers.

    Raises:
        RunError: If a process does not answer within 1800 seconds (`PATIENCE`).
        RuntimeError: If `jax.distributed` was not initialized.
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
