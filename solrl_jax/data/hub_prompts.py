"""Prompt sets on the Hugging Face hub: `hub:OWNER/DATASET[:SPLIT][:COLUMN]`.

The files of a split are found as the `datasets` library finds them: by the metadata of the data
set's card, else by the names of the files. Only those files are downloaded, to the hub's cache.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fsspec.utils import glob_translate

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompt_files import ENDINGS
from solrl_jax.errors import InputError
from solrl_jax.storage import hub

# Begins the name of a prompt set on the hub.
HUB = "hub:"
FORM = "hub:OWNER/DATASET[:SPLIT][:COLUMN]"
# The most bytes of the files of a split. A set of prompts with images is often a thousand times
# larger, and is more likely a mistake than a wish.
MAX_BYTES = 4 * 2**30
DATA_ENDINGS = (".parquet", *(ending for ending in ENDINGS if ending != ".parquet"), ".txt")
# Files that describe a data set and hold no rows of it.
METADATA_FILES = ("dataset_infos.json", "dataset_info.json", "state.json", "requirements.txt")
# Words in the path of a file, between characters that are no letters or digits, and their split.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
SHARD = re.compile(r"(?:^|/)(?P<split>[\w.]+)-\d+-of-(?P<count>\d+)(?:-[0-9a-f]+)?\.\w+$")
# "**" at the start of a longer part, e.g. "**.csv", and "**" elsewhere in a part. Older clients of
# the hub accepted such patterns, and `glob_translate` does not.
LEADING_STARS = re.compile(r"(^|/)\*\*(?=[^/])")
STARS = re.compile(r"(?<=[^/*])\*{2,}")


class Reference(NamedTuple):
    """What `hub:OWNER/DATASET[:SPLIT][:COLUMN]` names.

    Attributes:
        repository: The data set, OWNER/DATASET.
        split: The name of the split; None: "train" if there is one, else the only split.
        column: The column of the prompts, or the key in JSON objects; None: for each file, the
            first of "prompt", "Prompt", "Prompts", "caption" and "text" that it has. No effect for
            text files.
    """

    repository: str
    split: str | None
    column: str | None


def parse_reference(path: str, where: str) -> Reference:
    """Splits the name of a prompt set on the hub into its parts. The hub is not asked.

    Args:
        path: The text, which begins with "hub:". An empty split or column counts as none, so
            "hub:OWNER/DATASET::COLUMN" names a column of the default split. A column may have
            colons.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The parts, with None for a split or column that is not named.

    Raises:
        InputError: If the first part is not of the form OWNER/DATASET.
    """
    repository, split, column = [*path.removeprefix(HUB).split(":", 2), "", ""][:3]
    if not hub.is_name(repository):
        raise InputError(f"{where}: {brief_repr(repository)} is no name OWNER/DATASET; use {FORM}")
    return Reference(repository, split or None, column or None)


def fetch_files(reference: Reference, where: str) -> list[Path]:
    """Returns the files of a split of a data set, and downloads those that are not in the local
    cache.

    Also downloads the data set's card (README.md). Without access to the hub, the files in the
    cache are used.

    Args:
        reference: The data set and the name of its split; None: "train" if there is one, else the
            only split. The column is not read.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The local files in the order of their paths in the repository, at least one.

    Raises:
        InputError: If the data set or the split does not exist or has no files of prompts, no split
            is named although there are several and none is "train", files of a numbered series are
            missing, files are neither on the hub nor in the cache, or the files of the split, in
            the cache or not, have more than 4 GiB together, which is checked before they are
            downloaded.
    """
    name = reference.repository
    sizes = _list_files(name, where)
    card = [file for file in sizes if file == "README.md"]
    folder = _snapshot(name, card, where) if card else None
    splits = find_splits(list(sizes), {} if folder is None else hub.read_card(folder, "dataset"))
    files = _choose_split(splits, reference, where)
    total = sum(sizes[file] for file in files)
    if total > MAX_BYTES:
        raise InputError(
            f"{where}: its files take {total / 1e9:.3g} GB; expected prompts without images, at"
            f" most {MAX_BYTES / 1e9:.3g} GB"
        )
    folder = _snapshot(name, [*card, *files], where)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise InputError(f"{where}: {missing[0]} is not in the hub's cache ({folder})")
    return [folder / file for file in files]


def find_splits(files: Sequence[str], card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Finds which files of a data set hold which split, much as the library `datasets` does.

    Only prompt files count: .parquet, .json, .jsonl, .ndjson, .jsonlines, .csv, .tsv and .txt
    (`DATA_ENDINGS`), without hidden files, files in hidden folders, and those that describe the
    data set, such as dataset_infos.json (`METADATA_FILES`).

    If the data set's card declares its files by split (`data_files` in its `configs`, of which only
    the default one or else the first is read), the declared patterns decide; splits without a
    matching file are left out. Otherwise only the files with the most frequent ending count, and
    their names decide. If several endings are equally frequent, the first in `DATA_ENDINGS` wins;
    ".json" and ".jsonl" are different endings. "NAME-00000-of-00002.parquet" belongs to the split
    NAME (letters, digits, "_" and "." only), and another file to the split that a word of its path
    mentions (`SPLIT_WORDS`), e.g. "val" for "validation". If no file mentions a split, all belong
    to "train"; if only some do, the others are left out.

    Args:
        files: The paths of all files of the repository, with "/" between the parts.
        card: The metadata of the data set's card, the YAML at the top of README.md, by name. Only
            "configs" is read. It may be empty.

    Returns:
        The sorted paths of the files by the name of their split, e.g. {"test": ["data/test.csv"]};
        at least one path each. {} if there are no prompt files, or none that a declared pattern
        matches.
    """
    data = [
        file
        for file in files
        if PurePosixPath(file).suffix.lower() in DATA_ENDINGS
        and PurePosixPath(file).name not in METADATA_FILES
        and not any(part.startswith(".") for part in PurePosixPath(file).parts)
    ]
    declared = _declared_splits(card)
    if declared:
        matches = {}
        for split, patterns in declared.items():
            expressions = [_compile_glob(pattern) for pattern in patterns]
            matches[split] = sorted(f for f in data if any(e.match(f) for e in expressions))
        return {split: paths for split, paths in matches.items() if paths}
    counts = Counter(PurePosixPath(file).suffix.lower() for file in data)
    if not counts:
        return {}
    ending = max(counts, key=lambda suffix: (counts[suffix], -DATA_ENDINGS.index(suffix)))
    by_split: dict[str | None, list[str]] = {}
    for file in sorted(data):
        if PurePosixPath(file).suffix.lower() == ending:
            by_split.setdefault(_split_of(file), []).append(file)
    named = {split: paths for split, paths in by_split.items() if split is not None}
    return named or {"train": by_split[None]}


