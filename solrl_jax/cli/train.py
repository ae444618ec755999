"""`solrl train`: trains a preset, or resumes a run."""

import math
import shlex
import shutil
import sys
from typing import Any

import click

from solrl_jax import api
from solrl_jax.cli.options import INTERRUPTED, finish, iterations, json_option, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.parallel import hosts
from solrl_jax.planning.proposals import MESH_AUTO


@click.command("train")
@click.argument("preset")
@overrides_argument
@click.option(
    "--profile", multiple=True, metavar="ITER", callback=iterations,
    help="Write a trace of this iteration for TensorBoard and Perfetto; repeat it, or separate "
    "several with commas.",
)  # fmt: skip
@click.option(
    "--report",
    "html_report",
    is_flag=True,
    help="Keep RUN/report.html up to date (see `solrl report`).",
)
@click.option(
    "--force",
    is_flag=True,
    help="Continue with input files that changed, and with sizes that seem too large for memory.",
)
@click.option(
    "--hosts",
    metavar="N|auto",
    envvar="SOLRL_HOSTS",
    help="Number of processes that train together; auto: read it from SLURM, Open MPI, Kubernetes "
    "or a TPU pod.",
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
    help="With --hosts N: address of process 0.",
)
@json_option
def command(
    preset: str,
    overrides: tuple[str, ...],
    profile: tuple[int, ...],
    html_report: bool,
    force: bool,
    as_json: bool,
    **processes: Any,
) -> None:
    """Train PRESET (see `solrl presets`). The same command resumes.

    \b
    solrl train tiny
    solrl train tiny family=naive_quant train.iterations=20 run.dir=runs/x seed=1
    srun solrl train flux1_sol_rl_pickscore --hosts auto mesh.fsdp=8 run.dir=/shared/run

    \f
    Args:
        preset: The name of a preset.
        overrides: Settings that differ, as `key=value`. "mesh=auto" chooses the mesh, the gradient
            checkpointing and the batch sizes for this machine. "run.dir=PATH" is the run directory,
            by default `runs/PRESET-FAMILY-seedSEED`.
        profile: The numbers of the iterations to trace, from 1 to `train.iterations`; empty: none.
            Traces are written to the folder `profile` in the run directory.
        html_report: Whether `report.html` in the run directory is kept up to date.
        force: Whether to continue with input files that changed, with sizes that seem too large for
            memory, and with a `report.html` that this package did not write, which is then
            replaced.
        as_json: Whether to print the result as one line of JSON in place of text, also if training
            was interrupted. If there are several processes, only the first prints.
        **processes: "hosts" (the number of processes as text, or "auto"; None for a single one),
            "host" (the number of this process, from 0) and "coordinator" (HOST:PORT of the first
            process). The last two must be given if "hosts" is a number, and be None otherwise.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If the run directory, an input file or a value in `processes` cannot be used,
            the directory holds another run (with other settings that the trained parameters depend
            on), or `force` is needed.
        RunError: If processes are missing, or the run fails for another reason.
        SystemExit: With code 130, if training was interrupted.
    """
    # Raises before the other processes are waited for.
    resolve(preset, [override for override in overrides if override != MESH_AUTO])
    hosts.initialize(**processes)
    try:
        summary = api.train(
            preset,
            *overrides,
            profile=profile,
            html_report=html_report,
            force=force,
            progress_bar=True,
        )
    except api.TrainingInterrupted as stop:
        summary = stop.summary
    interrupted = summary["interrupted"]
    if hosts.is_first():
        text = (
            f"interrupted: {summary['run']}" if interrupted else closing_lines(summary, html_report)
        )
        finish(summary, as_json, text)
    if interrupted:
        sys.exit(INTERRUPTED)


def closing_lines(summary: dict[str, Any], html_report: bool) -> str:
    """Returns the lines that `solrl train` prints at its end: the gain, the report, and the
    commands that generate images and export the policy.

    Args:
        summary: The result of `api.train`. The function reads its entries "run" (the directory),
            "before" and "after" (metrics of the evaluations before and after training; if they lack
            a score, the gain is "unknown") and "trained_in_full" (the number of arrays that are
            trained in full; if it is above 0, the policy is exported to a directory and not to a
            LoRA file).
        html_report: Whether the run wrote `report.html`. If not, the command that writes it is
            shown.

    Returns:
        Three lines, joined by line feeds; the last has both commands. They begin with "solrl", or
        with the path of the running program if that is not on PATH.
    """
    run = shlex.quote(summary["run"])
    program = "solrl" if shutil.which("solrl") else sys.argv[0]
    report = f"open {run}/report.html in a browser" if html_report else f"{program} report {run}"
    generate = f"{program} generate {run} --prompts FILE --out images"
    # A LoRA file cannot hold parameters that are trained in full.
    out = "DIRECTORY" if summary["trained_in_full"] else "lora.safetensors"
    export = f"{program} export {run} --out {out}"
    return (
        f"gained: {describe_gain(summary['before'], summary['after'])}\n"
        f"report: {report}\n"
        f"next:   {generate}; {export}"
    )


def describe_gain(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describes by how much training changed the scores of the held-out prompts.

    A change of at most twice its standard error (the root of the sum of the squares of both
    standard errors), or with an unknown one, is marked with "which may be chance".

    Args:
        before: The metrics of the evaluation before training, by name. The mean reward is
            "eval/reward", and each standard error is under the key of its score followed by
            "/standard_error" (None or missing: it is unknown).
        after: The metrics of the last evaluation, by name. Its scores of strict success are those
            under keys that end in "/strict".

    Returns:
        For the mean reward and for each score of strict success, its change and both values with
        standard errors, e.g. "held-out reward +0.120 (0.300 ± 0.010 -> 0.420 ± 0.012), strict
        success +0.100 (...)". Several scores of strict success have this same label. If any of
        these scores is missing or None in `before` or `after`, only a phrase that says that the
        gain is unknown.
    """
    names = ["eval/reward", *(name for name in after if name.endswith("/strict"))]
    if any(row.get(name) is None for name in names for row in (before, after)):
        return "unknown, because nothing was evaluated before and after"
    parts = []
    for name in names:
        recorded = [row.get(f"{name}/standard_error") for row in (before, after)]
        errors = [math.nan if error is None else error for error in recorded]
        change = after[name] - before[name]
        label = "held-out reward" if name == "eval/reward" else "strict success"
        verdict = "" if abs(change) > 2 * math.hypot(*errors) else ", which may be chance"
        values = [
            f"{row[name]:.3f} ± {error:.3f}"
            for row, error in zip((before, after), errors, strict=True)
        ]
        parts.append(f"{label} {change:+.3f} ({' -> '.join(values)}{verdict})")
    return ", ".join(parts)
