"""Kills a small run of `solrl train tiny` at random moments, starts it again each time, and checks that nothing is lost.

    python scripts/check_kills.py                              # 20 kills; 19 minutes on 2 busy cores
    python scripts/check_kills.py --kills 5 --seed 3 --folder runs/kills

An uninterrupted run comes first. It says how long a start and an iteration take. Then SIGKILLs: one in five during a start, the
others during the iterations after it. After each kill the newest checkpoint is verified byte for byte. A kill may lose the
iteration under way and nothing else: with run.checkpoint_every=1 the iteration before is on the disk. At the end the state
equals that of the uninterrupted run to the bit. So do the ledger, and the metrics without times.

Prints a line for each kill, and one of JSON at the end. The exit code is 1 if something differs.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq

from solrl_jax.config.presets import resolve
from solrl_jax.run import checkpoint, checkpoint_writer, metrics
from solrl_jax.training.experiment import build, state_shapes

SMALL = (
    "train.prompts=2", "rollout.candidates=8", "rollout.kept=4", "rollout.chunk=2", "rollout.steps=3",
    "rollout.explore.steps=2", "optimizer.micro_batch=2", "policy.timestep_fraction=0.7", "eval.prompts=2",
    "eval.images_per_prompt=2", "eval.grid=0", "eval.steps=3", "eval.every=5", "run.checkpoint_every=1", "run.keep_best=1",
    "run.tensorboard=false", "mesh.data=1",
)  # fmt: skip
IN_START = 0.2  # share of the kills
SAID = re.compile(r"(?:resuming after )?iteration (\d+)")


class Process:
    """A start of the run: its messages with their times, and the last iteration that it reported."""

    def __init__(self, folder: Path, iterations: int) -> None:
        command = [sys.executable, "-m", "solrl_jax", "train", "tiny", *SMALL, f"train.iterations={iterations}"]
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"), "JAX_PLATFORMS": "cpu"}
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [*command, f"run.dir={folder}"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | compiled | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )
        self.lines: list[tuple[float, str]] = []
        self.iteration = 0
        self._spoke = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._spoke:
                self.lines.append((time.monotonic() - self._began, line.rstrip()))
                if match := SAID.match(line):
                    self.iteration = int(match[1])
                self._spoke.notify_all()
        with self._spoke:
            self._spoke.notify_all()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def finished(self) -> list[float]:
        """The seconds after which each iteration of this start was finished."""
        return [when for when, line in self.lines if line.startswith("iteration ")]

    def wait_for(self, count: int) -> None:
        """Waits until `count` iterations are finished, or the process has ended."""
        with self._spoke:
            self._spoke.wait_for(lambda: len(self.finished()) >= count or not self._reader.is_alive())

    def end(self, number: int | None = None) -> int:
        """Sends a signal, if one is given, and waits; returns the exit status, negative for a signal."""
        if number is not None:
            self._process.send_signal(number)
        status = self._process.wait()
        self._reader.join()
        return status


def newest(folder: Path) -> int:
    """The iteration of the newest checkpoint; 0 if there is none. A damaged checkpoint ends the script."""
    for path in checkpoint.candidates(folder / "checkpoints"):
        checkpoint.verify(path)
        return checkpoint.iteration_of(path) or 0
    return 0


def state_of(folder: Path, iterations: int) -> dict[str, np.ndarray]:
    """The arrays of the last checkpoint, by key path."""
    config = resolve("tiny", (*SMALL, f"train.iterations={iterations}", f"run.dir={folder}"))
    state, meta = checkpoint.restore(checkpoint.candidates(folder / "checkpoints")[0], state_shapes(build(config)))
    assert meta["iteration"] == iterations
    return {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(state)}


def record(folder: Path) -> list[dict]:
    """The metrics without times."""
    return [{name: value for name, value in row.items() if "second" not in name} for row in metrics.read(folder)]


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long an uninterrupted run takes, in seconds."""

    start: float  # until the first iteration is finished
    each: float  # of the other iterations


