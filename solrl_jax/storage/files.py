"""Writes files and directories that appear complete or not at all.

A file or directory is written under a hidden sibling name, then renamed. If the process is killed,
either the old or the new version is in place. Hidden siblings may remain, which the next write
removes. Replacing a directory takes two renames, and between them neither version has the name. A
directory may also have a manifest, by which a reader can tell whether it was altered. If the disk
refuses a write, the error is a RunError of one line.

In an object store (`stores.StorePath`), a file is written on this machine first and then uploaded.
It appears under its name only when it is complete. A directory is uploaded file by file, its
manifest last, and removed with its manifest first. Readers ignore a directory without a manifest.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.storage.readers import parse_json, read_bytes
from solrl_jax.storage.stores import RunPath, StorePath

# Prefixes of the hidden siblings: of paths that are being written, and of paths that are being
# removed.
PARTIAL = ".partial-"
REMOVING = ".removing-"
MANIFEST = "manifest.json"
# Prefix of the directories of this machine whose content is uploaded to a store.
STAGING = "solrl-"
# `find_damage` always compares the contents of files of at most so many bytes.
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
    """Returns in a few words why the disk refused an operation, e.g. "disk full"; None if the disk
    is not the cause.

    Every OSError counts as a refusal. Other errors do if their message quotes the system's text for
    a full disk, a used-up quota, a file that is too large, a read-only file system or a missing
    permission, as libraries in C++ do, or says "RESOURCE_EXHAUSTED", which counts as "disk full".

    Args:
        error: The error that the operation raised.

    Returns:
        The reason or None. For an OSError of any other kind it is the system's text (`strerror`);
        without one, the first line of the message; without a message, the name of the error's type.
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
def disk_errors_as_run_errors(path: RunPath, note: Callable[[], str] = str) -> Iterator[None]:
    """Turns an error of the disk in the body into a RunError of one line. A context manager and
    decorator.

    Every OSError, also a StoreError, counts as an error of the disk, so the body must not read the
    user's input. Another error counts only if its message says so, e.g. that the disk is full
    (`disk_reason`); otherwise it passes unchanged.

    Args:
        path: The file or directory that the body writes, for the message alone.
        note: A function without arguments that returns text, which is appended to the message as it
            is. It is called only if there is an error of the disk. By default nothing is appended.

    Raises:
        RunError: "REASON while writing PATH", with the REASON of `disk_reason`.
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

    Does nothing for a directory if its file system cannot sync directories.

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
def atomic(path: str | RunPath) -> Iterator[Path]:
    """Lets the body write a file that appears under its name only when it is complete. A context
    manager.

    The body writes a temporary file beside `path`. At the end of the body, that file gets the mode
    of a new file, is synced to the disk and renamed, and the directory is synced. If the body
    fails, `path` stays as it was, and the temporary file is removed. Only one writer of a path may
    run at a time.

    Args:
        path: The file to write; a text is a path of this machine, even if it looks like a URL. An
            existing file (or a link, not its target) is replaced, and missing parent directories
            are created. For one in a store, the body writes a temporary file of this machine, which
            is uploaded when the body ends.

    Yields:
        The path of the temporary file, which exists and is empty: `.partial-NAME` beside `path`,
        or, if `path` is in a store, NAME in a temporary directory.

    Raises:
        RunError: If the disk or the store refuses an operation. Every OSError of the body counts as
            that, and any other error whose message says so, e.g. that the disk is full
            (`disk_reason`). All others pass unchanged.
    """
    if isinstance(path, StorePath):
        with disk_errors_as_run_errors(path), tempfile.TemporaryDirectory(prefix=STAGING) as folder:
            partial = Path(folder) / path.name
            partial.touch()
            yield partial
            path.upload(partial)
        return
    path = Path(path)
    partial = path.with_name(PARTIAL + path.name)
    with disk_errors_as_run_errors(path):
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


def atomic_write(path: str | RunPath, data: bytes | str) -> None:
    """Writes a file that appears under its name only when it is complete, and syncs it to the disk.

    Args:
        path: The file to write; a text is a path of this machine, even if it looks like a URL. An
            existing file (or a link, not its target) is replaced, or stays as it was if writing
            fails. Missing parent directories are created.
        data: The content. Text is encoded as UTF-8.

    Raises:
        RunError: If the disk or the store refuses.
    """
    content = data.encode() if isinstance(data, str) else data
    if isinstance(path, StorePath):
        with disk_errors_as_run_errors(path):
            path.write_bytes(content)
        return
    with atomic(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def atomic_directory(path: RunPath) -> Iterator[Path]:
    """Lets the body fill a directory that appears under its name only when it is complete. A
    context manager.

    The body fills a temporary directory beside it, which is renamed at the end. If the body fails,
    `path` stays as it was, and the temporary directory is removed; the next call removes one that a
    killed process left. The content is not synced to the disk.

    Args:
        path: The directory to write. An existing directory or file is replaced, and missing parent
            directories are created. If it is a link, only the link is replaced. A store has no
            rename. There, the old content is removed first, and then the new files are uploaded one
            by one, `manifest.json` last if the body wrote one. A failed upload leaves the files
            that it has written.

    Yields:
        The path of the empty temporary directory: `.partial-NAME` beside `path`, or, if `path` is
        in a store, one of this machine with another name.

    Raises:
        RunError: If the disk refuses to create or rename a directory, or the store refuses. Errors
            of the body pass unchanged.
    """
    if isinstance(path, StorePath):
        with contextlib.ExitStack() as stack:
            with disk_errors_as_run_errors(path):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=STAGING))
            yield Path(folder)
            with disk_errors_as_run_errors(path):
                path.remove_all(MANIFEST)
                upload_directory(Path(folder), path)
        return
    partial = path.with_name(PARTIAL + path.name)
    replaced = path.with_name(REMOVING + path.name)
    try:
        with disk_errors_as_run_errors(path):
            _remove(partial)
            _remove(replaced)
            partial.mkdir(parents=True)
        yield partial
        with disk_errors_as_run_errors(path):
            publish(partial, path, replaced=replaced)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(
    name: str, paths: Iterable[RunPath], force: bool, *, folders: bool = False
) -> None:
    """Checks that no existing file is about to be replaced, unless `force` allows it.

    Args:
        name: The argument that the paths come from, for the message, e.g. "out".
        paths: The paths that are about to be written. A link exists even if it leads nowhere.
        force: Whether existing files may be replaced. Devices and pipes never may.
        folders: Whether existing directories are treated like files, so that `force` allows
            replacing them. If not, an existing directory is an error even with `force`.

    Raises:
        InputError: If a path exists and may not be replaced. The message names it.
    """
    existing = [path for path in paths if exists(path)]
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


def refuse_link(name: str, path: Path) -> None:
    """Checks that the path of a directory that is about to be replaced is not a link.

    Args:
        name: The argument that the path comes from, for the message, e.g. "out".
        path: The directory, which need not exist.

    Raises:
        InputError: If the path is a symbolic link, even one that leads nowhere.
    """
    if path.is_symlink():
        missing = "" if path.exists() else ", to nothing"
        raise InputError(f"{name}={path}: is a link{missing}; name the directory itself")


def exists(path: RunPath) -> bool:
    """Whether there is a file, a directory or a link of this name, even a link that leads nowhere.

    Args:
        path: The path, here or in a store (where a directory exists if there are objects below it).

    Raises:
        StoreError: If the store refuses or cannot be reached.
    """
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def writable_directory(path: RunPath, name: str = "the run directory") -> RunPath:
    """Creates a directory if it is missing, and checks that files can be written to it.

    It writes, syncs and removes a small hidden file.

    Args:
        path: The directory. Missing parents are created too. In a store no directory is created,
            and only the hidden file is tried; the bucket must exist.
        name: The name of the directory in the error message, e.g. the argument that it comes from.

    Returns:
        `path` itself.

    Raises:
        InputError: If `path` is a file, or cannot be created or written. It may have been created
            then.
    """
    probe = path / f"{PARTIAL}probe-{os.getpid()}"
    try:
        if isinstance(path, Path):
            if path.exists() and not path.is_dir():
                raise InputError(f"{name} {path} is a file; name another one")
            path.mkdir(parents=True, exist_ok=True)
        try:
            # One block and a sync, because a full disk still takes empty files and unsynced bytes.
            probe.write_bytes(bytes(4096))
            if isinstance(probe, Path):
                sync(probe)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{name} {path} cannot be written: {disk_reason(error)}") from error
    return path


def cache_directory(path: str | None, name: str, field: str) -> Path | None:
    """Returns the directory of a cache that a setting names. Nothing is written, and it need not
    exist.

    Args:
        path: The value of the setting: a directory, in which "~" is expanded; "" for the folder
            `solrl_jax/NAME` in the user's cache directory (`XDG_CACHE_HOME`, by default
            `~/.cache`); or None for no cache.
        name: NAME in this path.
        field: The name of the setting, for the error message.

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
def exclusive_lock(directory: RunPath) -> Iterator[None]:
    """Locks a directory for this process while the body runs. A context manager.

    It does not wait: if the lock is taken, it fails. The lock (`flock` of the file `.lock` in the
    directory) ends with the process, even if that is killed. The file stays.

    A store has no locks. There, this process takes the directory over: it writes its name to
    `.lock`, and removes the file at the end if the name is still its own (errors of this removal
    are ignored). A process that used the directory before learns of this by `check_owner`.

    Args:
        directory: The directory. It must exist, except in a store.

    Raises:
        InputError: If another process, or another call in this one, has the lock. Not for a store.
        RunError: If the file `.lock` cannot be opened or, in a store, written.
        OSError: If the file system does not support such locks.
    """
    if isinstance(directory, StorePath):
        atomic_write(directory / ".lock", _process_name())
        try:
            yield
        finally:
            with contextlib.suppress(RunError):
                check_owner(directory)
                (directory / ".lock").unlink()
        return
    with disk_errors_as_run_errors(directory / ".lock"):
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is using the run directory {directory}") from error
        yield
    finally:
        os.close(descriptor)


