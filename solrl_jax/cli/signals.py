"""The signals that stop a command. They wait while modules are imported: a signal would break that off with a stack."""

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """From here on, signals wait for `unblock`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def unblock() -> None:
    """Signals that wait arrive now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """A context in which signals wait."""
    block()
    try:
        yield
    finally:
        unblock()


def ignore() -> None:
    """Nothing is left to stop. Python removes handlers before it ends, and a signal would change the exit code then."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
