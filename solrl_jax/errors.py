"""The two errors that a command reports in one line, and helpers that turn other errors into
them."""

import contextlib
from collections.abc import Callable, Iterator


class RunError(Exception):
    """The run failed for a reason outside of its input, such as a full disk.

    The message is one line. A command that raises it exits with code 1.
    """


class InputError(ValueError):
    """The user's input cannot be used.

    The message is one line that says what to change. A command that raises it exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has none."""
    return next(iter(text(error).splitlines()), type(error).__name__)


def text(error: BaseException) -> str:
    """Returns an error's message.

    It is empty for a foreign exception whose `__str__` fails.
    """
    try:
        return str(error)
    except Exception:
        return ""


def in_words(error: BaseException) -> str:
    """Returns an error's type and message in one line, e.g. "ValueError: bad shape"."""
    return f"{type(error).__name__}: {' '.join(text(error).split())}".removesuffix(": ")


def one_line(text: str) -> str:
    """Makes a text safe to print as one line in a terminal.

    A line feed becomes a space. All other characters that are not printable, such as control
    characters and line separators, are escaped as in a Python literal.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text.replace("\n", " ")
    )


# The exceptions that code raises when a file has other content than it expects.
_CONTENT_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@contextlib.contextmanager
def in_one_line(make_message: Callable[[str], str] = str) -> Iterator[None]:
    """Turns errors about the content of files in the body into InputError with a message of one
    line.

    These are OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError and
    RecursionError, with their subclasses. The name of the type is part of the message unless it is
    an OSError or a ValueError.

    Args:
        make_message: Returns the message for the user, given the error's own message in one line.
            By default that message itself.
    """
    try:
        yield
    except _CONTENT_ERRORS as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(make_message(kind + " ".join(str(error).split()))) from error
