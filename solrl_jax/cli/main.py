"""`solrl`: the command line. Each command is a file in this folder, imported when it is called.

A command parses its arguments, calls functions of the package and prints. Results go to standard
output, progress and errors to standard error.

Exit codes: 0; 1: the run failed; 2: bad input; 130: interrupted by Ctrl-C, SIGTERM or SIGHUP.
"""

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import sys
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
    "generate": "Generate images with a run's averaged policy, or a model directory.",
    "export": "Write a run's averaged policy as a LoRA that diffusers or PEFT loads.",
    "convert": "Turn a torch pickle into safetensors.",
    "encode": "Fill the cache with a preset's encoded prompts.",
    "layers": "List a model's linear layers: quantized, or why not.",
    "plan": "Predict memory and time of training a preset on a device that need not be here.",
    "presets": "List the presets.",
    "doctor": "Show what this machine can do, and what a preset lacks here.",
}
# Names that commands had in version 0.2, which still work.
RENAMED_COMMANDS = {"sample": "generate", "linears": "layers"}
MAX_MESSAGE = 10_000  # characters; a message may quote what a file holds
# Settings of JAX that a shell may have for other programs, and with which ours cannot be traced.
FOREIGN_SETTINGS = (
    "JAX_ENABLE_X64",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_NUMPY_DTYPE_PROMOTION",
)
# What messages contain if a device or the host has too little memory.
OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "Out of memory allocating",
    "failed to map segment",
)
UNFORESEEN = "SOLRL_TRACEBACK=1 shows where in solrl_jax"


class Commands(click.Group):
    """The group of all commands. It imports a command when it is called, because JAX is slow to
    import.

    Commands and their summaries are those of `COMMANDS`; former names in `RENAMED_COMMANDS` work
    too.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands in the order of `COMMANDS`, without importing them.

        Args:
            ctx: The context of click. Not read.
        """
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command by its name or its former name. Signals are held back meanwhile.

        Args:
            ctx: The context of click. Not read.
            cmd_name: The name that the user typed, e.g. "train" or the former "sample".

        Returns:
            The command; None if there is none of this name.
        """
        name = RENAMED_COMMANDS.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        with signals.blocked():
            return importlib.import_module(f"solrl_jax.cli.{name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the arguments call. Also says on standard error if it has a new
        name.

        Args:
            ctx: The context of click, in which the command is looked up.
            args: The arguments from the name of the command on.

        Returns:
            The name of the command, the command, and the arguments after its name.

        Raises:
            click.UsageError: If there is no command of this name.
        """
        if args[0] in RENAMED_COMMANDS:
            click.echo(f"solrl {args[0]} is now solrl {RENAMED_COMMANDS[args[0]]}", err=True)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the called command.

        Messages of its InputErrors and RunErrors name settings as the command's options
        (`with_options`). Ctrl-C ends the process with exit code `INTERRUPTED` (130). All other
        errors pass unchanged.

        Args:
            ctx: The context of click, with the arguments.

        Returns:
            What the command returns.

        Raises:
            InputError: If the command raised it, with the changed message. A subclass keeps its
                type.
            RunError: If the command raised it, with the changed message. A subclass keeps its type.
            SystemExit: With code 130, if the command was interrupted. A line is printed before.
        """
        try:
            return super().invoke(ctx)
        except (InputError, RunError) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None:
                raise
            raise type(error)(with_options(str(error), command)) from error
        except KeyboardInterrupt:  # click would write an empty line first
            fail("interrupted", INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands in the help text, without importing them.

        Args:
            ctx: The context of click. Not read.
            formatter: Receives the list.
        """
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="solrl_jax")
def cli() -> None:
    """RL post-training of text-to-image flow models: explore in FP4, train in BF16."""


def with_options(message: str, command: click.Command) -> str:
    """Replaces the names of arguments in an error message by the options of a command.

    Functions of the package name their arguments as Python does: `num_steps=0: ...`, or `lora: ...`
    at the beginning, and `force=True`. These become `--num-steps=0`, `--lora` and `--force`. Names
    of settings such as `reward.timeout=0` stay.

    Args:
        message: The message of an error that the command raised.
        command: The command, whose options are looked for.

    Returns:
        The message in which the command's arguments appear as options, e.g. "--num-steps=0: ...".
    """
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            continue
        option = parameter.opts[0]
        names = {str(parameter.name), option.removeprefix("--").replace("-", "_")}
        name = "|".join(sorted(names))
        if parameter.is_flag:
            message = re.sub(rf"(?<![\w.-])({name})=True\b", option, message)
        else:
            message = re.sub(rf"(?<![\w.'\"/-])({name})=", f"{option}=", message)
            message = re.sub(rf"^({name})(?=[: ])", option, message)
    return message


