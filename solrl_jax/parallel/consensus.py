"""Decisions that all processes of a run share: what one finds or suffers, every one is told.

Answers go through jax's coordination service as JSON and not through the devices, so that threads may ask beside a computation:
collectives of two threads could meet in another order on every process, and then wait for one another for good.
"""

import collections
import json
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the only place that has the service's client; orbax takes it from here too

from solrl_jax.storage.errors import InputError, RunError, first_line

PATIENCE = 1800.0  # seconds for an answer: a process may have gigabytes to write, and if it dies jax tells the others
_asked: collections.Counter[str] = collections.Counter()


def together(label: str, act: Callable[[], Any], *kinds: type[Exception]) -> list[Any]:
    """Runs `act` on every process, each of which must call this: what it returned (JSON values), by process.

    If it raised anywhere, the error of the first such process is raised everywhere: as what it is when that is a RunError, an
    InputError or one of `kinds`, else as a RunError that names the process. One thread at a time may use a label.
    """
    if jax.process_count() == 1:
        return [act()]
    mine: BaseException | None = None
    try:
        said: dict[str, Any] = {"value": act()}
    except BaseException as error:  # whatever it is, the others must not wait for an answer
        mine, said = error, {"error": type(error).__name__, "message": first_line(error)}
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
    """What `act` returns or raises on the first process, on every one; the others wait. See `together`."""
    return together(label, act if jax.process_index() == 0 else lambda: None, *kinds)[0]


def _exchange(label: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Every process's answer, by process. A key holds one value for good, so a label counts how often it was used.

    Whoever has all answers knows that everyone has those of the time before, so each takes back what it said then: the
    service, which lives in the first process, holds two answers a label and process, however long a run is.
    """
    count, client, mine = _asked[label], distributed.global_state.client, jax.process_index()
    key = f"solrl_jax/{label}/{count}"
    _asked[label] += 1
    if client is None:
        raise RuntimeError("several processes, but jax.distributed was not initialised")
    client.key_value_set(f"{key}/{mine}", json.dumps(answer))
    answers = []
    for index in range(jax.process_count()):
        try:
            answers.append(json.loads(client.blocking_key_value_get(f"{key}/{index}", int(PATIENCE * 1000))))
        except jax.errors.JaxRuntimeError as error:
            raise RunError(f"process {index} gave no answer about {label}: {first_line(error)}") from error
    if count:
        client.key_value_delete(f"solrl_jax/{label}/{count - 1}/{mine}")
    return answers
