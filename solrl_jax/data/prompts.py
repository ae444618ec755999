"""Prompt sets: reading prompt files, and the order in which a run uses the prompts."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from solrl_jax.config.values import brief_repr
from solrl_jax.data.hub_prompts import HUB, fetch_files, parse_reference
from solrl_jax.data.prompt_files import MAX_PROMPTS, TABLES, read_rows, read_text_file, split_column
from solrl_jax.errors import InputError

T = TypeVar("T", bound=str)
CONTROL_CHARACTERS = re.compile(r"[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
# The most characters of a prompt or an instruction. Text encoders read a few hundred words.
MAX_CHARACTERS = 20_000
# Begins the name of a prompt set that is shipped with the package.
EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "prompt_sets"


class Prompt(str):
    """The text of a prompt, with metadata for rewards that need more than the text.

    GenEval, for instance, needs the objects that it counts. As a `str`, a prompt is compared and
    hashed by its text alone.

    Attributes:
        metadata: What the prompt file says about the prompt beside its text: values of JSON by the
            name of the column or key. An empty mapping for `Prompt(text)`.
    """

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> "Prompt":
        """Makes a prompt, which is a `str`. The text is not checked.

        Args:
            text: The text.
            metadata: Values of JSON by name. The mapping is kept, not copied. None: an empty one.
        """
        prompt = super().__new__(cls, text)
        prompt.metadata = metadata or {}
        return prompt


def load_prompts(path: str, field: str, *, distinct: bool = True) -> list[Prompt]:
    """Reads the prompts of a file, in order.

    A text file has one prompt per line; blank lines are skipped. Files that end in .json, .jsonl,
    .ndjson, .jsonlines, .csv, .tsv or .parquet are parsed: the prompt is in the column that the
    path names, or else under the first of "prompt", "Prompt", "Prompts", "caption" and "text" that
    the file has, and everything else is metadata.

    Args:
        path: A file; "FILE:COLUMN" with the column or key of the prompts; "embedded:NAME" for a set
            that is shipped with the package; or "hub:OWNER/DATASET[:SPLIT][:COLUMN]" for a data set
            of the Hugging Face hub, which is downloaded unless it is in the hub's cache (without
            access to the hub, only the cache is used). The default split is "train" if there is
            one, else the only split. `~` is not expanded.
        field: The setting that names the file, e.g. "prompts.train", for messages.
        distinct: True: a repeated prompt is returned once, at its first place, with the metadata of
            its first row. False: all are returned, each with the metadata of its row.

    Returns:
        The prompts with their metadata, in the order of the file; at least one.

    Raises:
        InputError: If the set cannot be found or read, holds no prompt or more than 2**20, or has a
            prompt that cannot be used: a blank one (blank lines excepted), one with characters that
            `check_text` refuses, or one of more than 20,000 characters. Also, whatever `distinct`
            is, if a prompt is repeated with other metadata, except in tables (.csv, .tsv, .parquet)
            and data sets of the hub.
    """
    where = f"{field}={path!r}"
    if path.startswith(HUB):
        prompts = _hub_prompts(path, where)
        is_table = True
    else:
        if path.startswith(EMBEDDED):
            file = _embedded_file(path, where)
            column = None
        else:
            file, column = split_column(path)
        prompts = _read_prompts(file, column, where)
        is_table = file.suffix.lower() in TABLES
    if not prompts:
        raise InputError(f"{where}: holds no prompt; expected one per line")
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        same_metadata = first.setdefault(prompt, prompt).metadata == prompt.metadata
        if not same_metadata and not is_table:
            raise InputError(f"{where}: {str(prompt)!r} comes twice, with different metadata")
    return list(first.values()) if distinct else prompts


def _read_prompts(file: Path, column: str | None, where: str) -> list[Prompt]:
    """Reads all prompts of a file, with repetitions.

    Args:
        file: The file: .json, .jsonl, .ndjson, .jsonlines, .csv, .tsv, .parquet, or any other one
            as text with one prompt per line.
        column: The column or key of the prompts; None: the first of "prompt", "Prompt", "Prompts",
            "caption" and "text" that is there. No effect for text files.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        The prompts with their metadata in the order of the file; [] for a file without any.

    Raises:
        InputError: If the file cannot be read, or a text cannot be used as a prompt.
    """
    return [
        check_text(Prompt(row.text, row.metadata), f"{where}: {row.position}")
        for row in read_rows(file, column, where)
    ]


def _hub_prompts(path: str, where: str) -> list[Prompt]:
    """Reads all prompts of a split of a data set of the hub, with repetitions.

    Also downloads the files of the split, unless they are in the hub's cache.

    Args:
        path: "hub:OWNER/DATASET[:SPLIT][:COLUMN]". If the split is missing or empty, it is "train"
            or, without a split "train", the only one. If the column is missing or empty, it is the
            first of "prompt", "Prompt", "Prompts", "caption" and "text" that a file has.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The prompts of all files of the split with their metadata, in the order of the files' paths.

    Raises:
        InputError: If `path` is malformed; if the data set is not available or has no such split or
            column; if it has several splits, none of them "train", and `path` names none; if files
            of the split are missing, or have more than 4 GiB or 2**20 prompts together; or if a
            text cannot be used as a prompt.
    """
    reference = parse_reference(path, where)
    prompts: list[Prompt] = []
    for file in fetch_files(reference, where):
        prompts += _read_prompts(file, reference.column, f"{where}: {file.name}")
        if len(prompts) > MAX_PROMPTS:
            raise InputError(f"{where}: more than {MAX_PROMPTS} prompts")
    return prompts


def check_text(text: T, where: str) -> T:
    """Returns `text` itself if it can be used as a prompt.

    Control characters (Unicode category Cc) are refused, because prompts are printed and a terminal
    would obey them. Those that are white space, such as tabs and line feeds, are accepted, and so
    is an empty text.

    Args:
        text: A prompt or an instruction.
        where: The place that the text comes from, with which a message begins, e.g.
            "prompts.train='a.txt': line 3".

    Raises:
        InputError: If the text is longer than 20,000 characters (`MAX_CHARACTERS`), or has control
            characters or characters that UTF-8 cannot encode.
    """
    encodable = text.encode(errors="replace").decode() == text
    if len(text) > MAX_CHARACTERS or CONTROL_CHARACTERS.search(text) or not encodable:
        raise InputError(
            f"{where}: {brief_repr(str(text[:80]))}: expected text of up to {MAX_CHARACTERS}"
            " characters without control characters"
        )
    return text


def load_instruction(path: str, field: str) -> str:
    """Reads the instruction that precedes every prompt.

    Args:
        path: The path of a UTF-8 text file. `~` is not expanded.
        field: The setting that names the file, e.g. "model.instruction", for messages.

    Returns:
        The text of the file without one line feed at its end. Other white space stays. Nothing is
        put between this text and a prompt.

    Raises:
        InputError: If the file does not exist, cannot be read as UTF-8 text or is blank, or if the
            text has more than 20,000 characters, or control characters other than white space such
            as line feeds.
    """
    where = f"{field}={path!r}"
    text = read_text_file(Path(path), where, "a text file with the instruction").removesuffix("\n")
    if not text.strip():
        raise InputError(f"{where}: holds no instruction")
    return check_text(text, where)


def draw_prompts(prompts: Sequence[T], seed: int, iteration: int, count: int) -> list[T]:
    """Returns the prompts of one iteration.

    Every epoch goes through all prompts in a new random order, without repetition. Prompts at its
    end that do not fill an iteration are left out. The result depends on the arguments alone, so a
    resumed run needs no position in the prompt set.

    Args:
        prompts: The prompt set, at least `count` prompts.
        seed: The seed of the order, not negative.
        iteration: The index of the iteration, from 0, one less than its number in the run.
        count: The number of prompts per iteration, at least 1 and at most `len(prompts)`.

    Returns:
        `count` entries of `prompts` from different positions, in the drawn order.

    Raises:
        ZeroDivisionError: If there are fewer than `count` prompts, or if `count` is 0.
    """
    iterations_per_epoch = len(prompts) // count
    epoch, position = divmod(iteration, iterations_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    return [prompts[i] for i in order[position * count : (position + 1) * count]]


def _embedded_file(path: str, where: str) -> Path:
    """Returns the file of an embedded prompt set.

    Args:
        path: The name of the set with the prefix "embedded:", e.g. "embedded:shapes-train".
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        The .txt or .jsonl file of this name in the package.

    Raises:
        InputError: If there is none of this name. The message lists the names.
    """
    files = [file for file in EMBEDDED_FOLDER.iterdir() if file.suffix in (".txt", ".jsonl")]
    by_name = {f"{EMBEDDED}{file.stem}": file for file in files}
    if path not in by_name:
        names = ", ".join(sorted(by_name))
        raise InputError(f"{where}: no such embedded prompt set; expected one of {names}")
    return by_name[path]
