"""`python -m solrl_jax` is `solrl`."""

from solrl_jax.commands import signals


def main() -> None:
    """`solrl`. Signals wait for the handlers that `cli.main` sets."""
    signals.block()
    from solrl_jax.commands import cli

    try:
        cli.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
