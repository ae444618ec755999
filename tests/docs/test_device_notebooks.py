"""The notebooks for TPUs and GPUs: they are those of their sources, their settings exist, their
figures are the record's, and `make test-all` runs them at the smallest size.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from solrl_jax.config.presets import resolve
from tests.docs.pages import DOCS, ROOT
from tests.small import SMALL

pytest.importorskip("nbconvert", reason="pip install solrl_jax[docs]")

import make_notebook
import nbformat

RECORD = json.loads((ROOT / "benchmarks" / "plan-notebooks.json").read_text())
# The settings in place of those of a notebook. Both lists of devices are replaced: each notebook
# reads its own.
TINY = """
PRESET = "tiny"
RUN = {run!r}
SETTINGS = {settings!r}
BY_CHIPS = {{1: []}}
BY_CARD = {{24: []}}
PROMPTS = ["a red circle", "two blue squares"]
"""


@pytest.fixture(params=make_notebook.FOR_DEVICES)
def name(request):
    return request.param


def parameters(name: str) -> dict:
    """The variables of the cell with the settings, by name."""
    source, _ = make_notebook.FOR_DEVICES[name]
    (cell,) = (
        cell
        for cell in make_notebook.cells(source.read_text())
        if make_notebook.PARAMETERS in cell.metadata.get("tags", [])
    )
    variables: dict = {}
    exec(cell.source, variables)
    return variables


def by_device(name: str) -> dict[int, list[str]]:
    """The settings of a notebook by the number of chips, or by the memory of the card in GB."""
    variables = parameters(name)
    return variables["BY_CHIPS" if name == "tpu" else "BY_CARD"]


def test_it_is_that_of_its_source(name):
    """Else: python scripts/make_notebook.py tpu gpu."""
    source, path = make_notebook.FOR_DEVICES[name]
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    expected = make_notebook.cells(source.read_text())
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells] == [
        (cell.cell_type, cell.source, cell.metadata) for cell in expected
    ]
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert any(cell.source.startswith("%pip install") for cell in notebook.cells)


def test_the_settings_exist(name):
    variables = parameters(name)
    for settings in by_device(name).values():
        config = resolve(variables["PRESET"], (*variables["SETTINGS"], *settings))
        assert config.rollout.explore.precision == "auto"


def test_the_plans_are_of_these_settings(name):
    """Settings of the length of a run and of its prompts change no program."""
    variables = parameters(name)
    plans = {plan["settings_of"]: plan for plan in RECORD["plans"] if plan["notebook"] == name}
    assert plans.keys() == by_device(name).keys()
    for key, settings in by_device(name).items():
        planned = shlex.split(plans[key]["command"])
        overrides = [word for word in planned[3:] if "=" in word]
        assert planned[:3] == ["solrl", "plan", variables["PRESET"]]
        chosen = [
            setting
            for setting in (*variables["SETTINGS"], *settings)
            if setting.startswith(
                ("model.", "rollout.", "optimizer.", "mesh.", "train.num_prompts")
            )
        ]
        assert sorted(overrides) == sorted(chosen)


def test_the_figures_are_the_records(name):
    """Peak and usable memory in GB, and the seconds of an iteration, to the printed digit."""
    source, _ = make_notebook.FOR_DEVICES[name]
    _, *rows = re.findall(r"^# \| (.+) \|$", source.read_text(), re.MULTILINE)  # without the head
    plans = [plan for plan in RECORD["plans"] if plan["notebook"] == name]
    page = (DOCS / "run-anywhere.md").read_text()
    for row, plan in zip(rows, plans, strict=True):
        *_, memory, seconds = row.split(" | ")
        peak = max(plan["peak_gb"].values())
        assert memory == f"{peak:.1f} of {plan['usable_gb']:.1f} GB"
        assert seconds == f"{plan['iteration_seconds']:.0f} s"
        assert peak < plan["usable_gb"]
        assert f"| {row} |" in page


@pytest.mark.exhaustive
def test_it_runs(name, tmp_path, monkeypatch):
    """With one device, as the smallest setting of each notebook has."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    source, _ = make_notebook.FOR_DEVICES[name]
    run = tmp_path / "run"
    code = TINY.format(run=str(run), settings=[*SMALL, "train.iterations=2"])
    notebook = make_notebook.with_parameters(make_notebook.unrun(source.read_text()), code)
    make_notebook.run(notebook)
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
    assert "held-out reward after: " in "".join(out.get("text", "") for out in outputs)
    assert Path(run, "lora.safetensors").is_file()
