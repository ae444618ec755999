"""`solrl plan`."""

from pathlib import Path

import click

from solrl_jax.cli.options import PATH, bar, finish, json_option, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.planning import topology
from solrl_jax.planning.targets import TARGETS
from solrl_jax.storage.files import refuse_existing


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
@click.option("--hlo", type=PATH, help="A folder for the compiled texts.")
@click.option("--force", is_flag=True, help="Replace texts that are at --hlo.")
@json_option
def command(
    preset: str,
    overrides: tuple[str, ...],
    device: str,
    hlo: Path | None,
    force: bool,
    as_json: bool,
    **on: int,
) -> None:
    """What training PRESET takes on devices that need not be here: memory, kernels, messages, least time. Needs no weights.

    The compiler of the devices must be installed: `pip install 'solrl_jax[plan-cuda]'` or `[plan-tpu]`, in an environment
    that does not train.

    \b
    solrl plan flux1_sol_rl_hpsv2 --device b200
    solrl plan flux1_sol_rl_hpsv2 mesh.fsdp=4 --device h200 --devices 8 --hosts 2 --hlo compiled
    """
    config = resolve(preset, overrides)
    target = TARGETS[device]
    refuse_existing("--hlo", hlo.glob("*.hlo") if hlo else (), force)
    topology.prepare(target)  # before JAX is imported
    from solrl_jax.planning import plan

    with bar(None, "plan", "program") as shown:

        def show(doing: str) -> None:
            shown.set_postfix_str(doing)
            shown.update()

        summary = plan.plan(config, plan.Devices(target, on["devices"], on["hosts"]), hlo, show)
    finish(summary, as_json, plan.table(summary))
