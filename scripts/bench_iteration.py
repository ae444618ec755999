"""Compares whole iterations of `sol_rl` and `naive_scaling` at full size with random weights.

    python scripts/bench_iteration.py flux1_sol_rl_hpsv2 train.num_prompts=1 --out iteration.json
    python scripts/bench_iteration.py tiny --families sol_rl,naive_scaling,diffusionnft

For each family the result has the median seconds of each phase over `--repeat` iterations, after
one that compiles, and the share of an iteration that `sync` takes (merging adapters and
quantizing). `times_sol_rl` is the time of an iteration divided by that of `sol_rl`.
"""

import statistics
from typing import Any

from bench.random_weights import random_experiment
from bench.timing import finish, parser

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.iteration import iterate


def measure(config: Config, repeat: int) -> dict[str, Any]:
    """Measures `repeat` iterations of a configuration. Returns the median seconds by phase."""
    experiment = random_experiment(config)
    state = fresh_state(experiment)
    measured = []
    for iteration in range(1, repeat + 2):
        state, outcome = iterate(experiment, state, iteration)
        measured.append(outcome.metrics)
    names = [name for name in measured[0] if name == "seconds" or name.startswith("seconds/")]
    medians = {
        name: statistics.median(row[name] for row in measured[1:])
        for name in names
        if name != "seconds/compile"
    }
    return {
        "exploration": experiment.explorer.format.describe(experiment.device),
        "seconds": medians["seconds"],
        "phases": {
            name.removeprefix("seconds/"): value for name, value in medians.items() if "/" in name
        },
        "sync_share": round(medians["seconds/sync"] / medians["seconds"], 5),
        "compile_seconds": [round(row["seconds/compile"], 2) for row in measured],
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--families",
        default="sol_rl,naive_scaling",
        help="separated by commas; the others are compared with the first",
    )
    args = options.parse_args(arguments)
    families = {}
    for name in args.families.split(","):
        families[name] = measure(
            resolve(args.preset, (f"family={name}", *args.overrides)), args.repeat
        )
    first = next(iter(families))
    for result in families.values():
        result[f"times_{first}"] = round(result["seconds"] / families[first]["seconds"], 3)
    finish({"preset": args.preset, "overrides": args.overrides, "families": families}, args.out)


if __name__ == "__main__":
    main()
