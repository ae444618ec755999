"""`python -m solrl_jax` is `solrl`."""

from solrl_jax.commands.cli import main

if __name__ == "__main__":
    main()
