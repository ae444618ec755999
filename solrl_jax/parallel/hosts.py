"""Several hosts: how a run finds the others, and what they agree on. One host is the case in which nobody else is asked.

Every process runs the same program on the same arguments (JAX's multi-controller model) and holds the shards of its own
devices. So two rules hold: what decides which program runs next is the same everywhere (`agreed`, `anywhere`), and what
the run directory is told, the first process tells it (`write`), for all to go on or to fail together.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from solrl_jax.parallel import consensus
from solrl_jax.storage.errors import InputError

T = TypeVar("T")
AUTO = "auto"
HEARTBEAT = 30  # seconds without a sign of life after which a process is taken for dead, and the others end
START = 300  # seconds in which all processes must have come
END = 15  # seconds that a process waits for the others to end too, after which it leaves, and they are told


def initialise(hosts: str, host: int | None = None, coordinator: str | None = None) -> None:
    """Joins the processes of a run; before anything else asks JAX for devices.

    hosts: how many processes there are, or "auto": what SLURM, Open MPI, Kubernetes or a TPU pod says of itself, as JAX reads
    it. host: which one this is, from 0; coordinator: HOST:PORT of the first, a free port of a host that all can reach.
    A process that dies ends the others with a message within a minute. Raises InputError.
    """
    given = {"--host": host, "--coordinator": coordinator}
    settings: dict[str, Any] = {}
    if hosts != AUTO:
        if not hosts.isdecimal() or not int(hosts):
            raise InputError(f"--hosts {hosts!r}: expected a number of processes from 1, or {AUTO}")
        if absent := [name for name, value in given.items() if value is None]:
            raise InputError(f"--hosts {hosts}: needs {' and '.join(absent)} too, or --hosts {AUTO}")
        assert host is not None
        if not 0 <= host < int(hosts):
            raise InputError(f"--host {host}: must be from 0 to {int(hosts) - 1}, with --hosts {hosts}")
        settings = {"num_processes": int(hosts), "process_id": host, "coordinator_address": coordinator}
    elif stray := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{stray[0]}: only with --hosts N, not with --hosts {AUTO}")
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=START, shutdown_timeout_seconds=END, **settings
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(f"--hosts {hosts}: {' '.join(str(error).split())}") from error


def first() -> bool:
    """Whether this is the process that writes the run directory and speaks to the terminal."""
    return jax.process_index() == 0


def write(act: Callable[[], Any]) -> None:
    """Does `act` in the first process, for which the others wait. An InputError or RunError is raised everywhere."""
    consensus.first("write", lambda: act() and None)


def agreed(find: Callable[[], T]) -> T:
    """What `find` returns in the first process (JSON), everywhere. An InputError or RunError is raised everywhere."""
    return consensus.first("agreed", find)


def everyones(value: T) -> list[T]:
    """The JSON value of each process, in their order."""
    return consensus.together("everyones", lambda: value)


def anywhere(flags: Sequence[bool]) -> list[bool]:
    """Of each flag, whether it is true in a process; there are as many everywhere."""
    return [any(of_all) for of_all in zip(*everyones(list(flags)), strict=True)]


def put(tree: Any, where: NamedSharding) -> Any:
    """Arrays that every process has whole on the host, placed on a mesh; each process gives its own devices their parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)
    place = lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index])
    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def fetch(tree: Any) -> Any:
    """Arrays of a mesh, whole, on the host of every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


def rows_held(where: NamedSharding, count: int) -> list[int]:
    """Which of `count` rows, split as `where` says, this process's devices hold, in order."""
    slices = {index[0].indices(count)[:2] for index in where.addressable_devices_indices_map((count,)).values() if index}
    return sorted({row for start, stop in slices for row in range(start, stop)})


def held(x: jax.Array) -> np.ndarray:
    """The rows of `rows_held`, from the devices of this process."""
    parts = {shard.index[0].indices(x.shape[0])[0]: shard for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])
