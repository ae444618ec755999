"""Writing to a run directory: a file appears complete or not at all, and a refusal of the disk is reported in one line.

A file or directory is written under a hidden sibling name, synced to the disk, then renamed. If the process is killed, it
leaves the old one or the new one, and at most one hidden sibling, which the next write replaces. A directory also has a
manifest, by which a reader can tell whether it was altered.
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

PARTIAL = ".partial-"
REMOVING = ".removing-"
MANIFEST = "manifest.json"
SMALL = 2**20  # bytes of a file whose contents are always compared

_REASONS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EFBIG: "file larger than allowed",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


def disk_reason(error: BaseException) -> str | None:
    """Why the disk refused, in a few words; None if `error` is not about the disk.

    Libraries written in C++ raise errors of other types with the system's words in their text, so the text counts too.
    """
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0) or error.strerror or first_line(error)
    if "RESOURCE_EXHAUSTED" in str(error):  # orbax, whose cause is not always in the text
        return _REASONS[errno.ENOSPC]
    return next(
        (reason for code, reason in _REASONS.items() if os.strerror(code) in str(error)), None
    )


@contextlib.contextmanager
def writing(path: Path, note: Callable[[], str] = str) -> Iterator[None]:
    """Raises a refusal of the disk in the body as a RunError with the reason, `path`, and the text of `note`.

    Every OSError counts, so the body must not read input.
    """
    try:
        yield
    except Exception as error:
        if (reason := disk_reason(error)) is None:
            raise
        raise RunError(f"{reason} while writing {path}{note()}") from error


def sync(path: Path) -> None:
    """Waits until the file's bytes, or the directory's names, are on the disk."""
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
    """Yields a sibling path to write. On success it becomes `path`; on failure it is removed, and `path` is untouched.

    The sibling has the suffix of `path`, because image writers choose the format by it. Missing parent directories are created.
    An OSError of the body is raised as RunError.
    """
    path = Path(path)
    partial = path.with_name(PARTIAL + path.name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # also a link that somebody planted: it would be written through
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Replaces the content of `path` by `data` (text as UTF-8). Raises RunError if the disk refuses."""
    with atomic(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a new sibling directory to fill. On success it replaces `path`; on failure it is removed, and `path` is untouched.

    What a killed process left is removed first. A refusal of the disk outside of the body is raised as RunError.
    """
    partial, replaced = (path.with_name(prefix + path.name) for prefix in (PARTIAL, REMOVING))
    try:
        with writing(path):
            for left in (partial, replaced):
                _remove(left)
            partial.mkdir(parents=True)
        yield partial
        with writing(path):
            publish(partial, path, replaced=replaced)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(
    option: str, paths: Iterable[Path], force: bool, *, folders: bool = False
) -> None:
    """Raises InputError if one of the files that a command is about to write exists, unless the user says so by `--force`.

    Devices and pipes are never replaced, nor are directories, unless the command writes such (`folders`).
    """
    there = [path for path in paths if os.path.lexists(path)]
    for path in there:
        # a link to a device, such as /dev/stdout, is one
        if not (
            path.is_file()
            or (path.is_symlink() and not (force and path.exists()))
            or (folders and path.is_dir())
        ):
            raise InputError(
                f"{option} {path}: is {'a directory' if path.is_dir() else 'no file'}; name another one"
            )
    if there and not force:
        raise InputError(
            f"{option} {there[0]}: exists; name another one, or add --force to replace it"
        )


def writable_directory(path: Path, name: str = "the run directory") -> Path:
    """Creates `path` if it does not exist, and tries a write in it.

    Raises InputError in one line, which calls it `name`, if it is a file, cannot be created, is read-only or has no room.
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
    """Locks `directory` for this process; raises InputError if another process holds the lock.

    The system releases the lock when the process ends, even if it is killed: there is nothing to clean up.
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
    """Writes `manifest.json` with the size and SHA-256 of every other file below `directory`, and syncs all of them."""
    files = {name: _describe(directory / name) for name in _file_names(directory)}
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in (*directory.rglob("*"), directory):
        sync(path)


def damage(directory: Path, *, contents: bool = True) -> str | None:
    """How `directory` differs from what was sealed, with the name of a file; None if it does not differ.

    contents: if False, only names and sizes are compared, and the contents of files of at most `SMALL` bytes.
    """
    name = MANIFEST
    try:
        manifest = parse_json(read_bytes(directory / MANIFEST))
        if not isinstance(manifest, dict):
            return f"{MANIFEST} is damaged"
        actual = set(_file_names(directory)) - {MANIFEST}
        for word, names in (
            ("missing", manifest.keys() - actual),
            ("unknown", actual - manifest.keys()),
        ):
            if names:
                return f"{word} file {', '.join(sorted(names)[:3])}"
        for name, entry in manifest.items():
            found = (directory / name).lstat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is no regular file"
            if not isinstance(entry, dict) or entry.get("size") != found.st_size:
                return f"{name} has {found.st_size} bytes, not the number that was written"
            if (contents or found.st_size <= SMALL) and entry != _describe(directory / name):
                return f"{name} was altered"
    except OSError as error:
        return f"{name} cannot be read: {disk_reason(error)}"
    except ValueError:
        return f"{name} is damaged"
    return None


def publish(temporary: Path, target: Path, *, replaced: Path) -> None:
    """Renames a sealed directory to `target`. An older `target` is first renamed to `replaced`, and removed afterwards."""
    if target.exists():
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync(target.parent)
    if replaced.exists():
        remove_directory(replaced)


def remove_directory(path: Path) -> None:
    """Removes a directory; of a link to one, the link. It is first renamed to a hidden name: a kill leaves no part in sight."""
    hidden = path.with_name(REMOVING + path.name.removeprefix(REMOVING))
    with writing(path):
        if hidden != path:
            _remove(hidden)
            os.replace(path, hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Removes what is at `path`, if anything is: a directory with all that is in it, or a file or link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file_names(path: Path) -> list[str]:
    """Every file below `path`, as sorted names relative to it."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def _describe(path: Path) -> dict[str, Any]:
    """The manifest's entry of one file: {"size": bytes, "sha256": hexadecimal}."""
    with path.open("rb") as stream:
        return {
            "size": os.fstat(stream.fileno()).st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }
