"""The site: it builds without a warning, its links lead somewhere, and it loads nothing from
elsewhere.
"""

import html.parser
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT

pytestmark = pytest.mark.slow
zensical = pytest.importorskip("zensical", reason="pip install solrl_jax[docs]")
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("source", "src"),
    ("iframe", "src"),
    ("image", "href"),
}


def copied(to: Path) -> Path:
    """What the site is built of, in a folder of its own: a build writes beside its
    configuration.
    """
    shutil.copytree(DOCS, to / "docs")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, to)
    (to / "solrl_jax").symlink_to(ROOT / "solrl_jax")
    return to


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


class Page(html.parser.HTMLParser):
    """What a built page points at, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.tags: defaultdict[str, list[dict[str, str | None]]] = defaultdict(list)
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags[tag].append(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}
        for name, value in attrs:
            if (
                value
                and (tag, name) in LOADED
                and attributes.get("rel") not in ("canonical", "prev", "next")
            ):
                self.loaded.append(value)
            if value and (tag, name) == ("a", "href"):
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages by path, and what the generator said."""
    folder = copied(tmp_path_factory.mktemp("site"))
    process = build(folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return (
        folder / "site",
        {path: Page(path) for path in (folder / "site").glob("*.html")},
        process.stdout + process.stderr,
    )


def test_nothing_is_warned_of(site):
    assert "griffe" not in site[2]  # of a docstring that does not say what the reference needs
    assert "No issues found" in site[2]


@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    folder = copied(tmp_path)
    with (folder / "docs" / "faq.md").open("a") as page:
        page.write("\n[nowhere](not-there.md)\n")
    assert build(folder).returncode != 0


def test_every_page_is_in_the_navigation():
    """A new page needs a line under `nav` in mkdocs.yml."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = re.findall(r"[\w-]+\.md", str(nav))
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))


def test_links_inside_lead_to_pages_and_anchors(site):
    pages = site[1]
    wrong = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        for link in page.links:
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:", link):
                continue
            destination = path if not target else (path.parent / unquote(target)).resolve()
            destination = destination / "index.html" if destination.is_dir() else destination
            if not destination.is_file() or (
                anchor and destination in pages and anchor not in pages[destination].anchors
            ):
                wrong.append((path.name, link))
    assert not wrong
    assert sum(len(page.links) for page in pages.values()) > 500


def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in site[1].items():
        assert [address for address in page.loaded if re.match(r"(https?:)?//", address)] == [], (
            path.name
        )
    styles = "".join(path.read_text() for path in site[0].rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?https?://", styles)


def test_pages_can_be_read_aloud(site):
    for path, page in site[1].items():
        assert all(image.get("alt") for image in page.tags["img"]), path.name
        assert not re.search(r"<th[^>]*>\s*</th>", path.read_text()), path.name
        assert page.tags["html"][0].get("lang") == "en"
        assert len(page.tags["h1"]) == 1 or path.name in ("404.html", "contributing.html"), (
            path.name
        )


def test_the_reference_has_every_public_name():
    import solrl_jax

    reference = set(
        re.findall(r"^::: solrl_jax\.[\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    )
    assert reference == set(solrl_jax.__all__) - {"__version__"}
