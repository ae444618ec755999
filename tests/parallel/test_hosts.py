"""Several hosts: two processes of four devices train like one of eight. If one dies, the run ends
and can be resumed.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from solrl_jax.errors import InputError, RunError
from solrl_jax.parallel import hosts
from solrl_jax.runs import metrics
from solrl_jax.runs import trainer as trainer
from solrl_jax.runs.progress import TerminalProgress
from tests.runs.test_resume import arrays
from tests.small import SMALL, small_config

# one reward is a network; the other is outside JAX, on the host that made the picture
REWARD = ("reward.weights={shapes: 1.0, tests.outside:mean: 1.0}", "reward.workers=1")
# levers that are calibrated, on which the hosts must agree
CALIBRATED = ("rollout.explore.correction_rank=8", "rollout.explore.sigmas=first")
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
TOLERANCE = 1e-6  # of the state, relative
LIMIT = 60  # seconds in which a run ends after one of its processes has


def start(folder: Path, host: int, port: int) -> subprocess.Popen:
    settings = [
        *SMALL,
        *MESH,
        *REWARD,
        *CALIBRATED,
        f"run.dir={folder}",
        "--hosts",
        "2",
        "--host",
        str(host),
    ]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "solrl_jax",
            "train",
            "tiny",
            *settings,
            "--coordinator",
            f"localhost:{port}",
        ],
        env=os.environ | {"XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


@pytest.mark.exhaustive
def test_two_hosts_train_as_one_does_though_one_of_them_dies(tmp_path):
    with TerminalProgress(bars=False) as report:
        trainer.run(small_config(tmp_path / "one", *REWARD, *CALIBRATED, "mesh.data=8"), report)

    port = free_port()
    first, second = (start(tmp_path / "two", host, port) for host in (0, 1))
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("iteration 2"):  # the checkpoint of the first is there by now
            break
    second.send_signal(signal.SIGKILL)
    died = time.monotonic()
    _, errors = first.communicate()
    second.communicate()
    assert time.monotonic() - died < LIMIT
    assert first.returncode == 1, errors
    # Python says that the process which was aborted did not release its semaphores
    lines = [
        line
        for line in errors.splitlines()
        if "resource_tracker" not in line and "leaked semaphore" not in line
    ]
    assert lines[-1].startswith("solrl: "), errors

    port = free_port()
    both = [start(tmp_path / "two", host, port) for host in (0, 1)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "resuming after iteration" in outputs[0][1]
    connected = "peer ranks"  # Gloo's threads print this in pieces
    assert not [
        line
        for text in outputs[1]
        for line in text.splitlines()
        if connected not in line and "[Gloo]" not in line
    ]
    ours = arrays(tmp_path / "two")
    theirs = arrays(tmp_path / "one")

    def norm(values):
        return np.sqrt(sum(np.sum(np.square(x.astype(np.float64))) for x in values))

    assert norm([ours[key] - theirs[key] for key in theirs]) < TOLERANCE * norm(theirs.values())
    kept, alone = (pq.read_table(tmp_path / name / "ledger") for name in ("two", "one"))
    for column in ("seed", "kept", "rank"):
        assert kept[column].equals(alone[column]), column
    rewards = (table["regenerated_reward"].to_numpy() for table in (kept, alone))
    np.testing.assert_allclose(*rewards, atol=1e-5)
    assert (
        len(
            {
                row["pool/tests.outside:mean"]
                for row in metrics.read(tmp_path / "two")
                if row["iteration"]
            }
        )
        > 1
    )


LATE = textwrap.dedent(
    """
    import sys, time
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from solrl_jax.parallel import hosts, sharding

    number = int(sys.argv[1])
    hosts.initialize("2", number, sys.argv[2])
    mesh = sharding.make_mesh(2, 2, 2)
    hosts.connect(mesh)
    time.sleep(35 * number)
    for axes in (("data", "fsdp", "tensor"), ("data", "fsdp"), "tensor"):
        numbers = np.arange(16.0, dtype=np.float32).reshape(8, 2)
        x = hosts.put(numbers, NamedSharding(mesh, PartitionSpec(axes)))
        print(float(jax.jit(lambda x: x.sum())(x)))
    """
)


@pytest.mark.exhaustive
def test_a_process_may_come_late_to_its_first_program():
    """Later than the 30 s that Gloo waits for a connection."""
    address = f"localhost:{free_port()}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")

    def start(number):
        return subprocess.Popen(
            [sys.executable, "-c", LATE, str(number), address],
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
        )

    outputs = [process.communicate(timeout=300)[0].split() for process in [start(0), start(1)]]
    assert [[line for line in lines if line == "120.0"] for lines in outputs] == [["120.0"] * 3] * 2


def call_roll(numbers: list[int], count: int) -> list[str]:
    """What each of these processes, a thread each, is told of a run of `count`."""
    address = f"localhost:{free_port()}"

    def message(number: int) -> str:
        try:
            hosts.roll_call(count, number, address)
            return ""
        except RunError as error:
            return str(error).removeprefix(f"hosts={count}, coordinator={address}: ")

    with ThreadPoolExecutor(len(numbers)) as threads:
        return list(threads.map(message, numbers))


@pytest.mark.slow
def test_processes_wait_for_each_other_and_name_those_that_are_not_there(monkeypatch):
    assert call_roll([2, 0, 1], 3) == ["", "", ""]
    monkeypatch.setattr(hosts, "START", 2)
    assert call_roll([0, 2], 4) == ["process 1, 3 not there after 2 seconds"] * 2
    assert call_roll([1, 2], 3) == ["process 0 not there after 2 seconds (Connection refused)"] * 2
    assert call_roll([0, 1, 1], 4) == ["two processes are host=1"] * 3


@pytest.mark.parametrize("result", [np.zeros(2), set(), None])
def test_what_an_action_returns_is_dropped(result):
    calls = []

    def act():
        calls.append(True)
        return result

    assert hosts.run_on_first(act) is None
    assert calls == [True]


def test_a_stranger_at_the_port_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(hosts, "ANSWER", 0.2)
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(hosts.roll_call, 2, 0, f"localhost:{port}")
        time.sleep(0.2)
        with (
            socket.create_connection(("localhost", port)) as silent,
            socket.create_connection(("localhost", port)) as wrong,
            socket.create_connection(("localhost", port)) as unknown,
        ):
            wrong.sendall(b"GET / HTTP/1.1\r\n")
            unknown.sendall(b"7\n")  # no process of a run of two
            hosts.roll_call(2, 1, f"localhost:{port}")
            assert first.result(5) is None
            assert silent


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=str)
def test_a_process_that_is_started_again_takes_its_place(order, monkeypatch):
    """Also if it is the last one to come: its connection that has ended does not count."""
    monkeypatch.setattr(hosts, "START", 30)
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(hosts.roll_call, 3, 0, f"localhost:{port}")
        time.sleep(0.2)
        with socket.create_connection(("localhost", port)) as ended:
            ended.sendall(b"1")
            time.sleep(0.2)
        others = []
        for i in order:
            others.append(threads.submit(hosts.roll_call, 3, i, f"localhost:{port}"))
            time.sleep(0.2)
        assert [process.result(60) for process in (first, *others)] == [None] * 3


def test_an_answer_of_another_program_is_no_outcome(monkeypatch):
    monkeypatch.setattr(hosts, "START", 1)
    server = socket.create_server(("localhost", 0))
    with server, ThreadPoolExecutor(1) as threads:

        def answer():
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"\xfe\x00\r\n")

        threads.submit(answer)
        problem = r"process 0 not there after 1 seconds \((another program|timed out)"
        with pytest.raises(RunError, match=problem):
            hosts.roll_call(2, 1, f"localhost:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("two",), "hosts='two': expected a number of processes from 1 to 4096, or auto"),
        (("2",), "hosts=2: needs host and coordinator too, or hosts=auto"),
        (("2", 2, "localhost:1"), "host=2: must be from 0 to 1, with hosts=2"),
        (("2", 0, "localhost"), "coordinator=localhost: expected HOST:PORT"),
        (("2", 0, "localhost:99999"), "coordinator=localhost:99999: expected HOST:PORT"),
        (("auto", 1), "host=1: only with a number of hosts"),
    ],
)
def test_what_does_not_name_the_hosts_is_refused(arguments, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        hosts.initialize(*arguments)
