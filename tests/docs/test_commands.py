"""Every command line that README and the pages print could be typed: commands, options, presets,
settings, files.
"""

import importlib
import re
from pathlib import Path

import click
import pytest

from solrl_jax.cli.main import COMMANDS
from solrl_jax.config.presets import preset_names, resolve
from solrl_jax.planning.proposals import MESH_AUTO
from tests.docs.pages import PAGES, ROOT, commands

PRINTED = [(page.name, words) for page in PAGES for words in commands(page)]
OURS = [(page, words) for page, words in PRINTED if words[0] == "solrl" or words[1:2] == ["solrl"]]


def test_there_are_many():
    assert len(OURS) > 50
    assert {page for page, _ in OURS} >= {"README.md", "guide.md", "tutorial.md"}


@pytest.mark.parametrize(
    ("page", "words"), OURS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_command_has_these_options_and_settings(page, words):
    words = words[words.index("solrl") :]
    assert words[1] in COMMANDS
    command = importlib.import_module(f"solrl_jax.cli.{words[1]}").command
    with (
        click.Context(click.Command("solrl")) as parent,
        command.make_context(words[1], words[2:], parent=parent) as context,
    ):
        parameters = context.params
    first = next(
        (parameter.name for parameter in command.params if isinstance(parameter, click.Argument)),
        None,
    )
    target = parameters.get("show") or parameters.get(first)
    if target in preset_names():
        settings = [setting for setting in parameters.get("overrides", ()) if setting != MESH_AUTO]
        resolve(target, settings)


def test_targets_of_make_and_scripts_exist():
    targets = {
        line.partition(":")[0]
        for line in (ROOT / "Makefile").read_text().splitlines()
        if ":" in line
    }
    for _, words in PRINTED:
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        if words[0] == "python" and words[1].startswith(("scripts/", "examples/")):
            assert Path(ROOT, words[1]).is_file(), words


def test_files_in_the_makefile_exist():
    text = (ROOT / "Makefile").read_text()
    paths = re.findall(r"(?<![\w./-])(?:docs|scripts|solrl_jax|tests)/[\w./-]+", text)
    assert len(paths) > 10
    assert [path for path in paths if not Path(ROOT, path).exists()] == []
