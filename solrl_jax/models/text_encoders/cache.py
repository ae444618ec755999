"""A cache of encoded prompts on disk, so that each prompt is encoded only once.

    FOLDER/ab/ab12....safetensors
        The encoding of one prompt, named by its key. The header has a checksum of both.
    FOLDER/files/...
        The SHA-256 of each weight file, so that gigabytes are not read at every start.

A key is a hash of everything that an encoding depends on (`TextEncoders`). So an entry is never out
of date, and the folder can be copied, shared and removed. Entries appear by an atomic rename. They
are not synced to the disk: if a crash of the machine cuts one short, its checksum fails, and it is
computed and written again.
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
from solrl_jax.storage.files import PARTIAL, cache_directory, disk_errors_as_run_errors, disk_reason
from solrl_jax.storage.readers import read_text

# Arrays by name: the encoding of one prompt, or, where a docstring says so, of several prompts with
# a leading axis of prompts.
Encoding = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder with the encodings of prompts: one safetensors file per prompt, named by its key
    (`key_of`).

    It also remembers the SHA-256 of weight files (`file_sha256`), in the subfolder `files`.

    Attributes:
        folder: the folder. It is created when something is first written.
    """

    folder: Path

    def read(self, key: str) -> Encoding | None:
        """Returns the encoding that is stored under a key.

        Args:
            key: the key of a prompt, 64 hexadecimal digits (`key_of`).

        Returns:
            The prompt's arrays by name, such as "text" [tokens, features]. None if nothing is
            stored under the key, or if the file cannot be read or is damaged (the checksum in its
            header is wrong).

        Raises:
            PermissionError: a folder of the cache may not be searched.
        """
        if not self.has(key):
            return None
        try:
            with safe_open(self.entry_path(key), "numpy") as file:
                names = file.keys()
                encoding = {name: file.get_tensor(name) for name in names}
                metadata = file.metadata()
        except (OSError, SafetensorError, AttributeError):
            return None  # damaged; AttributeError stands for a dtype that NumPy lacks
        return encoding if metadata == {"sha256": _digest(encoding, key)} else None

    def has(self, key: str) -> bool:
        """Whether a file is stored under a key.

        Args:
            key: the key of a prompt, 64 hexadecimal digits (`key_of`).

        Returns:
            True even if the file is damaged.

        Raises:
            PermissionError: a folder of the cache may not be searched.
        """
        return self.entry_path(key).is_file()

    def write(self, key: str, encoding: Encoding) -> None:
        """Stores an encoding under a key, in place of an older one.

        The file appears complete or not at all. It is not synced to the disk: a crash of the
        machine may damage it, which `read` notices.

        Args:
            key: the key of a prompt, 64 hexadecimal digits (`key_of`).
            encoding: the prompt's arrays by name, such as "text" [tokens, features].

        Raises:
            RunError: the disk refuses, for example because it is full or the folder may not be
                written.
        """
        arrays = {name: np.ascontiguousarray(x) for name, x in encoding.items()}
        with disk_errors_as_run_errors(self.entry_path(key)):
            _replace(self.entry_path(key), save(arrays, {"sha256": _digest(arrays, key)}))

    def file_sha256(self, file: Path) -> str:
        """Returns the SHA-256 of a file's content, which the cache remembers for the next call.

        The file is read, whole, only if the cache remembers no hash for its resolved path, size,
        mtime, ctime, device and inode. If the cache cannot be written, the result is not
        remembered.

        Args:
            file: the file. Links are followed.

        Returns:
            64 hexadecimal digits.

        Raises:
            OSError: the file is missing or cannot be read.
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
            digest = read_text(known)
            if re.fullmatch("[0-9a-f]{64}", digest):
                return digest
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        # If the folder is read-only, the next start reads the file again.
        with contextlib.suppress(OSError):
            _replace(known, digest.encode())
        return digest

    def check_writable(self) -> None:
        """Checks that the cache can be written, by creating its folder and, for a moment, an empty
        file in it.

        Raises:
            InputError: the folder cannot be created or written.
        """
        probe = self.folder / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"model.prompt_cache_dir={str(self.folder)!r}: cannot be written "
                f"({disk_reason(error)}); name another directory, or null for none"
            ) from error

    def entry_path(self, key: str) -> Path:
        """Returns the path of the file for a key, whether it exists or not.

        Args:
            key: the key of a prompt (`key_of`), here ab12....

        Returns:
            FOLDER/ab/ab12....safetensors for a key ab12....
        """
        return self.folder / key[:2] / f"{key}.safetensors"


def open_cache(path: str | None) -> Cache | None:
    """Returns the cache of encoded prompts that a configuration names. Nothing is written, and the
    folder need not exist.

    Args:
        path: the folder (`model.prompt_cache_dir`); "~" is expanded. "": the folder
            `solrl_jax/prompts` in the user's cache directory (`XDG_CACHE_HOME`, by default
            `~/.cache`). None: no cache.

    Returns:
        The cache, or None if `path` is None.

    Raises:
        InputError: the path is a file, or it needs a home directory that the user does not have.
        PermissionError: a parent of the folder may not be searched.
    """
    folder = cache_directory(path, "prompts", "model.prompt_cache_dir")
    return None if folder is None else Cache(folder)


def key_of(identity: str, tokens: Mapping[str, np.ndarray]) -> str:
    """Returns the key under which a prompt's encoding is stored: a SHA-256.

    Args:
        identity: a hash of everything else that determines the encoding: the text encoders'
            weights, configurations and dtype (`TextEncoders.identity`).
        tokens: the tokens of the prompt: arrays by name, without an axis of prompts.

    Returns:
        64 hexadecimal digits.
    """
    return _digest(tokens, identity)


def _replace(path: Path, data: bytes) -> None:
    """Writes a file by rename, so that it appears complete or not at all. An older file is
    replaced.

    Nothing is synced to the disk. If the writing fails or is interrupted, the temporary file beside
    it is removed.

    Args:
        path: the file. Its directory is created if necessary.
        data: the content.

    Raises:
        OSError: the disk refuses.
    """
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


def _digest(arrays: Mapping[str, np.ndarray], prefix: str) -> str:
    """Returns the SHA-256 of a text and of named arrays.

    Args:
        arrays: arrays by name. Names, dtypes, shapes and values are hashed. The order of the
            dictionary does not matter.
        prefix: the text. For the checksum of a cached encoding, its key. For the key itself, the
            hash of the text encoders' weights, configurations and dtype (`TextEncoders.identity`).

    Returns:
        64 hexadecimal digits.
    """
    total = hashlib.sha256(json.dumps(prefix).encode())
    for name in sorted(arrays):
        x = arrays[name]
        total.update(json.dumps([name, x.dtype.name, x.shape]).encode())
        total.update(x.tobytes())
    return total.hexdigest()
