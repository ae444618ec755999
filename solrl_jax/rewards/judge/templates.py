"""The questions that a judge is asked: those of the package, by name, and files of users.

A question is a text in which `{prompt}` stands for the prompt of the image. The images come before
it.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from solrl_jax.data.prompt_files import read_text_file
from solrl_jax.data.prompts import check_text
from solrl_jax.errors import InputError

FOLDER = Path(__file__).parents[2] / "assets" / "judge"
PLACEHOLDER = "{prompt}"

Criteria = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Template:
    """A question, and how its answer is scored.

    Attributes:
        text: The question, in which {prompt} stands for the prompt of the image. It need not occur,
            as in a question about aesthetics.
        score: How an answer is scored if the option `score` of the judge is None: "digits" (the
            mean of the digits in the range of the option `scale`, each weighted by its probability
            as the first token of the answer), "yes" (the probability of yes against no), "json"
            (the mean of the numbers in its JSON object, one per criterion) or "preference" (the
            probability that the first of two images is preferred). Numbers are scaled from their
            range to [0, 1]. None: the question is a user's, and the option must be set.
        criteria: For "json", (lowest, highest) number of each criterion by its name, which apply if
            the option `criteria` is empty. Empty: the question has none of its own.
    """

    text: str
    score: str | None
    criteria: Criteria


# How the answers to the questions of the package are scored.
SCORES = {
    "alignment": "yes",
    "alignment-digits": "digits",
    "text": "yes",
    "aesthetics": "digits",
    "rubric": "json",
    "preference": "preference",
}
# In the manner of UnifiedReward, which rates several aspects at once.
RUBRIC: Criteria = MappingProxyType(
    {"alignment": (1.0, 5.0), "coherence": (1.0, 5.0), "style": (1.0, 5.0)}
)


def read_template(prompt: str, field: str) -> Template:
    """Reads the question that a judge is asked.

    Args:
        prompt: A name in `SCORES` ("alignment", "alignment-digits", "text", "aesthetics", "rubric"
            or "preference"), or a UTF-8 text file. A name wins over a file of this name.
        field: The setting that names it, e.g. "reward.options.judge.prompt", for messages.

    Returns:
        The question, without white space at its ends. That of a file has no `score` and no
        criteria.

    Raises:
        InputError: If there is no such question or file; if the file is blank, no UTF-8 text,
            longer than 20,000 characters or has control characters other than white space; or if
            its placeholder seems misspelt: it has a word in braces, such as {caption}, and no
            {prompt} (`PLACEHOLDER`).
    """
    if prompt in SCORES:
        text = (FOLDER / f"{prompt}.txt").read_text(encoding="utf-8").strip()
        return Template(text, SCORES[prompt], RUBRIC if prompt == "rubric" else {})
    where = f"{field}={prompt!r}"
    expected = f"one of {', '.join(SCORES)}, or a text file with the question"
    text = read_text_file(Path(prompt), where, expected).strip()
    if not text:
        raise InputError(f"{where}: holds no question")
    other = re.search(r"\{\w+\}", text)
    if other is not None and PLACEHOLDER not in text:
        raise InputError(f"{where}: has {other[0]} and no {PLACEHOLDER}, which stands for a prompt")
    return Template(check_text(text, where), None, {})
