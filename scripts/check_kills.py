"""Kills runs of `solrl train tiny`, damages their checkpoints and fills their disks.

    python scripts/check_kills.py                  # 20 kills, 40 flipped bits, 12 full disks
    python scripts/check_kills.py --kills 5 --flips 0 --disks 0 --seed 3 --folder runs/kills

An uninterrupted run comes first. It determines how long a start and an iteration take. At the end
of each of the three parts, the state, the ledger and the metrics without times must equal those of
the uninterrupted run bit for bit.

* Kills: SIGKILL, 20 % of them during a start, the others during the following iterations. After
  each kill the newest checkpoint is verified byte for byte. With run.checkpoint_every=1 a kill may
  lose only the iteration in progress.
* Flips: one bit in a file of the newest checkpoint, for each file in turn. The next start must
  restore the checkpoint before it and name the damaged file. Every tenth time the run is also
  continued.
* Disks: a run on a file system that is too small for it. It must exit with one line that names the
  last good checkpoint, and continue from there once there is room. Mounting a file system needs
  root; otherwise this part is skipped.

Prints one line per case and one line of JSON at the end. The exit code is 1 if something differs.
"""

import argparse
import dataclasses
import functools
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
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq

from solrl_jax.config.presets import resolve
from solrl_jax.rl.experiment import build, state_shapes
from solrl_jax.runs import checkpoint, checkpoint_writer, metrics

SMALL = (
    "train.num_prompts=2",
    "rollout.candidates=8",
    "rollout.kept=4",
    "rollout.per_device_batch_size=2",
    "rollout.num_steps=3",
    "rollout.explore.num_steps=2",
    "optimizer.per_device_batch_size=2",
    "algorithm.timestep_fraction=0.7",
    "eval.num_prompts=2",
    "eval.num_images_per_prompt=2",
    "eval.num_grid_images=0",
    "eval.num_steps=3",
    "eval.every=5",
    "run.checkpoint_every=1",
    "run.keep_best=1",
    "run.tensorboard=false",
    "mesh.data=1",
)
IN_START = 0.2  # share of the kills that happen during a start
PROGRESS = re.compile(r"(?:resuming after )?iteration (\d+)")


class Process:
    """A process of the run: its messages with their times, and the last iteration that it reported.

    Args:
        folder: The run directory.
        iterations: The length of the run.
    """

    def __init__(self, folder: Path, iterations: int) -> None:
        command = [
            sys.executable,
            "-m",
            "solrl_jax",
            "train",
            "tiny",
            *SMALL,
            f"train.iterations={iterations}",
        ]
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PLATFORMS": "cpu",
        }
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
                if match := PROGRESS.match(line):
                    self.iteration = int(match[1])
                self._spoke.notify_all()
        with self._spoke:
            self._spoke.notify_all()

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def finished(self) -> list[float]:
        """The seconds from the start to the end of each iteration."""
        return [when for when, line in self.lines if line.startswith("iteration ")]

    def wait_for(self, count: int) -> None:
        """Waits until `count` iterations are finished or the process has exited."""
        with self._spoke:
            self._spoke.wait_for(
                lambda: len(self.finished()) >= count or not self._reader.is_alive()
            )

    def end(self, number: int | None = None) -> int:
        """Sends a signal, if given, and waits. Returns the exit status, negative for a signal."""
        if number is not None:
            self._process.send_signal(number)
        status = self._process.wait()
        self._reader.join()
        return status


def newest(folder: Path) -> int:
    """Verifies the newest checkpoint. Returns its iteration, or 0 if there is none."""
    for path in checkpoint.list_checkpoints(folder / "checkpoints"):
        checkpoint.verify(path)
        return checkpoint.iteration_of(path) or 0
    return 0


@functools.cache
def shapes() -> Any:
    """The abstract state of a run."""
    return state_shapes(build(resolve("tiny", SMALL)))


