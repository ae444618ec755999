"""Standard streams that are closed, full or of another encoding, and devices that are not there."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys

import pytest

from solrl_jax.cli import main
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage import readers

pytestmark = pytest.mark.slow


def exit_code(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["solrl", *arguments])
    with pytest.raises(SystemExit) as stop:
        main.main()
    return stop.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ("presets", "--json"),
        pytest.param(("presets",), marks=pytest.mark.exhaustive),
        ("presets", "--show", "nope", "--json"),
    ],
)
def test_a_full_disk_under_the_output_is_one_line(arguments, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = exit_code(monkeypatch, *arguments)
    message = capsys.readouterr().err
    assert message.startswith(
        "solrl: unknown preset 'nope'"
        if code == 2
        else "solrl: the output cannot be written: disk full"
    )
    assert (code, message.count("\n")) == (2 if "nope" in arguments else 1, 1)


def test_streams_that_are_closed_are_no_failure(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["solrl", "presets"])
    main.main()
    assert sys.stdout.name == sys.stderr.name == "/dev/null"


def test_an_encoding_that_lacks_a_character_is_no_failure(monkeypatch, tmp_path):
    (tmp_path / "p.txt").write_text("a café\n")
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="cp437"))
    monkeypatch.setattr(
        sys,
        "argv",
        ["solrl", "presets", "--show", "tiny", f"prompts.train={tmp_path}/p.txt", "--json"],
    )
    main.main()
    assert json.loads(buffer.getvalue())["first"][0]["prompt"] == "a café"


def test_libraries_that_find_too_little_memory_are_one_line():
    cause = "libjax_common.so: failed to map segment from shared object"
    message, code = main.describe_failure(ImportError(cause))
    assert (message.partition(";")[0], code) == (f"out of memory: {cause}", 1)
    assert main.UNFORESEEN in main.describe_failure(ImportError("no such name"))[0]


def test_figures_are_drawn_whatever_the_shell_asks_for(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "abacus")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setattr(sys, "argv", ["solrl", "presets"])
    main.main()
    assert "JAX_ENABLE_X64" not in os.environ
    drawing = [sys.executable, "-c", "import matplotlib.pyplot"]
    assert subprocess.run(drawing, env=os.environ, check=False).returncode == 0


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_a_closed_terminal_stops_a_run_and_nohup_does_not(ignored, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        monkeypatch.setattr(sys, "argv", ["solrl", "presets"])
        main.main()
        with TerminalProgress(bars=False) as report:
            # as a terminal that is gone
            monkeypatch.setattr(sys, "stderr", open("/dev/full", "w"))  # noqa: SIM115
            os.kill(os.getpid(), signal.SIGHUP)
            with contextlib.nullcontext() if ignored else pytest.raises(KeyboardInterrupt):
                report.phase("explore", 4, 1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_ends_any_command_as_ctrl_c_does(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "solrl_jax.cli.presets.preset_rows", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
        assert exit_code(monkeypatch, "presets") == main.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "solrl: interrupted\n"


@pytest.mark.parametrize(
    ("number", "module"),
    [(signal.SIGTERM, "pydantic"), (signal.SIGINT, "numpy"), (signal.SIGHUP, "jax")],
)
def test_an_interruption_waits_for_an_import(number, module):
    """Signals come at the import, and again as Python ends. NumPy, broken off, would show a stack
    and raise ImportError.
    """
    code = f"""
import atexit, os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r} and name not in sys.modules:
            os.kill(os.getpid(), {int(number)})

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {int(number)})

late = Late()
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.meta_path.insert(0, Finder())
sys.argv = ["solrl", "layers", "tiny"]
from solrl_jax.__main__ import main
main()
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (130, "solrl: interrupted\n")


def test_a_file_of_the_kernel_that_has_nothing_yet_is_empty(monkeypatch, tmp_path):
    """As /proc/kmsg: a regular file by its mode, of which a read that does not wait returns
    None.
    """

    class Waiting(io.BytesIO):
        def read(self, *_):
            return None

    (tmp_path / "p.txt").touch()
    monkeypatch.setattr(readers, "open", lambda *_, **__: Waiting(), raising=False)
    assert readers.read_bytes(tmp_path / "p.txt") == b""
