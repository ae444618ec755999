"""The notebook is that of its source, the page is that of the notebook, and `make test-all` runs
it.
"""

import pytest

from tests.docs.pages import DOCS, ROOT

pytest.importorskip("nbconvert", reason="pip install solrl_jax[docs]")

import make_notebook
import nbformat


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(make_notebook.NOTEBOOK, as_version=4)


def test_it_is_that_of_its_source(notebook):
    """Else: `make notebook`."""
    expected = make_notebook.cells(make_notebook.SOURCE.read_text())
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in expected
    ]


def test_all_of_it_was_run_and_nothing_failed(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [out for cell in code for out in cell.outputs]
    assert {out.output_type for out in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in out.get("data", {}) for out in outputs) >= 5


def test_the_page_is_that_of_the_notebook(notebook):
    text, pictures = make_notebook.page(notebook, "one-iteration")
    assert text == (DOCS / "one-iteration.md").read_text()
    for name, data in pictures.items():
        assert (DOCS / name).read_bytes() == data
    assert {path.name for path in DOCS.glob("one-iteration*.png")} == pictures.keys()
    assert str(ROOT) not in text


@pytest.mark.exhaustive
def test_it_runs_and_says_the_same(notebook, monkeypatch):
    """Its text to the character but for rewards, whose last digits are a machine's; its pictures
    may differ with matplotlib.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a reader has
    again = make_notebook.unrun(make_notebook.SOURCE.read_text())
    make_notebook.run(again)

    def texts(cells):
        return [
            out.text
            for cell in cells
            if cell.cell_type == "code"
            for out in cell.outputs
            if out.get("text")
        ]

    assert len(texts(again.cells)) == len(texts(notebook.cells))
    assert texts(again.cells)[:2] == texts(notebook.cells)[:2]  # settings, prompts and seeds
