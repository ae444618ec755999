"""Multi-host runs: start-up, agreement between processes, and arrays that span hosts.

Every process runs the same program on the same arguments (JAX's multi-controller model) and holds
the shards of its own devices. Two rules follow. A value that decides which program runs next must
be the same in every process (`agreed`, `anywhere`). Only the first process writes to the run
directory (`write`); then all continue, or all fail. With one process, no function communicates.
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
AUTO = "auto"  # JAX reads the number of processes from the cluster's environment
MOST = 4096  # processes
# All times are in seconds.
HEARTBEAT = 30  # a process without a heartbeat for so long counts as dead, and the others end
START = 300  # all processes must join within this time
ANSWER = 5  # a process that connects must send its number within this time
END = 15  # how long a process that ends waits for the others


def initialise(hosts: str | None, host: int | None = None, coordinator: str | None = None) -> None:
    """Joins the processes of a run. Call it before anything else asks JAX for devices.

    Does nothing if `hosts` is None. Otherwise it also waits, up to `START` (300) seconds, until all
    processes have connected; silences the log messages of `jax._src.distributed` below warnings;
    and installs a handler of SIGABRT: if a process dies, or has no heartbeat for `HEARTBEAT` (30)
    seconds, JAX ends the others with a message that has its number, and their exit code is 1.

    Args:
        hosts: The number of processes as text, from "1" to "4096". With "auto", JAX reads it from
            SLURM, Open MPI, Kubernetes or a TPU pod. None means that this is the only process.
        host: The number of this process, from 0. Required with a number of hosts, and refused
            without one.
        coordinator: HOST:PORT of the first process, a free port that all processes can reach.
            Required with a number of hosts, and refused without one.

    Raises:
        InputError: If `host` or `coordinator` is missing or not wanted with these `hosts`, `hosts`
            or `host` is out of range, the address cannot be used, or JAX refuses them.
        RunError: If processes have not joined within `START` (300) seconds, or two were given one
            number. The message names them.
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
    # The name of a logger, which JAX has no other way to quiet. It reports each connection.
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
    """Handles SIGABRT, which JAX raises in a process when another one has died.

    Writes one line to standard error and ends the process at once with exit code 1, without any
    clean-up of Python. JAX 0.10 cannot call a Python function instead.

    Args:
        number: The number of the signal, which is not read.
    """
    os.write(
        2,
        b"solrl: JAX ended this process, for the reason above; "
        b"the same command goes on from the last checkpoint\n",
    )
    os._exit(1)


def roll_call(count: int, mine: int, coordinator: str) -> None:
    """Waits until all processes have connected to the first one. Every process calls this.

    `jax.distributed.initialize` aborts if a process is missing, and its message does not name it;
    this one does. `multihost_utils` works only after that. The first process listens on the port,
    and the others connect again and again until it does.

    Args:
        count: The number of processes of the run, this one included.
        mine: The number of this process, from 0 to `count` - 1.
        coordinator: HOST:PORT of the first process. HOST must not be empty; PORT is from 1 to
            65535. The port is closed again on return.

    Raises:
        RunError: In every process that has connected, if others have not after `START` (300)
            seconds, or if two processes were given one number; in the other processes, if the first
            one does not answer within `START` seconds.
        InputError: If `coordinator` is no HOST:PORT, or if the first process cannot open the port.
    """
    address, _, port = coordinator.rpartition(":")
    try:
        address.encode("idna")  # the look-up does this, and would raise UnicodeError
    except UnicodeError:  # e.g. an empty or overlong label between two dots
        address = ""
    if not (address and is_number(port) and 0 < int(port) < 2**16):
        raise InputError(f"coordinator={coordinator}: expected HOST:PORT")
    end = time.monotonic() + START
    problem = _call(mine, (address, int(port)), end) if mine else _listen(count, int(port), end)
    if problem:
        raise RunError(f"hosts={count}, coordinator={coordinator}: {problem}")


def _listen(count: int, port: int, end: float) -> str:
    """Waits in the first process for the other ones, and sends each of them the outcome.

    A connection that sends no number of a process, 1 to `count` - 1, within `ANSWER` (5) seconds is
    ignored. The wait ends early when two processes send the same number.

    Args:
        count: The number of processes, including this one. 1 does not wait.
        port: The port to listen on, on all addresses of this host, IPv6 too if it has that.
        end: When to give up, by `time.monotonic`, in seconds.

    Returns:
        The problem in a few words, e.g. "process 1, 3 not there after 300 seconds" or "two
        processes are host=2"; "" if all processes have connected.

    Raises:
        InputError: If the port cannot be opened.
    """
    callers: dict[int, socket.socket] = {}
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            dual_stack = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual_stack else socket.AF_INET
            server = stack.enter_context(
                socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack)
            )
        except OSError as error:
            raise InputError(
                f"coordinator: port {port} cannot be opened ({error.strerror})"
            ) from error
        while len(callers) < count - 1 and not problem:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                caller = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(
                    str(number) for number in range(1, count) if number not in callers
                )
                problem = f"process {missing} not there after {START} seconds"
                break
            caller.settimeout(ANSWER)
            with contextlib.suppress(OSError, ValueError):  # not a process of this run
                number = int(caller.recv(16))
                if not 1 <= number < count:
                    raise ValueError
                problem = f"two processes are host={number}" if number in callers else ""
                callers[number] = caller
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall(problem.encode() + b"\n")
    return problem


