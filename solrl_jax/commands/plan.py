"""`solrl plan`."""

from typing import Any

import click

from solrl_jax.commands.options import bar, finish, json_option, machine_options, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.planning import plan
from solrl_jax.planning.devices import machine, pretend


@click.command("plan")
@click.argument("preset")
@overrides_argument
@machine_options
@json_option
def command(preset: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """What training PRESET would need: memory, operations, messages, time; from shapes, on no device. Needs no weights.

    \b
    solrl plan flux1_sol_rl_hpsv2 --devices 8 --memory 80GB
    solrl plan flux1_sol_rl_hpsv2 mesh.fsdp=4 --device tpu-v6e --hosts 32
    """
    config, described = resolve(preset, overrides), machine(**options)
    pretend(described.count)
    with bar(None, "plan", "step") as shown:

        def show(doing: str) -> None:
            shown.set_postfix_str(doing)
            shown.update()

        summary = plan.plan(config, described, show)
    finish(summary, as_json, plan.table(summary))
