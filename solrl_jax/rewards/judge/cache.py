"""A cache of a judge's scores, in one SQLite file that all processes of a host share.

A key is a hash of everything that a score depends on (the prompt, the images and `Judge.identity`),
so the file can be copied and removed. A key identifies the model by its name alone. If the endpoint
starts to serve another model under the same name, remove the file.
"""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_jax.rewards.host import ScoringFailure
from solrl_jax.storage.readers import parse_json

FILE = "scores.sqlite"
# Part of every key. Increase it when a change of the code scores the same request differently.
VERSION = 1
# Seconds that a process waits for another one that writes.
LOCK_TIMEOUT = 30.0


def cache_key(identity: Mapping[str, Any], prompt: str, images: list[str]) -> str:
    """Returns the key under which the cache stores the scores of a request.

    Args:
        identity: Everything that a score depends on besides the prompt and the images, as JSON
            values by name: the model, the question and further options (`Judge.identity`). The
            order of its keys has no effect.
        prompt: The prompt of the image or pair.
        images: A hash of the pixels of each image, in order: one, or two that are compared.

    Returns:
        A SHA-256 hash of the arguments, 64 hexadecimal digits.

    Raises:
        TypeError: If `identity` holds something that JSON cannot represent.
    """
    content = [VERSION, identity, prompt, images]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Cache:
    """The scores of a judge on disk, by request key: a SQLite file `scores.sqlite` in a directory.

    The constructor creates both if missing, and raises ScoringFailure if it cannot. Several
    processes may use the same file at once. Entries are never removed, and there is no limit on
    their number. An object may only be used in the thread that created it. Calls in other threads
    raise ScoringFailure.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the cache. Also creates the directory and the file `scores.sqlite` if missing.

        The file gets SQLite's write-ahead log: while it is open, `scores.sqlite-wal` and
        `scores.sqlite-shm` are beside it.

        Args:
            folder: The directory. Missing parents are created, too.

        Raises:
            ScoringFailure: If the directory or the file cannot be created, the file is not a SQLite
                database or cannot be written, or another process keeps it locked for 30 seconds
                (`LOCK_TIMEOUT`).
        """
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=LOCK_TIMEOUT, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, scores TEXT NOT NULL) "
                "WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise self._failure(error) from None

    def read(self, key: str) -> dict[str, float] | None:
        """Returns the scores of a request by name, or None if none are stored.

        Args:
            key: The key of the request, from `cache_key`.

        Raises:
            ScoringFailure: If the file cannot be read, the entry is not a JSON object of numbers
                that are finite as floats, or another process keeps the file locked for 30 seconds
                (`LOCK_TIMEOUT`).
        """
        try:
            row = self._database.execute("SELECT scores FROM scores WHERE key = ?", [key])
            entry = row.fetchone()
            if entry is None:
                return None
            return {str(name): float(score) for name, score in parse_json(entry[0]).items()}
        except (sqlite3.Error, ValueError, AttributeError, TypeError, OverflowError) as error:
            raise self._failure(error) from None

    def write(self, key: str, scores: Mapping[str, float]) -> None:
        """Stores the scores of a request in the file immediately, and replaces any existing ones.

        Args:
            key: The key of the request, from `cache_key`.
            scores: The scores of the request by name, "reward" among them. They must be finite,
                because `read` refuses entries with other numbers.

        Raises:
            ScoringFailure: If the file cannot be written, e.g. on a full disk, or another process
                has it locked for 30 seconds (`LOCK_TIMEOUT`).
        """
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO scores VALUES (?, ?)", [key, json.dumps(dict(scores))]
            )
        except sqlite3.Error as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> ScoringFailure:
        """Returns, and does not raise, a ScoringFailure for an error of the cache.

        Args:
            error: The error of the file or of SQLite. The message has its text, the path of the
                file and a remedy.
        """
        return ScoringFailure(
            f"its cache {self._path} cannot be used ({error}); remove it, or name another "
            "directory or null as the option cache"
        )
