"""`solrl plan`: estimates memory and time of training on devices that need not be present."""

from pathlib import Path

import click

from solrl_jax.cli.options import PATH, bar, finish, json_option, overrides_argument
from solrl_jax.planning.preset import plan
from solrl_jax.planning.targets import TARGETS


@click.command("plan")
@click.argument("preset")
@overrides_argument
@click.option(
    "--device",
    default="h200",
    show_default=True,
    type=click.Choice(list(TARGETS)),
    help="The kind of device.",
)
@click.option(
    "--devices", default=1, show_default=True, type=click.IntRange(1, 1024), help="On each host."
)
@click.option("--hosts", default=1, show_default=True, type=click.IntRange(1, 4096))
@click.option("--hlo", type=PATH, help="Directory for the compiled programs as text.")
@click.option("--force", is_flag=True, help="Replace the programs that are at --hlo.")
@json_option
def command(
    preset: str,
    overrides: tuple[str, ...],
    device: str,
    devices: int,
    hosts: int,
    hlo: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Estimate memory and time of training PRESET on devices, which need not be present.

    Compiles the programs for the devices and needs no weights. The compiler of the devices must be
    installed: `pip install 'solrl_jax[plan-cuda]'` or `[plan-tpu]`, in an environment that does not
    train.

    \b
    solrl plan flux1_sol_rl_pickscore --device b200
    solrl plan flux1_sol_rl_pickscore mesh.fsdp=4 --device h200 --devices 8 --hosts 2 --hlo compiled

    \f
    Compiles on all CPU cores. Also imports objectives and rewards from outside the package, and
    reads the prompt sets. Those of the hub are downloaded unless they are in the hub's cache. A
    model is not downloaded: its configuration is read from its directory, the hub's cache or the
    package. Sets environment variables for the rest of the process, so that JAX runs on the CPU
    without a compilation cache and libtpu does not look for a TPU (`planning.topology.prepare`).

    Args:
        preset: The name of a preset.
        overrides: Settings that differ, as `key=value`.
        device: The kind of device, a key of `planning.targets.TARGETS`, e.g. "h200".
        devices: The number of devices on each host. A TPU host has 1, 4 or 8 chips, of one or two
            devices each.
        hosts: The number of hosts that train together, at least 1.
        hlo: A directory for the compiled programs as text, which is created if necessary; None:
            they are not written.
        force: Whether programs that are at `hlo` are replaced.
        as_json: Whether to print the result of `planning.preset.plan` as one line of JSON in place
            of text.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If the compiler is not installed, there are no such devices, the configuration
            cannot be run on so many, or `hlo` cannot be written or has programs without `force`.
        RunError: If a compiled program cannot be written to the disk.
    """
    with bar(None, "plan", "program") as progress:

        def show(program: str) -> None:
            progress.set_postfix_str(program)
            progress.update()

        summary = plan(
            preset,
            *overrides,
            device=device,
            devices=devices,
            hosts=hosts,
            hlo=hlo,
            force=force,
            progress=show,
        )
    from solrl_jax.planning.plan import table  # after JAX was set up for the devices

    finish(summary, as_json, table(summary))
