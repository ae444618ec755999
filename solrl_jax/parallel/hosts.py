"""Multi-host runs: start-up, agreement between processes, and arrays that span hosts.

Every process runs the same program on the same arguments (JAX's multi-controller model) and holds
the shards of its own devices. Two rules follow. A value that decides which program runs next must
be the same in every process (`from_first`, `any_flags`). Only the first process writes to the run
directory (`run_on_first`); then all continue, or all fail. With one process, no function
communicates.
"""

import contextlib
import ctypes
import itertools
import logging
import os
import select
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
from solrl_jax.storage.readers import is_short_digits

T = TypeVar("T")
AUTO = "auto"  # JAX reads the number of processes from the cluster's environment
MOST = 4096  # processes
# All times are in seconds.
HEARTBEAT = 30  # a process without a heartbeat for so long counts as dead, and the others end
START = 300  # all processes must join within this time
ANSWER = 5  # a process that connects must send its number within this time
OUTCOME = b"solrl: "  # how an answer of the first process in the roll call begins
END = 15  # how long a process that ends waits for the others


def initialize(hosts: str | None, host: int | None = None, coordinator: str | None = None) -> None:
    """Connects the processes of a run on several hosts. Call it before anything asks JAX for
    devices.

    It waits up to 300 seconds (`START`) for all processes (with a number of hosts twice: in
    `roll_call`, and then in JAX). Afterwards, if a process dies or stops responding for 30 seconds
    (`HEARTBEAT`), JAX ends the others with a message, and their exit code is 1. For this it
    replaces the handler of SIGABRT. It also silences JAX's messages about connections.

    Args:
        hosts: The number of processes as text, from "1" to "4096". "1" initializes
            `jax.distributed`, too. "auto": JAX reads this number, the number of this process and
            the address from SLURM, Open MPI, Kubernetes or a TPU pod. None: this is the only
            process, and nothing is done.
        host: The number of this process, counted from 0. Required if `hosts` is a number; otherwise
            it must be None.
        coordinator: HOST:PORT of the first process (number 0), with a free port that all processes
            can reach. Required if `hosts` is a number; otherwise it must be None.

    Raises:
        InputError: If an argument is missing, out of range or not allowed with the others, the
            address cannot be used, or JAX refuses them. With "auto", also if JAX finds no cluster
            or processes are missing after 300 seconds.
        RunError: With a number of hosts, if processes are missing after 300 seconds, or two have
            the same number. The message names them.
    """
    given = {"host": host, "coordinator": coordinator}
    settings: dict[str, Any] = {}
    if hosts in (None, AUTO):
        if stray := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{stray[0]}={given[stray[0]]}: only with a number of hosts")
        if hosts is None:
            return
    else:
        if not (is_short_digits(hosts) and 1 <= int(hosts) <= MOST):
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
    """Handles SIGABRT, which JAX raises in a process when another one of the run has died.

    Writes one line to standard error (that JAX has given the reason above, and that the same
    command goes on from the last checkpoint), and ends the process at once with exit code 1.

    Args:
        number: The number of the signal, not used.
    """
    os.write(
        2,
        b"solrl: JAX ended this process, for the reason above; "
        b"the same command goes on from the last checkpoint\n",
    )
    os._exit(1)


def roll_call(count: int, mine: int, coordinator: str) -> None:
    """Waits until all processes of a run have connected to the first one (number 0). Every process
    must call it.

    Unlike `jax.distributed.initialize`, its error says which processes are missing.

    Args:
        count: The number of processes of the run.
        mine: The number of this process, from 0 to `count` - 1.
        coordinator: HOST:PORT of the first process, which listens on this port, on all its
            addresses, until `roll_call` ends. The port is free again afterwards.

    Raises:
        RunError: If a process has not connected after 300 seconds (`START`), or two have the same
            number.
        InputError: If `coordinator` is not of the form HOST:PORT; in the first process also if it
            cannot open the port.
    """
    address, _, port = coordinator.rpartition(":")
    try:
        address.encode("idna")  # the look-up does this, and would raise UnicodeError
    except UnicodeError:  # e.g. an empty or overlong label between two dots
        address = ""
    if not (address and is_short_digits(port) and 0 < int(port) < 2**16):
        raise InputError(f"coordinator={coordinator}: expected HOST:PORT")
    end = time.monotonic() + START
    server = (address.strip("[]"), int(port))  # an IPv6 address is written in brackets
    problem = (
        _report_to_first(mine, server, end) if mine else _collect_reports(count, int(port), end)
    )
    if problem:
        raise RunError(f"hosts={count}, coordinator={coordinator}: {problem}")


