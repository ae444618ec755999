"""Holds back the signals that stop a command, e.g. while modules are imported.

A signal would interrupt an import with a traceback.
"""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Holds signals back until `unblock`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Delivers the signals that were held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Holds signals back while the body runs."""
    block()
    try:
        yield
    finally:
        unblock()


def ignore() -> None:
    """Ignores signals from now on, when nothing is left to stop.

    Python removes handlers before it ends, and a signal would change the exit code then.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
