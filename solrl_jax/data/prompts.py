"""Prompt sets: files with one prompt a line, the order in which a run draws them, and the instruction before each prompt."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError
from solrl_jax.storage.readers import parse_json, read_text

T = TypeVar("T", bound=str)
CONTROLS = re.compile(r"[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
MOST_CHARACTERS = 20_000  # of a prompt or an instruction; encoders read some hundred words
MOST_LINES = (
    2**20
)  # of a prompt file; in all of a .jsonl file also as many lists and objects, which take the most memory
EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "prompt_sets"


class Prompt(str):
    """The text of a prompt, and `metadata` for rewards that need more, such as GenEval's counts and colours."""

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.metadata = metadata or {}
        return prompt


def load_prompts(path: str, field: str, *, distinct: bool = True) -> list[Prompt]:
    """The prompts of a file, in order. Blank lines are skipped.

    A text file has one prompt a line. A `.jsonl` file has one object a line, as GenEval's: "prompt", and metadata.

    Args:
      path: a file, or "embedded:NAME".
      field: the setting that names the file, for messages.
      distinct: return a prompt that is repeated once.

    Raises InputError if the file is absent, is not text, holds no or too many prompts, or repeats one with other metadata.
    """
    where = f"{field}={path!r}"
    file = _embedded(path, where) if path.startswith(EMBEDDED) else Path(path)
    json = file.suffix == ".jsonl"
    parse = _parse_json if json else lambda line, where: Prompt(line)
    text = _read_text(file, where, "a text file of one prompt a line, or .jsonl")
    if text.count("\n") > MOST_LINES or (json and text.count("[") + text.count("{") > MOST_LINES):
        raise InputError(
            f"{where}: more than {MOST_LINES} lines{', or lists and objects in them' if json else ''}"
        )
    # `splitlines` would also split at U+2028 and others, at which editors do not
    numbered = (
        (f"{where}: line {n}", line.strip()) for n, line in enumerate(text.split("\n"), start=1)
    )
    prompts = [plain(parse(line, at), at) for at, line in numbered if line]
    if not prompts:
        raise InputError(f"{where}: holds no prompt; expected one a line")
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if first.setdefault(prompt, prompt).metadata != prompt.metadata:
            raise InputError(f"{where}: {str(prompt)!r} comes twice, with different metadata")
    return list(first.values()) if distinct else prompts


def plain(text: T, where: str) -> T:
    """The text. Raises InputError unless it is of a length that somebody wrote, and of characters that files can hold.

    Controls that a terminal obeys are refused: prompts that are shown must not act.
    """
    if (
        len(text) > MOST_CHARACTERS
        or CONTROLS.search(text)
        or text.encode(errors="replace").decode() != text
    ):
        raise InputError(
            f"{where}: {brief_repr(str(text[:80]))} is no text of up to {MOST_CHARACTERS} characters without controls"
        )
    return text


def _embedded(path: str, where: str) -> Path:
    files = {
        EMBEDDED + p.stem: p for p in EMBEDDED_FOLDER.iterdir() if p.suffix in (".txt", ".jsonl")
    }
    if path not in files:
        raise InputError(
            f"{where}: no such embedded prompt set; there are {', '.join(sorted(files))}"
        )
    return files[path]


def _read_text(file: Path, where: str, expected: str) -> str:
    """The content of a text file, without a byte-order mark. Raises InputError, which says what is expected."""
    try:
        return read_text(file)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error


def _parse_json(line: str, where: str) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("prompt"), str)
        or not value["prompt"].strip()
    ):
        raise InputError(f'{where}: expected an object with the text under "prompt"')
    return Prompt(value.pop("prompt").strip(), value)


def load_instruction(path: str, field: str) -> str:
    """The text of a file, which goes before every prompt; without the last end of line.

    field: the setting that names the file, for messages. Raises InputError if the file is absent, not text, or blank.
    """
    text = _read_text(
        Path(path), f"{field}={path!r}", "a text file that holds the instruction"
    ).removesuffix("\n")
    if not text.strip():
        raise InputError(f"{field}={path!r}: holds no instruction")
    return plain(text, f"{field}={path!r}")


def draw_prompts(prompts: Sequence[T], seed: int, iteration: int, count: int) -> list[T]:
    """The `count` prompts of an iteration, from 0. Every epoch goes through all prompts, in a new order.

    The result depends on the arguments alone, so a resumed run needs no cursor. Within an epoch no prompt is drawn twice. If
    fewer than `count` prompts are left in an epoch, they are dropped.
    """
    an_epoch = len(prompts) // count
    epoch, position = divmod(iteration, an_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    return [prompts[i] for i in order[position * count : (position + 1) * count]]