def _collect_reports(count: int, port: int, end: float) -> str:
    """Waits for all other processes to connect, and sends them the outcome. This is the first
    process's part of `roll_call`.

    Connections that do not send the number of a process within 5 seconds (`ANSWER`) are ignored. A
    process that connects anew, because it was started again, takes the place of its connection that
    has ended.

    Args:
        count: The number of processes of the run, this one included.
        port: The port to listen on, on all addresses of this host.
        end: The time at which to give up, in seconds of `time.monotonic`.

    Returns:
        "" if all processes have connected; otherwise the problem, e.g. "process 1, 3 not there
        after 300 seconds" or "two processes are host=2".

    Raises:
        InputError: If the port cannot be opened.
    """
    connected: dict[int, socket.socket] = {}
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
        while not problem:
            if len(connected) == count - 1:
                # A process may have ended meanwhile. The process that replaces it must connect.
                connected = {i: c for i, c in connected.items() if not _has_ended(c)}
                if len(connected) == count - 1:
                    break
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                caller = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(
                    str(number) for number in range(1, count) if number not in connected
                )
                problem = f"process {missing} not there after {START} seconds"
                break
            caller.settimeout(ANSWER)
            with contextlib.suppress(OSError, ValueError):  # not a process of this run
                number = int(caller.recv(16))
                if not 1 <= number < count:
                    raise ValueError
                if number in connected and not _has_ended(connected[number]):
                    problem = f"two processes are host={number}"
                    _send_outcome(caller, problem)
                else:
                    connected[number] = caller
        for caller in connected.values():
            _send_outcome(caller, problem)
    return problem


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the other side of a connection has closed or reset it, without waiting.

    Args:
        connection: The connection. All data that the other side sent must have been read; unread
            data gives False.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    readable = poller.poll(0)
    try:
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _send_outcome(connection: socket.socket, problem: str) -> None:
    """Sends the outcome of the roll call to a process: `OUTCOME` ("solrl: "), the problem and a
    line feed. It does not close the connection. A connection that has ended is no error.

    Args:
        connection: The connection to the process.
        problem: The problem; "" if all processes have connected.
    """
    with contextlib.suppress(OSError):
        connection.sendall(OUTCOME + problem.encode() + b"\n")


def _report_to_first(mine: int, address: tuple[str, int], end: float) -> str:
    """Connects to the first process, and waits for the outcome. All processes but the first do this
    in `roll_call`.

    It tries every 0.2 seconds until the first process answers, whose host name need not exist yet.
    An answer that does not begin with `OUTCOME` ("solrl: ") comes from another program at this
    port, and is ignored.

    Args:
        mine: The number of this process, which is sent as decimal digits.
        address: (host, port) of the first process.
        end: The time at which to give up, in seconds of `time.monotonic`.

    Returns:
        "" if all processes have connected; otherwise the problem: the text that the first process
        sent, or "process 0 not there after 300 seconds", followed by the reason in parentheses if
        it is known.
    """
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as first:
                first.sendall(str(mine).encode())
                first.settimeout(left + ANSWER)
                answer = first.recv(1000)
                if answer.startswith(OUTCOME):
                    return answer.removeprefix(OUTCOME).decode().strip()
                why = " (another program, or an earlier start, listens on its port)"
        except OSError as error:
            # It does not listen yet. Its name may not exist either, because some clusters create it
            # when the process starts.
            why = f" ({error.strerror or error})"
        time.sleep(min(0.2, left))
    return f"process 0 not there after {START} seconds{why}"


