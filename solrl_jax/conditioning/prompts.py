"""Prompt sets: files of one prompt a line, the order in which a run goes through them, and what goes before each prompt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from solrl_jax.storage.errors import InputError

T = TypeVar("T", bound=str)
EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "prompt_sets"


class Prompt(str):
    """A prompt is its text. `metadata` is what rewards are told beside it (as GenEval's counts and colours), mostly nothing."""

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.metadata = metadata or {}
        return prompt


def load_prompts(path: str, field: str, *, distinct: bool = True) -> list[Prompt]:
    """The prompts of a file, in order, each once if `distinct`; blank lines are skipped. Errors name `field`.

    A text file has a prompt a line. A `.jsonl` file has an object a line, as GenEval's: its "prompt", all else being metadata.
    Raises InputError when the file is absent, not text, holds no prompt, or has other metadata where a prompt comes again.
    """
    where = f"{field}={path!r}"
    file = _embedded(path, where) if path.startswith(EMBEDDED) else Path(path)
    parse = _parse_json if file.suffix == ".jsonl" else lambda line, where: Prompt(line)
    prompts = [parse(line, f"{where}: line {n}") for n, line in enumerate(_lines(file, where), start=1) if line]
    if not prompts:
        raise InputError(f"{where}: holds no prompt; expected one a line")
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if first.setdefault(prompt, prompt).metadata != prompt.metadata:
            raise InputError(f"{where}: {str(prompt)!r} comes twice, with different metadata")
    return list(first.values()) if distinct else prompts


def _embedded(path: str, where: str) -> Path:
    files = {EMBEDDED + p.stem: p for p in EMBEDDED_FOLDER.iterdir() if p.suffix in (".txt", ".jsonl")}
    if path not in files:
        raise InputError(f"{where}: no such embedded prompt set; there are {', '.join(sorted(files))}")
    return files[path]


def _lines(file: Path, where: str) -> list[str]:
    """The lines of a text file, without what surrounds them."""
    try:
        # a byte-order mark is no part of the first prompt; a line ends where an editor ends it, not at the likes of U+2028
        return [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected a text file of one prompt a line, or .jsonl") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error


def _parse_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not value["prompt"].strip():
        raise InputError(f'{where}: expected an object with the text under "prompt"')
    return Prompt(value.pop("prompt").strip(), value)


def load_instruction(path: str, field: str) -> str:
    """The text of a file, to be put before every prompt; the end of its last line is no part of it. Errors name `field`.

    Raises InputError when the file is absent, not text, or blank.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")
    except FileNotFoundError:
        raise InputError(f"{field}={path!r}: no such file; expected a text file that holds the instruction") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{field}={path!r}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise InputError(f"{field}={path!r}: holds no instruction")
    return text


def draw_prompts(prompts: Sequence[T], seed: int, iteration: int, count: int) -> list[T]:
    """The `count` prompts of iteration `iteration` (from 0): every epoch goes through all, in an order of its own.

    A function of its arguments alone, so that the cursor is the iteration. Iterations are disjoint within an epoch; what
    is left of an epoch when fewer than `count` remain is dropped, so that no iteration has a prompt twice.
    """
    an_epoch = len(prompts) // count
    epoch, position = divmod(iteration, an_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    return [prompts[i] for i in order[position * count : (position + 1) * count]]
