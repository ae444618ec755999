"""Paths in object stores: `gs://BUCKET/...` and `s3://BUCKET/...`, through fsspec.

A run directory is a `RunPath`: a path on this machine, or a `StorePath` in a bucket. Both have the
methods of `pathlib.Path` that the files of a run need. gcsfs and s3fs read the credentials, the
region and the endpoint from where the tools of the store read them (environment variables,
configuration files, the metadata service of a cloud machine). `etils.epath` reads both stores too,
but it remembers listings, which other processes change, and has the errors of each client.

A store has objects with a name and a content, and neither directories, links, locks nor a rename.
An object appears whole or not at all, and whoever reads or lists it afterwards sees it. So a file
needs no temporary name, and a directory of several files counts once its last file is there.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from solrl_jax.errors import InputError, RunError, as_input_error, first_line

# The stores by the beginning of their URLs, and the package of fsspec that reads each.
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
# An empty object of this name stands for an empty directory.
_MARKER = ".directory"
_URL = re.compile(r"(\w+):/+(.*)", re.DOTALL)


class StoreError(OSError, RunError):
    """A store refused a request, or cannot be reached. The message is "URL: REASON", in one line;
    `strerror` is REASON, while `errno` and `filename` are None.

    It is an OSError, so that a store that refuses is handled like a disk that does. It is a
    RunError, so that a command reports it in one line wherever it is raised.
    """

    def __init__(self, path: "StorePath", reason: str) -> None:
        """Creates the error.

        Args:
            path: The object that the request was for.
            reason: Why the request failed, in one line. It is also the attribute `strerror`.
        """
        super().__init__(f"{path}: {reason}")
        self.strerror = reason


@dataclasses.dataclass(frozen=True, order=True)
class StorePath:
    """A path in an object store: an object, or the beginning of the names of several.

    It has no `__fspath__`, so functions for files of this machine refuse it with a TypeError; `str`
    gives its URL. All methods that ask the store raise StoreError if it refuses or cannot be
    reached, and InputError if the package that reads it is not installed. The FileNotFoundErrors
    that methods list under "Raises" are not StoreErrors. Creating paths and joining them by `/`
    sends no request.

    Attributes:
        scheme: The store, "gs" or "s3" (a key of `PACKAGES`).
        key: The bucket and the name in it, e.g. `bucket/runs/a`.
    """

    scheme: str
    key: PurePosixPath

    def __str__(self) -> str:
        """Returns the URL, e.g. "gs://bucket/runs/a"."""
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> "StorePath":
        """Returns the path with a further part.

        Args:
            name: The part, or several with "/" between them. It must not begin with "/", which
                would replace the whole path (not checked).
        """
        return dataclasses.replace(self, key=self.key / name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.key.name

    @property
    def stem(self) -> str:
        """The last part of the path without its suffix."""
        return self.key.stem

    @property
    def parent(self) -> "StorePath":
        """The path without its last part. The parent of a bucket is not a valid path."""
        return dataclasses.replace(self, key=self.key.parent)

    def with_name(self, name: str) -> "StorePath":
        """Returns the path with another last part.

        Args:
            name: The last part.
        """
        return dataclasses.replace(self, key=self.key.with_name(name))

    def with_suffix(self, suffix: str) -> "StorePath":
        """Returns the path with another suffix.

        Args:
            suffix: The suffix with its dot, or "" for none.
        """
        return dataclasses.replace(self, key=self.key.with_suffix(suffix))

    def absolute(self) -> "StorePath":
        """Returns the path itself, which is absolute."""
        return self

    def resolve(self) -> "StorePath":
        """Returns the path itself, because a store has no links."""
        return self

    def is_symlink(self) -> bool:
        """Returns False, because a store has no links."""
        return False

    def is_file(self) -> bool:
        """Whether there is an object of this name.

        Raises:
            StoreError: If the store refuses or cannot be reached.
            InputError: If the package that reads the store is not installed.
        """
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below this path, but none of exactly this name.

        Raises:
            StoreError: If the store refuses or cannot be reached.
        """
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it.

        Raises:
            StoreError: If the store refuses or cannot be reached.
        """
        return self._kind() is not None

    def iterdir(self) -> Iterator["StorePath"]:
        """Yields the paths directly below this one, sorted by name: objects (but not the marker
        object of `mkdir`), and paths with objects below them.

        Nothing is yielded if there is only an object of exactly this name. Errors are raised when
        the first path is asked for.

        Raises:
            FileNotFoundError: If there is no object of this name or below it.
            StoreError: If the store refuses or cannot be reached.
        """
        with self._requests():
            entries = _client(self.scheme).ls(str(self.key), detail=False)
        keys = {PurePosixPath(entry) for entry in entries} - {self.key}
        for name in sorted({key.name for key in keys} - {_MARKER}):
            yield self / name

    def glob(self, pattern: str) -> Iterator["StorePath"]:
        """Yields those paths of `iterdir` (objects directly below this path, and paths with objects
        below them) whose last part matches a pattern, sorted by name. It yields none if there are
        no objects below this path.

        Args:
            pattern: A pattern of `fnmatch` without a slash. It is case-sensitive.

        Raises:
            StoreError: If the store refuses or cannot be reached.
        """
        with contextlib.suppress(FileNotFoundError):
            for path in self.iterdir():
                if fnmatch.fnmatchcase(path.name, pattern):
                    yield path

    def file_sizes(self) -> dict[str, int]:
        """Lists all objects below this path but those that `mkdir` has written.

        Returns:
            The size of each object in bytes, by its name relative to this path, sorted by name. An
            empty dict if there is none.

        Raises:
            FileNotFoundError: If there is no such bucket.
            StoreError: If the store refuses or cannot be reached.
        """
        with self._requests():
            entries = _client(self.scheme).find(str(self.key), detail=True)
        sizes = {
            str(PurePosixPath(name).relative_to(self.key)): entry["size"]
            for name, entry in sorted(entries.items())
        }
        return {
            name: size
            for name, size in sizes.items()
            if name != "." and PurePosixPath(name).name != _MARKER
        }

    def size(self) -> int:
        """Returns the size of the object in bytes.

        Raises:
            FileNotFoundError: If there is no such object, even if there are objects below this
                path.
            StoreError: If the store refuses or cannot be reached.
        """
        with self._requests():
            info = _client(self.scheme).info(str(self.key))
        if info["type"] == "directory":  # only objects below it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return int(info["size"])

    def read_bytes(self) -> bytes:
        """Returns the content of the object.

        Raises:
            FileNotFoundError: If there is no such object.
            StoreError: If the store refuses or cannot be reached.
        """
        with self._requests():
            return _client(self.scheme).cat_file(str(self.key))

    def read_start(self, count: int) -> bytes:
        """Returns the first bytes of the object, or all if it has fewer. No others are downloaded.

        Args:
            count: The number of bytes, at least 1.

        Raises:
            FileNotFoundError: If there is no such object.
            StoreError: If the store refuses or cannot be reached.
        """
        count = min(count, self.size())
        if count == 0:  # stores refuse a range of an empty object
            return b""
        with self._requests():
            return _client(self.scheme).cat_file(str(self.key), start=0, end=count)

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Reads the whole object, and returns its content as a binary stream.

        Args:
            mode: "rb". A store has no files that are written piece by piece.

        Raises:
            FileNotFoundError: If there is no such object.
            ValueError: If `mode` is another one.
            StoreError: If the store refuses or cannot be reached.
        """
        if mode != "rb":
            raise ValueError(f"mode={mode!r}: objects are opened for reading only")
        return io.BytesIO(self.read_bytes())

    def write_bytes(self, data: bytes) -> None:
        """Writes the object at once. An older one is replaced.

        Args:
            data: The content.

        Raises:
            StoreError: If there is no such bucket, or the store refuses or cannot be reached.
        """
        with self._requests():
            try:
                _client(self.scheme).pipe_file(str(self.key), data)
            except FileNotFoundError as error:
                raise StoreError(self, f"there is no bucket {self.key.parts[0]}") from error

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Writes an empty object below this path, so that `is_dir` is true.

        `iterdir` and `file_sizes` leave that object out.

        Args:
            parents: Ignored. No parent is needed.
            exist_ok: Ignored. An existing directory is not an error.

        Raises:
            StoreError: If there is no such bucket, or the store refuses or cannot be reached.
        """
        (self / _MARKER).write_bytes(b"")

    def unlink(self, missing_ok: bool = True) -> None:
        """Removes the object. Nothing happens if there is none.

        Args:
            missing_ok: Ignored. A missing object is not an error.

        Raises:
            StoreError: If the store refuses or cannot be reached.
        """
        with self._requests(), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).rm_file(str(self.key))

    def remove_all(self, first: str) -> None:
        """Removes all objects below this path (those of `file_sizes`; the one of `mkdir` stays).

        They are removed one by one, and an error leaves the rest.

        Args:
            first: The name, relative to this path, of the object that is removed before all others,
                e.g. of the manifest without which readers ignore the rest. It may be missing.

        Raises:
            FileNotFoundError: If there is no such bucket.
            StoreError: If the store refuses or cannot be reached.
        """
        # One by one: the client's request for several takes "*", "?" and "[" for patterns.
        for name in sorted(self.file_sizes(), key=lambda name: name != first):
            (self / name).unlink()

    def copy_all(self, target: "StorePath", last: str) -> None:
        """Copies all objects below this path (those of `file_sizes`) within the store. Older ones
        of the same names are replaced. An error leaves the copies that have been made.

        Args:
            target: The path below which the copies are made, with the same scheme; the bucket may
                be another one.
            last: The name, relative to this path, of the object that is copied after all others,
                e.g. of the manifest without which readers ignore the copy. It may be missing.

        Raises:
            FileNotFoundError: If one of the two buckets does not exist.
            StoreError: If the store refuses or cannot be reached.
        """
        for name in sorted(self.file_sizes(), key=lambda name: name == last):
            with self._requests():
                _client(self.scheme).cp_file(str((self / name).key), str((target / name).key))

    def upload(self, source: Path) -> None:
        """Writes a file of this machine to the object. An older one is replaced.

        Args:
            source: The file.

        Raises:
            FileNotFoundError: If there is no such file or bucket.
            StoreError: If the file cannot be read, or the store refuses or cannot be reached.
        """
        with self._requests():
            _client(self.scheme).put_file(str(source), str(self.key))

    def download(self, target: Path) -> None:
        """Copies the object to this machine.

        Args:
            target: The file to write. An existing one is replaced, and missing parent directories
                are created. A failed download may leave a part of the file.

        Raises:
            FileNotFoundError: If there is no such object.
            OSError: If a directory cannot be created.
            StoreError: If the disk refuses the file, or the store refuses or cannot be reached.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._requests():
            _client(self.scheme).get_file(str(self.key), str(target))

    def _kind(self) -> str | None:
        """Returns "file" if there is an object of this name, otherwise "directory" if there are
        objects below this path, or None if there is neither.
        """
        try:
            with self._requests():
                return _client(self.scheme).info(str(self.key))["type"]
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _requests(self) -> Iterator[None]:
        """Turns errors that a client raises in the body into a StoreError. A context manager.

        InputError (by which `_client` says that a package is missing), StoreError and
        FileNotFoundError pass. A FileNotFoundError without an error number, as clients raise it, is
        replaced by one with the number of the system and this path.

        Raises:
            StoreError: If the body raised another Exception.
        """
        try:
            yield
        except (StoreError, InputError):
            raise
        except FileNotFoundError as error:
            if error.errno is not None:  # e.g. of a file to upload
                raise
            reason = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, reason, str(self)) from error
        except Exception as error:  # each client has errors of several libraries
            reason = first_line(error)
            if isinstance(error, PermissionError):
                reason = f"permission denied ({reason})"
            raise StoreError(self, reason) from error


