"""Runs of a study as processes of `solrl train`, several at once. What is finished is not repeated; what stopped goes on."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from solrl_jax.runs.directory import is_run, read_run
from solrl_jax.runs.metrics import read
from solrl_jax.storage.files import writing
from solrl_jax.study.plan import Run


def log_of(run: Run) -> Path:
    """The file of what a run says."""
    return run.folder.with_name(f"{run.name}.log")


def finished(run: Run) -> bool:
    """Whether its directory holds this very run, trained and evaluated to the end."""
    if not is_run(run.folder) or read_run(run.folder) != run.config:
        return False
    return any(
        row["iteration"] == run.config.train.iterations and "eval/reward" in row
        for row in read(run.folder)
    )


def train(
    runs: Sequence[Run], out: Path, processes: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Trains what is not finished, `processes` runs at once. Returns why runs failed, by their names; others go on.

    say: told of each run that ends. What a run says is in `out/ARM-SEED.log`. Raises KeyboardInterrupt when it is interrupted;
    the runs under way have then saved.
    """
    waiting = [run for run in runs if not finished(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished")
    failed: dict[str, str] = {}
    started: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(processes) as threads:
        ending = {threads.submit(_train, run, out, processes, started): run for run in waiting}
        try:
            for number, future in enumerate(as_completed(ending), 1):
                run = ending[future]
                problem = future.result()
                if problem is not None:
                    failed[run.name] = problem
                say(f"{number}/{len(waiting)} {run.name}: {problem or _last(run)}")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for child in started:
                child.terminate()  # it saves its last whole iteration
            raise
    return failed


def _train(
    run: Run, out: Path, processes: int, started: list[subprocess.Popen[bytes]]
) -> str | None:
    """Why the run failed; None if it did not."""
    log = log_of(run)
    share = str(max(1, (os.cpu_count() or 1) // processes))
    # threads of XLA on a CPU; programs are compiled once for all seeds of an arm
    shared = {
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "NPROC": share,
        "OMP_NUM_THREADS": share,
    }
    with writing(log):
        log.unlink(missing_ok=True)  # also a link or a pipe
    with writing(log), log.open("wb") as lines:
        child = subprocess.Popen(
            (sys.executable, "-m", "solrl_jax", "train", *run.arguments),
            stdin=subprocess.DEVNULL, stdout=lines, stderr=lines, env=shared | os.environ,
            start_new_session=True,  # Ctrl-C reaches it once, through `train`: a second signal would stop it without saving
        )  # fmt: skip
        started.append(child)
        code = child.wait()
    if code == 0:
        return None
    if code < 0:
        return f"ended by signal {-code}; {log} has what it said"
    return log.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("solrl: ")


def _last(run: Run) -> str:
    rows = [row for row in read(run.folder) if "eval/reward" in row]
    told = (
        "not finite" if value is None else f"{value:.3f}"
        for value in (rows[0]["eval/reward"], rows[-1]["eval/reward"])
    )
    return f"held-out reward {' -> '.join(told)}"
