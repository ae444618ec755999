"""Decisions that all processes of a run share: every process is told what each of them found, and which error it had.

Answers go as JSON through JAX's coordination service, not through the devices. So a thread may ask while a computation runs.
Collectives of two threads could start in a different order on each process, and would then wait for each other forever.
"""

import collections
import json
from collections.abc import Callable
from typing import Any

import jax
from jax._src import (
    distributed,
)  # the only place that has the service's client; orbax takes it from here too

from solrl_jax.errors import InputError, RunError, first_line

PATIENCE = 1800.0  # seconds to wait for an answer: a process may have gigabytes to write; if it dies, JAX tells the others
_asked: collections.Counter[str] = collections.Counter()


def together(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> list[Any]:
    """Calls `act` on every process, and gives all of them what it returned (JSON values), by process. Every process must call.

    If `act` raised, the error of the first process where it did is raised in all: a RunError, an InputError and an error of one
    of `kinds` as itself, any other as a RunError that names the process. Only one thread at a time may use a label.
    """
    if jax.process_count() == 1:
        return [act()]
    mine: BaseException | None = None
    try:
        said: dict[str, Any] = {"value": act()}
    except BaseException as error:  # whatever it is, the others must not wait for an answer
        mine = error
        said = {"error": type(error).__name__, "message": first_line(error)}
    answers = _exchange(label, said)
    for index, answer in enumerate(answers):
        if "error" in answer:
            if index == jax.process_index() and mine is not None:
                raise mine
            known: tuple[type[Exception], ...] = (RunError, InputError, *kinds)
            for kind in known:
                if kind.__name__ == answer["error"]:
                    raise kind(answer["message"]) from mine
            raise RunError(f"process {index}: {answer['error']}: {answer['message']}") from mine
    return [answer["value"] for answer in answers]


def first(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """Gives every process what `act` returns or raises on the first; the others wait. See `together`."""
    return together(label, act if jax.process_index() == 0 else lambda: None, *kinds)[0]


def client() -> Any:
    """The client of JAX's coordination service, which stores a string for each key.

    Raises:
        RuntimeError: If `jax.distributed` was not initialized.
    """
    if distributed.global_state.client is None:
        raise RuntimeError("several processes, but jax.distributed was not initialised")
    return distributed.global_state.client


def _exchange(label: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer of each process, by process. The service keeps a key's value forever, so each use of a label has a number.

    A process that has all answers knows that all processes have those of the use before. Each then deletes its earlier answer.
    So the service, which runs in the first process, holds at most two answers for a label and process.
    """
    count = _asked[label]
    service = client()
    mine = jax.process_index()
    key = f"solrl_jax/{label}/{count}"
    _asked[label] += 1
    service.key_value_set(f"{key}/{mine}", json.dumps(answer))
    answers = []
    for index in range(jax.process_count()):
        try:
            answers.append(
                json.loads(service.blocking_key_value_get(f"{key}/{index}", int(PATIENCE * 1000)))
            )
        except jax.errors.JaxRuntimeError as error:
            raise RunError(
                f"process {index} gave no answer about {label}: {first_line(error)}"
            ) from error
    if count:
        service.key_value_delete(f"solrl_jax/{label}/{count - 1}/{mine}")
    return answers
