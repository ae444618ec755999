"""Kills a small run of `solrl train tiny` at random moments, starts it again each time, and checks what was lost: nothing.

    python scripts/check_kills.py                              # 20 kills; 19 minutes on 2 busy cores
    python scripts/check_kills.py --kills 5 --seed 3 --folder runs/kills

An uninterrupted run comes first; it says how long starting and iterating take. Then SIGKILLs: one in five falls into a start,
the others into the iterations after it. After each, the newest checkpoint that is good byte for byte is looked up. A kill may
lose the iteration under way, and nothing else: with run.checkpoint_every=1 the one before it is on the disk. At the end the
whole state equals the uninterrupted run's to the bit, and so do the ledger and the metrics but for times.

Prints a line a kill, and one of JSON at the end; exit code 1 if anything is not as said.
"""

import argparse
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

from solrl_jax.config.presets import resolve
from solrl_jax.policy.state import abstract_state
from solrl_jax.run import checkpoint, checkpoint_writer, ledger, metrics
from solrl_jax.training.experiment import build

SMALL = (
    "train.prompts=2", "rollout.candidates=8", "rollout.kept=4", "rollout.chunk=2", "rollout.steps=3",
    "rollout.explore.steps=2", "optimizer.micro_batch=2", "policy.timestep_fraction=0.7", "eval.prompts=2",
    "eval.images_per_prompt=2", "eval.grid=0", "eval.steps=3", "eval.every=5", "run.checkpoint_every=1", "run.keep_best=1",
    "run.tensorboard=false", "mesh.data=1",
)  # fmt: skip
IN_START = 0.2  # share of the kills
SAID = re.compile(r"(?:resuming after )?iteration (\d+)")


class Process:
    """A start of the run: the seconds after which it said something, and the last iteration that it spoke of."""

    def __init__(self, folder: Path, iterations: int) -> None:
        command = [sys.executable, "-m", "solrl_jax.commands.cli", "train", "tiny", *SMALL, f"train.iterations={iterations}"]
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"), "JAX_PLATFORMS": "cpu"}
        self._began, self._process = time.monotonic(), subprocess.Popen(
            [*command, f"run.dir={folder}"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=os.environ | compiled | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )  # fmt: skip
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

    def finished(self) -> list[float]:
        """When each iteration of this start was finished."""
        return [when for when, line in self.lines if line.startswith("iteration ")]

    def wait_for(self, count: int) -> None:
        """Returns when so many iterations were finished, or when the process has ended."""
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
    """The iteration of the newest checkpoint that is good byte for byte; 0 for none. One that is damaged ends the script."""
    for path in checkpoint.candidates(folder / "checkpoints"):
        checkpoint.verify(path)
        return checkpoint.iteration_of(path) or 0
    return 0


def state_of(folder: Path, iterations: int) -> dict[str, np.ndarray]:
    """The arrays of the last checkpoint, by key path."""
    config = resolve("tiny", (*SMALL, f"train.iterations={iterations}", f"run.dir={folder}"))
    experiment = build(config)
    backbone = experiment.backbone
    abstract = abstract_state(backbone.transformer, list(experiment.targets), config.lora, config.optimizer, backbone.mesh)
    state, meta = checkpoint.restore(checkpoint.candidates(folder / "checkpoints")[0], abstract)
    assert meta["iteration"] == iterations
    return {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(state)}


def record(folder: Path) -> list[dict]:
    """The metrics without times."""
    return [{name: value for name, value in row.items() if "second" not in name} for row in metrics.read(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, help="of the run (default: two a kill, more than the kills let it make)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where both runs are left (default: nowhere)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    iterations, rng, began = arguments.iterations or 2 * arguments.kills + 2, random.Random(arguments.seed), time.monotonic()
    problems: list[str] = []

    for _ in range(2):  # the second time with its programs compiled, as the starts after a kill
        shutil.rmtree(folder / "whole", ignore_errors=True)
        whole = Process(folder / "whole", iterations)
        if (status := whole.end()) != 0:
            sys.exit(f"the uninterrupted run ended with {status}: {whole.lines[-1:]}")
    finished = whole.finished()
    start, each = finished[0], (finished[-1] - finished[0]) / (len(finished) - 1)
    print(f"uninterrupted: {iterations} iterations, first after {start:.1f} s, then {each:.2f} s each", flush=True)

    lost_iterations, saves_under_way, resumed = [], 0, 0
    for number in range(1, arguments.kills + 1):
        run = Process(folder / "killed", iterations)
        if rng.random() < IN_START:
            moment = rng.uniform(0, start)
            time.sleep(moment)
        else:
            run.wait_for(1)
            time.sleep(rng.uniform(0, 2 * each))
        when = time.monotonic() - run._began
        status = run.end(signal.SIGKILL)
        if status != -signal.SIGKILL:
            problems.append(f"kill {number} came too late: the run had ended with {status}")
            break
        saving_now = sorted(path.name for path in (folder / "killed").glob(f"checkpoints/{checkpoint_writer.SAVING}*"))
        left, reached = newest(folder / "killed"), max(run.iteration, resumed)
        lost, resumed = reached - left, left
        lost_iterations.append(lost)
        saves_under_way += bool(saving_now)
        beside = f", while {', '.join(saving_now)} was written" if saving_now else ""
        print(f"kill {number:2d} after {when:5.1f} s, in iteration {reached + 1}{beside}: goes on after {left}", flush=True)
        if lost > 0:
            problems.append(f"kill {number} lost {lost} finished iterations")
        problems += [f"kill {number}: {line}" for _, line in run.lines if "skipped checkpoint" in line or "Traceback" in line]
    last = Process(folder / "killed", iterations)
    if (status := last.end()) != 0:
        problems.append(f"the last start ended with {status}: {last.lines[-1:]}")
    else:
        ours, theirs = (state_of(folder / name, iterations) for name in ("killed", "whole"))
        problems += [f"{key} differs" for key in theirs if ours[key].tobytes() != theirs[key].tobytes()]
        if not ledger.read(folder / "killed" / "ledger").equals(ledger.read(folder / "whole" / "ledger")):
            problems.append("the ledgers differ")
        if record(folder / "killed") != record(folder / "whole"):
            problems.append("the metrics differ")
    if arguments.folder is None:
        shutil.rmtree(folder)
    report = {
        "kills": len(lost_iterations),
        "iterations": iterations,
        "seed": arguments.seed,
        "lost_nothing_finished": sum(lost <= 0 for lost in lost_iterations),
        "kills_while_a_checkpoint_was_written": saves_under_way,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "problems": problems,
    }
    print(json.dumps(report))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
