"""Holds back the signals that stop a command, e.g. while modules are imported.

A signal would interrupt an import with a traceback.
"""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Holds back Ctrl-C, SIGTERM and SIGHUP in this thread, until `unblock` is called once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Ends `block`. Signals that were held back arrive at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Holds back Ctrl-C, SIGTERM and SIGHUP in this thread during a `with` statement.

    Signals that were held back arrive at its end. Of two nested statements, the end of the inner
    one already lets them arrive.
    """
    block()
    try:
        yield
    finally:
        unblock()


def ignore() -> None:
    """Ignores Ctrl-C, SIGTERM and SIGHUP from now on. Call it in the main thread, when a command is
    done.

    Otherwise a signal that arrives while Python shuts down would change the exit code.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
