"""The sizes that keep the code readable: of functions, of argument lists, of the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, ROOF, ROOMS

ROOT = Path(__file__).parents[1]
MOST_LINES = 60  # of a function, from `def` to its last line, docstring included
MOST_ARGUMENTS = 7  # `self` and `cls` not counted
MOST_OF_ALL = 22_066
FILES = [
    path
    for folder in ("solrl_jax", "scripts", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's arguments, of all kinds."""
    given = function.args
    named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    names = [argument.arg for argument in named if argument is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_function_fits_on_a_screen(path):
    def length(function):
        return function.end_lineno - function.lineno + 1

    long = {
        function.name: length(function)
        for function in functions(path)
        if length(function) > MOST_LINES
    }
    assert not long, f"at most {MOST_LINES} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_function_takes_few_arguments(path):
    """Where there are more, a noun is missing."""
    many = {f.name: arguments(f) for f in functions(path) if len(arguments(f)) > MOST_ARGUMENTS}
    assert not many, f"at most {MOST_ARGUMENTS} arguments"


def test_the_package_is_its_rooms():
    there = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert there == {*ROOMS, "assets", "configs", "py.typed", *(f"{file}.py" for file in ROOF)}


def test_the_package_stays_small():
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")) <= MOST_OF_ALL
