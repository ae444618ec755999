"""Prompt sets: reading prompt files, and the order in which a run uses the prompts."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError
from solrl_jax.storage.readers import parse_json, read_text

T = TypeVar("T", bound=str)
CONTROL_CHARACTERS = re.compile(r"[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
MAX_CHARACTERS = 20_000  # of a prompt or an instruction; text encoders read a few hundred words
MAX_PROMPTS = 2**20  # lines of a prompt file
EMBEDDED = "embedded:"  # begins the name of a prompt set that is shipped with the package
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "prompt_sets"


class Prompt(str):
    """The text of a prompt, with metadata for rewards that need more than the text.

    GenEval, for instance, needs the objects that it counts.

    Args:
      text: the prompt.
      metadata: any values of JSON by name. None: no metadata.
    """

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.metadata = metadata or {}
        return prompt


def load_prompts(path: str, field: str, *, distinct: bool = True) -> list[Prompt]:
    """Reads the prompts of a file, in order. Blank lines are skipped.

    A text file has one prompt per line. A `.jsonl` file has one JSON object per line, as GenEval's:
    the text under "prompt", and everything else is metadata.

    Args:
      path: a file, or "embedded:NAME" for a set that is shipped with the package.
      field: the setting or option that names the file, for messages.
      distinct: whether a prompt that is repeated is returned only once.

    Raises:
      InputError: if the file does not exist, is not text, holds no prompt or too many, or repeats
        one with other metadata.
    """
    where = f"{field}={path!r}"
    file = _embedded_file(path, where) if path.startswith(EMBEDDED) else Path(path)
    is_json = file.suffix == ".jsonl"
    text = _read_text(file, where, "a text file with one prompt per line, or .jsonl")
    # `splitlines` would also split at characters such as U+2028, at which editors do not.
    lines = text.split("\n")
    if len(lines) > MAX_PROMPTS:
        raise InputError(f"{where}: more than {MAX_PROMPTS} lines")
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            line_name = f"{where}: line {number}"
            stripped = line.strip()
            prompt = _parse_json_prompt(stripped, line_name) if is_json else Prompt(stripped)
            prompts.append(check_text(prompt, line_name))
    if not prompts:
        raise InputError(f"{where}: holds no prompt; expected one per line")
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if first.setdefault(prompt, prompt).metadata != prompt.metadata:
            raise InputError(f"{where}: {str(prompt)!r} comes twice, with different metadata")
    return list(first.values()) if distinct else prompts


def check_text(text: T, where: str) -> T:
    """Returns `text` if it can be used as a prompt.

    Control characters are refused, because prompts are printed and a terminal would obey them.

    Args:
      text: a prompt or an instruction.
      where: where the text comes from, for messages.

    Raises:
      InputError: if the text is longer than 20,000 characters, or has control characters or
        characters that UTF-8 cannot encode.
    """
    encodable = text.encode(errors="replace").decode() == text
    if len(text) > MAX_CHARACTERS or CONTROL_CHARACTERS.search(text) or not encodable:
        raise InputError(
            f"{where}: {brief_repr(str(text[:80]))}: expected text of up to {MAX_CHARACTERS}"
            " characters without control characters"
        )
    return text


def load_instruction(path: str, field: str) -> str:
    """Reads the instruction that precedes every prompt, without the end of its last line.

    Args:
      path: a text file.
      field: the setting or option that names the file, for messages.

    Raises:
      InputError: if the file does not exist, is not text, or is blank.
    """
    where = f"{field}={path!r}"
    text = _read_text(Path(path), where, "a text file with the instruction").removesuffix("\n")
    if not text.strip():
        raise InputError(f"{where}: holds no instruction")
    return check_text(text, where)


def draw_prompts(prompts: Sequence[T], seed: int, iteration: int, count: int) -> list[T]:
    """The prompts of one iteration.

    Every epoch goes through all prompts in a new random order, without repetition; prompts at its
    end that do not fill an iteration are left out. The result depends on the arguments alone, so a
    resumed run needs no position in the prompt set.

    Args:
      prompts: the prompt set, at least `count` prompts.
      seed: the seed of the order.
      iteration: the index of the iteration, from 0.
      count: the number of prompts per iteration.
    """
    iterations_per_epoch = len(prompts) // count
    epoch, position = divmod(iteration, iterations_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    return [prompts[i] for i in order[position * count : (position + 1) * count]]


def _embedded_file(path: str, where: str) -> Path:
    """The file of an embedded prompt set. Raises InputError if there is none of this name."""
    files = [file for file in EMBEDDED_FOLDER.iterdir() if file.suffix in (".txt", ".jsonl")]
    by_name = {f"{EMBEDDED}{file.stem}": file for file in files}
    if path not in by_name:
        names = ", ".join(sorted(by_name))
        raise InputError(f"{where}: no such embedded prompt set; expected one of {names}")
    return by_name[path]


def _read_text(file: Path, where: str, expected: str) -> str:
    """The content of a text file, without a byte-order mark.

    Raises InputError that says what is `expected`.
    """
    try:
        return read_text(file)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error


def _parse_json_prompt(line: str, where: str) -> Prompt:
    """The prompt in a line of a .jsonl file. Raises InputError that begins with `where`."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    text = value.pop("prompt", None) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InputError(f'{where}: expected an object with the text under "prompt"')
    return Prompt(text.strip(), value)
