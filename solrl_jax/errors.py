"""The two errors that a command reports in one line, and helpers that turn other errors into
them."""

import contextlib
from collections.abc import Callable, Iterator


class RunError(Exception):
    """The run failed for a reason outside of its input, such as a full disk.

    The message is one line. A command that raises it prints the message and exits with code 1. It
    is no subclass of InputError or ValueError.
    """


class InputError(ValueError):
    """The user's input cannot be used. A subclass of ValueError.

    The message is one line that says what to change. A command that raises it prints the message
    and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is
    empty.

    A message that begins with a line break has an empty first line, which is returned as "".

    Args:
        error: The error. A `__str__` that fails counts as an empty message.
    """
    return next(iter(text(error).splitlines()), type(error).__name__)


def text(error: BaseException) -> str:
    """Returns an error's message, `str(error)`, with all its lines.

    Args:
        error: The error. If its `__str__` raises an Exception, the result is "".
    """
    try:
        return str(error)
    except Exception:
        return ""


def in_words(error: BaseException) -> str:
    """Returns an error's type and message in one line, e.g. "ValueError: bad shape".

    Args:
        error: The error. Each run of white space in its message, line breaks included, becomes one
            space. For an empty message, or a `__str__` that fails, the result is the name of the
            type alone.
    """
    return f"{type(error).__name__}: {' '.join(text(error).split())}".removesuffix(": ")


def one_line(text: str) -> str:
    r"""Makes a text safe to print as one line in a terminal.

    A line feed becomes a space. Every other character that is not printable (`str.isprintable`),
    such as a carriage return, a control character, a line separator or a lone surrogate, is escaped
    as in a Python literal, e.g. `\r` or `\x1b`. Backslashes in the text stay as they are, so the
    text cannot be recovered from the result.

    Args:
        text: Any text. "" gives "".

    Returns:
        The text without line breaks and control characters.
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
    RecursionError, with their subclasses. An InputError is a ValueError, so it is replaced by an
    InputError whose message went through `make_message`. All other errors, such as RunError, pass
    unchanged. Also works as a decorator.

    Args:
        make_message: Returns the message for the user, given the error's own message, in which each
            run of white space is one space. The name of the error's type and ": " stand before it
            unless the error is an OSError or a ValueError. By default that text itself.

    Raises:
        InputError: If the body raises one of these errors, which becomes the `__cause__`.
    """
    try:
        yield
    except _CONTENT_ERRORS as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(make_message(kind + " ".join(str(error).split()))) from error