@dataclasses.dataclass
class Kills:
    """What the kills did so far."""

    lost: list[int] = dataclasses.field(default_factory=list)  # finished iterations that each kill lost
    saves_under_way: int = 0  # kills while a checkpoint was written
    problems: list[str] = dataclasses.field(default_factory=list)


def run_whole(folder: Path, iterations: int) -> Timing:
    """Runs `folder`/whole without interruption."""
    for _ in range(2):  # the second time its programs are compiled, as they are in the starts after a kill
        shutil.rmtree(folder / "whole", ignore_errors=True)
        whole = Process(folder / "whole", iterations)
        if (status := whole.end()) != 0:
            sys.exit(f"the uninterrupted run ended with {status}: {whole.lines[-1:]}")
    finished = whole.finished()
    timing = Timing(finished[0], (finished[-1] - finished[0]) / (len(finished) - 1))
    print(
        f"uninterrupted: {iterations} iterations, first after {timing.start:.1f} s, then {timing.each:.2f} s each", flush=True
    )
    return timing


def kill_often(folder: Path, iterations: int, count: int, timing: Timing, rng: random.Random) -> Kills:
    """Starts `folder`/killed and kills it, `count` times."""
    kills, resumed = Kills(), 0
    for number in range(1, count + 1):
        run = Process(folder / "killed", iterations)
        if rng.random() < IN_START:
            time.sleep(rng.uniform(0, timing.start))
        else:
            run.wait_for(1)
            time.sleep(rng.uniform(0, 2 * timing.each))
        when = run.age
        if (status := run.end(signal.SIGKILL)) != -signal.SIGKILL:
            kills.problems.append(f"kill {number} came too late: the run had ended with {status}")
            break
        saving_now = sorted(path.name for path in (folder / "killed").glob(f"checkpoints/{checkpoint_writer.SAVING}*"))
        left, reached = newest(folder / "killed"), max(run.iteration, resumed)
        lost, resumed = reached - left, left
        kills.lost.append(lost)
        kills.saves_under_way += bool(saving_now)
        beside = f", while {', '.join(saving_now)} was written" if saving_now else ""
        print(f"kill {number:2d} after {when:5.1f} s, in iteration {reached + 1}{beside}: goes on after {left}", flush=True)
        if lost > 0:
            kills.problems.append(f"kill {number} lost {lost} finished iterations")
        bad = [line for _, line in run.lines if "skipped checkpoint" in line or "Traceback" in line]
        kills.problems += [f"kill {number}: {line}" for line in bad]
    return kills


def differences(folder: Path, iterations: int) -> list[str]:
    """Lets `folder`/killed come to its end, and compares it with `folder`/whole."""
    last = Process(folder / "killed", iterations)
    if (status := last.end()) != 0:
        return [f"the last start ended with {status}: {last.lines[-1:]}"]
    ours, theirs = (state_of(folder / name, iterations) for name in ("killed", "whole"))
    problems = [f"{key} differs" for key in theirs if ours[key].tobytes() != theirs[key].tobytes()]
    if not pq.read_table(folder / "killed" / "ledger").equals(pq.read_table(folder / "whole" / "ledger")):
        problems.append("the ledgers differ")
    if record(folder / "killed") != record(folder / "whole"):
        problems.append("the metrics differ")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, help="of the run (default: two for each kill, and two more)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where both runs are kept (default: they are deleted)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    iterations, began = arguments.iterations or 2 * arguments.kills + 2, time.monotonic()
    timing = run_whole(folder, iterations)
    kills = kill_often(folder, iterations, arguments.kills, timing, random.Random(arguments.seed))
    problems = kills.problems + differences(folder, iterations)
    if arguments.folder is None:
        shutil.rmtree(folder)
    report = {
        "kills": len(kills.lost),
        "iterations": iterations,
        "seed": arguments.seed,
        "lost_nothing_finished": sum(lost <= 0 for lost in kills.lost),
        "kills_while_a_checkpoint_was_written": kills.saves_under_way,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "problems": problems,
    }
    print(json.dumps(report))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
