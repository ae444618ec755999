"""Writes files and directories that appear complete or not at all.

A file or directory is written under a hidden sibling name, synced to the disk, then renamed. If the
process is killed, the old one or the new one is there, and at most one hidden sibling, which the
next write replaces. A directory may also have a manifest, by which a reader can tell whether it was
altered. If the disk refuses a write, the error is a RunError of one line.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.storage.readers import parse_json, read_bytes

# Prefixes of the hidden siblings: of what is being written, and of what is being removed.
PARTIAL = ".partial-"
REMOVING = ".removing-"
MANIFEST = "manifest.json"
# `damage` always compares the contents of files of at most so many bytes.
SMALL = 2**20

_REASONS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EFBIG: "file larger than allowed",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


def disk_reason(error: BaseException) -> str | None:
    """Returns why the disk refused an operation, in a few words; None for an error of another kind.

    Every OSError counts. Libraries in C++ raise errors of other types that quote the system's
    message, so the message of any error is searched for it.

    Args:
        error: The error that an operation on a file raised.
    """
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0) or error.strerror or first_line(error)
    message = str(error)
    if "RESOURCE_EXHAUSTED" in message:  # orbax does not always quote the system's message
        return _REASONS[errno.ENOSPC]
    for code, reason in _REASONS.items():
        if os.strerror(code) in message:
            return reason
    return None


@contextlib.contextmanager
def writing(path: Path, note: Callable[[], str] = str) -> Iterator[None]:
    """Turns an error of the disk in the body into a RunError of one line. Also works as a
    decorator.

    Every OSError counts as one (see `disk_reason`), so the body must not read the user's input.

    Args:
        path: The file or directory that the body writes. The message names it.
        note: Returns text for the end of the message. It is called when an error occurs.
    """
    try:
        yield
    except Exception as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        raise RunError(f"{reason} while writing {path}{note()}") from error


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; they order renames themselves.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Replaces a file at once, when the body has written all of it.

    Missing parent directories are created. If the body raises, `path` is untouched. The file gets
    the permissions that new files have (666 without the umask), whatever mode the body created it
    with: safetensors creates files that their owner alone can read.

    Args:
        path: The file to write. It may exist.

    Yields:
        The path of a hidden sibling, which the body writes and which becomes `path`. It has the
        suffix of `path`, because image writers choose the format by it.

    Raises:
        RunError: If the disk refuses. Every OSError of the body counts.
    """
    path = Path(path)
    partial = path.with_name(PARTIAL + path.name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # also if it is a link, through which the body would write
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        try:
            yield partial
            if stat.S_IMODE(partial.stat().st_mode) != mode:
                partial.chmod(mode)
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Writes a whole file at once, see `atomic`.

    Args:
        path: The file to write. It may exist.
        data: The content. Text is encoded as UTF-8.

    Raises:
        RunError: If the disk refuses.
    """
    with atomic(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Replaces a directory at once, when the body has filled the new one.

    Leftovers of a killed process are removed first. If the body raises, `path` is untouched.

    Args:
        path: The directory to write. It may exist.

    Yields:
        The path of a new, empty sibling directory, which the body fills and which becomes `path`.

    Raises:
        RunError: If the disk refuses an operation outside of the body.
    """
    partial = path.with_name(PARTIAL + path.name)
    replaced = path.with_name(REMOVING + path.name)
    try:
        with writing(path):
            _remove(partial)
            _remove(replaced)
            partial.mkdir(parents=True)
        yield partial
        with writing(path):
            publish(partial, path, replaced=replaced)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(
    name: str, paths: Iterable[Path], force: bool, *, folders: bool = False
) -> None:
    """Checks that no existing file is replaced, unless that is wanted.

    Args:
        name: The argument that the paths come from, for the message, e.g. "out".
        paths: The files that are about to be written.
        force: Whether existing files may be replaced. Devices and pipes never are.
        folders: Whether directories are written, so that `force` covers them too.

    Raises:
        InputError: If a path exists that may not be replaced.
    """
    existing = [path for path in paths if os.path.lexists(path)]
    for path in existing:
        # With `force`, a link counts as its target, so that a link to a device (/dev/stdout) is
        # one.
        is_replaceable_link = path.is_symlink() and not (force and path.exists())
        is_replaceable_folder = folders and path.is_dir()
        if not (path.is_file() or is_replaceable_link or is_replaceable_folder):
            kind = "a directory" if path.is_dir() else "no file"
            raise InputError(f"{name}={path}: is {kind}; name another one")
    if existing and not force:
        raise InputError(
            f"{name}={existing[0]}: exists; name another one, or replace it with force=True"
        )


def writable_directory(path: Path, name: str = "the run directory") -> Path:
    """Creates a directory if necessary, and checks that files can be written to it.

    Args:
        path: The directory. Missing parents are created too.
        name: What the messages call it, e.g. the argument that it comes from.

    Returns:
        `path`.

    Raises:
        InputError: If it is a file, cannot be created, is read-only, or if the disk is full.
    """
    probe = path / f"{PARTIAL}probe-{os.getpid()}"
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"{name} {path} is a file; name another one")
        path.mkdir(parents=True, exist_ok=True)
        try:
            # One block and a sync, because a full disk still takes empty files and unsynced bytes.
            probe.write_bytes(bytes(4096))
            sync(probe)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{name} {path} cannot be written: {disk_reason(error)}") from error
    return path


