"""Measures everything on a GPU within a given number of minutes, the most important first.

    python scripts/bench_gpu.py --minutes 9 --out measured
    python scripts/bench_gpu.py --minutes 9 --out measured --models flux1 --steps facts,steps,update
    python scripts/bench_gpu.py --minutes 5 --out measured --models tiny --formats nvfp4 mesh.data=1

The last command also runs on a CPU. Nothing is downloaded: the models have their released
configurations and random weights, which are generated on the device. The steps are:

* facts: the device, and the versions of the driver, CUDA, cuDNN and JAX.
* checks: small matmuls in FP8 and NVFP4 and attention on the device, beside plain JAX.
* kernels: each fused kernel and the same computation in plain JAX, and quantized matmuls and their
  emulation, at the sizes of the released models; the largest difference, and the seconds of both.
* parity: the rewards of the embedded pipelines for the same seeds on this device and on the CPU;
  which library kernels ran.
* products: matmuls in BF16 and in each native format (nvfp4, fp8; `--formats` selects others), at
  the shapes of the models' quantized layers, and their share of the device's public peak.
* steps, per model: a batch regenerated in BF16 and explored in each format; seconds per call and
  per solver step, and those of `sync`.
* rollout, per model: decoding and scoring a batch, and the gradient of the reward if the objective
  trains on it. With the results of `steps` this gives the time of an iteration's rollout phase,
  compared with `naive_scaling`.
* update, per model: two or three micro-batches, from which the time of an update follows.

The programs are the jitted functions of the training. A time is the median of `--repeat` calls
after a first one that compiles; each call waits for its result. It is reported with the roofline
time of the same compiled program, and their ratio. Memory is the allocator's high-water mark, which
is known if a program raises it, and the planned memory of the same arrays.

The output folder has one JSON file per step, updated after each figure, and `summary.md`, updated
after each step. Each step runs in its own process. A step that fails is recorded with the first
line of its error. A step for which no time is left is recorded as skipped. A step that is running
at the end is stopped, and its figures remain. `kernels`, `parity` and `products` are stopped after
about 30 % of the time each.
"""

import argparse
from pathlib import Path

from bench.gpu import schedule, summary
from bench.gpu.record import Record, Task

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.storage.files import writable_directory


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the models' presets, as in `solrl train`",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit (default: 9)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--models",
        default="sana,flux1",
        help=f"separated by commas (default: sana,flux1), from {', '.join(schedule.PRESETS)}",
    )
    parser.add_argument(
        "--steps",
        default=",".join(schedule.ALL + schedule.EACH),
        help="separated by commas (default: all)",
    )
    parser.add_argument(
        "--formats", default="", help="separated by commas (default: the native ones)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="number of calls whose median is taken (default: 3)"
    )
    args = parser.parse_args(arguments)
    try:
        todo = parse_tasks(args)
    except (ConfigError, InputError) as error:
        parser.error(str(error))

    def after(record: Record) -> None:
        print(
            f"{record.name}: {record.state}, {record.seconds:.1f} s {record.reason}".rstrip(),
            flush=True,
        )
        summary.write(todo, args.out)

    schedule.run(todo, 60 * args.minutes, after)
    print(summary.page(todo), end="")


def parse_tasks(args: argparse.Namespace) -> list[Task]:
    """Checks the command line and returns the steps to run.

    Raises:
        InputError: If a model, step or format is unknown, or the folder is not writable.
        ConfigError: If an override is invalid.
    """

    def listed(text):
        return tuple(part.strip() for part in text.split(",") if part.strip())

    models = listed(args.models)
    steps = listed(args.steps)
    formats = listed(args.formats)
    for option, names, known in (
        ("--models", models, tuple(schedule.PRESETS)),
        ("--steps", steps, schedule.ALL + schedule.EACH),
        ("--formats", formats, schedule.QUANTIZED),
    ):
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"{option} {','.join(unknown)}: expected some of {', '.join(known)}")
    for model in models:
        preset, *chosen = schedule.PRESETS[model]
        resolve(preset, (*chosen, *args.overrides))
    folder = str(writable_directory(args.out, "--out"))
    shared = Task("", "", models, tuple(args.overrides), formats, args.repeat, folder)
    return list(schedule.tasks(shared, steps))


if __name__ == "__main__":
    main()