def connect(mesh: Mesh) -> None:
    """Opens the connections between all devices of a mesh, by one sum over every combination of
    mesh axes, and waits for the sums.

    Otherwise the connections would be opened in the middle of a run, where a process that is 30
    seconds late makes Gloo fail (JAX's collectives between CPUs). Every process must call it. With
    one process, it does nothing.

    Args:
        mesh: The mesh, over the devices of all processes.
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


def is_first() -> bool:
    """Returns whether this is the first process of the run, which writes to the run directory and
    to the terminal.
    """
    return jax.process_index() == 0


def run_on_first(act: Callable[[], Any]) -> None:
    """Calls a function in the first process only, while the others wait. Every process must call
    it, from one thread at a time.

    Args:
        act: The function, without arguments. Its result is dropped.

    Raises:
        Exception: The exception of `act`, in the first process.
        InputError: In the other processes, if `act` raised an InputError.
        RunError: In the other processes, if `act` raised any other exception (also a subclass of
            InputError; the message contains the first line of the exception's message) or took more
            than 1800 seconds; and in any process, if another one does not call this within that
            time.
        RuntimeError: If there are several processes and `jax.distributed` was not initialized.
    """

    def run() -> None:
        act()

    consensus.from_first("run_on_first", run)


def run_on_every(act: Callable[[], Any]) -> None:
    """Calls a function in every process. Afterwards all continue, or all fail. Every process must
    call it, from one thread at a time.

    Args:
        act: The function, without arguments. Its result is dropped.

    Raises:
        Exception: The exception of `act` in this process, if it failed in no process with a lower
            number.
        InputError: If the first process (by number) in which `act` failed is another one, and its
            exception is an InputError.
        RunError: If the exception of that process has any other type (also a subclass of
            InputError), or if a process does not answer within 1800 seconds.
        RuntimeError: If there are several processes and `jax.distributed` was not initialized.
    """

    def run() -> None:
        act()

    consensus.on_every("run_on_every", run)


def from_first(find: Callable[[], T]) -> T:
    """Calls a function in the first process only, and returns its result in every process. Every
    process must call it, from one thread at a time.

    Args:
        find: A function without arguments that returns a JSON value. With several processes the
            value goes through JSON, which turns tuples into lists and numeric keys into strings.

    Returns:
        The result of `find`.

    Raises:
        Exception: The exception of `find`, in the first process; with several processes, a
            TypeError if its value is not JSON.
        InputError: In the other processes, if `find` raised an InputError.
        RunError: In the other processes, if the first one raised any other exception (also a
            subclass of InputError), or `find` took more than 1800 seconds; and in any process, if
            another one does not call this within that time.
        RuntimeError: If there are several processes and `jax.distributed` was not initialized.
    """
    return consensus.from_first("from_first", find)


def gather_values(value: T) -> list[T]:
    """Collects one value from each process. Every process must call it, from one thread at a time.

    Args:
        value: This process's value. With several processes it must be a JSON value; it goes through
            JSON, which turns tuples into lists and numeric keys into strings.

    Returns:
        The values of all processes, in the order of their numbers.

    Raises:
        RunError: If another process does not answer within 1800 seconds; or if a value is not JSON,
            in all processes but one.
        TypeError: In that one: the first process (by number) whose value is not JSON.
        RuntimeError: If there are several processes and `jax.distributed` was not initialized.
    """
    return consensus.on_every("gather_values", lambda: value)


def any_flags(flags: Sequence[bool]) -> list[bool]:
    """Combines lists of flags by "or" over all processes. Every process must call it, from one
    thread at a time.

    Args:
        flags: The flags of this process, as many as in every other process. With several processes
            they must be of type bool (a NumPy bool is an error).

    Returns:
        For each position, whether the flag is true in any process.

    Raises:
        ValueError: In every process, if the processes pass different numbers of flags.
        RunError: If a process does not answer within 1800 seconds.
        RuntimeError: If there are several processes and `jax.distributed` was not initialized.
    """
    return [any(values) for values in zip(*gather_values(list(flags)), strict=True)]


def host_memory() -> int:
    """Returns the size of this host's physical memory in bytes. A smaller limit of a container is
    not considered.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def put(tree: Any, where: NamedSharding) -> Any:
    """Places arrays on the devices of a mesh. Every process must call it.

    Args:
        tree: A pytree of whole arrays, of NumPy or JAX, with equal values in every process (which
            is not checked).
        where: The sharding of every array.

    Returns:
        The pytree with global arrays.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    def place(x):
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(lambda x: place(np.asarray(x)), tree)


def fetch(tree: Any) -> Any:
    """Copies whole arrays from the devices of all processes to the memory of every process. Every
    process must call it.

    It waits until the arrays are computed.

    Args:
        tree: A pytree of arrays that span the devices of all processes. With several processes, an
            array that lies only on the devices of its own process would be concatenated with the
            arrays of the other processes along the leading axis.

    Returns:
        The pytree with NumPy arrays of the same shapes and dtypes.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def local_row_indices(where: NamedSharding, count: int) -> list[int]:
    """Returns which rows of a sharded array the devices of this process hold.

    Args:
        where: The sharding of the rows (the array's leading axis). Its spec names no other axis.
        count: The number of rows of the array, a multiple of the number of shards.

    Returns:
        The indices of the rows, ascending, each once.
    """
    slices = {
        index[0].indices(count)[:2]
        for index in where.addressable_devices_indices_map((count,)).values()
        if index
    }
    return sorted({row for start, stop in slices for row in range(start, stop)})


def local_rows(x: jax.Array) -> np.ndarray:
    """Returns the rows of a sharded array that the devices of this process hold.

    Args:
        x: An array that is sharded along its leading axis at most.

    Returns:
        A NumPy array [rows, ...] with these rows in ascending order, each once. With one process it
        is all of `x`.
    """
    parts = {shard.index[0].indices(x.shape[0])[0]: shard for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])
