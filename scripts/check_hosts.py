"""Two hosts of four devices train as one of eight, though one of them is killed in each stage of an iteration in turn.

    python scripts/check_hosts.py            # 20 to 30 minutes on 2 CPU cores

A run of one process comes first, and one of two, which has to keep the same candidates and end with the same state to 1e-6.
Then, for each stage, two processes start anew; one of them kills itself in that stage of the second iteration. The other one
has to end by itself within a minute. Both start again, and have to end as the run of two processes that nobody killed did.
The mesh is data=2 fsdp=2 tensor=2 in all runs of two processes.

Prints a line a stage, and one of JSON at the end; exit code 1 if anything is not as said.
"""

import argparse
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
from pathlib import Path
from typing import Any

import numpy as np
from check_kills import SMALL, state_of

from solrl_jax.run import ledger

ITERATIONS = 3
SETTINGS = (*SMALL, "eval.every=2", f"train.iterations={ITERATIONS}")
STAGES = ("encode", "sync", "explore", "regenerate", "update", "evaluate", "save")
TOLERANCE = 1e-6  # of the state, relative
LIMIT = 60.0  # seconds in which the other process ends
DELAY = 0.05  # seconds into the stage


def child(stage: str, arguments: list[str]) -> None:
    """`solrl` with `arguments`, but that the process kills itself in `stage` of the second iteration, if one is named."""
    from solrl_jax.commands import cli
    from solrl_jax.run import checkpoint_writer, progress
    from solrl_jax.training import iteration as train

    begun = {"iterations": 0}
    die = lambda: threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def in_stage(name: str) -> None:
        begun["iterations"] += name == "encode"
        if name == stage and begun["iterations"] == 2:
            die()

    start, show, begin = train.Clock.start, progress.Reporter.stage, checkpoint_writer.begin

    def started(clock: Any, name: str) -> None:
        in_stage(name)
        start(clock, name)

    def shown(report: Any, name: str, rows: int, done: int) -> None:
        if name == "evaluate" and not done:
            in_stage(name)
        show(report, name, rows, done)

    def begun_saving(*args: Any, **options: Any) -> Any:
        in_stage("save")
        return begin(*args, **options)

    train.Clock.start, progress.Reporter.stage, checkpoint_writer.begin = started, shown, begun_saving  # type: ignore[method-assign]
    sys.argv = ["solrl", *arguments]
    cli.main()


class Processes:
    """The processes of a start, and what they say."""

    def __init__(self, folder: Path, hosts: int, dying: int | None = None, stage: str = "") -> None:
        mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2") if hosts == 2 else ("mesh.data=8",)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"), "JAX_PLATFORMS": "cpu"}
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // hosts}"}
        self.logs = [folder.with_name(f"{folder.name}-{host}.log") for host in range(hosts)]
        self.processes = []
        for host, log in enumerate(self.logs):
            named = ["--hosts", str(hosts), "--host", str(host), "--coordinator", f"localhost:{port}"] if hosts > 1 else []
            command = ["train", "tiny", *SETTINGS, *mesh, f"run.dir={folder}", *named]
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--child", stage if host == dying else "", *command],
                        env=os.environ | compiled | flags,
                        stdout=out,
                        stderr=out,
                    )
                )

    def wait(self) -> list[int]:
        return [process.wait() for process in self.processes]


def apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The distance of two states over the size of the second."""
    norm = lambda arrays: float(np.sqrt(sum(np.sum(np.square(x.astype(np.float64))) for x in arrays)))
    return norm([ours[key] - theirs[key] for key in theirs]) / norm(theirs.values())


def kept(folder: Path) -> list[tuple[int, bool]]:
    """Every candidate's seed, and whether it was kept."""
    table = ledger.read(folder / "ledger")
    return list(zip(table["seed"].to_pylist(), table["kept"].to_pylist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help="in which one is killed, with commas")
    parser.add_argument("--folder", type=Path, help="where the runs are left (default: nowhere)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hosts-"))
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    rows, began = [], time.monotonic()
    if (status := Processes(folder / "one", 1).wait()) != [0]:
        sys.exit(f"the run of one process ended with {status}: {(folder / 'one-0.log').read_text()[-500:]}")
    if (statuses := Processes(folder / "two", 2).wait()) != [0, 0]:
        sys.exit(f"the run of two processes ended with {statuses}: {(folder / 'two-0.log').read_text()[-500:]}")
    theirs = state_of(folder / "two", ITERATIONS)
    beside_one = apart(theirs, state_of(folder / "one", ITERATIONS))
    print(f"one process and two: {beside_one:.1e} apart", flush=True)
    if beside_one > TOLERANCE or kept(folder / "two") != kept(folder / "one"):
        problems.append(f"two processes end {beside_one:.1e} from one, or keep others")
    for number, stage in enumerate(arguments.stages.split(",")):
        run, dying = folder / stage, number % 2
        start = Processes(run, 2, dying, stage)
        status = start.processes[dying].wait()
        died = time.monotonic()
        other = start.processes[1 - dying].wait()
        seconds = time.monotonic() - died
        if status != -signal.SIGKILL or other == 0:
            problems.append(f"{stage}: the processes ended with {status} and {other}")
        if seconds > LIMIT:
            problems.append(f"{stage}: the other process ended after {seconds:.0f} s")
        again = Processes(run, 2)
        if (statuses := again.wait()) != [0, 0]:
            problems.append(f"{stage}: the second start ended with {statuses}: {again.logs[0].read_text()[-300:]}")
            continue
        ours = state_of(run, ITERATIONS)
        distance = apart(ours, theirs)
        if distance > TOLERANCE or kept(run) != kept(folder / "two"):
            problems.append(f"{stage}: ends {distance:.1e} from the run that nobody killed, or keeps others")
        rows.append({"stage": stage, "killed": dying, "other_ended_after_seconds": round(seconds, 1), "apart": distance})
        print(
            f"{stage}: process {dying} killed, the other ended {seconds:.0f} s later; restarted: {distance:.1e} apart",
            flush=True,
        )
    if arguments.folder is None:
        shutil.rmtree(folder)
    print(json.dumps({"kills": rows, "minutes": round((time.monotonic() - began) / 60, 1), "problems": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
