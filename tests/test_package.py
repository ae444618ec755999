"""What a user installs: the archives hold the package and nothing beside it, and the installed
package trains.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.small import SMALL

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# of the wheel; of a version in the changelog
MOST_BYTES = 22_000_000
MOST_LINES = 40
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

# A user's own program, in a directory that has a `models` and a `configs` of its own.
PROGRAM = """
import json, sys
import models
import solrl_jax
from solrl_jax.cli.main import main

main()
ours = sorted(
    {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "solrl_jax"}
)
print(json.dumps({"models": models.MINE, "ours": ours}))
"""


def call(*command: str | Path, **options) -> str:
    process = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, as for a user whom pip finds no wheel for."""
    folder = tmp_path_factory.mktemp("archives")
    environment = os.environ.copy()
    if importlib.util.find_spec("hatchling") is None:
        call(*PIP, "install", "--quiet", "--target", folder / "hatchling", "hatchling>=1.25")
        environment["PYTHONPATH"] = str(folder / "hatchling")
    call(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "sdist",
        "--directory",
        folder,
        cwd=ROOT,
        env=environment,
    )
    (sdist,) = folder.glob("*.tar.gz")
    call(
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        sdist,
        env=environment,
    )
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def packed() -> set[str]:
    """The files of the package in this checkout, by path."""
    files = (
        path
        for path in (ROOT / "solrl_jax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_links_at_the_top_lead_into_the_package():
    for name in ("models", "configs"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).readlink() == Path("solrl_jax", name)
        assert (ROOT / name).is_dir()


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(archives, packed):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"solrl_jax", f"solrl_jax-{VERSION}.dist-info"}
    assert {name for name in names if name.startswith("solrl_jax/")} == packed
    for name in (
        "py.typed",
        "configs/tiny.yaml",
        "configs/model/flux1.yaml",
        "models/flux/transformer.py",
        "assets/pipelines/tiny-sana",
        "assets/pipelines/tiny-wan/transformer",
    ):
        assert any(packed_name.startswith(f"solrl_jax/{name}") for packed_name in names), name


@pytest.mark.slow
def test_the_wheel_is_small(archives):
    assert archives[1].stat().st_size < MOST_BYTES


def test_a_version_is_dated_short_and_the_same_everywhere():
    changes = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    dates = {}
    for version in changes:
        head, _, entries = version.partition("\n")
        if head == "Unreleased" and not dates:
            continue
        number, date = re.fullmatch(r"([\d.]+) \((\d{4}-\d\d-\d\d)(?:, .+)?\)", head).groups()
        dates[number] = date
        assert len(entries.strip().splitlines()) <= MOST_LINES, number
    assert next(iter(dates)) == VERSION
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (VERSION, dates[VERSION])


@pytest.mark.slow
def test_the_sdist_holds_the_package_once_with_its_documents_and_tests(archives, packed):
    with tarfile.open(archives[0]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    tops = {name.split("/")[0] for name in names}
    assert {name for name in names if name.startswith("solrl_jax/")} == packed
    assert tops >= {
        "solrl_jax",
        "tests",
        "scripts",
        "docs",
        "examples",
        "benchmarks",
        "README.md",
        "LICENSE",
        "mkdocs.yml",
        "pyproject.toml",
    }
    assert not tops & {"models", "configs"}


@pytest.mark.exhaustive
def test_the_installed_package_trains_beside_models_and_configs_of_the_users_own(
    archives, tmp_path
):
    installed = tmp_path / "installed"
    mine = tmp_path / "mine"
    call(*PIP, "install", "--quiet", "--no-deps", "--target", installed, archives[1])
    (mine / "models").mkdir(parents=True)
    (mine / "models" / "__init__.py").write_text("MINE = 'the user\\'s own'\n")
    (mine / "configs" / "model").mkdir(parents=True)
    for name in ("tiny.yaml", "model/tiny-sana.yaml"):
        (mine / "configs" / name).write_text("what: nobody reads\n")
    (mine / "program.py").write_text(PROGRAM)
    # before the checkout, which is installed in this environment
    environment = os.environ | {"PYTHONPATH": str(installed)}
    settings = (
        *SMALL,
        "train.iterations=2",
        "eval.num_grid_images=0",
        f"run.dir={tmp_path / 'run'}",
        "--json",
    )
    lines = call(
        sys.executable, "program.py", "train", "tiny", *settings, cwd=mine, env=environment
    ).splitlines()
    summary, imported = map(json.loads, lines[-2:])
    assert summary["iterations"] == 2
    assert imported["models"] == "the user's own"
    assert str(installed / "solrl_jax" / "__init__.py") in imported["ours"]
    assert [file for file in imported["ours"] if not Path(file).is_relative_to(installed)] == []
    assert len(imported["ours"]) > 50
    assert call(installed / "bin" / "solrl", "--version", cwd=mine, env=environment) == call(
        sys.executable, "-m", "solrl_jax", "--version", cwd=mine, env=environment
    )
