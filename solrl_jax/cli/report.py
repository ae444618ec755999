"""`solrl report`: shows runs as one HTML page."""

from pathlib import Path

import click

from solrl_jax.cli.options import PATH, RUN_PATH, finish, force_option, json_option
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.runs import report
from solrl_jax.storage.files import refuse_existing, writable_directory
from solrl_jax.storage.stores import RunPath


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RUN_PATH)
@click.option(
    "--out",
    type=PATH,
    help="Output file.  [default: RUN/report.html, or ./report.html for several runs]",
)
@click.option("--plan", type=PATH, help="The JSON of `solrl plan PRESET --json`, to be shown too.")
@force_option
@json_option
def command(
    runs: tuple[RunPath, ...], out: Path | None, plan: Path | None, force: bool, as_json: bool
) -> None:
    """Show what runs did as one HTML page, which needs no network.

    \f
    Args:
        runs: The run directories, at least one. They may be in an object store (gs:// or s3://).
        out: The file to write; None: `report.html` in the run (also if it is in a store), or in the
            working directory for several runs.
        plan: A file with the JSON of `solrl plan PRESET --json`, which is shown too; None: no plan.
        force: Whether an existing file is replaced. Without `out`, a report of an earlier call is
            replaced in any case.
        as_json: Whether to print one line of JSON in place of text: "out" (the page) and "runs"
            (the list of run directories).

    Raises:
        InputError: If a run is damaged, invalid or without metrics, `plan` cannot be read or is no
            plan, `out` is a directory or cannot be written, or the file exists without `force`.
        RunError: If the page cannot be written to the disk.
    """
    page: RunPath = out or (runs[0] / report.NAME if len(runs) == 1 else Path(report.NAME))
    if page.is_dir():
        raise InputError(f"--out {page}: is a directory; name a file")
    if out is not None or not report.is_page(page):
        refuse_existing("out", [page], force)
    if out is not None:
        writable_directory(page.absolute().parent, "--out")
    with as_input_error():
        report.write(runs, page, plan=plan)
    finish(
        {"out": str(page), "runs": [str(run) for run in runs]},
        as_json,
        f"open in a browser: {page}",
    )
