"""`python -m solrl_jax` is `solrl`."""

from solrl_jax.cli import signals


def main() -> None:
    """Runs the command line `solrl` with the arguments of `sys.argv`, see `cli.main.main`.

    Ctrl-C, SIGTERM and SIGHUP are held back while modules are imported, until the handlers of
    `cli.main.main` are set, and are ignored once the command has ended, also by an error.

    Raises:
        SystemExit: If the command did not succeed: with code 2 (bad input), 130 (interrupted) or 1
            (any other failure).
        BaseException: An unforeseen error as it is, if the environment variable SOLRL_TRACEBACK is
            set.
    """
    signals.block()
    from solrl_jax.cli import main

    try:
        main.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
