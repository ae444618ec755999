"""The two errors that a command reports in one line: what the user gave cannot work, or the run failed."""

import contextlib
from collections.abc import Callable, Iterator


class RunError(Exception):
    """The run failed for a reason outside of its input; the message is one line (exit code 1)."""


class InputError(ValueError):
    """What the user gave cannot work; the message is one line that says what to change (exit code 2)."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type when it has none."""
    return next(iter(text(error).splitlines()), type(error).__name__)


def text(error: BaseException) -> str:
    """An error's message; "" for an exception of somebody else's that cannot make one."""
    try:
        return str(error)
    except Exception:
        return ""


def in_words(error: BaseException) -> str:
    """An error's type and message, in one line."""
    return f"{type(error).__name__}: {' '.join(text(error).split())}".removesuffix(": ")


def one_line(text: str) -> str:
    """The text without what a terminal obeys: an end of line becomes a space, other controls and separators are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text.replace("\n", " ")
    )


# what reading raises for content of another form than it expects
_OF_CONTENT = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@contextlib.contextmanager
def in_one_line(shown: Callable[[str], str] = str) -> Iterator[None]:
    """Raises as InputError, in one line, whatever the body raises while it reads a model's files.

    shown: makes the message for the user from that line.
    """
    try:
        yield
    except _OF_CONTENT as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(shown(kind + " ".join(str(error).split()))) from error
