"""`solrl report`."""

from pathlib import Path

import click

from solrl_jax.commands.options import finish, json_option
from solrl_jax.run import report
from solrl_jax.storage.errors import InputError


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Output file.  [default: RUN/report.html; of several report.html]")
@json_option
def command(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Show what runs did as one HTML page, which needs no network."""
    out = out or (runs[0] / report.NAME if len(runs) == 1 else Path(report.NAME))
    if out.is_dir():
        raise InputError(f"--out {out}: is a directory; name a file")
    report.write(runs, out)
    finish({"out": str(out), "runs": [str(run) for run in runs]}, as_json, f"open in a browser: {out}")