# A path of a run directory, or in one.
RunPath = Path | StorePath


def is_url(text: str) -> bool:
    """Whether a text is the URL of an object store, i.e. begins with gs:// or s3://.

    Args:
        text: The text.
    """
    return text.startswith(tuple(f"{scheme}://" for scheme in PACKAGES))


def expand_home(path: str) -> str:
    """Returns a path in which the home directory takes the place of a leading `~` or `~USER`.

    Shells do not expand the `~` in an override such as `run.dir=~/runs/x`.

    Args:
        path: The path, which need not exist. Without a leading `~` it is returned as it is.

    Raises:
        ValueError: If there is no such user, or no home directory.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        raise ValueError(f"no home directory of {path.partition('/')[0]} is known")
    return expanded


def run_path(path: str | Path | StorePath) -> RunPath:
    """Returns the path of a run directory. Nothing is read.

    Args:
        path: A path of this machine, in which "~" is not expanded, or the URL of a store (gs:// or
            s3://). With one slash, as in a `pathlib.Path` of a URL, it counts as the URL too.

    Returns:
        A `StorePath` for the URL of a store, otherwise a `pathlib.Path`, also for the URL of any
        other scheme. A `StorePath` is returned as it is.

    Raises:
        InputError: If the URL has no bucket.
    """
    if isinstance(path, StorePath):
        return path
    match = _URL.fullmatch(str(path))
    if match is None or match[1] not in PACKAGES:
        return Path(path)
    key = PurePosixPath(match[2])
    if not key.parts:
        raise InputError(f"{path}: has no bucket; expected {match[1]}://BUCKET/DIRECTORY")
    return StorePath(match[1], key)


def local_path(argument: str, path: str | Path) -> Path:
    """Returns a path of this machine, in which `~` is expanded, and refuses the URL of an object
    store.

    Args:
        argument: The name of the argument that has the path, for messages.
        path: The path, which need not exist.

    Raises:
        InputError: If `path` is the URL of a store (gs:// or s3://), or begins with the `~USER` of
            a user that does not exist.
    """
    with as_input_error(lambda message: f"{argument}={path}: {message}"):
        expanded = expand_home(str(path))
    local = run_path(expanded)
    if not isinstance(local, Path):
        raise InputError(f"{argument}={path}: expected a path on this machine, not in a store")
    return local


def check_run_dir(text: str) -> str:
    """Checks that `run.dir` is a path of this machine or the URL of a directory in a known store. A
    pydantic validator.

    Args:
        text: The setting. "" is accepted. Paths of this machine are not looked at.

    Returns:
        The text. A slash at the end of a URL is removed.

    Raises:
        ValueError: If the text is a URL (SCHEME://...) of another scheme, one without a bucket and
            a directory in it, or one in which a part of the path is empty, "." or "..".
    """
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        return text
    accepted = " or ".join(f"{name}://BUCKET/DIRECTORY" for name in PACKAGES)
    parts = rest.rstrip("/").split("/")
    if scheme not in PACKAGES or len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise ValueError(f"expected {accepted}, or a path of this machine")
    return f"{scheme}://{'/'.join(parts)}"


def _client(scheme: str) -> Any:
    """Returns fsspec's file system of a store, which fsspec creates once in each thread.

    It remembers no listings, because other processes write to the store too.

    Args:
        scheme: The store, a key of `PACKAGES`.

    Raises:
        InputError: If the package that reads the store is not installed.
    """
    try:
        import fsspec

        importlib.import_module(PACKAGES[scheme])
    except ImportError as error:
        raise InputError(
            f"{scheme}:// needs {PACKAGES[scheme]}: pip install 'solrl_jax[stores]'"
        ) from error
    return fsspec.filesystem(scheme, use_listings_cache=False)
