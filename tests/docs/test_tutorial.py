"""The tutorial, from top to bottom: every file that it prints is written, every command is run, at
the smallest sizes.
"""

import os
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from PIL import Image

from solrl_jax.cli import main
from solrl_jax.models.locate import EMBEDDED_FOLDER
from tests.docs.pages import DOCS, ROOT, blocks, commands
from tests.small import SMALL

TUTORIAL = DOCS / "tutorial.md"
# FLUX.1's architecture in miniature, and a reward whose network comes with the package
MINIATURE = ("model=tiny-flux", "reward=tiny-clip")
OUTSIDE = {
    "python3",
    "source",
    "pip",
    "hf",
}  # what sets up an environment; tests/test_package.py installs the wheel
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def smaller(words: list[str]) -> list[str]:
    """A printed command of `solrl` with the settings that make it small."""
    released = MINIATURE if any(word.startswith("flux1_") for word in words) else ()
    return [*words[1:], *released, *(SMALL if words[1] == "train" else ())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the page tells the reader to write. It is where the commands
    run.
    """
    path = tmp_path_factory.mktemp("tutorial")
    before = os.getcwd()
    for block in blocks(TUTORIAL):
        if block.title:
            (path / block.title).write_text(block.body)
    os.chdir(path)
    yield path
    os.chdir(before)


def follow(part: str, monkeypatch) -> list[list[str]]:
    """Runs the commands of a part of the page, in order. Returns those that were run."""
    steps = []
    for words in commands(TUTORIAL):
        if ("flux" in " ".join(words)) != (part == "flux") or words[0] in OUTSIDE:
            continue
        if words[0] == "python":
            subprocess.run(
                [sys.executable, *words[1:]],
                check=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        else:
            assert words[0] == "solrl"
            monkeypatch.setattr(sys, "argv", smaller_argv := ["solrl", *smaller(words)])
            code = 0
            try:
                main.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
            assert code == 0 or (words[1] == "doctor" and part == "flux"), smaller_argv
        steps.append(words)
    return steps


@pytest.mark.exhaustive
def test_the_first_part_goes_from_nothing_to_a_lora_in_diffusers(folder, monkeypatch, capfd):
    steps = follow("tiny", monkeypatch)
    assert [words[1] for words in steps if words[0] == "solrl"] == [
        "doctor", "train", "presets", "train", "train", "eval", "generate", "export",
    ]  # fmt: skip
    output = capfd.readouterr().out
    assert "missing    nothing" in output
    assert output.count("gained: held-out reward") == 3
    assert (folder / "runs" / "first" / "report.html").is_file()
    assert (folder / "my-lora.safetensors").stat().st_size > 1000
    assert len(list((folder / "images").glob("0*.png"))) == 4
    change = re.search(r"mean change of a pixel: ([\d.]+)", output)
    assert change is not None
    assert 0 < float(change[1]) < 0.5


@pytest.mark.exhaustive
def test_the_second_part_does_the_same_with_flux(folder, monkeypatch, capfd):
    steps = follow("flux", monkeypatch)
    assert [words[1] for words in steps] == ["doctor", "encode", "train", "export"]
    code = (folder / "use_flux_lora.py").read_text()
    for original, replacement in (
        ("black-forest-labs/FLUX.1-dev", str(EMBEDDED_FOLDER / "tiny-flux")),
        ('"cuda"', '"cpu"'), ("torch.bfloat16", "torch.float32"), ("512", "32"), ("=28", "=2"),
    ):  # fmt: skip
        assert original in code
        code = code.replace(original, replacement)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert np.asarray(Image.open(folder / "circle.png")).shape == (32, 32, 3)


def test_what_is_installed_is_this_version_and_has_the_extras():
    installs = [
        word
        for words in commands(TUTORIAL)
        if words[:2] == ["pip", "install"]
        for word in words[2:]
    ]
    ours = [
        re.fullmatch(r"\./solrl_jax-(.+)-py3-none-any\.whl(?:\[(\w+)\])?", word)
        for word in installs
        if "solrl" in word
    ]
    assert len(ours) == 2
    for match in ours:
        assert match is not None
        assert match[1] == PROJECT["version"]
        assert match[2] is None or match[2] in PROJECT["optional-dependencies"]
