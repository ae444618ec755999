"""docs/method.md names functions that exist, and has the sections that docstrings cite."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "solrl_jax"
TEXT = (ROOT / "docs" / "method.md").read_text()
MENTIONS = sorted(set(re.findall(r"`([a-z_0-9/]+\.py)(?:: ([\w.]+))?`", TEXT)))
SECTIONS = {int(number) for number in re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)}


def names_of(body: list[ast.stmt]) -> set[str]:
    """What a module or a class defines: functions, classes with their own names behind a point,
    assigned names.
    """
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in names_of(node.body)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_what_is_looked_for_is_found():
    assert len(MENTIONS) > 40
    assert names_of(ast.parse("X = 1\nclass A:\n  def f(self): ...\ndef g(): ...").body) == {
        "X",
        "A",
        "A.f",
        "g",
    }


@pytest.mark.parametrize(("path", "name"), MENTIONS)
def test_a_named_function_exists(path, name):
    assert (PACKAGE / path).is_file()
    assert not name or name in names_of(ast.parse((PACKAGE / path).read_text()).body)


def test_folders_that_are_named_exist():
    folders = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*)`", TEXT))
    assert folders
    assert all((PACKAGE / folder).is_dir() for folder in folders)


def test_sections_that_docstrings_cite_exist():
    assert set(range(8)) == SECTIONS
    cited = set()
    for file in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *(ROOT / "tests").rglob("*.py")]:
        for numbers in re.findall(
            r"method\.md`?,\s+sections? ((?:\d+(?:, | and )?)+)", file.read_text()
        ):
            cited |= {int(number) for number in re.findall(r"\d+", numbers)}
    assert cited
    assert cited <= SECTIONS


def test_no_text_outside_the_repository_is_cited():
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *(ROOT / "scripts").rglob("*.py")]
    assert [str(file) for file in sources if re.search(r"\bspec, section", file.read_text())] == []
