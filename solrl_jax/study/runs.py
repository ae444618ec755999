"""Trains the runs of a study as processes of `solrl train`, several at once.

Finished runs are not repeated, and interrupted runs continue.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from solrl_jax.config.schema import Config
from solrl_jax.rl.experiment import fit_prompt_counts, load_prompt_sets
from solrl_jax.runs.directory import is_run, read_run
from solrl_jax.runs.metrics import read
from solrl_jax.storage.files import disk_errors_as_run_errors
from solrl_jax.study.plan import Run


def log_of(run: Run) -> Path:
    """Returns the file for the output of a run, `ARM-SEED.log` (the name of the run is ARM-SEED),
    beside the run directory.

    Args:
        run: The run, which need not be trained. The file need not exist.
    """
    return run.folder.with_name(f"{run.name}.log")


def finished(run: Run) -> bool:
    """Returns whether a run is finished: trained and evaluated to the end in its directory.

    If the saved configuration differs from that of the run, the prompt sets are read too, and
    downloaded if they are on the hub and not in its cache.

    Args:
        run: The run.

    Returns:
        True if it is. False if its directory is not a run directory, if its `config.yaml` differs
        from `run.config` in any setting (except for numbers of prompts that were reduced to those
        of its prompt sets), or if its metrics have no entry for the held-out reward of the last
        iteration (an entry for a non-finite reward suffices).

    Raises:
        InputError: If the `config.yaml` in the directory, or a prompt set, cannot be read, or the
            metrics are too large.
        ConfigError: If that file is not a valid configuration. Also if `train.num_prompts` exceeds
            the size of the training set, and `run.config` is invalid with every number up to that
            size.
    """
    if not is_run(run.folder):
        return False
    saved = read_run(run.folder)
    if saved != run.config and saved != _with_available_prompts(run.config):
        return False
    return any(
        row["iteration"] == run.config.train.iterations and "eval/reward" in row
        for row in read(run.folder)
    )


def _with_available_prompts(config: Config) -> Config:
    """Returns a configuration with `train.num_prompts` and `eval.num_prompts` reduced to the number
    of distinct prompts in its training and in its test set, as a run reduces them when it starts.

    If the training set is too small, `train.num_prompts` becomes the largest number up to its size
    with which the configuration is valid. Sets of the hub are downloaded unless they are in its
    cache.

    Args:
        config: The configuration of a run, which is returned itself if nothing is reduced.

    Raises:
        InputError: If a prompt set cannot be read.
        ConfigError: If the training set is too small, and the configuration is invalid with every
            number up to its size.
    """
    train_prompts, test_prompts = load_prompt_sets(config)
    return fit_prompt_counts(config, len(train_prompts), len(test_prompts))[0]


def train(
    runs: Sequence[Run], out: Path, processes: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Trains the runs that are not finished, each in a process of `solrl train`.

    A run that was interrupted continues from its last checkpoint. The output of each run is written
    to the file `ARM-SEED.log` beside its directory.

    Args:
        runs: All runs of the study. Their directories lie in `out`.
        out: The directory of the study, which must exist, and in which no other process may train
            (it is not locked here). Compiled programs, which all runs share, are kept in
            `out/programs`.
        processes: The number of runs that train at once, at least 1. They share the threads of the
            CPU equally.
        say: Called in this thread with one line of progress at a time: at the start, how many runs
            are finished (if any are); then, whenever a run ends, its name with its first and last
            reward, or why it failed. An error that it raises stops the runs as Ctrl-C does, and is
            raised again.

    Returns:
        For each run that failed, by its name ARM-SEED, one line that says why. The other runs are
        trained all the same.

    Raises:
        InputError: If the configuration of an existing run directory, or the prompt sets of a run
            whose directory has another configuration, cannot be read.
        ConfigError: If the configuration of an existing run directory is invalid. Also if
            `train.num_prompts` of its run exceeds the size of the training set, and the run's
            configuration is invalid with every number up to that size.
        RunError: If the log of a run cannot be created, or its process cannot be started. No other
            run is started, and those that train are stopped, save their last complete iteration,
            and are waited for.
        KeyboardInterrupt: After Ctrl-C. The runs are stopped in the same way.
    """
    waiting = [run for run in runs if not finished(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished")
    failed: dict[str, str] = {}
    children = _Children()
    with ThreadPoolExecutor(processes) as threads:
        ending = {threads.submit(_train, run, out, processes, children): run for run in waiting}
        try:
            for number, future in enumerate(as_completed(ending), 1):
                run = ending[future]
                problem = future.result()
                if problem is not None:
                    failed[run.name] = problem
                say(f"{number}/{len(waiting)} {run.name}: {problem or _gain(run)}")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    return failed


class _Children:
    """The `solrl train` processes of a study. Any thread may start one, and any may stop all."""

    def __init__(self) -> None:
        """Creates an empty collection of processes."""
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_stopped = False

    def start(
        self, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Starts a process, which does not get a Ctrl-C of the terminal.

        Args:
            command: The program and its arguments.
            output: The file for standard output and standard error.
            environment: All environment variables of the process.

        Returns:
            The process; None if `stop` has been called. Then none is started.

        Raises:
            OSError: If the process cannot be started.
        """
        with self._lock:
            if self._is_stopped:
                return None
            # In a session of its own, Ctrl-C reaches the process once, through `stop`. A second
            # signal would stop it without saving.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            self._processes.append(process)
            return process

    def stop(self) -> None:
        """Asks all processes to end (SIGTERM), and lets no other one start. A run then saves its
        last complete iteration. Nothing is waited for.
        """
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                process.terminate()


def _train(run: Run, out: Path, processes: int, children: _Children) -> str | None:
    """Trains one run in a process of its own, and waits for it.

    Its output replaces the file `ARM-SEED.log`. The process gets an equal part of the CPU's threads
    (NPROC, OMP_NUM_THREADS) and a directory of compiled programs (JAX_COMPILATION_CACHE_DIR). Each
    of these variables that this process's environment has keeps its value.

    Args:
        run: The run, whose arguments `solrl train` is called with.
        out: The directory of the study. All runs share the compiled programs in `out/programs`.
        processes: The number of runs that train at once and share the CPU cores.
        children: The collection that starts the process. By its `stop`, the caller can end it.

    Returns:
        None if it succeeded. Otherwise why the run failed: the signal that ended it, the last line
        of its output (its exit code if there is none), or that the study was stopped before it was
        started.

    Raises:
        RunError: If the log cannot be created, or the process cannot be started.
    """
    log = log_of(run)
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "NPROC": threads,  # XLA's threads on a CPU
        "OMP_NUM_THREADS": threads,
    }
    with disk_errors_as_run_errors(log):
        log.unlink(missing_ok=True)  # also a link or a pipe
    with disk_errors_as_run_errors(log), log.open("wb") as lines:
        command = (sys.executable, "-m", "solrl_jax", "train", *run.arguments)
        child = children.start(command, lines, environment | os.environ)
        if child is None:
            return "not started, because the study was stopped"
        code = child.wait()
    if code == 0:
        return None
    if code < 0:
        return f"ended by signal {-code}; its output is in {log}"
    last = log.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("solrl: ")
    return last or f"ended with exit code {code} and printed nothing"


def _gain(run: Run) -> str:
    """Describes the held-out reward of a finished run before and after training.

    Args:
        run: The run, whose `metrics.jsonl` must have an evaluation (otherwise IndexError).

    Returns:
        E.g. "held-out reward 0.312 -> 0.587", with the first and the last recorded reward; "not
        finite" stands for one that was not.
    """
    rewards = [row["eval/reward"] for row in read(run.folder) if "eval/reward" in row]
    texts = ["not finite" if x is None else f"{x:.3f}" for x in (rewards[0], rewards[-1])]
    return f"held-out reward {texts[0]} -> {texts[1]}"