def _compile_glob(pattern: str) -> re.Pattern[str]:
    """Translates a glob pattern of a data set's card to a regular expression.

    The rules are those of the hub's client: "*", "?" and "[...]" do not match a "/". The part "**"
    matches any number of folders, also none (at the end of the pattern at least one part).
    "**.csv" is read as "**/*.csv".

    Args:
        pattern: The pattern of a path, from the top of the repository, e.g. "data/**/train-*".

    Returns:
        The expression, whose `match` accepts only the whole path of a file, with "/" between its
        parts.
    """
    return re.compile(glob_translate(STARS.sub("*", LEADING_STARS.sub(r"\1**/*", pattern))))


def _split_of(file: str) -> str | None:
    """Returns the split that the path of a file mentions, or None if it mentions none.

    For "FOLDER/NAME-00000-of-00002.ENDING" it is NAME as it is, if that has letters, digits, "_"
    and "." alone. Otherwise the last word of the path that is in `SPLIT_WORDS` decides, in any case
    of letters; "val" and "dev", for instance, stand for "validation". A word is a run of letters
    and digits, so "train2" mentions no split.

    Args:
        file: The path in the repository, folders included.
    """
    shard = SHARD.search(file)
    if shard:
        return shard["split"]
    words = re.split(r"[^a-z0-9]+", file.lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)