def check_owner(directory: StorePath) -> None:
    """Checks that no other process has taken over a directory in a store.

    Args:
        directory: The directory, which this process uses within `exclusive_lock`.

    Raises:
        RunError: If another process has taken the directory over, if `.lock` is missing, or if the
            store refuses.
    """
    with disk_errors_as_run_errors(directory / ".lock"):
        try:
            owner = (directory / ".lock").read_bytes().decode(errors="replace")
        except FileNotFoundError:
            raise RunError(
                f"{directory / '.lock'} is gone: another process has used the run directory and "
                "ended, or somebody removed the file"
            ) from None
    if owner != _process_name():
        raise RunError(f"another process has taken over the run directory {directory}: {owner}")


@functools.cache
def _process_name() -> str:
    """Returns the name of this process in the file `.lock` of a store: "process PID on HOST (ID)",
    where ID is 32 random hexadecimal digits.

    No other process has it, on any machine.
    """
    return f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex})"


def write_manifest(directory: Path) -> None:
    """Writes a `manifest.json` with the size and SHA-256 of every file below a directory, so that
    `find_damage` can check them.

    It is a JSON object of {"size", "sha256"} by the path relative to the directory. Also syncs all
    files and directories to the disk.

    Args:
        directory: The directory, without a manifest.

    Raises:
        OSError: If a file cannot be read or written.
    """
    files = {name: _manifest_entry(directory / name) for name in _file_names(directory)}
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in (*directory.rglob("*"), directory):
        sync(path)


