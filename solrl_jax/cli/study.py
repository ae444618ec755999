"""`solrl study`: trains several arms with several seeds, and compares them."""

import os
import sys
from pathlib import Path

import click

from solrl_jax.cli.options import PATH, TARGET, finish, json_option
from solrl_jax.errors import InputError, one_line
from solrl_jax.storage.files import exclusive_lock, writable_directory
from solrl_jax.study import page, summary
from solrl_jax.study.cost import find_prices
from solrl_jax.study.plan import read_plan, runs_of
from solrl_jax.study.runs import log_of, train


@click.command("study")
@click.argument("plan", metavar="PLAN", type=TARGET)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--quick", is_flag=True, help="Use the plan's reduced settings.")
@click.option(
    "--out",
    type=PATH,
    help="Output directory.  [default: runs/study-PLAN, or runs/study-PLAN-quick]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Runs at the same time.  [default: one per core; use 1 on a GPU or TPU]",
)
@click.option(
    "--prices",
    default="flux1-b200",
    show_default=True,
    metavar="MODEL-DEVICE|FILE",
    help="Prices of the counted work.",
)
@click.option(
    "--compare-only", is_flag=True, help="Train nothing: compare the runs that are finished."
)
@json_option
def command(
    plan: str,
    overrides: tuple[str, ...],
    quick: bool,
    out: Path | None,
    processes: int | None,
    prices: str,
    compare_only: bool,
    as_json: bool,
) -> None:
    """Train the arms of PLAN with several seeds, and compare them. The same command resumes.

    PLAN is paper, objectives, learning, frontier, exploration, proxy, or a YAML file like those in
    configs/study/. Cost is counted work at the prices of a released model on a device (`solrl
    plan`), not the time that this machine took.

    \b
    solrl study objectives --quick
    solrl study paper --prices sana-b200 --compare-only

    \f
    Args:
        plan: The study to run: the name of one in the package, or a YAML file. It lists arms
            (settings to compare) and seeds; every arm is trained with every seed, except for runs
            that are finished.
        overrides: Settings of all runs that differ, as `key=value`. A run whose directory has other
            settings counts as not finished, and fails if its trained parameters depend on them.
        quick: Whether to train the small version of the study, with the seeds and overrides under
            `quick` in the plan.
        out: The directory of the runs, their logs, and `study.json`, `study.md` and `study.png`,
            which each call replaces. None: `runs/study-NAME`, where NAME is that of the plan or its
            file without ".yaml", with "-quick" added for the quick version.
        processes: The number of runs that train at once, 1 to 64. None: one per CPU core. Must be
            None with `compare_only`.
        prices: The prices of the counted work: the name MODEL-DEVICE of prices in the package, e.g.
            "sana-b200", or a file with the JSON of `solrl plan`.
        compare_only: Whether to train nothing, and only compare the runs that are finished.
        as_json: Whether to print one line of JSON in place of text: "out", the content of
            `study.json` and, if runs failed, "error" and "exit_code".

    Raises:
        ConfigError: If a setting is invalid.
        InputError: If an argument or the files of a run cannot be used, the directory has files
            that no study wrote, or another process trains in it.
        RunError: If a result cannot be written to the disk.
        SystemExit: With code 1, if runs failed. The others are compared.
    """
    if compare_only and processes is not None:
        raise InputError(f"processes={processes}: --compare-only starts none; leave it out")
    study_plan = read_plan(plan)
    price_table = find_prices(prices)
    name = Path(plan).stem + ("-quick" if quick else "")
    folder = out or Path("runs") / f"study-{name}"
    runs = runs_of(study_plan, folder, quick, overrides)
    failed = {}
    writable_directory(folder, "--out")
    page.refuse_foreign(folder, () if compare_only else map(log_of, runs))
    if not compare_only:  # comparing is possible while another process trains
        with exclusive_lock(folder):
            workers = processes or os.cpu_count() or 1
            failed = dict(train(runs, folder, workers, _print_progress))
    study, courses = summary.summarize(name, study_plan, runs, price_table, failed)
    page.write(folder, study, courses, summary.sweeps(study_plan, runs))
    result = {"out": str(folder), **study}
    message = ""
    if failed:
        first = ": ".join(next(iter(failed.items())))
        message = f"{len(failed)} of {len(runs)} runs failed, e.g. {first}"
        result |= {"error": message, "exit_code": 1}
    finish(result, as_json, f"{page.markdown(study)}written to {folder}")
    if failed:
        click.echo(f"solrl: {one_line(message)}", err=True)
        sys.exit(1)


def _print_progress(line: str) -> None:
    """Prints a line of progress on standard error.

    Args:
        line: The text. Line feeds in it become spaces.
    """
    click.echo(one_line(line), err=True)
