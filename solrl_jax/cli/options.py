"""Options that several commands share, progress bars, and printing of results."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from solrl_jax.config.values import MAX_NUMBER, expand_home
from solrl_jax.storage.readers import is_number, strict

INTERRUPTED = 130  # the exit code of a command that Ctrl-C, SIGTERM or SIGHUP ended

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


class _Path(click.Path):
    """The type of an option that is a path. `~` is expanded, and an empty path is refused.

    The value is a `pathlib.Path` if the type is made with `path_type=Path`, as `PATH` is; otherwise
    text, as of `click.Path`.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts the text of an option to a path.

        Args:
            value: The text, or a path, which stays.
            param: The option, for messages.
            ctx: The context of click, for messages.

        Returns:
            The path, of the type `path_type`; text if that is None.

        Raises:
            click.BadParameter: If the text is empty, has a null character, or begins with the
                `~USER` of a user that does not exist; or for what `click.Path` refuses, e.g. a
                missing file if the type is made with `exists=True`.
        """
        if value == "":
            self.fail("expected a path; an empty one would be the working directory", param, ctx)
        return super().convert(TARGET.convert(value, param, ctx), param, ctx)


class _Target(click.ParamType):
    """The type of an argument that is a path or another name of what a command reads, as text. `~`
    is expanded.
    """

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Expands `~` at the beginning of the text of an argument.

        Args:
            value: The text. A value of another type is returned as it is.
            param: The argument, for messages.
            ctx: The context of click, for messages.

        Returns:
            The text, with `~` or `~USER` at its beginning replaced by the home directory.

        Raises:
            click.BadParameter: If the text has a null character, or begins with the `~USER` of a
                user that does not exist.
        """
        if isinstance(value, str) and "\0" in value:
            self.fail(f"{value!r}: no name can hold a null character", param, ctx)
        try:
            return expand_home(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value}: {error}", param, ctx)


PATH = _Path(path_type=Path)
TARGET = _Target()


def finite(
    _context: click.Context, _parameter: click.Parameter, value: float | None
) -> float | None:
    """A click callback that checks a number. click's ranges accept NaN and infinities.

    Args:
        _context: Not read.
        _parameter: Not read.
        value: The number, or None.

    Returns:
        `value` unchanged.

    Raises:
        click.BadParameter: If the number is NaN or not finite in float32.
    """
    if value is not None and not abs(value) <= MAX_NUMBER:
        raise click.BadParameter(f"{value} is not finite in float32")
    return value


def iterations(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """A click callback that parses iteration numbers, repeated or separated by commas.

    Args:
        _context: Not read.
        _parameter: Not read.
        values: The text of each use of the option, e.g. ("3", "10,20").

    Returns:
        The numbers in the given order, repetitions included; an empty tuple if the option was not
        used. 0 is not refused here.

    Raises:
        click.BadParameter: If a part is not a whole number of one to nine digits.
    """
    parts = [part for value in values for part in value.split(",")]
    wrong = [part for part in parts if not is_number(part)]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no iteration; expected e.g. 3 or 3,10")
    return tuple(map(int, parts))


checkpoint_option = click.option(
    "--checkpoint", default="latest", show_default=True, metavar="best|latest|ITERATION",
    help="Checkpoint of a run; best: the one with the highest eval/reward.",
)  # fmt: skip
force_option = click.option("--force", is_flag=True, help="Replace what is at --out.")
trust_option = click.option(
    "--trust-run",
    "trust",
    is_flag=True,
    help="Use the rewards and objectives outside the package that the run names.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one line of JSON."
)


def bar(total: int | None, name: str, unit: str = "img"):
    """Creates a tqdm progress bar on standard error, shown only if that is a terminal.

    Args:
        total: The number of units. None: unknown.
        name: The text before the bar.
        unit: The name of a unit, by default an image.

    Returns:
        The bar, a context manager. `update(n)` advances it by n units.
    """
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


def finish(summary: dict[str, Any], as_json: bool, text: str) -> None:
    """Prints the result of a command on standard output.

    Args:
        summary: The result, as values of JSON by name.
        as_json: Whether to print `summary` as one line of JSON. Otherwise `text` is printed.
        text: The result for a reader.
    """
    if as_json:
        print_json(summary)
    else:
        click.echo(text)


def print_json(value: Any) -> None:
    """Prints a value as one line of strict JSON on standard output.

    Args:
        value: Nested dicts, lists, tuples and plain values. Numbers that are not finite become
            null.

    Raises:
        TypeError: If JSON has no such value.
    """
    click.echo(json.dumps(strict(value), allow_nan=False))
