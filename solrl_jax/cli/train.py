"""`solrl train`."""

import math
import shutil
import sys
from typing import Any

import click

from solrl_jax.cli.options import INTERRUPTED, finish, iterations, json_option, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.parallel.hosts import initialise
from solrl_jax.runs import trainer
from solrl_jax.runs.progress import TerminalProgress


@click.command("train")
@click.argument("preset")
@overrides_argument
@click.option(
    "--profile", multiple=True, metavar="ITER", callback=iterations,
    help="Write a trace of this iteration for TensorBoard and Perfetto; repeat it, or separate several with commas.",
)  # fmt: skip
@click.option(
    "--report", "page", is_flag=True, help="Keep RUN/report.html up to date (see `solrl report`)."
)
@click.option(
    "--force",
    is_flag=True,
    help="Go on with texts that changed, and with sizes that seem too large for memory.",
)
@click.option(
    "--hosts",
    metavar="N|auto",
    envvar="SOLRL_HOSTS",
    help="Number of processes that train together; auto: read it from SLURM, Open MPI, Kubernetes or a TPU pod.",
)
@click.option(
    "--host",
    type=int,
    envvar="SOLRL_HOST",
    help="With --hosts N: the number of this process, from 0.",
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="SOLRL_COORDINATOR",
    help="With --hosts N: where the first is.",
)
@json_option
def command(
    preset: str,
    overrides: tuple[str, ...],
    profile: tuple[int, ...],
    page: bool,
    force: bool,
    as_json: bool,
    **hosts: Any,
) -> None:
    """Train PRESET (see `solrl presets`). The same command resumes.

    \b
    solrl train tiny
    solrl train tiny family=naive_quant train.iterations=20 run.dir=runs/x seed=1
    srun solrl train flux1_sol_rl_hpsv2 --hosts auto mesh.fsdp=8 run.dir=/shared/run
    """
    config = resolve(preset, overrides)
    initialise(**hosts)
    with TerminalProgress() as progress:
        summary = trainer.run(config, progress, profile, page, force=force)
    if progress.speaks:
        finish(
            summary,
            as_json,
            f"interrupted: {summary['run']}" if summary["interrupted"] else closing(summary, page),
        )
    if summary["interrupted"]:
        sys.exit(INTERRUPTED)


def closing(summary: dict[str, Any], page: bool) -> str:
    """The last lines of a run: what was gained, where its report is, what to try next. page: whether the report was made."""
    run = summary["run"]
    program = "solrl" if shutil.which("solrl") else sys.argv[0]
    report = f"open {run}/report.html in a browser" if page else f"{program} report {run}"
    following = f"{program} generate {run} --prompts FILE --out images; {program} export {run} --out lora.safetensors"
    return f"gained: {gained(summary['before'], summary['after'])}\nreport: {report}\nnext:   {following}"


def gained(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The held-out scores before and after in words, with standard errors. A gain below two of them is called none."""
    names = ["eval/reward", *(name for name in after if name.endswith("/strict"))]
    if any(row.get(name) is None for name in names for row in (before, after)):
        return "unknown, for nothing was evaluated before and after"
    parts = []
    for name in names:
        errors = [row.get(f"{name}/standard_error") or 0.0 for row in (before, after)]
        change = after[name] - before[name]
        told = "held-out reward" if name == "eval/reward" else "strict success"
        verdict = "" if abs(change) > 2 * math.hypot(*errors) else ", which may be chance"
        values = [
            f"{row[name]:.3f} ± {error:.3f}"
            for row, error in zip((before, after), errors, strict=True)
        ]
        parts.append(f"{told} {change:+.3f} ({' -> '.join(values)}{verdict})")
    return ", ".join(parts)
