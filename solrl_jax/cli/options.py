"""Options that several commands share, progress bars, and printing of results."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from solrl_jax.config.values import MAX_NUMBER
from solrl_jax.storage.readers import is_short_digits, to_strict_json
from solrl_jax.storage.stores import expand_home, is_url, run_path

INTERRUPTED = 130  # the exit code of a command that Ctrl-C, SIGTERM or SIGHUP ended

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


class _Path(click.Path):
    """The click type of an option that is a path. A leading `~` is expanded.

    The value is a `pathlib.Path`, which need not exist. Unlike `click.Path`, this type also refuses
    an empty path. The URL of a directory in an object store becomes a `StorePath` if the type was
    created with `is_run=True` (`RUN_PATH`), and is refused otherwise.
    """

    def __init__(self, *, is_run: bool = False) -> None:
        """Creates the click type of an option that is a path.

        Args:
            is_run: Whether the option is for a run directory, which may be in an object store. If
                not, URLs of object stores are refused.
        """
        super().__init__(path_type=Path)
        self._is_run = is_run

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts the text of an option to a path. A leading `~` or `~USER` is expanded.

        Args:
            value: The text that the user gave.
            param: The option, which error messages name.
            ctx: The context of click, for error messages.

        Returns:
            A `StorePath` if the text begins with gs:// or s3://, otherwise a `pathlib.Path`, which
            need not exist.

        Raises:
            click.BadParameter: If the text is empty, contains a null character, begins with the
                `~USER` of a user that does not exist, or names a file or directory that may not be
                read; or if it is the URL of an object store, and this type was created without
                `is_run=True`.
            InputError: If this type was created with `is_run=True`, and the text is the URL of an
                object store without a bucket.
        """
        if value == "":
            self.fail("expected a path; an empty one would be the working directory", param, ctx)
        if isinstance(value, str) and is_url(value):
            if self._is_run:
                return run_path(value)
            self.fail(f"{value}: must be on this machine; only a run may be in a store", param, ctx)
        return super().convert(TARGET.convert(value, param, ctx), param, ctx)


class _Target(click.ParamType):
    """The click type of an argument that is a path or a name, e.g. of a preset. The value is text.

    A leading `~` is expanded.
    """

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Expands a leading `~` in the text of an argument.

        Args:
            value: The text that the user gave.
            param: The argument, which error messages name.
            ctx: The context of click, for error messages.

        Returns:
            The text, in which the home directory takes the place of `~` or `~USER`.

        Raises:
            click.BadParameter: If there is no such user or no home directory, or the text contains
                a null character.
        """
        if isinstance(value, str) and "\0" in value:
            self.fail(f"{value!r}: no name can hold a null character", param, ctx)
        try:
            return expand_home(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value}: {error}", param, ctx)


PATH = _Path()
RUN_PATH = _Path(is_run=True)
TARGET = _Target()


def finite(
    _context: click.Context, _parameter: click.Parameter, value: float | None
) -> float | None:
    """Refuses NaN and infinite values of an option, as a callback of click.

    Args:
        _context: The context of click. Not read.
        _parameter: The option. Not read.
        value: The number; None if the option was not given.

    Returns:
        `value`, unchanged.

    Raises:
        click.BadParameter: If the number is NaN, infinite, or too large for float32.
    """
    if value is not None and not abs(value) <= MAX_NUMBER:
        raise click.BadParameter(f"{value} is not finite in float32")
    return value


def iterations(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """Parses an option with numbers of iterations, as a callback of click.

    Args:
        _context: The context of click. Not read.
        _parameter: The option. Not read.
        values: The text of each use of the option, e.g. ("3", "10,20"), without spaces. () if the
            option was not given.

    Returns:
        All numbers in their order, with repetitions, e.g. (3, 10, 20). Whether there are such
        iterations is not checked.

    Raises:
        click.BadParameter: If a part is not a whole number of one to nine digits.
    """
    parts = [part for value in values for part in value.split(",")]
    wrong = [part for part in parts if not is_short_digits(part)]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no iteration; expected e.g. 3 or 3,10")
    return tuple(map(int, parts))


checkpoint_option = click.option(
    "--checkpoint", default="latest", show_default=True, metavar="best|latest|ITERATION",
    help="Checkpoint of a run; best: the one with the highest eval/reward.",
)  # fmt: skip
force_option = click.option("--force", is_flag=True, help="Overwrite existing output files.")
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
    """Creates a progress bar (tqdm) on standard error. It is shown only on a terminal.

    Args:
        total: The number of units that make the bar full; None if it is unknown.
        name: The text before the bar.
        unit: The name of one unit, e.g. "img" for images.

    Returns:
        The bar, to be used in a `with` statement. Its method `update(n)` advances it by n units.
    """
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


def finish(summary: dict[str, Any], as_json: bool, text: str) -> None:
    """Prints the result of a command on standard output.

    Args:
        summary: The result as a dict of JSON values. Floats that are not finite become null.
        as_json: True: `summary` is printed, as one line of JSON. False: `text` is printed.
        text: The result as text for people.
    """
    if as_json:
        print_json(summary)
    else:
        click.echo(text)


def print_json(value: Any) -> None:
    """Prints a value as one line of strict JSON on standard output.

    Args:
        value: Nested dicts, lists, tuples and plain values. Floats that are not finite become null.

    Raises:
        TypeError: If JSON has no such value.
    """
    click.echo(json.dumps(to_strict_json(value), allow_nan=False))