def find_damage(directory: Path, *, contents: bool = True) -> str | None:
    """Compares a directory with the manifest that `write_manifest` wrote.

    It raises no error: files that cannot be read, links in place of files, and a missing or damaged
    manifest (or directory) are differences too. Additional links to directories are not noticed.

    Args:
        directory: The directory.
        contents: Whether to compare the contents (SHA-256) of all files. If False, only those of
            files up to 1 MiB (`SMALL`), and the names and sizes of all.

    Returns:
        The first difference in a few words, e.g. "missing file a.json", "unknown file c.txt" (not
        in the manifest) or "b.bin was altered". None if there is none.
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
            if is_compared and entry != _manifest_entry(directory / name):
                return f"{name} was altered"
    except OSError as error:
        return f"{name} cannot be read: {disk_reason(error)}"
    except ValueError:
        return f"{name} is damaged"
    return None


def publish(temporary: Path, target: Path, *, replaced: Path) -> None:
    """Renames a complete directory to its final name, and syncs the name to the disk.

    Args:
        temporary: The complete directory.
        target: Its final path, on the same file system. An older directory, file or link there is
            replaced (a link itself, not its target). For a moment, neither the new nor the old one
            has the name.
        replaced: A path beside `target`, not in use, to which the older one is moved before it is
            removed. It stays there if `temporary` cannot be renamed to `target`.

    Raises:
        OSError: If a rename or the sync fails.
        RunError: If the older one cannot be removed. The new directory is then in place.
    """
    if exists(target):
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync(target.parent)
    if exists(replaced):
        remove_directory(replaced)


def stored_damage(directory: StorePath) -> str | None:
    """Compares the names and sizes of the files of a directory in a store with its manifest.

    Contents are not compared, because that would download them. After a download, `find_damage`
    compares the contents of the copy. Nothing is raised: a store that refuses and a missing or
    damaged manifest count as differences.

    Args:
        directory: The directory.

    Returns:
        The first difference in a few words, e.g. "missing file a.json" or "unknown file c.txt" (not
        in the manifest), or why the manifest cannot be read. None if there is no difference.
    """
    try:
        manifest = parse_json(read_bytes(directory / MANIFEST))
        expected = {name: entry["size"] for name, entry in manifest.items()}
        sizes = directory.file_sizes()
    except OSError as error:
        return f"{MANIFEST} cannot be read: {disk_reason(error)}"
    except InputError as error:  # the package that reads the store is not installed
        return f"{MANIFEST} cannot be read: {first_line(error)}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    sizes.pop(MANIFEST, None)
    for name in sorted(expected.keys() | sizes.keys()):
        if name not in sizes:
            return f"missing file {name}"
        if name not in expected:
            return f"unknown file {name}"
        if expected[name] != sizes[name]:
            return f"{name} has {sizes[name]} bytes, not the number that was written"
    return None


def move(path: RunPath, target: RunPath) -> None:
    """Gives a file another name. In a store, which has no rename, it is copied and removed.

    Args:
        path: The file.
        target: Its new name, in the same directory. An existing file is replaced.

    Raises:
        RunError: If the disk or the store refuses.
    """
    with disk_errors_as_run_errors(target):
        if isinstance(path, StorePath):
            atomic_write(target, path.read_bytes())
            path.unlink()
        else:
            os.replace(path, str(target))


def upload_directory(source: Path, target: StorePath, *, without: Collection[str] = ()) -> None:
    """Uploads all files below a directory to a store, its `manifest.json` last if there is one.

    Args:
        source: The directory. Links to files are followed, links to directories are left out.
        target: The path below which the files are written. Files of the same names are replaced,
            and others stay.
        without: Names of files, relative to the directory, that are left out.

    Raises:
        OSError: If a file cannot be read, or the store refuses.
    """
    names = [name for name in _file_names(source) if name not in without]
    for name in sorted(names, key=lambda name: name == MANIFEST):
        (target / name).upload(source / name)


def download_directory(source: StorePath, target: Path) -> list[str]:
    """Copies all objects below a path of a store to a directory of this machine.

    Args:
        source: The path in the store.
        target: The directory. It is created if there is an object to copy; files of the same names
            are replaced, and others stay.

    Returns:
        The names of the copied files relative to the directory, sorted.

    Raises:
        OSError: If the store or the disk refuses.
    """
    names = list(source.file_sizes())
    for name in names:
        (source / name).download(target / name)
    return names


def remove_directory(path: RunPath) -> None:
    """Removes a directory with its content. If the process is killed, no incomplete directory is
    left that readers would take for a complete one.

    On a disk, the directory is first renamed to `.removing-NAME`; an older one of that name is
    removed. If the path is a link, only the link is removed. A store has no rename. There, the
    manifest is removed first, and readers ignore a directory without one.

    Args:
        path: The directory. On a disk it must exist. In a store, or if its name is `.removing-NAME`
            already, it may be missing; then nothing happens.

    Raises:
        RunError: If the disk or the store refuses, or a directory that must exist does not.
    """
    if isinstance(path, StorePath):
        with disk_errors_as_run_errors(path):
            path.remove_all(MANIFEST)
        return
    hidden = path.with_name(REMOVING + path.name.removeprefix(REMOVING))
    with disk_errors_as_run_errors(path):
        if hidden != path:
            _remove(hidden)
            os.replace(path, hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a directory with its content, a file, or a link (not its target).

    Args:
        path: The path to remove. It may be missing.

    Raises:
        OSError: If the disk refuses.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file_names(path: Path) -> list[str]:
    """Lists all files below a directory, those in subdirectories and hidden ones included.

    Args:
        path: The directory. If it is missing, the result is [].

    Returns:
        The paths relative to the directory, with "/" between folders, sorted. Directories and links
        to directories are left out.
    """
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def _manifest_entry(path: Path) -> dict[str, Any]:
    """Returns the entry of a file in a manifest.

    Args:
        path: The file. A link counts as its target.

    Returns:
        {"size": number of bytes, "sha256": hash of the content as 64 hexadecimal digits}.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as stream:
        return {
            "size": os.fstat(stream.fileno()).st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }
