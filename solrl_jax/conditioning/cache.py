"""Encodings of prompts on disk, found by content: what a text encoder once said of a prompt it need not be asked again.

FOLDER/ab/ab12....safetensors    one prompt's encoding, named by its key; a checksum of it and of the key is in its header
FOLDER/files/...                 SHA-256 of each weight file, so that gigabytes are read once and not at every start

A key stands for all that an encoding depends on (`backbone.TextEncoders`), so an entry is right wherever the folder lies and
whoever wrote it; it is never out of date, and the folder can be copied, shared and removed. Entries appear by rename under
names that no two writers share. They are not synced: what a crash of the machine leaves half-written fails its checksum, and
an entry that fails is no entry, to be computed and written again.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from solrl_jax.storage.errors import InputError
from solrl_jax.storage.files import PARTIAL, disk_reason, writing

Encoding = dict[str, np.ndarray]  # of one prompt
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32, "BOOL": np.bool_}  # by the format's names


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder of encodings; it is made when the first one is written."""

    folder: Path

    def read(self, key: str, like: Mapping[str, Any]) -> Encoding | None:
        """The entry of `key`; None if there is none, or none that is whole and has the names, shapes and dtypes of `like`."""
        try:
            data = self._entry(key).read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            told = header.pop("__metadata__")
            encoding = {name: _array(data, start, field) for name, field in header.items()}
            sound = told == {"sha256": _checksum(encoding, key)}
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return None  # absent, or any bytes at all in its place
        described = lambda arrays: {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in arrays.items()}
        return encoding if sound and described(encoding) == described(like) else None

    def has(self, key: str) -> bool:
        """Whether there is an entry of `key`, be it sound or not."""
        return self._entry(key).is_file()

    def write(self, key: str, encoding: Encoding) -> None:
        """Makes `encoding` the entry of `key`. Raises RunError when the disk refuses."""
        arrays = {name: np.ascontiguousarray(x) for name, x in encoding.items()}
        self._appear(self._entry(key), save(arrays, {"sha256": _checksum(arrays, key)}))

    def digest(self, file: Path) -> str:
        """The SHA-256 of a file's content. It is read again only if it is another file, or changed, by what the system says:
        its place, size, times of change and inode, as version control judges whether a file has changed."""
        stat = file.stat()
        identity = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino]
        known = self.folder / "files" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.fullmatch("[0-9a-f]{64}", digest := known.read_text()):
                return digest
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        with contextlib.suppress(OSError):  # a folder that is only read from: the next start reads the file again
            self._replace(known, digest.encode())
        return digest

    def check_writable(self) -> None:
        """Raises InputError in one line if no entry can be written."""
        probe = self.folder / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            remedy = "name another directory, or null for none"
            raise InputError(f"model.cache={str(self.folder)!r}: cannot be written ({disk_reason(error)}); {remedy}") from error

    def _entry(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def _appear(self, path: Path, data: bytes) -> None:
        with writing(path):
            self._replace(path, data)

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{PARTIAL}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            with partial.open("xb") as stream:
                stream.write(data)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def open_cache(path: str | None) -> Cache | None:
    """The cache that `model.cache` names: a folder, '' for the user's own, None for none. Raises InputError for a file."""
    if path is None:
        return None
    if path:
        folder = Path(path).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "solrl_jax" / "prompts"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"model.cache={path!r}: is a file; expected a directory, '' for the user's own, or null for none")
    return Cache(folder)


def key_of(identity: str, tokens: Mapping[str, np.ndarray]) -> str:
    """Names an encoding: of one prompt's `tokens` by the encoders that `identity` names."""
    return _checksum(tokens, identity)


def _array(data: bytes, start: int, field: Mapping[str, Any]) -> np.ndarray:
    """A tensor of a safetensors file that is in memory, its numbers from byte `start` on; a view."""
    first, _ = field["data_offsets"]
    return np.frombuffer(data, DTYPES[field["dtype"]], math.prod(field["shape"]), start + first).reshape(field["shape"])


def _checksum(arrays: Mapping[str, np.ndarray], owner: str) -> str:
    """Of whose they are, names, dtypes, shapes and every bit."""
    total = hashlib.sha256(json.dumps(owner).encode())
    for name in sorted(arrays):
        x = arrays[name]
        total.update(json.dumps([name, x.dtype.name, x.shape]).encode())
        total.update(x.tobytes())
    return total.hexdigest()
