"""Several hosts: how the processes of a run find each other, and how they agree. On one host nobody else is asked.

Every process runs the same program on the same arguments (JAX's multi-controller model) and holds the shards of its own
devices. Two rules follow. A value that decides which program runs next must be the same in every process (`agreed`,
`anywhere`). Only the first process writes to the run directory (`write`); then all go on, or all fail.
"""

import logging
import os
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
HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead, and the others end
START = 300  # seconds within which all processes must have joined
END = 15  # seconds that a process waits at its end for the others; then it leaves, and they are told


def initialise(hosts: str, host: int | None = None, coordinator: str | None = None) -> None:
    """Joins the processes of a run. Call it before anything else asks JAX for devices.

    hosts: the number of processes, or "auto": JAX reads it from SLURM, Open MPI, Kubernetes or a TPU pod. host: the number of
    this process, from 0. coordinator: HOST:PORT of the first process, a free port that all can reach. If a process dies, the
    others end with a message within a minute. Raises InputError.
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
    except (RuntimeError, ValueError, LookupError) as error:
        raise InputError(f"--hosts {hosts} --coordinator {coordinator}: {' '.join(str(error).split())}") from error


def first() -> bool:
    """Whether this is the process that writes to the run directory and to the terminal."""
    return jax.process_index() == 0


def write(act: Callable[[], Any]) -> None:
    """Calls `act` in the first process; the others wait. An InputError or RunError is raised in all of them."""
    consensus.first("write", lambda: act() and None)


def agreed(find: Callable[[], T]) -> T:
    """Gives every process what `find` returns in the first (JSON). An InputError or RunError is raised in all of them."""
    return consensus.first("agreed", find)


def everyones(value: T) -> list[T]:
    """The JSON value of each process, in their order."""
    return consensus.together("everyones", lambda: value)


def anywhere(flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether it is true in any process. All processes give the same number of flags."""
    return [any(of_all) for of_all in zip(*everyones(list(flags)), strict=True)]


def memory() -> int:
    """The bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def put(tree: Any, where: NamedSharding) -> Any:
    """Places arrays on a mesh. Every process has the full arrays on its host, and gives its own devices their parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)
    place = lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index])
    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def fetch(tree: Any) -> Any:
    """The full arrays of a mesh, on the host of every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


def rows_held(where: NamedSharding, count: int) -> list[int]:
    """The numbers of the rows that this process's devices hold, in order, of `count` rows placed by `where`."""
    slices = {index[0].indices(count)[:2] for index in where.addressable_devices_indices_map((count,)).values() if index}
    return sorted({row for start, stop in slices for row in range(start, stop)})


def held(x: jax.Array) -> np.ndarray:
    """The rows of `x` that this process's devices hold, in the order of `rows_held`."""
    parts = {shard.index[0].indices(x.shape[0])[0]: shard for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])
