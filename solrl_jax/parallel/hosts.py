"""Several hosts: how the processes of a run find each other, and how they agree. On one host nobody else is asked.

Every process runs the same program on the same arguments (JAX's multi-controller model) and holds the shards of its own
devices. Two rules follow. A value that decides which program runs next must be the same in every process (`agreed`,
`anywhere`). Only the first process writes to the run directory (`write`); then all go on, or all fail.
"""

import contextlib
import ctypes
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from solrl_jax.errors import InputError, RunError
from solrl_jax.parallel import consensus
from solrl_jax.storage.readers import is_number

T = TypeVar("T")
# processes
AUTO = "auto"
MOST = 4096
HEARTBEAT = (
    30  # seconds without a heartbeat after which a process counts as dead, and the others end
)
START = 300  # seconds within which all processes must have joined
ANSWER = 5  # seconds within which a process that calls must say its number
END = (
    15  # seconds that a process waits at its end for the others; then it leaves, and they are told
)


def initialise(hosts: str | None, host: int | None = None, coordinator: str | None = None) -> None:
    """Joins the processes of a run. Call it before anything else asks JAX for devices.

    hosts: the number of processes; "auto": JAX reads it from SLURM, Open MPI, Kubernetes or a TPU pod; None: there is no other.
    host: the number of this process, from 0. coordinator: HOST:PORT of the first process, a free port that all can reach. If a
    process dies, or is not heard of for `HEARTBEAT` seconds, JAX ends the others with a message that has its number, and their
    exit code is 1. Raises InputError, and RunError that names the processes that are not there `START` seconds after this one.
    """
    given = {"host": host, "coordinator": coordinator}
    settings: dict[str, Any] = {}
    if hosts in (None, AUTO):
        if stray := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{stray[0]}={given[stray[0]]}: only with a number of hosts")
        if hosts is None:
            return
    else:
        if not (is_number(hosts) and 1 <= int(hosts) <= MOST):
            raise InputError(
                f"hosts={hosts!r}: expected a number of processes from 1 to {MOST}, or {AUTO}"
            )
        if absent := [name for name, value in given.items() if value is None]:
            raise InputError(f"hosts={hosts}: needs {' and '.join(absent)} too, or hosts={AUTO}")
        assert host is not None
        if not 0 <= host < int(hosts):
            raise InputError(f"host={host}: must be from 0 to {int(hosts) - 1}, with hosts={hosts}")
        roll_call(int(hosts), host, str(coordinator))
        settings = {
            "num_processes": int(hosts),
            "process_id": host,
            "coordinator_address": coordinator,
        }
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT,
            initialization_timeout=START,
            shutdown_timeout_seconds=END,
            **settings,
        )
    except (RuntimeError, ValueError, LookupError) as error:
        raise InputError(
            f"hosts={hosts}, coordinator={coordinator}: {' '.join(str(error).split())}"
        ) from error


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    """What SIGABRT calls: JAX aborts a process that hears of another's death. In 0.10 it cannot call Python instead."""
    os.write(
        2,
        b"solrl: JAX ended this process, for the reason above; the same command goes on from the last checkpoint\n",
    )
    os._exit(1)


def roll_call(count: int, mine: int, coordinator: str) -> None:
    """Returns when all `count` processes have called. JAX would abort if some did not, and name none.

    Raises RunError in all that called if others have not after `START` seconds, or if two have one number; InputError for an
    address that cannot be used.
    """
    address, _, port = coordinator.rpartition(":")
    try:
        address.encode("idna")  # as it is looked up
    except UnicodeError:  # nothing between two dots, or too much
        address = ""
    if not (address and is_number(port) and 0 < int(port) < 2**16):
        raise InputError(f"coordinator={coordinator}: expected HOST:PORT")
    end = time.monotonic() + START
    problem = _call(mine, (address, int(port)), end) if mine else _listen(count, int(port), end)
    if problem:
        raise RunError(f"hosts={count}, coordinator={coordinator}: {problem}")


def _listen(count: int, port: int, end: float) -> str:
    """Waits for the other processes and answers them: what is wrong, or nothing."""
    there: dict[int, socket.socket] = {}
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = stack.enter_context(
                socket.create_server(("", port), family=family, dualstack_ipv6=both)
            )
        except OSError as error:
            raise InputError(
                f"coordinator: port {port} cannot be opened ({error.strerror})"
            ) from error
        while len(there) < count - 1 and not problem:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                caller = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(
                    str(number) for number in range(1, count) if number not in there
                )
                problem = f"process {missing} not there after {START} seconds"
                break
            caller.settimeout(ANSWER)
            with contextlib.suppress(OSError, ValueError):  # a stranger
                number = int(caller.recv(16))
                problem = f"two processes are host={number}" if number in there else ""
                there[number] = caller
        for caller in there.values():
            with contextlib.suppress(OSError):
                caller.sendall(problem.encode() + b"\n")
    return problem


def _call(mine: int, address: tuple[str, int], end: float) -> str:
    """Calls the first process until it is there; returns what it answers."""
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as first:
                first.sendall(str(mine).encode())
                first.settimeout(left + ANSWER)
                if answer := first.recv(1000):
                    return answer.decode().strip()
        except (
            OSError
        ) as error:  # not there yet; nor its name, where the cluster gives it one when it starts
            why = f" ({error.strerror or error})"
            time.sleep(min(0.2, left))
    return f"process 0 not there after {START} seconds{why}"


def connect(mesh: Mesh) -> None:
    """Connects every group of devices that a program may sum over. Done later, Gloo waits only 30 s for a slower process."""
    if jax.process_count() == 1:
        return
    names = mesh.axis_names
    ones = put(np.ones(mesh.devices.shape, np.float32), NamedSharding(mesh, PartitionSpec(*names)))
    for axes in itertools.chain(
        *(itertools.combinations(names, count) for count in range(1, len(names) + 1))
    ):
        others = PartitionSpec(*(None if name in axes else name for name in names))
        total = jax.shard_map(
            partial(jax.lax.psum, axis_name=axes),
            mesh=mesh,
            in_specs=ones.sharding.spec,
            out_specs=others,
        )
        jax.block_until_ready(jax.jit(total)(ones))


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

    def place(x):
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def fetch(tree: Any) -> Any:
    """The full arrays of a mesh, on the host of every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def rows_held(where: NamedSharding, count: int) -> list[int]:
    """The numbers of the rows that this process's devices hold, in order, of `count` rows placed by `where`."""
    slices = {
        index[0].indices(count)[:2]
        for index in where.addressable_devices_indices_map((count,)).values()
        if index
    }
    return sorted({row for start, stop in slices for row in range(start, stop)})


def held(x: jax.Array) -> np.ndarray:
    """The rows of `x` that this process's devices hold, in the order of `rows_held`."""
    parts = {shard.index[0].indices(x.shape[0])[0]: shard for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])
