"""Functions of users that a configuration names as `module:function`."""

import contextlib
import importlib
import os
import sys
from typing import Any

from solrl_jax.errors import InputError, type_and_message


def search_working_directory() -> None:
    """Appends the working directory to `sys.path`, unless it or "" is in it.

    Modules of the working directory can then be imported, in this process and in the worker
    processes of rewards.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def import_objective(name: str) -> Any:
    """Imports a user's objective, also from the working directory (`search_working_directory`).

    The standard output of the module goes to standard error, because that of this process is the
    command's.

    Args:
        name: The objective, as "module:function".

    Returns:
        The object of that name, of any type. Repeated calls return the same one.

    Raises:
        InputError: If the import raises anything but KeyboardInterrupt, even SystemExit, or the
            module has no such object.
    """
    search_working_directory()
    module, _, function = name.partition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return getattr(importlib.import_module(module), function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        raise InputError(
            f"algorithm.objective={name!r}: cannot be imported ({type_and_message(error)})"
        ) from error
