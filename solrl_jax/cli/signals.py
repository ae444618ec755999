"""Holds back the signals that stop a command, e.g. while modules are imported.

A signal would interrupt an import with a traceback.
"""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Holds back Ctrl-C, SIGTERM and SIGHUP in this thread until the next call of `unblock`. Calls
    are not counted: a single `unblock` ends several of them. Other threads that run already still
    receive these signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Ends `block` in this thread. Signals that were held back arrive at once. Without `block`, the
    call has no effect.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Holds back Ctrl-C, SIGTERM and SIGHUP in this thread during a `with` statement.

    Signals that were held back arrive at its end. If two such statements are nested, signals arrive
    at the end of the inner one, and the rest of the outer one holds back nothing. Other threads
    that run already still receive these signals.
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
