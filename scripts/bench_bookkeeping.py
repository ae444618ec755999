"""Measures what the training loop costs beside the iterations, after 1 and after 10,000 of them.

    python scripts/bench_bookkeeping.py tiny --out benchmarks/bookkeeping-cpu.json

The loop writes metrics, the ledger and the report, and runs the rank monitor. Only the first
iteration is computed; all others return its result, so that the remaining time is the loop's own.
No checkpoint is written and nothing is evaluated in between, because their cost does not depend on
earlier iterations. The result has the median milliseconds of the first and the last `--window`
iterations, and the share of the last ones in the time of a real iteration.
"""

import contextlib
import io
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from bench.timing import finish, parser

from solrl_jax.config.presets import resolve
from solrl_jax.rl.iteration import IterationResult
from solrl_jax.runs import trainer
from solrl_jax.runs.progress import TerminalProgress

SETTINGS = ("eval.every=0", "eval.num_grid_images=0", "rollout.explore.min_rank_correlation=0.01")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--iterations", type=int, default=10_000)
    options.add_argument("--window", type=int, default=100)
    args = options.parse_args(arguments)
    iterate = trainer.iterate
    starts = list[float]()
    real = list[IterationResult]()

    def again(experiment, state, *rest):
        if not real:
            state, outcome = iterate(experiment, state, *rest)
            real.append(outcome)
        starts.append(time.perf_counter())
        return state, real[0]

    trainer.iterate = again
    with tempfile.TemporaryDirectory() as folder, TerminalProgress(bars=False) as progress:
        run = f"{folder}/run"
        length = (
            f"train.iterations={args.iterations}",
            f"run.checkpoint_every={args.iterations}",
            f"run.dir={run}",
        )
        config = resolve(args.preset, (*SETTINGS, *length, *args.overrides))
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.run(config, progress, html_report=True)
        sizes = {
            name: (Path(run) / name).stat().st_size for name in ("metrics.jsonl", "report.html")
        }
        sizes["ledger"] = sum(path.stat().st_size for path in (Path(run) / "ledger").iterdir())
    took = [1e3 * (after - before) for before, after in itertools.pairwise(starts)]
    iteration = 1e3 * (real[0].metrics["seconds"] - real[0].metrics["seconds/compile"])
    median = {
        "first": statistics.median(took[: args.window]),
        "last": statistics.median(took[-args.window :]),
    }
    result = {
        "preset": args.preset,
        "overrides": args.overrides,
        "iterations": args.iterations,
        "iteration_ms": round(iteration, 1),
        **{f"{name}_ms": round(value, 3) for name, value in median.items()},
        "last_share": round(median["last"] / iteration, 5),
        "bytes": {name: size // args.iterations for name, size in sizes.items()},
    }
    finish(result, args.out)


if __name__ == "__main__":
    main()
