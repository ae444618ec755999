"""Writes files and directories that appear complete or not at all.

A file or directory is written under a hidden sibling name, then renamed. If the process is killed,
the old one or the new one is there, and hidden siblings, which the next write removes. Only between
the two renames that replace a directory does neither have its name. A directory may also have a
manifest, by which a reader can tell whether it was altered. If the disk refuses a write, the error
is a RunError of one line.
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
    """Returns why the disk refused an operation, in a few words such as "disk full".

    Every OSError counts as a refusal. Libraries in C++ raise errors of other types that quote the
    system's message, so the message of any other error is searched for those of a full disk, a
    used-up quota, a file that is too large, a read-only file system and a lack of permission, and
    for "RESOURCE_EXHAUSTED", which counts as a full disk.

    Args:
        error: The error that an operation on a file raised.

    Returns:
        The reason. An OSError of another kind has the system's message, or the first line of its
        own. None if the error is no OSError and quotes no such message, which means that the disk
        is not the cause.
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
    """Turns an error of the disk in the body into a RunError of one line.

    Works as a context manager and as a decorator. Every OSError counts as an error of the disk, so
    the body must not read the user's input. An error for which `disk_reason` returns None, such as
    a ValueError, and exceptions like KeyboardInterrupt pass unchanged.

    Args:
        path: The file or directory that the body writes, which the message names. It need not
            exist, and is not touched here.
        note: Returns text for the end of the message, which follows without a space. It is called
            only when an error occurs. By default the text is empty.

    Raises:
        RunError: "REASON while writing PATH", if `disk_reason` finds a reason in the body's error.
    """
    try:
        yield
    except Exception as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        raise RunError(f"{reason} while writing {path}{note()}") from error


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a directory, are on the disk (fsync).

    Does nothing for a directory on a file system that cannot sync directories (EINVAL or ENOTSUP).

    Args:
        path: An existing file or directory. A link counts as its target.

    Raises:
        OSError: If `path` cannot be opened, or the disk refuses.
    """
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

    Missing parent directories are created. The new file and its name are synced to the disk. If the
    body raises, whatever it raises, `path` is untouched and the sibling is removed. The file gets
    the permissions that new files have (666 without the umask), whatever mode the body created it
    with: safetensors creates files that only their owner can read. Two writers of one path at the
    same time would share the sibling, so the caller must prevent that.

    Args:
        path: The file to write. It may exist; if it is a link, the link itself is replaced.

    Yields:
        The path of an empty hidden sibling, `.partial-NAME`, which the body writes and which
        becomes `path`. A leftover of this name is removed first. It has the suffix of `path`,
        because image writers choose the format by it.

    Raises:
        RunError: If the disk refuses an operation. Every OSError of the body counts as that; other
            errors of the body pass unchanged, unless their message quotes the system's text for a
            full or read-only disk.
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
    """Writes a whole file at once and syncs it to the disk. If that fails, the file stays as it
    was.

    Args:
        path: The file to write. It may exist. Missing parent directories are created.
        data: The content. Text is encoded as UTF-8; its line ends are not translated.

    Raises:
        RunError: If the disk refuses.
    """
    with atomic(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Replaces a directory at once, when the body has filled the new one.

    Missing parent directories are created. Leftovers of a killed process, `.partial-NAME` and
    `.removing-NAME`, are removed first. If the body raises, `path` is untouched and the new
    directory is removed. The content is not synced to the disk; only the final name is.

    Args:
        path: The directory to write. It may exist, as a directory or a file; its old content is
            removed after the new directory has its name. If it is a link, only the link is.

    Yields:
        The path of a new, empty sibling directory, `.partial-NAME`, which the body fills and which
        becomes `path`.

    Raises:
        RunError: If the disk refuses an operation outside of the body. Errors of the body pass
            unchanged.
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
    """Checks that no existing file is replaced, unless that is wanted. Writes and removes nothing.

    Args:
        name: The argument that the paths come from, for the message, e.g. "out".
        paths: The files, or with `folders` the files and directories, that are about to be written.
        force: Whether existing files and links that lead nowhere may be replaced. Devices and
            pipes, also behind a link, never are.
        folders: Whether directories are written, so that `force` covers existing directories too.

    Raises:
        InputError: If `force` is False and a path exists, even as a link that leads nowhere. If a
            path is a directory and `folders` is False, or is neither a file nor a directory,
            whatever `force` is. The message names the first such path.
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

    For the check, writes a hidden file of 4096 bytes, syncs it to the disk and removes it.

    Args:
        path: The directory. Missing parents are created too.
        name: What the messages call it, e.g. the argument that it comes from.

    Returns:
        `path`.

    Raises:
        InputError: If `path` is a file, cannot be created, lies on a read-only file system, may not
            be written by this user, or if the disk is full. A directory that was created stays.
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