@contextlib.contextmanager
def only_user(directory: Path) -> Iterator[None]:
    """Locks an existing directory for this process while the body runs.

    The lock is that of a file `.lock` in the directory. The system releases it when the process
    ends, even if it is killed, so there is nothing to clean up.

    Raises:
        InputError: If another process holds the lock.
        RunError: If the file cannot be created.
    """
    with writing(directory / ".lock"):
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is using the run directory {directory}") from error
        yield
    finally:
        os.close(descriptor)


def seal(directory: Path) -> None:
    """Writes `manifest.json` with the size and SHA-256 of every other file below a directory.

    Also syncs all files and directories below it.
    """
    files = {name: _describe(directory / name) for name in _file_names(directory)}
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in (*directory.rglob("*"), directory):
        sync(path)


def damage(directory: Path, *, contents: bool = True) -> str | None:
    """Compares a directory with its manifest, which `seal` wrote.

    Args:
        directory: The directory.
        contents: Whether to compare the SHA-256 of all files. If False,
            names and sizes are compared, and the SHA-256 of files of at most `SMALL` bytes.

    Returns:
        The first difference, with the name of a file; None if there is none.
    """
    name = MANIFEST
    try:
        manifest = parse_json(read_bytes(directory / MANIFEST))
        if not isinstance(manifest, dict):
            return f"{MANIFEST} is damaged"
        actual = set(_file_names(directory)) - {MANIFEST}
        missing = sorted(manifest.keys() - actual)
        if missing:
            return f"missing file {', '.join(missing[:3])}"
        unknown = sorted(actual - manifest.keys())
        if unknown:
            return f"unknown file {', '.join(unknown[:3])}"
        for name, entry in manifest.items():
            status = (directory / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is no regular file"
            if not isinstance(entry, dict) or entry.get("size") != status.st_size:
                return f"{name} has {status.st_size} bytes, not the number that was written"
            is_compared = contents or status.st_size <= SMALL
            if is_compared and entry != _describe(directory / name):
                return f"{name} was altered"
    except OSError as error:
        return f"{name} cannot be read: {disk_reason(error)}"
    except ValueError:
        return f"{name} is damaged"
    return None


def publish(temporary: Path, target: Path, *, replaced: Path) -> None:
    """Renames a directory that is complete to its final name.

    Args:
        temporary: The directory.
        target: Its final name, in the same parent directory. It may exist.
        replaced: The name that an older `target` has meanwhile. It is removed afterwards.
    """
    if target.exists():
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync(target.parent)
    if replaced.exists():
        remove_directory(replaced)


def remove_directory(path: Path) -> None:
    """Removes a directory with its content. Of a link to a directory, the link is removed.

    It is renamed to a hidden name first, so that no part of it is visible after a kill.

    Raises:
        RunError: If the disk refuses.
    """
    hidden = path.with_name(REMOVING + path.name.removeprefix(REMOVING))
    with writing(path):
        if hidden != path:
            _remove(hidden)
            os.replace(path, hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a directory with its content, a file or a link. Does nothing if `path` is absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file_names(path: Path) -> list[str]:
    """Returns the names of all files below a directory, relative to it and sorted."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def _describe(path: Path) -> dict[str, Any]:
    """Returns the manifest's entry of one file: {"size": bytes, "sha256": hexadecimal digits}."""
    with path.open("rb") as stream:
        return {
            "size": os.fstat(stream.fileno()).st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }
