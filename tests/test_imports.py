"""The architecture: rooms import downwards only, files in no circle, nobody PyTorch; and importing
the package is quick.
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "solrl_jax"
# from the floor up; a file may import from its own room and from those before it (ARCHITECTURE.md)
ROOMS = (
    "errors",
    "storage",
    "quant",
    "parallel",
    "config",
    "data",
    "models",
    "diffusion",
    "rewards",
    "rl",
    "runs",
    "planning",
    "study",
    "api",
    "cli",
)
ROOF = {
    "__init__",
    "__main__",
    "testing",
}  # files above all rooms: what users import or start
FORBIDDEN = {"torch", "diffusers", "torchao", "torchvision", "tensorflow"}
# reads pickles, once and on request: it imports PyTorch when it is called
LATE = {"solrl_jax.cli.convert": {"torch"}}


def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name; a folder's `__init__.py` has the name of the
    folder.
    """

    def dotted(path):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    return {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


MODULES = modules()


def imports(path: Path, late: bool = True) -> set[str]:
    """What a file imports, files of the package by their dotted names; late: inside functions
    too.
    """
    names = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else str(node.module) for name in full}
    return names


def room(module: str) -> int:
    """The number of a file's room; one more than the last for files above all rooms."""
    name = module.split(".")[1] if "." in module else "__init__"
    assert name in ROOMS or name in ROOF, (
        f"{module} is in no room: give it one in ROOMS and in ARCHITECTURE.md"
    )
    return ROOMS.index(name) if name in ROOMS else len(ROOMS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_rooms_import_downwards_only(module):
    for name in imports(MODULES[module]):
        assert name.split(".")[0] not in FORBIDDEN - LATE.get(module, set()), (
            f"{module} imports {name}"
        )
        if name in MODULES:
            assert room(name) <= room(module), f"{module} imports {name}, whose room is above"


@pytest.mark.slow
def test_files_do_not_import_each_other_in_a_circle():
    """Imports inside functions count: they would only hide a circle from Python."""
    graph = {module: imports(path) & MODULES.keys() - {module} for module, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_what_may_be_imported_late_is_not_imported_at_once():
    for module, names in LATE.items():
        at_once = {name.split(".")[0] for name in imports(MODULES[module], late=False)}
        assert not at_once & names, module


@pytest.mark.parametrize("arguments", [["-c", "import solrl_jax"], ["-m", "solrl_jax", "--help"]])
def test_neither_the_package_nor_the_help_page_imports_jax(arguments):
    """JAX takes seconds to import, transformers more."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], check=True, capture_output=True, text=True
    )
    imported = {
        line.rpartition("|")[2].strip()
        for line in process.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "solrl_jax" in imported
    assert not imported & {"jax", "flax", "optax", "transformers", "orbax"}


def test_the_inits_of_packages_import_nothing():
    for path in PACKAGE.glob("*/**/__init__.py"):
        assert not imports(path), path