def cache_directory(path: str | None, name: str, field: str) -> Path | None:
    """Returns the directory of a cache. Nothing is written, and it need not exist.

    Args:
        path: The setting: a directory, in which "~" is expanded; "" for `solrl_jax/NAME` in the
            user's cache directory (`XDG_CACHE_HOME`, by default `~/.cache`); or None for no cache.
        name: The name of the directory in the user's cache directory.
        field: The name of the setting, for messages.

    Returns:
        The directory; None for no cache.

    Raises:
        InputError: If the path is a file, or needs a home directory that the user does not have.
        PermissionError: If a parent of the directory may not be searched.
    """
    if path is None:
        return None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        directory = Path(path or user_cache / "solrl_jax" / name).expanduser()
    except RuntimeError as error:  # containers may have users without a home
        raise InputError(
            f"{field}={path!r}: there is no home directory; "
            "name another directory, or null for none"
        ) from error
    if directory.exists() and not directory.is_dir():
        raise InputError(
            f"{field}={path!r}: is a file; expected a directory, "
            "'' for the user's cache directory, or null for none"
        )
    return directory


@contextlib.contextmanager
def only_user(directory: Path) -> Iterator[None]:
    """Locks an existing directory for this process while the body runs.

    The lock is an exclusive `flock` of a file `.lock` in the directory, which is created if
    necessary and stays. The system releases the lock when the process ends, even if it is killed,
    so there is nothing to clean up. It does not wait for another process to release the lock.

    Args:
        directory: The directory. It must exist.

    Raises:
        InputError: If another process, or another call in this one, holds the lock.
        RunError: If the file `.lock` cannot be opened or created.
        OSError: If the file system does not support such locks.
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
    """Writes `manifest.json` with the size and SHA-256 of every file below a directory.

    Reads all files. Also syncs all files and directories below the directory, the manifest and the
    directory itself to the disk.

    Args:
        directory: The directory. It must not have a manifest yet: an old one would be listed in the
            new one, which `damage` then reports as a missing file.

    Raises:
        OSError: If a file cannot be read or written.
    """
    files = {name: _describe(directory / name) for name in _file_names(directory)}
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in (*directory.rglob("*"), directory):
        sync(path)


def damage(directory: Path, *, contents: bool = True) -> str | None:
    """Compares a directory with its manifest, which `seal` wrote.

    Links to directories are not compared. Nothing is raised for files that cannot be read.

    Args:
        directory: The directory, which `seal` has given a `manifest.json`.
        contents: Whether to compare the SHA-256 of all files. If False, only names and sizes are
            compared, and the SHA-256 of files of at most `SMALL` bytes (1 MiB).

    Returns:
        The first difference in a few words, with the names of at most three files. Missing files
        come first, then unknown ones, then files that are no regular file or have another size or
        content, then files that cannot be read. A manifest that is absent or damaged counts as a
        difference. None if there is no difference.
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
    """Renames a complete directory to its final name, and syncs the names in the parent directory.

    Args:
        temporary: The complete directory, which is renamed and no longer exists afterwards.
        target: Its final path, on the same file system. It may exist; between two renames there is
            then for a moment no `target`.
        replaced: The path that an older `target` is renamed to meanwhile, in the directory that
            holds `target`. What is at this path at the end is removed, also if there was no older
            `target`.

    Raises:
        OSError: If a rename or the sync fails.
        RunError: If the older directory cannot be removed.
    """
    if target.exists():
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync(target.parent)
    if replaced.exists():
        remove_directory(replaced)


def remove_directory(path: Path) -> None:
    """Removes a directory with its content. If it is a link to a directory, only the link is
    removed.

    The directory is renamed to a hidden name, `.removing-NAME`, first, so that no part of it is
    visible after a kill. A leftover of that name is removed too.

    Args:
        path: The directory. It may have the hidden name already, and is then not renamed.

    Raises:
        RunError: If the disk refuses, or if `path` does not exist under a name that is not hidden.
    """
    hidden = path.with_name(REMOVING + path.name.removeprefix(REMOVING))
    with writing(path):
        if hidden != path:
            _remove(hidden)
            os.replace(path, hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a directory with its content, a file, or a link but not its target.

    Args:
        path: What to remove. Nothing happens if there is no such file.

    Raises:
        OSError: If the disk refuses.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file_names(path: Path) -> list[str]:
    """Lists all files below a directory, also those in subdirectories and hidden ones.

    Args:
        path: The directory that is searched.

    Returns:
        The paths relative to the directory, as text with "/" between folders, sorted. Directories
        and links to directories are left out. An empty list if there is no such directory.
    """
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def _describe(path: Path) -> dict[str, Any]:
    """Reads one file and returns its entry in the manifest.

    Args:
        path: The file. A link counts as its target.

    Returns:
        {"size": the number of bytes, "sha256": 64 hexadecimal digits of the hash of the content}.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as stream:
        return {
            "size": os.fstat(stream.fileno()).st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }
