"""Holds back the signals that stop a command, e.g. while modules are imported.

A signal would interrupt an import with a traceback.
"""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Holds back the signals in `STOPPING` (Ctrl-C, SIGTERM, SIGHUP) for this thread, until
    `unblock`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Lets the signals in `STOPPING` reach this thread again. Those that were held back arrive at
    once.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Holds back the signals in `STOPPING` (Ctrl-C, SIGTERM, SIGHUP) for this thread while the body
    of a `with` statement runs.

    They arrive afterwards, also if they were held back before.
    """
    block()
    try:
        yield
    finally:
        unblock()


def ignore() -> None:
    """Ignores the signals in `STOPPING` from now on, when nothing is left to stop.

    Python removes handlers before it ends, and a signal would change the exit code then. It must be
    called in the main thread.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
