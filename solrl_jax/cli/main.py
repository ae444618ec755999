"""`solrl`: the command line. One file a command, imported when the command is called.

Exit codes: 0; 1: the run failed; 2: bad input; 130: interrupted, by Ctrl-C, SIGTERM or SIGHUP. Results go to standard output,
progress to standard error.
"""

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from solrl_jax.cli import signals
from solrl_jax.cli.options import INTERRUPTED, print_json
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError, RunError, first_line, one_line, text
from solrl_jax.storage.files import disk_reason

COMMANDS = {
    "train": "Train a preset; the same command resumes.",
    "eval": "Score a run's averaged policy, or a model directory, on the test prompts.",
    "rank": "Measure how well exploration ranks candidates.",
    "study": "Train the arms of a plan with several seeds, and compare them.",
    "report": "Show what runs did as one HTML page, which needs no network.",
    "sample": "Make pictures of prompts with a run's averaged policy, or a model directory.",
    "export": "Write a run's averaged policy as a LoRA that diffusers or PEFT loads.",
    "convert": "Turn a torch pickle into safetensors.",
    "encode": "Fill the cache with a preset's encoded prompts.",
    "linears": "List the linears of a model: quantised or not and why.",
    "plan": "What training a preset takes on a device: memory, kernels, messages, least time.",
    "presets": "List the presets.",
    "doctor": "What this machine can do, and what a preset lacks here.",
}
MOST_SHOWN = 10_000  # characters of a message, which may list whatever a file holds
MOST_DEVICES = 9999  # of a host; JAX makes as many CPU devices as it is told, until memory ends
# settings of JAX that a shell may have for other programs: with them ours cannot be traced
OTHER_PROGRAMS = ("JAX_ENABLE_X64", "JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION")
NO_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "Out of memory allocating",
    "failed to map segment",
)  # of a device; of the host
UNFORESEEN = "this is an error in solrl_jax"


class Commands(click.Group):
    """Imports the file of a command when that command is called: JAX takes seconds to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with signals.blocked():
            return importlib.import_module(f"solrl_jax.cli.{cmd_name}").command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # for which click would write an empty line first
            fail("interrupted", INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="solrl_jax")
def cli() -> None:
    """RL post-training of text-to-image flow models: explore in FP4, train in BF16."""


def main() -> None:
    """The entry point: whatever ends a command is one line on standard error, and with `--json` an object too."""
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # nothing forks here, and the library warns as if it did
    os.environ.setdefault(
        "HF_HUB_VERBOSITY", "error"
    )  # the library tells of each time that it asks again
    os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever the shell asks for
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # the library warns at import that PyTorch is absent
    for name in OTHER_PROGRAMS:
        os.environ.pop(name, None)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # says that there is no TPU
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _hung_up)
    _open_streams()
    try:
        signals.unblock()  # see `__main__`
        if (count := os.environ.get("JAX_NUM_CPU_DEVICES", "")).isdecimal() and len(count) > len(
            str(MOST_DEVICES)
        ):
            raise InputError(
                f"JAX_NUM_CPU_DEVICES={count[:80]}: expected a number of up to {MOST_DEVICES}"
            )
        cli(prog_name="solrl", standalone_mode=False)  # also for `python -m solrl_jax`
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except (
        SystemExit
    ) as stop:  # of a command; or of a function of the user's, which must not end as success
        if stop.code not in (1, INTERRUPTED):
            fail(f"a function that was called ended the process (SystemExit: {stop.code})", 1)
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        fail(*explained(error))


def _hung_up(*_: object) -> None:
    """Stops as Ctrl-C does, because the terminal was closed."""
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # shell and kernel may both send it, and a second Ctrl-C would not save
    signal.raise_signal(signal.SIGINT)


def _open_streams() -> None:
    """Opens the standard streams that the caller closed (`>&-`), and lets any text be written to the others."""
    for name in ("stdin", "stdout", "stderr"):
        if (
            getattr(sys, name) is None
        ):  # else the next file that is opened takes its place, and gets what libraries print
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # an encoding without ±; a path that is not UTF-8


def explained(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for whatever ended a command."""
    match error:
        case click.ClickException():
            return error.format_message(), error.exit_code
        case ConfigError() | InputError():
            return str(error), 2
        case RunError():
            return str(error), 1
        case KeyboardInterrupt() | click.exceptions.Abort():
            return "interrupted", INTERRUPTED
        case BrokenPipeError():  # `| head`
            return "nobody reads the output any more", 1
        case OSError(
            filename=str() | bytes() as name
        ):  # a name that is too long, a folder that may not be read
            return f"{os.fsdecode(name)}: {error.strerror}", 2
        case ValueError() if named := [text for text in sys.argv if "\0" in text]:
            return f"{named[0]!r}: holds a null character, which no name can", 2
        case FileNotFoundError(
            filename=None
        ):  # no file was named, so it is the one that relative paths begin with
            return "the working directory is not there any more", 2
        case OSError(filename=None):  # `> /dev/full`
            return f"the output cannot be written: {disk_reason(error)}", 1
    if isinstance(error, MemoryError) or any(sign in text(error) for sign in NO_MEMORY):
        smaller = "rollout.per_device_batch_size, optimizer.per_device_batch_size or model.vae_tile_size, or model.gradient_checkpointing=blocks"
        return f"out of memory: {first_line(error)}; a smaller {smaller} needs less", 1
    raised_in = next(
        (frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__))), ""
    )
    if raised_in.endswith("jax/_src/config.py"):  # where JAX reads its environment variables
        return f"a setting of JAX in the environment: {first_line(error)}", 2
    if raised_in.endswith("xla_bridge.py"):
        asked = os.environ.get("JAX_PLATFORMS")
        return (
            f"JAX_PLATFORMS={asked!r}: JAX cannot open these devices ({first_line(error)}); see `solrl doctor`",
            2,
        )
    if os.environ.get("SOLRL_TRACEBACK"):
        raise error
    return (
        f"{type(error).__name__}: {first_line(error)}; {UNFORESEEN}, and SOLRL_TRACEBACK=1 shows where",
        1,
    )


def fail(message: str, code: int) -> NoReturn:
    """Ends the process with one line on standard error. Passwords in addresses are left out."""
    message = re.sub(r"://[^/@\s]+@", "://***@", message)
    message = one_line(message if len(message) <= MOST_SHOWN else f"{message[:MOST_SHOWN]} ...")
    try:
        if "--json" in sys.argv:
            print_json({"error": message, "exit_code": code})
        sys.stdout.flush()
    except OSError:  # a closed pipe, a full disk
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python fails again as it ends
    with contextlib.suppress(OSError):
        click.echo(f"solrl: {message}", err=True)
    sys.exit(code)
