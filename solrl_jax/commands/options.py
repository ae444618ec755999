"""Options that several commands take, and those that belong together; how commands show progress and results."""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import click

from solrl_jax.planning.devices import DEVICES
from solrl_jax.storage.errors import InputError

Command = Callable[..., Any]

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


def finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    """A click callback: ranges let infinity and NaN pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not finite")
    return value


def iterations(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """A click callback: numbers of iterations, given one by one or with commas."""
    parts = [part for value in values for part in value.split(",")]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise click.BadParameter(f"{wrong[0]!r} is no iteration; expected e.g. 3 or 3,10")
    return tuple(map(int, parts))


checkpoint_option = click.option(
    "--checkpoint", default="latest", show_default=True, metavar="best|latest|ITERATION",
    help="Which of a run's; best: with the highest eval/reward.",
)  # fmt: skip
positive = click.FloatRange(0.0, min_open=True)
json_option = click.option("--json", "as_json", is_flag=True, help="End with one line of JSON on standard output.")


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator of several options, which the help lists in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# of a command that several hosts run together; each may come from the environment
hosts_options = together(
    click.option(
        "--hosts", metavar="N|auto", envvar="SOLRL_HOSTS",
        help="Processes that run this command together; auto: as SLURM, Open MPI, Kubernetes or a TPU pod says.",
    ),
    click.option("--host", type=int, envvar="SOLRL_HOST", help="With --hosts N: which of them this is, from 0."),
    click.option("--coordinator", metavar="HOST:PORT", envvar="SOLRL_COORDINATOR", help="With --hosts N: the first's."),
)  # fmt: skip

# what `planning.devices.machine` takes
machine_options = together(
    click.option("--devices", default=8, show_default=True, type=click.IntRange(1), help="On each host."),
    click.option("--hosts", default=1, show_default=True, type=click.IntRange(1)),
    click.option("--device", default="h100", show_default=True, type=click.Choice(sorted(DEVICES)), help="Whose figures."),
    click.option("--memory", metavar="SIZE", help="Of a device, e.g. 80GB, in place of the public figure; so are the others."),
    click.option("--peak-tflops", metavar="N", type=positive, callback=finite, help="Of products in BF16."),
    click.option("--memory-bandwidth", metavar="GB/S", type=positive, callback=finite),
    click.option("--link-bandwidth", metavar="GB/S", type=positive, callback=finite, help="Within a host, one way."),
    click.option("--network-bandwidth", metavar="GB/S", type=positive, callback=finite, help="Between hosts, per device."),
)  # fmt: skip


def join_hosts(hosts: str | None, host: int | None, coordinator: str | None) -> None:
    """What `hosts_options` ask for. Raises InputError."""
    if hosts is None:
        if host is not None or coordinator is not None:
            raise InputError("--host and --coordinator: only with --hosts N")
        return
    from solrl_jax.parallel.hosts import initialise

    initialise(hosts, host, coordinator)


def bar(total: int | None, name: str, unit: str = "img"):
    """A progress bar on standard error, silent where that is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


def finish(summary: dict[str, Any], as_json: bool, text: str) -> None:
    click.echo(json.dumps(summary) if as_json else text)