def _call(mine: int, address: tuple[str, int], end: float) -> str:
    """Connects to the first process, again and again until it listens, and waits for the outcome.

    It pauses for 0.2 seconds after each failed attempt. A host name that cannot be resolved counts
    as one, because some clusters create it when the process starts.

    Args:
        mine: The number of this process, which it sends.
        address: The host and port of the first process.
        end: When to give up, by `time.monotonic`, in seconds.

    Returns:
        The problem in a few words, as the first process describes it or because it has not answered
        in time; "" if all processes have connected.
    """
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as first:
                first.sendall(str(mine).encode())
                first.settimeout(left + ANSWER)
                if answer := first.recv(1000):
                    return answer.decode().strip()
        except OSError as error:
            # It does not listen yet. Its name may not exist either, because some clusters create it
            # when the process starts.
            why = f" ({error.strerror or error})"
            time.sleep(min(0.2, left))
    return f"process 0 not there after {START} seconds{why}"


def connect(mesh: Mesh) -> None:
    """Runs one sum over every combination of mesh axes, so that their devices are connected.

    Otherwise a later program would connect them, and Gloo waits only 30 s for a slower process.
    Every process must call it. Waits for the sums; does nothing with one process.

    Args:
        mesh: The mesh of all processes.
    """
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
    """Returns whether this process, number 0, writes to the run directory and to the terminal. True
    if it is the only process.
    """
    return jax.process_index() == 0


def write(act: Callable[[], Any]) -> None:
    """Calls `act` in the first process, while the others wait. Every process must call it.

    Args:
        act: A function without arguments. Its result is dropped.

    Raises:
        Exception: What `act` raised, in the first process.
        InputError: In the processes other than the first, if `act` raised an InputError there.
        RunError: In the processes other than the first, if `act` raised a RunError or an error of
            any other type but InputError there. In any process, if another one gives no answer
            within 1800 seconds.
    """

    def run() -> None:
        act()

    consensus.first("write", run)


def agreed(find: Callable[[], T]) -> T:
    """Calls `find` in the first process and returns its value in every process. All must call it.

    Args:
        find: A function without arguments that returns a JSON value. With several processes the
            value makes a round trip through JSON, which turns tuples into lists. With one process
            it is returned as it is.

    Returns:
        The value that `find` returned in the first process, in every process.

    Raises:
        Exception: What `find` raised, in the first process.
        InputError: In the processes other than the first, if `find` raised an InputError there.
        RunError: In the processes other than the first, if `find` raised a RunError or an error of
            any other type but InputError there. In any process, if another one gives no answer
            within 1800 seconds.
    """
    return consensus.first("agreed", find)


def everyones(value: T) -> list[T]:
    """Returns the values that all processes passed, in the order of their numbers. All must call
    it.

    Args:
        value: A JSON value. With several processes it makes a round trip through JSON, which turns
            tuples into lists. With one process the result is `[value]`.

    Raises:
        RunError: If a process gives no answer within 1800 seconds.
    """
    return consensus.together("everyones", lambda: value)


def anywhere(flags: Sequence[bool]) -> list[bool]:
    """Returns for each flag whether it is true in any process. All processes must call it.

    Args:
        flags: The flags of this process. All processes pass as many flags; an empty sequence gives
            [].

    Raises:
        ValueError: If the processes pass different numbers of flags.
        RunError: If a process gives no answer within 1800 seconds.
    """
    return [any(values) for values in zip(*everyones(list(flags)), strict=True)]


def memory() -> int:
    """Returns the size of this host's physical memory (RAM) in bytes, used or not. A smaller limit
    of a container is not considered.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def put(tree: Any, where: NamedSharding) -> Any:
    """Places arrays on a mesh.

    Args:
        tree: A tree of full arrays, of NumPy or JAX. Every process passes equal ones.
        where: The sharding that every array of the tree gets.

    Returns:
        The tree with global arrays. With several processes, each transfers only the shards of its
        own devices.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    def place(x):
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def fetch(tree: Any) -> Any:
    """Copies arrays from their mesh to the host of every process. All processes must call it.

    Waits until the arrays are computed.

    Args:
        tree: A tree of global arrays.

    Returns:
        The tree with a full NumPy array of the same shape and dtype in place of each array, also
        where shards are on devices of other processes.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def rows_held(where: NamedSharding, count: int) -> list[int]:
    """Returns the indices of the rows that this process's devices hold, ascending and without
    duplicates.

    Args:
        where: The sharding of an array with one axis, or of the leading axis.
        count: The number of rows of the array, which the sharding must divide.
    """
    slices = {
        index[0].indices(count)[:2]
        for index in where.addressable_devices_indices_map((count,)).values()
        if index
    }
    return sorted({row for start, stop in slices for row in range(start, stop)})


def held(x: jax.Array) -> np.ndarray:
    """Returns the rows of an array that this process's devices hold, by ascending index.

    Args:
        x: An array that is sharded along its leading axis at most. Rows that several devices hold
            are returned once.

    Returns:
        A NumPy array [rows, ...] of the dtype of `x`. With one process it is all of `x`.
    """
    parts = {shard.index[0].indices(x.shape[0])[0]: shard for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])
