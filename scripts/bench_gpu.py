"""All that is to be measured on a GPU, in one command for so many minutes: the most important first.

    python scripts/bench_gpu.py --minutes 9 --out measured
    python scripts/bench_gpu.py --minutes 9 --out measured --models flux1 --steps facts,steps,update
    python scripts/bench_gpu.py --minutes 5 --out measured --models tiny --formats nvfp4 mesh.data=1    # a CPU can do this

Nothing is downloaded. The models have their released configurations and random weights, made on the device. Steps:

* facts: the device, the versions of the driver, CUDA and cuDNN, of JAX.
* kernels: each fused kernel beside its twin in plain JAX at the sizes of the released models: the
  largest difference, and the seconds of both.
* parity: the embedded pipelines' rewards of the same seeds here and on the CPU; which kernels of libraries ran.
* products: BF16 and each format that the device has natively (nvfp4, fp8; --formats names others) at the shapes of the
  models' quantised linears; the share of the device's public peak.
* steps, of each model: a chunk regenerated in BF16, and explored in each format: seconds a call and a step, of `sync` too.
* rollout, of each model: decoding and scoring a chunk; with the calls of `steps` and their number, the rollout phase of an
  iteration, against `naive_scaling`.
* update, of each model: two or three micro-batches; times their number, the update of an iteration.

Programs are the jitted functions that train. A time is a median of --repeat calls after a first one that compiles, each until
its result is there; beside it are the plan's least seconds, read from the compiled text of the same program, and their ratio.
Memory is the allocator's high-water mark, which is known where a program raises it, and the plan's sum for the same arrays.

DIR has a JSON file a step, written anew after each figure, and `summary.md`, written anew after each step. A step runs in a
process of its own. One that fails is recorded with the first line of its error; one for which no time is left is recorded as
skipped; one that runs when the minutes are over is ended, and what it has found stays. `kernels`, `parity` and `products`
are ended before, when each has had about three tenths of the minutes.
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
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of the models' presets, as `solrl train` takes them",
    )
    made.add_argument(
        "--minutes", type=float, default=9.0, help="after these all is over (default: 9)"
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the records go")
    made.add_argument(
        "--models", default="sana,flux1,sd3", help=f"with commas, of {', '.join(schedule.PRESETS)}"
    )
    made.add_argument(
        "--steps", default=",".join(schedule.ALL + schedule.EACH), help="with commas (default: all)"
    )
    made.add_argument(
        "--formats", default="", help="with commas (default: those that the device has natively)"
    )
    made.add_argument(
        "--repeat", type=int, default=3, help="times are medians of this many calls (default: 3)"
    )
    args = made.parse_args(arguments)
    try:
        todo = asked(args)
    except (ConfigError, InputError) as error:
        made.error(str(error))

    def after(record: Record) -> None:
        print(
            f"{record.name}: {record.state}, {record.seconds:.1f} s {record.reason}".rstrip(),
            flush=True,
        )
        summary.write(todo, args.out)

    schedule.run(todo, 60 * args.minutes, after)
    print(summary.page(todo), end="")


def asked(args: argparse.Namespace) -> list[Task]:
    """The steps of a command line. Raises InputError or ConfigError for what cannot be, before anything runs."""

    def listed(text):
        return tuple(part.strip() for part in text.split(",") if part.strip())

    models = listed(args.models)
    steps = listed(args.steps)
    formats = listed(args.formats)
    for option, given, known in (
        ("--models", models, tuple(schedule.PRESETS)),
        ("--steps", steps, schedule.ALL + schedule.EACH),
        ("--formats", formats, schedule.QUANTISED),
    ):
        if unknown := [name for name in given if name not in known]:
            raise InputError(f"{option} {','.join(unknown)}: expected some of {', '.join(known)}")
    for model in models:
        preset, *chosen = schedule.PRESETS[model]
        resolve(preset, (*chosen, *args.overrides))
    folder = str(writable_directory(args.out, "--out"))
    shared = Task("", "", models, tuple(args.overrides), formats, args.repeat, folder)
    return list(schedule.tasks(shared, steps))


if __name__ == "__main__":
    main()
