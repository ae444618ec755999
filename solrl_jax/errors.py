"""The two errors that a command reports in one line, and helpers that turn other errors into
them."""

import contextlib
from collections.abc import Callable, Iterator


class RunError(Exception):
    """The run failed for a reason other than its input, such as a full disk.

    The message is one line. When it reaches a command, the command prints the message and exits
    with code 1. It is not a ValueError.
    """


class InputError(ValueError):
    """The user's input cannot be used.

    The message is one line that says what to change. When it reaches a command, the command prints
    the message and exits with code 2. It is a ValueError.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message that is not blank, without stripping it, or the
    name of its type if there is none.

    Args:
        error: The error.
    """
    lines = (line for line in text(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)


def text(error: BaseException) -> str:
    """Returns an error's whole message, `str(error)`.

    Args:
        error: The error. If its `__str__` fails, the result is "".
    """
    try:
        return str(error)
    except Exception:
        return ""


def type_and_message(error: BaseException) -> str:
    """Returns an error's type and message in one line, e.g. "ValueError: bad shape".

    Args:
        error: The error. White space in its message becomes single spaces. If the message is empty,
            the result is the type alone.
    """
    return f"{type(error).__name__}: {' '.join(text(error).split())}".removesuffix(": ")


def one_line(text: str) -> str:
    r"""Makes a text safe to print as one line in a terminal.

    Line feeds become spaces. Other characters that are not printable are escaped as in a Python
    literal, e.g. `\r` or `\x1b`.

    Args:
        text: Any text.

    Returns:
        The text without line breaks and control characters. The original cannot be recovered from
        it.
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
def as_input_error(make_message: Callable[[str], str] = str) -> Iterator[None]:
    """Turns errors that the body raises about the content of files into an InputError of one line.
    A context manager and decorator.

    It converts OSError (thus also `storage.stores.StoreError`, which is a RunError), ValueError
    (thus also InputError and ConfigError), LookupError, TypeError, AttributeError, ArithmeticError
    and RecursionError. Other errors, such as any other RunError, pass unchanged.

    Args:
        make_message: A function that turns the error's message into the message for the user. Its
            argument is one line, which begins with the error's type unless the error is an OSError
            or a ValueError. Its result must be one line, which is not checked. The default returns
            the argument.

    Raises:
        InputError: If the body raises one of these errors.
    """
    try:
        yield
    except _CONTENT_ERRORS as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InputError(make_message(kind + " ".join(str(error).split()))) from error