def state_of(folder: Path, iterations: int) -> dict[str, np.ndarray]:
    """Returns the arrays of the last checkpoint by key path."""
    state, meta = checkpoint.restore(
        checkpoint.list_checkpoints(folder / "checkpoints")[0], shapes()
    )
    assert meta["iteration"] == iterations
    return {
        jax.tree_util.keystr(key): np.asarray(leaf)
        for key, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def record(folder: Path) -> list[dict]:
    """Returns the metrics without times."""
    return [
        {name: value for name, value in row.items() if "second" not in name}
        for row in metrics.read(folder)
    ]


@dataclasses.dataclass(frozen=True)
class Timing:
    """The duration of an uninterrupted run.

    Attributes:
        start: The seconds until the first iteration is finished.
        each: The seconds per further iteration.
    """

    start: float
    each: float


@dataclasses.dataclass
class Kills:
    """The outcome of the kills.

    Attributes:
        lost: The number of finished iterations that each kill lost.
        saves_under_way: The number of kills while a checkpoint was being written.
        problems: What differed from the expected outcome.
    """

    lost: list[int] = dataclasses.field(default_factory=list)
    saves_under_way: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def run_whole(folder: Path, iterations: int) -> Timing:
    """Runs `folder`/whole without interruption. Returns its timing."""
    # The second run finds its programs in the compilation cache, as the starts after a kill do.
    for _ in range(2):
        shutil.rmtree(folder / "whole", ignore_errors=True)
        whole = Process(folder / "whole", iterations)
        if (status := whole.end()) != 0:
            sys.exit(f"the uninterrupted run ended with {status}: {whole.lines[-1:]}")
    finished = whole.finished()
    timing = Timing(finished[0], (finished[-1] - finished[0]) / (len(finished) - 1))
    print(
        f"uninterrupted: {iterations} iterations, first after {timing.start:.1f} s, "
        f"then {timing.each:.2f} s each",
        flush=True,
    )
    return timing


def kill_often(
    folder: Path, iterations: int, count: int, timing: Timing, rng: random.Random
) -> Kills:
    """Starts and kills the run `folder`/killed `count` times. Returns the outcome."""
    kills = Kills()
    resumed = 0
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
        saving_now = sorted(
            path.name
            for path in (folder / "killed").glob(f"checkpoints/{checkpoint_writer.SAVING}*")
        )
        left = newest(folder / "killed")
        reached = max(run.iteration, resumed)
        lost = reached - left
        resumed = left
        kills.lost.append(lost)
        kills.saves_under_way += bool(saving_now)
        beside = f", while {', '.join(saving_now)} was written" if saving_now else ""
        print(
            f"kill {number:2d} after {when:5.1f} s, in iteration {reached + 1}{beside}: "
            f"goes on after {left}",
            flush=True,
        )
        if lost > 0:
            kills.problems.append(f"kill {number} lost {lost} finished iterations")
        bad = [line for _, line in run.lines if "skipped checkpoint" in line or "Traceback" in line]
        kills.problems += [f"kill {number}: {line}" for line in bad]
    return kills


def differences(run: Path, whole: Path, iterations: int) -> tuple[list[str], list[str]]:
    """Runs to the end and compares the result with the uninterrupted run.

    Args:
        run: The run directory.
        whole: The directory of the uninterrupted run.
        iterations: The length of both runs.

    Returns:
        The messages of the run, and the differences.
    """
    last = Process(run, iterations)
    status = last.end()
    messages = [line for _, line in last.lines]
    if status != 0:
        return messages, [f"the last start ended with {status}: {messages[-1:]}"]
    ours, theirs = (state_of(folder, iterations) for folder in (run, whole))
    problems = [f"{key} differs" for key in theirs if ours[key].tobytes() != theirs[key].tobytes()]
    if not pq.read_table(run / "ledger").equals(pq.read_table(whole / "ledger")):
        problems.append("the ledgers differ")
    if record(run) != record(whole):
        problems.append("the metrics differ")
    return messages, problems


def flip_bits(folder: Path, iterations: int, count: int, rng: random.Random) -> list[str]:
    """Flips a bit in the newest checkpoint of a copy of `folder`/whole, `count` times.

    Each time the state is restored as at a start. Every tenth time the run is also continued.

    Returns:
        The problems.
    """
    whole = folder / "whole"
    run = folder / "flipped"
    problems = []
    for number in range(1, count + 1):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        last, before = checkpoint.list_checkpoints(run / "checkpoints")[:2]
        assert isinstance(last, Path)
        files = sorted(path for path in last.rglob("*") if path.is_file() and path.stat().st_size)
        file = files[(number - 1) % len(files)]
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        bit = rng.randrange(8)
        data[at] ^= 1 << bit
        file.write_bytes(data)
        restored = checkpoint.restore_latest(run / "checkpoints", shapes(), {})
        assert restored is not None
        state, meta, messages = restored
        good, _ = checkpoint.restore(before, shapes())
        wrong = []
        if meta["iteration"] != iterations - 1:
            wrong.append(f"resumes after {meta['iteration']}")
        same = jax.tree.map(
            lambda ours, theirs: np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(),
            state,
            good,
        )
        if not all(jax.tree.leaves(same)):
            wrong.append("another state")
        if number % 10 == 1:
            messages, more = differences(run, whole, iterations)
            wrong += more
            if f"resuming after iteration {iterations - 1}" not in messages:
                wrong.append(f"said {messages[:3]}")
        skipped = [line for line in messages if line.startswith(f"skipped checkpoint {last}: ")]
        if not skipped:
            wrong.append("said nothing")
        problems += [f"flip {number}, {file.relative_to(last)}: {what}" for what in wrong]
        print(
            f"flip {number:2d}, bit {bit} of byte {at} of {file.relative_to(last)}: {skipped}",
            flush=True,
        )
    return problems


def fill_disks(folder: Path, iterations: int, count: int) -> list[str]:
    """Runs on `count` file systems that are too small, and continues after enlarging them.

    Returns:
        The problems.
    """
    whole = folder / "whole"
    disk = folder / "disk"
    problems = []
    needed = sum(path.stat().st_blocks * 512 for path in whole.rglob("*"))
    disk.mkdir(exist_ok=True)
    for number in range(1, count + 1):
        room = needed * number // (count + 1) // 4096 * 4096
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", disk], check=True)
        try:
            full = Process(disk / "run", iterations)
            status = full.end()
            messages = [line for _, line in full.lines]
            refusals = [line for line in messages if line.startswith("solrl: ")]
            wrong = [] if status == 1 else [f"ended with {status}"]
            named = re.search(r"the last (?:finite )?checkpoint is (\S+)", " ".join(refusals))
            last = newest(disk / "run")
            if (
                len(refusals) != 1
                or "disk full" not in refusals[0]
                or any("Traceback" in line for line in messages)
            ):
                wrong.append(f"said {messages[-4:]}")
            if last and not (named and int(Path(named[1]).name) == last):
                wrong.append(f"the last checkpoint is {last}, and it said {refusals}")
            subprocess.run(["mount", "-o", f"remount,size={4 * needed}", disk], check=True)
            wrong += differences(disk / "run", whole, iterations)[1]
        finally:
            subprocess.run(["umount", disk], check=True)
        problems += [f"disk {number}: {problem}" for problem in wrong]
        print(
            f"disk {number:2d} of {room} bytes, last checkpoint {last}: "
            f"{refusals or messages[-3:]}",
            flush=True,
        )
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--disks", type=int, default=12)
    parser.add_argument(
        "--iterations", type=int, help="length of the run (default: 2 per kill, plus 2)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the runs (default: they are deleted)"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    iterations = arguments.iterations or 2 * arguments.kills + 2
    began = time.monotonic()
    timing = run_whole(folder, iterations)
    rng = random.Random(arguments.seed)
    whole = folder / "whole"
    kills = kill_often(folder, iterations, arguments.kills, timing, rng)
    problems = kills.problems + (
        differences(folder / "killed", whole, iterations)[1] if arguments.kills else []
    )
    problems += flip_bits(folder, iterations, arguments.flips, rng)
    disks = arguments.disks if os.geteuid() == 0 else 0
    problems += fill_disks(folder, iterations, disks)
    if arguments.folder is None:
        shutil.rmtree(folder)
    report = {
        "kills": len(kills.lost),
        "flips": arguments.flips,
        "disks": disks,
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
