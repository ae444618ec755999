"""A cache of encoded prompts on disk: what a text encoder computed once is read from then on.

FOLDER/ab/ab12....safetensors    one prompt's encoding, named by its key; the header has a checksum of both
FOLDER/files/...                 SHA-256 of each weight file, so that gigabytes are not read at every start

A key is a hash of all that an encoding depends on (`TextEncoders`). So an entry is never out of date, and the folder can be
copied, shared and removed. An entry appears by rename, and two writers never share a temporary name. Entries are not synced to
the disk: one that a crash of the machine cut short fails its checksum, and is computed and written again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from solrl_jax.errors import InputError
from solrl_jax.storage.files import PARTIAL, disk_reason, writing
from solrl_jax.storage.readers import read_text

Encoding = dict[str, np.ndarray]  # of one prompt


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder of encodings. It is created when the first one is written."""

    folder: Path

    def read(self, key: str) -> Encoding | None:
        """The entry of `key`; None if it is absent or damaged."""
        if not self.has(key):
            return None  # absent, or a pipe, which would be waited for
        try:
            with safe_open(self._entry(key), "numpy") as file:
                # noqa: SIM118
                encoding = {name: file.get_tensor(name) for name in file.keys()}
                told = file.metadata()
        except (OSError, SafetensorError, AttributeError):  # the last for a dtype that NumPy lacks
            return None  # any bytes at all
        return encoding if told == {"sha256": _checksum(encoding, key)} else None

    def has(self, key: str) -> bool:
        """Whether there is an entry of `key`, damaged or not."""
        return self._entry(key).is_file()

    def write(self, key: str, encoding: Encoding) -> None:
        """Makes `encoding` the entry of `key`. Raises RunError if the disk refuses."""
        arrays = {name: np.ascontiguousarray(x) for name, x in encoding.items()}
        with writing(self._entry(key)):
            _replace(self._entry(key), save(arrays, {"sha256": _checksum(arrays, key)}))

    def digest(self, file: Path) -> str:
        """The SHA-256 of a file's content.

        The file is read again only if its path, size, times of change, device or inode have changed, as git decides that.
        """
        stat = file.stat()
        identity = [
            str(file.resolve()),
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            stat.st_dev,
            stat.st_ino,
        ]
        known = self.folder / "files" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        with contextlib.suppress(OSError, ValueError):
            if re.fullmatch("[0-9a-f]{64}", digest := read_text(known)):
                return digest
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        with contextlib.suppress(
            OSError
        ):  # the folder may be read-only; then the next start reads the file again
            _replace(known, digest.encode())
        return digest

    def check_writable(self) -> None:
        """Raises InputError if no entry can be written."""
        probe = self.folder / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            remedy = "name another directory, or null for none"
            raise InputError(
                f"model.prompt_cache_dir={str(self.folder)!r}: cannot be written ({disk_reason(error)}); {remedy}"
            ) from error

    def _entry(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def open_cache(path: str | None) -> Cache | None:
    """The cache that `model.prompt_cache_dir` names: a folder, '' for the user's own, None for none. Raises InputError if it is a file."""
    if path is None:
        return None
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "solrl_jax" / "prompts"
    try:
        folder = Path(path or own).expanduser()
    except RuntimeError as error:  # a user without one, as containers have them; or ~NAME
        raise InputError(
            f"model.prompt_cache_dir={path!r}: there is no such home; name another directory, or null for none"
        ) from error
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"model.prompt_cache_dir={path!r}: is a file; expected a directory, '' for the user's own, or null for none"
        )
    return Cache(folder)


def key_of(identity: str, tokens: Mapping[str, np.ndarray]) -> str:
    """The key of the encoding of one prompt's `tokens` by the encoders that `identity` names."""
    return _checksum(tokens, identity)


def _replace(path: Path, data: bytes) -> None:
    """Makes `data` the content of a file, by rename. Raises OSError."""
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


def _checksum(arrays: Mapping[str, np.ndarray], owner: str) -> str:
    """A hash of names, dtypes, shapes and every bit, and of `owner`."""
    total = hashlib.sha256(json.dumps(owner).encode())
    for name in sorted(arrays):
        x = arrays[name]
        total.update(json.dumps([name, x.dtype.name, x.shape]).encode())
        total.update(x.tobytes())
    return total.hexdigest()
