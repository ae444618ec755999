"""What the pages of the site print: blocks of code, and the commands in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    title: str  # the file that the reader is to write it to, if it has one
    body: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    matches = re.findall(
        r"^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [Block(*parts) for parts in matches]


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page, as a shell splits them, in order. What follows a # is left
    out.
    """
    lines = [
        line
        for block in blocks(page)
        if block.language in ("", "sh")
        for line in block.body.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
