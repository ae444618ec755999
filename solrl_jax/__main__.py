"""`python -m solrl_jax` is `solrl`."""

from solrl_jax.cli import signals


def main() -> None:
    """`solrl`. Signals wait for the handlers that `main.main` sets."""
    signals.block()
    from solrl_jax.cli import main

    try:
        main.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    main()