def main() -> None:
    """Runs the command line, with the arguments of `sys.argv`.

    Whatever ends a command is one line on standard error, and with `--json` also an object on
    standard output. Returns if the command succeeded; otherwise the process ends with an exit code
    of this module.

    Also changes the whole process:

    * Environment variables. MPLBACKEND is set to "agg". TOKENIZERS_PARALLELISM, HF_HUB_VERBOSITY
      and TRANSFORMERS_VERBOSITY are set unless they are there. JAX_ENABLE_X64,
      JAX_NUMPY_RANK_PROMOTION and JAX_NUMPY_DTYPE_PROMOTION are removed.
    * Signals. SIGTERM and SIGHUP act as Ctrl-C, except that a SIGHUP that is ignored (`nohup`)
      stays so. The signals that `signals.block` held back are let through.
    * Streams. Standard streams that the caller closed lead nowhere, and text that the encoding of
      an output lacks is escaped.
    * The logger of JAX's platforms shows errors only.

    Raises:
        SystemExit: With code 1, 2 or 130, if the command did not succeed.
        BaseException: An unforeseen error as it is, if SOLRL_TRACEBACK is set.
    """
    # Nothing forks here, but the library warns as if something did.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # it reports every retry
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that PyTorch is absent
    os.environ["MPLBACKEND"] = "agg"  # figures go to files
    for name in FOREIGN_SETTINGS:
        os.environ.pop(name, None)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # it reports a missing TPU
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _hang_up)
    _open_streams()
    try:
        signals.unblock()  # see `__main__`
        cli(prog_name="solrl", standalone_mode=False)  # also for `python -m solrl_jax`
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except SystemExit as stop:
        # A user's function, such as a reward, must not end the process as a success.
        if stop.code not in (1, INTERRUPTED):
            fail(f"a function that was called ended the process (SystemExit: {stop.code})", 1)
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        fail(*explained(error))


def _hang_up(*_: object) -> None:
    """Handles SIGHUP, which a closed terminal sends: raises SIGINT in this process, as Ctrl-C does.

    Returns if a handler of SIGINT only notes it. Every later SIGHUP is ignored.

    Args:
        *_: The number of the signal and the stack frame. Not read.
    """
    # The shell and the kernel may both send it, and a second Ctrl-C would stop without saving.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _open_streams() -> None:
    """Opens the standard streams that the caller closed, and lets any text be written to them."""
    for name in ("stdin", "stdout", "stderr"):
        # Otherwise the next file that is opened takes the place of a closed one, and gets what
        # libraries print.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # For encodings without ±, and for paths that are not UTF-8.
            stream.reconfigure(errors="backslashreplace")


def explained(error: BaseException) -> tuple[str, int]:
    """Explains whatever ended a command.

    Args:
        error: The error that ended the command, of any type.

    Returns:
        The message in one or more lines, and the exit code: 2 for ConfigError, InputError and an
        OSError about a file; `INTERRUPTED` (130) for interruptions; that of click for its errors;
        and 1 for RunError, output that cannot be written, too little memory and everything
        unforeseen.

    Raises:
        BaseException: `error` itself, if it is unforeseen and the environment variable
            SOLRL_TRACEBACK is set.
    """
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
        case OSError(filename=str() | bytes() as name):  # e.g. a name that is too long
            return f"{os.fsdecode(name)}: {error.strerror}", 2
        case OSError(filename=None) if not isinstance(error, FileNotFoundError):  # `> /dev/full`
            return f"the output cannot be written: {disk_reason(error)}", 1
    if isinstance(error, MemoryError) or any(sign in text(error) for sign in OUT_OF_MEMORY):
        return (
            f"out of memory: {first_line(error)}; a smaller rollout.per_device_batch_size, "
            "optimizer.per_device_batch_size or model.vae_tile_size, or "
            "model.gradient_checkpointing=blocks needs less",
            1,
        )
    if os.environ.get("SOLRL_TRACEBACK"):
        raise error
    return f"{type(error).__name__}: {first_line(error)}; {UNFORESEEN}", 1


def fail(message: str, code: int) -> NoReturn:
    """Ends the process with one line on standard error, and with --json also a JSON object on
    standard output.

    Args:
        message: The error. Line feeds become spaces, credentials in URLs are left out, and it is
            cut at `MAX_MESSAGE` (10,000) characters.
        code: The exit code of the process: 1, 2 or 130.

    Raises:
        SystemExit: Always, with `code`.
    """
    message = re.sub(r"://[^/@\s]+@", "://***@", message)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} ..."
    message = one_line(message)
    try:
        if "--json" in sys.argv:
            print_json({"error": message, "exit_code": code})
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk, at which Python would fail again as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        click.echo(f"solrl: {message}", err=True)
    sys.exit(code)
