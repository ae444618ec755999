"""`solrl study`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from solrl_jax.cli.options import PATH, finish, json_option
from solrl_jax.errors import InputError, one_line
from solrl_jax.storage.files import only_user, writable_directory
from solrl_jax.study import page, summary
from solrl_jax.study.cost import find_prices
from solrl_jax.study.plan import read_plan, runs_of
from solrl_jax.study.runs import log_of, train


@click.command("study")
@click.argument("plan", metavar="PLAN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--quick", is_flag=True, help="The plan's small size.")
@click.option("--out", type=PATH, help="Output folder.  [default: runs/study-PLAN]")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Runs at once.  [default: one a core; on a GPU or TPU say 1]",
)
@click.option(
    "--prices",
    default="flux1-b200",
    show_default=True,
    metavar="MODEL-DEVICE|FILE",
    help="What counted work costs.",
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
    compare_only: bool,
    as_json: bool,
    **others: Any,
) -> None:
    """Train what PLAN lists, with several seeds, and compare. The same command resumes.

    PLAN is paper, objectives, exploration, or a YAML file like theirs (configs/study/). Cost is counted work at the prices of
    a released model on a device (`solrl plan`), never the time that this machine took.

    \b
    solrl study objectives --quick
    solrl study paper --prices sana-b200 --compare-only
    """
    if compare_only and others["processes"] is not None:
        raise InputError(
            f"--processes {others['processes']}: --compare-only starts none; leave it out"
        )
    opened = read_plan(plan)
    prices = find_prices(others["prices"])
    name = Path(plan).stem + ("-quick" if quick else "")
    folder = out or Path("runs") / f"study-{name}"
    runs = runs_of(opened, folder, quick, overrides)
    failed: Mapping[str, str] = {}
    writable_directory(folder, "--out")
    page.refuse_foreign(folder, () if compare_only else map(log_of, runs))
    if not compare_only:  # which may be done while a study trains
        with only_user(folder):

            def say(line):
                return click.echo(one_line(line), err=True)

            failed = train(runs, folder, others["processes"] or os.cpu_count() or 1, say)
    study, courses = summary.summarise(name, opened, runs, prices, failed)
    page.write(folder, study, courses, summary.sweeps(opened, runs))
    why = (
        f"{len(failed)} of {len(runs)} runs failed, e.g. {': '.join(next(iter(failed.items())))}"
        if failed
        else None
    )
    told = {"error": why, "exit_code": 1} if failed else {}
    finish(
        {"out": str(folder), **study, **told}, as_json, f"{page.markdown(study)}written to {folder}"
    )
    if failed:
        click.echo(f"solrl: {one_line(str(why))}", err=True)
        sys.exit(1)
