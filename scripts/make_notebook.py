"""Makes docs/one-iteration.ipynb of scripts/one_iteration.py, runs it, and writes it as a page of the site.

python scripts/make_notebook.py        (pip install 'solrl_jax[docs]'; three minutes on two cores)
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
    """The cells of a file in the percent format: `# %%` begins one of code, `# %% [markdown]` one of text in comments."""
    made = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        text = body.strip("\n")
        if "[markdown]" in head:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            cell = nbformat.v4.new_markdown_cell(text)
        else:
            cell = nbformat.v4.new_code_cell(text)
        cell["id"] = f"cell-{number}"
        made.append(cell)
    return made


def unrun(source: str) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells(source), metadata=kernel)


def run(notebook: nbformat.NotebookNode) -> None:
    """Executes all cells in place. What is written to standard error is left out: times and warnings of this machine."""
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
    """The notebook in Markdown, and its pictures by file name. Each picture is described by the heading that it is under."""
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    made = sorted(
        resources["outputs"], key=lambda file: [int(number) for number in re.findall(r"\d+", file)]
    )
    renamed = {file: f"{name}-{i}.png" for i, file in enumerate(made)}
    found = {renamed[file]: resources["outputs"][file] for file in made}
    heading = ""
    lines = []
    for line in text.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        shown = re.fullmatch(r"!\[\w*\]\((.+)\)", line.strip())
        lines.append(
            f"![pictures of the step: {heading}]({renamed[shown[1]]})" if shown else line.rstrip()
        )
    return "\n".join(lines).strip() + "\n", found


def main() -> None:
    notebook = unrun(SOURCE.read_text())
    run(notebook)
    nbformat.write(notebook, NOTEBOOK)
    text, pictures = page(notebook, NOTEBOOK.stem)
    for old in NOTEBOOK.parent.glob(f"{NOTEBOOK.stem}-*.png"):
        old.unlink()
    for name, data in pictures.items():
        (NOTEBOOK.parent / name).write_bytes(data)
    NOTEBOOK.with_suffix(".md").write_text(text)
    print(f"{NOTEBOOK}: {len(notebook.cells)} cells, {len(pictures)} pictures", file=sys.stderr)


if __name__ == "__main__":
    main()
