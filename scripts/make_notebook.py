"""Builds the notebook docs/one-iteration.ipynb from scripts/one_iteration.py, and its page.

    python scripts/make_notebook.py

The script executes the notebook, which takes three minutes on two cores, and writes it to
docs/one-iteration.md with its figures as PNG files. It needs `pip install 'solrl_jax[docs]'`.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "scripts" / "one_iteration.py"
NOTEBOOK = ROOT / "docs" / "one-iteration.ipynb"


def cells(source: str) -> list[nbformat.NotebookNode]:
    """Splits a file in the percent format into notebook cells.

    `# %%` begins a code cell and `# %% [markdown]` a text cell, whose lines are comments.
    """
    result = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        text = body.strip("\n")
        if "[markdown]" in head:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            cell = nbformat.v4.new_code_cell(text)
        cell["id"] = f"cell-{number}"
        result.append(cell)
    return result


def unrun(source: str) -> nbformat.NotebookNode:
    """Returns the notebook of a file in the percent format, without outputs."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells(source), metadata=kernel)


def run(notebook: nbformat.NotebookNode) -> None:
    """Executes all cells in place.

    Standard error is dropped, because it holds timings and warnings of this machine.
    """
    NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for out in cell.outputs:
                out.get("data", {}).pop("text/plain", None)


def page(notebook: nbformat.NotebookNode, name: str) -> tuple[str, dict[str, bytes]]:
    """Renders an executed notebook.

    Args:
        notebook: The notebook, with outputs.
        name: The prefix of the names of its image files.

    Returns:
        The Markdown text, and the content of each image by file name. The alternative text of an
        image names the section that it belongs to.
    """
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    files = sorted(
        resources["outputs"], key=lambda file: [int(number) for number in re.findall(r"\d+", file)]
    )
    renamed = {file: f"{name}-{i}.png" for i, file in enumerate(files)}
    images = {renamed[file]: resources["outputs"][file] for file in files}
    heading = ""
    lines = []
    for line in text.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        image = re.fullmatch(r"!\[\w*\]\((.+)\)", line.strip())
        if image:
            lines.append(f"![images of the section: {heading}]({renamed[image[1]]})")
        else:
            lines.append(line.rstrip())
    return "\n".join(lines).strip() + "\n", images


def main() -> None:
    notebook = unrun(SOURCE.read_text())
    run(notebook)
    nbformat.write(notebook, NOTEBOOK)
    text, images = page(notebook, NOTEBOOK.stem)
    for old in NOTEBOOK.parent.glob(f"{NOTEBOOK.stem}-*.png"):
        old.unlink()
    for name, data in images.items():
        (NOTEBOOK.parent / name).write_bytes(data)
    NOTEBOOK.with_suffix(".md").write_text(text)
    print(f"{NOTEBOOK}: {len(notebook.cells)} cells, {len(images)} images", file=sys.stderr)


if __name__ == "__main__":
    main()