def _declared_splits(card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the splits that the card of a data set declares, as patterns of file names.

    A card has a list `configs`. Only one of its entries with `data_files` is read: the first that
    has `default: true` or `config_name: default`, or the first of all if none has. Its `data_files`
    is an object of patterns by split, a list of objects with "split" and "path" (the patterns), or
    patterns alone, whose files belong to "train". Patterns are a text or a list of texts. Entries
    of other forms are left out. If a list names a split twice, its last entry counts.

    Args:
        card: The metadata of the card by name. Only "configs" is read.

    Returns:
        By the name of each split, glob patterns of whole paths from the top of the repository, e.g.
        {"train": ["data/train-*"]}. The entry's `data_dir` is put in front. {} if no files are
        declared.
    """
    configs = card.get("configs")
    if not isinstance(configs, list):
        return {}
    configs = [config for config in configs if isinstance(config, dict) and "data_files" in config]
    if not configs:
        return {}
    default = next(
        (c for c in configs if c.get("default") is True or c.get("config_name") == "default"),
        configs[0],
    )
    data_files = default["data_files"]
    entries: Iterable[tuple[Any, Any]]
    if isinstance(data_files, dict):
        entries = data_files.items()
    elif isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        entries = [(entry.get("split"), entry.get("path")) for entry in data_files]
    else:
        entries = [("train", data_files)]
    folder = str(default.get("data_dir") or "").strip("/")
    splits: dict[str, list[str]] = {}
    for split, paths in entries:
        listed = paths if isinstance(paths, list) else [paths]
        patterns = [path for path in listed if isinstance(path, str)]
        if isinstance(split, str) and patterns:
            splits[split] = [
                posixpath.normpath(f"{folder}/{path}".lstrip("/")) for path in patterns
            ]
    return splits


def _choose_split(splits: Mapping[str, list[str]], reference: Reference, where: str) -> list[str]:
    """Returns the files of the split that a reference names.

    Args:
        splits: The sorted paths of the files of each split, by its name.
        reference: The reference, of which the field `split` is read: the name of the split, a key
            of `splits` ("val" is not "validation"). None: "train" if there is one, or the only
            split.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The sorted paths of the files in the repository, at least one.

    Raises:
        InputError: If `splits` is empty or has no such split, if there are several without "train"
            and none is named, or if files of a numbered series are missing, e.g. if there is only
            "NAME-00000-of-00002.parquet".
    """
    if not splits:
        raise InputError(
            f"{where}: the data set has no files that end in {', '.join(DATA_ENDINGS)}"
        )
    known = ", ".join(sorted(splits))
    split = reference.split
    if split is None:
        split = "train" if "train" in splits else next(iter(splits))
        if len(splits) > 1 and split != "train":
            raise InputError(f"{where}: name one of its splits ({known}) as {FORM}")
    if split not in splits:
        raise InputError(f"{where}: no split {split!r}; there are {known}")
    files = splits[split]
    shards = [shard for shard in map(SHARD.search, files) if shard]
    # By the path before the number, because a split may have several series of files.
    series = Counter((shard.string[: shard.end("split")], shard["count"]) for shard in shards)
    for (path, count), num_files in series.items():
        if num_files < int(count):
            raise InputError(
                f"{where}: only {num_files} of the {int(count)} files {path}-*-of-{count} of the "
                f"split {split!r} are there"
            )
    return files


def _list_files(name: str, where: str) -> dict[str, int]:
    """Lists the files of a data set on the hub. If the hub gives no list, for any reason, those in
    the local cache are listed.

    Args:
        name: The data set, OWNER/DATASET.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The size in bytes of each file by its path in the repository. Sizes that the hub does not
        give are 0.

    Raises:
        InputError: If the hub gives no list, and the cache does not have the data set.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        siblings = HfApi().dataset_info(name, files_metadata=True).siblings or []
        return {file.rfilename: file.size or 0 for file in siblings}
    except Exception as error:  # the client raises a dozen unrelated types
        problem = error
    try:  # without patterns, a snapshot with the files of one split would count as incomplete
        folder = Path(
            snapshot_download(name, repo_type="dataset", local_files_only=True, allow_patterns=[])
        )
    except Exception:
        raise hub.unavailable(where + ":", problem) from problem
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _snapshot(name: str, files: Sequence[str], where: str) -> Path:
    """Downloads files of a data set to the hub's cache, unless they are there.

    Args:
        name: The data set, OWNER/DATASET.
        files: The paths of the files in the repository. Those that do not exist are left out.
        where: The start of messages: the setting and its value, e.g. "prompts.train='hub:a/b'".

    Returns:
        The local directory of the newest revision, which has the files. If the hub cannot be
        reached or refuses, the directory of the newest revision in the cache, where some of the
        files may be missing.

    Raises:
        InputError: If the hub cannot be reached or refuses, and the cache has no revision; or if a
            download fails.
    """
    return hub.snapshot(name, lambda: files, f"{where}:", repo_type="dataset")
