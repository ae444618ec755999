"""Builds the notebooks from their sources, which are Python files in the percent format.

    python scripts/make_notebook.py        # all notebooks
    python scripts/make_notebook.py tpu    # one of: one-iteration, tpu, gpu

`one-iteration` is executed, which takes three minutes on two cores. It is written to
docs/one-iteration.ipynb, and to docs/one-iteration.md with its figures as PNG files. The others are
written to examples/notebooks/ without outputs, since they are for devices that are not here.
It needs `pip install 'solrl_jax[docs]'`.
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
# Notebooks for devices that are not here: source and notebook by name.
FOR_DEVICES = {
    name: (
        ROOT / "scripts" / "notebooks" / f"{name}.py",
        ROOT / "examples" / "notebooks" / f"{name}.ipynb",
    )
    for name in ("tpu", "gpu")
}
INSTALL = "install"  # tag of a cell that installs packages
PARAMETERS = "parameters"  # tag of the cell with the settings


def cells(source: str) -> list[nbformat.NotebookNode]:
    """Splits a file in the percent format into notebook cells.

    `# %%` begins a code cell and `# %% [markdown]` a text cell, whose lines are comments.
    `tags=["NAME"]` behind `# %%` gives a cell a tag. A line `# %NAME ...` of a code cell is a magic
    command, which the notebook has without the comment sign.
    """
    result = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        text = body.strip("\n")
        if "[markdown]" in head:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            text = re.sub(r"^# (?=%\w)", "", text, flags=re.MULTILINE)
            cell = nbformat.v4.new_code_cell(text)
        if tags := re.findall(r"tags=\[\"(\w+)\"\]", head):
            cell.metadata["tags"] = tags
        cell["id"] = f"cell-{number}"
        result.append(cell)
    return result


def unrun(source: str) -> nbformat.NotebookNode:
    """Returns the notebook of a file in the percent format, without outputs."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells(source), metadata=kernel)


def with_parameters(notebook: nbformat.NotebookNode, code: str) -> nbformat.NotebookNode:
    """Returns a copy of a notebook with other settings, which installs nothing.

    Args:
        notebook: The notebook. One of its cells has the tag `PARAMETERS`.
        code: Python code that runs after that cell, to replace its variables.
    """
    changed = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if INSTALL not in tags:
            changed.append(cell)
        if PARAMETERS in tags:
            changed.append(nbformat.v4.new_code_cell(code, id="injected-parameters"))
    return nbformat.v4.new_notebook(cells=changed, metadata=notebook.metadata)


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


def make_one_iteration() -> None:
    """Executes one-iteration.ipynb and writes it, its page and its images."""
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


def main(*names: str) -> None:
    known = (NOTEBOOK.stem, *FOR_DEVICES)
    for name in names or known:
        if name == NOTEBOOK.stem:
            make_one_iteration()
        elif name in FOR_DEVICES:
            source, path = FOR_DEVICES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(unrun(source.read_text()), path)
            print(path, file=sys.stderr)
        else:
            sys.exit(f"{name}: expected one of {', '.join(known)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
