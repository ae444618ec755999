"""`python -m solrl_jax` is `solrl`."""

import signal

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """`solrl`, whose `main` answers signals: they wait for it, because an import that one breaks off shows a stack.

    One that comes when all is done changes nothing: Python takes their handlers away before it ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    from solrl_jax.commands import cli

    try:
        cli.main()
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
