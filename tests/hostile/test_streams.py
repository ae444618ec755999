"""Standard streams that are closed, full or of another encoding, and devices that are not there."""

import io
import json
import sys

import pytest

from solrl_jax.commands import cli
from solrl_jax.storage import readers


def ended(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["solrl", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


@pytest.mark.parametrize("arguments", [("presets",), ("presets", "--json"), ("presets", "--show", "nope", "--json")])
def test_a_full_disk_under_the_output_is_one_line(arguments, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = ended(monkeypatch, *arguments)
    said = capsys.readouterr().err
    assert said.startswith("solrl: unknown preset 'nope'" if code == 2 else "solrl: the output cannot be written: disk full")
    assert (code, said.count("\n")) == (2 if "nope" in arguments else 1, 1)


def test_streams_that_are_closed_are_no_failure(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["solrl", "presets"])
    cli.main()
    assert sys.stdout.name == sys.stderr.name == "/dev/null"


def test_an_encoding_that_lacks_a_character_is_no_failure(monkeypatch, tmp_path):
    (tmp_path / "p.txt").write_text("a café\n")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp437"))
    monkeypatch.setattr(sys, "argv", ["solrl", "presets", "--show", "tiny", f"prompts.train={tmp_path}/p.txt", "--json"])
    cli.main()
    assert json.loads(written.getvalue())["first"][0]["prompt"] == "a café"


def test_devices_that_jax_cannot_open_are_bad_input(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(RuntimeError) as caught:
        xla_bridge.get_backend("abacus")
    assert cli.explained(caught.value) == (
        f"JAX_PLATFORMS='abacus': JAX cannot open these devices ({caught.value}); see `solrl doctor`",
        2,
    )


def test_a_working_directory_that_is_gone_is_bad_input(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.pt").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert ended(monkeypatch, "convert", str(tmp_path / "a.pt"), "--out", "x.safetensors") == 2
    assert capsys.readouterr().err == "solrl: the working directory is not there any more\n"


def test_a_file_of_the_kernel_that_has_nothing_yet_is_empty(monkeypatch, tmp_path):
    """As /proc/kmsg: a regular file by its mode, of which a read that does not wait returns None."""

    class Waiting(io.BytesIO):
        def read(self, *_):
            return None

    (tmp_path / "p.txt").touch()
    monkeypatch.setattr(readers, "open", lambda *_, **__: Waiting(), raising=False)
    assert readers.read_bytes(tmp_path / "p.txt") == b""
