"""`solrl train`."""

import sys
from typing import Any

import click

from solrl_jax.commands.options import (
    INTERRUPTED,
    finish,
    hosts_options,
    iterations,
    join_hosts,
    json_option,
    overrides_argument,
)
from solrl_jax.config.presets import resolve
from solrl_jax.run import loop
from solrl_jax.run.progress import Reporter


@click.command("train")
@click.argument("preset")
@overrides_argument
@click.option(
    "--profile",
    multiple=True,
    metavar="ITER",
    callback=iterations,
    help="Write a trace of this iteration for TensorBoard and Perfetto; repeat it, or separate several with commas.",
)
@click.option("--report", "page", is_flag=True, help="Keep RUN/report.html up to date (see `solrl report`).")
@click.option("--force", is_flag=True, help="Go on with prompts that changed, and with sizes that seem too large for memory.")
@hosts_options
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
    join_hosts(**hosts)
    with Reporter() as report:
        summary = loop.run(config, report, profile, page, force=force)
    if report.speaks:
        finish(summary, as_json, f"{'interrupted' if summary['interrupted'] else 'done'}: {summary['run']}")
    if summary["interrupted"]:
        sys.exit(INTERRUPTED)
