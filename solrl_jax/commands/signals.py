"""The signals that stop a command, kept waiting while an import that one would break off runs: it would show a stack."""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Keeps signals waiting until `unblock`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Lets those that wait arrive."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    block()
    try:
        yield
    finally:
        unblock()


def ignore() -> None:
    """For when all is done: Python takes handlers away before it ends."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
