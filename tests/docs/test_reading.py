"""README, tutorial and CONTRIBUTING can be read by a tired stranger: the Flesch-Kincaid grade of their prose, by textstat."""

import re

import pytest

from tests.docs.pages import DOCS, ROOT

textstat = pytest.importorskip("textstat", reason="pip install solrl_jax[docs]")
READ = [ROOT / "README.md", DOCS / "tutorial.md", ROOT / "CONTRIBUTING.md"]
MOST = 10.0  # years at school


def prose(text: str) -> str:
    """The sentences of a page: without tables, headings, pictures and blocks of code."""
    text = re.sub(
        r"^```.*?^```$|<[^>]+>|^(---|--8<--).*$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    parts = [part.strip() for part in re.split(r"\n\s*\n|\n- ", text)]
    linked = [
        re.sub(r"\[(.*?)\]\(.*?\)", r"\1", part)
        for part in parts
        if part and not part.startswith(("|", "#", "!["))
    ]
    plain = [" ".join(re.sub("[*>`]", "", part).split()) for part in linked]
    return "\n".join(
        part if part.endswith((".", "!", "?")) else part.rstrip(":;,") + "." for part in plain
    )


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_the_grade_is_low(page):
    text = prose(page.read_text())
    assert textstat.lexicon_count(text) > 250
    assert textstat.flesch_kincaid_grade(text) <= MOST


def test_hard_prose_is_noticed():
    hard = "Notwithstanding considerable heterogeneity, the aforementioned regularisation methodology demonstrates robustness."
    assert textstat.flesch_kincaid_grade(prose(hard)) > MOST
