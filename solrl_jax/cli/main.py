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
    "eval": "Score a run's EMA policy, or a model, on the held-out prompts.",
    "rank": "Measure how well exploration ranks candidates.",
    "study": "Train the arms of a plan with several seeds, and compare them.",
    "report": "Show what runs did as one HTML page, which needs no network.",
    "generate": "Generate images with a run's EMA policy, or with a model.",
    "export": "Write a run's EMA policy as a LoRA that diffusers or PEFT loads.",
    "convert": "Turn a torch pickle into safetensors.",
    "encode": "Fill the cache with a preset's encoded prompts.",
    "layers": "List a model's linear layers: quantized, or why not.",
    "plan": "Estimate memory and time of training on a device, which need not be present.",
    "presets": "List the presets.",
    "doctor": "Report what this machine supports, and what a preset still requires.",
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
    """The group of all `solrl` commands, for click.

    A command's module is imported only when that command is called, because importing JAX is slow.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands in the order of the help text, without importing their
        modules.

        Args:
            ctx: The context of click. Not read.
        """
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command and returns it, or None if there is no such command.

        Ctrl-C, SIGTERM and SIGHUP are held back until the import is done.

        Args:
            ctx: The context of click. Not read.
            cmd_name: The name that the user typed, e.g. "train". A former name of a command, e.g.
                "sample", is accepted too.
        """
        name = RENAMED_COMMANDS.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        with signals.blocked():
            return importlib.import_module(f"solrl_jax.cli.{name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the user called, and imports it. For a former name, also prints
        the present one on standard error.

        Args:
            ctx: The context of click.
            args: The arguments of the command line, at least one. The first is the name of the
                command.

        Returns:
            The name of the command as it was typed, the command, and the arguments after its name.

        Raises:
            click.UsageError: If there is no such command.
        """
        if args[0] in RENAMED_COMMANDS:
            click.echo(f"solrl {args[0]} is now solrl {RENAMED_COMMANDS[args[0]]}", err=True)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that the user called.

        InputErrors and RunErrors of the command are raised again with a message that names its
        options, e.g. "--num-steps", in place of Python arguments (`with_options`). Other errors,
        also ConfigErrors, pass unchanged. Ctrl-C ends the process with the message "interrupted" on
        standard error, with `--json` also as an object on standard output (`fail`).

        Args:
            ctx: The context of click, with the arguments.

        Returns:
            The result of the command.

        Raises:
            InputError: If the command raised one or a subclass, with the changed message.
            RunError: If the command raised one or a subclass, with the changed message.
            SystemExit: With code 130, after Ctrl-C.
        """
        try:
            return super().invoke(ctx)
        except (InputError, RunError) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None:
                raise
            # A subclass may need other arguments than a message.
            kind = InputError if isinstance(error, InputError) else RunError
            raise kind(with_options(str(error), command)) from error
        except KeyboardInterrupt:  # click would write an empty line first
            fail("interrupted", INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands into the help text, without importing their modules.

        Args:
            ctx: The context of click. Not read.
            formatter: The object of click that collects the help text.
        """
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="solrl_jax")
def cli() -> None:
    """RL post-training of text-to-image flow models: explore in FP4, train in BF16."""


def with_options(message: str, command: click.Command) -> str:
    """Rewrites an error message so that it names options of the command line, not Python arguments.

    For example, `num_steps=0: ...` becomes `--num-steps=0: ...`, and `force=True` becomes
    `--force`. The name of a flag is rewritten only before `=True`. The name of any other option is
    rewritten before `=`, and without a value only at the beginning of the message. Names of
    configuration fields, such as `reward.timeout`, are not changed.

    Args:
        message: The message of the error.
        command: The command that raised it. Only the names of its options are rewritten.

    Returns:
        The rewritten message.
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
    """Runs the command line, with the arguments in `sys.argv`.

    Returns if the command succeeds. An error is printed in one line on standard error, with
    `--json` also as an object on standard output, and ends the process. Call it in the main thread.

    Also prepares the process: sets environment variables so that libraries print less and
    matplotlib opens no window, removes JAX settings that this package does not support from the
    environment (`FOREIGN_SETTINGS`), lets SIGTERM and SIGHUP act as Ctrl-C (SIGHUP stays ignored if
    it was), ends `signals.block`, and makes standard streams accept any text.

    Raises:
        SystemExit: If the command did not succeed: with code 2 (bad input), 130 (interrupted) or 1
            (any other failure, see `describe_failure`). A user's function, such as a reward, that
            raises SystemExit with a code other than 1 and 130, even 0, is a failure with code 1.
        BaseException: An unforeseen error as it is, if the environment variable SOLRL_TRACEBACK is
            set.
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
        fail(*describe_failure(error))


def _hang_up(*_: object) -> None:
    """Handles SIGHUP, the signal of a terminal that was closed: raises SIGINT once, as Ctrl-C does.

    Later SIGHUPs are ignored, because a second Ctrl-C would stop training before it has saved.

    Args:
        *_: The number of the signal and the stack frame. Not read.
    """
    # The shell and the kernel may both send it, and a second Ctrl-C would stop without saving.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _open_streams() -> None:
    """Makes standard input, output and error usable.

    Streams that are closed are connected to the null device. Characters that an output cannot
    encode are written as escapes.
    """
    for name in ("stdin", "stdout", "stderr"):
        # Otherwise the next file that is opened takes the place of a closed one, and gets what
        # libraries print.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # For encodings without ±, and for paths that are not UTF-8.
            stream.reconfigure(errors="backslashreplace")


def describe_failure(error: BaseException) -> tuple[str, int]:
    """Returns the message and the exit code for an error that ended a command.

    Args:
        error: The error, of any type.

    Returns:
        A pair: the message, and the exit code. The code is 2 for wrong input (ConfigError,
        InputError, an OSError that names a file), 130 for an interruption, click's own code for
        errors of click, and 1 for all others: a RunError, an output that cannot be written, too
        little memory (with advice in the message), and unforeseen errors.

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
            return "the output pipe was closed", 1
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
    """Prints an error and ends the process.

    The message is one line on standard error, after "solrl: ". If the command line contains
    `--json`, a JSON object with "error" and "exit_code" is also printed on standard output.

    Args:
        message: The message. It is brought into one line and cut to 10,000 characters
            (`MAX_MESSAGE`), and user names and passwords in URLs become "***".
        code: The exit code of the process: 2 (bad input), 130 (interrupted) or 1 (any other
            failure).

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
