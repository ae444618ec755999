"""Checks that two hosts of four devices train as one of eight, also if one is killed in any phase.

    python scripts/check_hosts.py            # 20 to 30 minutes on 2 CPU cores

A run of one process comes first, then a run of two processes. Both must keep the same candidates
and end with the same state up to 1e-6. Then, for each phase, two processes start anew, and one of
them kills itself in that phase of the second iteration. The other must exit by itself within a
minute, with exit code 1. Both start again and must end like the undisturbed run of two processes.
All runs of two processes have the mesh data=2, fsdp=2, tensor=2.

Prints one line per phase and one line of JSON at the end. The exit code is 1 if something differs.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from check_kills import SMALL, state_of

ITERATIONS = 3
SETTINGS = (*SMALL, "eval.every=2", f"train.iterations={ITERATIONS}")
PHASES = ("encode", "sync", "explore", "regenerate", "update", "evaluate", "save")
TOLERANCE = 1e-6  # relative distance of two states
LIMIT = 60.0  # seconds within which the other process must exit
DELAY = 0.05  # seconds from the start of the phase to the kill


def child(phase: str, arguments: list[str]) -> None:
    """Runs `solrl` in this process.

    Args:
        phase: The phase of the second iteration in which the process kills itself. "": none.
        arguments: The arguments of `solrl`.
    """
    from solrl_jax.cli import main
    from solrl_jax.rl.phase_timer import PhaseTimer
    from solrl_jax.runs import checkpoint_writer
    from solrl_jax.runs.progress import TerminalProgress

    begun = {"iterations": 0}

    def die():
        return threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def in_phase(name: str) -> None:
        begun["iterations"] += name == "encode"
        if phase and name == phase and begun["iterations"] == 2:
            die()

    def before(owner: Any, method: str, name_of: Callable[..., str]) -> None:
        """Patches a method so that `in_phase` is called first.

        Args:
            owner: The class or module of the method.
            method: The name of the method.
            name_of: Maps the arguments of a call to the name of a phase.
        """
        original = getattr(owner, method)

        def wrapped(*args: Any, **options: Any) -> Any:
            in_phase(name_of(*args))
            return original(*args, **options)

        setattr(owner, method, wrapped)

    before(PhaseTimer, "start", lambda clock, name: name)
    before(
        TerminalProgress,
        "phase",
        lambda report, name, rows, done: name if name == "evaluate" and not done else "",
    )
    before(checkpoint_writer, "begin", lambda *args: "save")
    sys.argv = ["solrl", *arguments]
    main.main()


class Processes:
    """The processes of a run, which start at once, and their logs.

    Args:
        folder: The run directory. The logs are written beside it.
        hosts: The number of processes, 1 or 2.
        dying: The process that kills itself. None: none does.
        phase: The phase in which it does.
    """

    def __init__(self, folder: Path, hosts: int, dying: int | None = None, phase: str = "") -> None:
        mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2") if hosts == 2 else ("mesh.data=8",)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PLATFORMS": "cpu",
        }
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // hosts}"}
        self.logs = [folder.with_name(f"{folder.name}-{host}.log") for host in range(hosts)]
        self.processes = []
        for host, log in enumerate(self.logs):
            named = (
                ["--hosts", str(hosts), "--host", str(host), "--coordinator", f"localhost:{port}"]
                if hosts > 1
                else []
            )
            command = ["train", "tiny", *SETTINGS, *mesh, f"run.dir={folder}", *named]
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            __file__,
                            "--child",
                            phase if host == dying else "",
                            *command,
                        ],
                        env=os.environ | compiled | flags,
                        stdout=out,
                        stderr=out,
                    )
                )

    def wait(self) -> list[int]:
        return [process.wait() for process in self.processes]


def apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The norm of the difference of two states, divided by the norm of the second."""

    def norm(arrays):
        return float(np.sqrt(sum(np.sum(np.square(x.astype(np.float64))) for x in arrays)))

    return norm([ours[key] - theirs[key] for key in theirs]) / norm(theirs.values())


def kept(folder: Path) -> list[tuple[int, bool]]:
    """Returns the seed of each candidate, and whether it was kept."""
    table = pq.read_table(folder / "ledger")
    return list(zip(table["seed"].to_pylist(), table["kept"].to_pylist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Kill:
    """The outcome of killing one of two processes.

    Attributes:
        phase: The phase in which the process was killed.
        killed: The index of the process.
        other_ended_after_seconds: The time until the other process exited.
        apart: The relative distance of the restarted run's state from that of the undisturbed run.
    """

    phase: str
    killed: int
    other_ended_after_seconds: float
    apart: float


def compare_hosts(folder: Path) -> list[str]:
    """Runs one process and two, undisturbed. Returns the differences."""
    for name, hosts in (("one", 1), ("two", 2)):
        if any(statuses := Processes(folder / name, hosts).wait()):
            log = (folder / f"{name}-0.log").read_text()[-500:]
            sys.exit(f"the run {name} ended with {statuses}: {log}")
    distance = apart(state_of(folder / "two", ITERATIONS), state_of(folder / "one", ITERATIONS))
    print(f"one process and two: {distance:.1e} apart", flush=True)
    if distance <= TOLERANCE and kept(folder / "two") == kept(folder / "one"):
        return []
    return [f"two processes end {distance:.1e} from one, or keep others"]


def kill_in(phase: str, dying: int, folder: Path) -> tuple[Kill | None, list[str]]:
    """Kills one of two processes, starts both again, and compares the result.

    Args:
        phase: The phase of the second iteration in which the process is killed.
        dying: The index of the process.
        folder: The folder of all runs.

    Returns:
        The outcome (None if the second start failed), and the problems.
    """
    problems = []
    run = folder / phase
    start = Processes(run, 2, dying, phase)
    status = start.processes[dying].wait()
    died = time.monotonic()
    other = start.processes[1 - dying].wait()
    seconds = time.monotonic() - died
    if status != -signal.SIGKILL or other != 1:
        problems.append(f"{phase}: the processes ended with {status} and {other}")
    if seconds > LIMIT:
        problems.append(f"{phase}: the other process ended after {seconds:.0f} s")
    again = Processes(run, 2)
    if any(statuses := again.wait()):
        return None, [
            *problems,
            f"{phase}: the second start ended with {statuses}: {again.logs[0].read_text()[-300:]}",
        ]
    distance = apart(state_of(run, ITERATIONS), state_of(folder / "two", ITERATIONS))
    if distance > TOLERANCE or kept(run) != kept(folder / "two"):
        problems.append(f"{phase}: ends {distance:.1e} from the undisturbed run, or keeps others")
    print(
        f"{phase}: process {dying} killed, other ended {seconds:.0f} s later; "
        f"restarted: {distance:.1e} apart",
        flush=True,
    )
    return Kill(phase, dying, round(seconds, 1), distance), problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--phases",
        default=",".join(PHASES),
        help="phases in which a process is killed, separated by commas",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the runs (default: they are deleted)"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hosts-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    kills = []
    problems = compare_hosts(folder)
    for number, phase in enumerate(arguments.phases.split(",")):
        kill, more = kill_in(phase, number % 2, folder)
        problems += more
        kills += [dataclasses.asdict(kill)] if kill else []
    if arguments.folder is None:
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "kills": kills,
                "minutes": round((time.monotonic() - began) / 60, 1),
                "problems": problems,
            }
        )
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
