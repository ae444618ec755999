"""Writes checkpoints to a file system that all processes share, and removes old ones.

`checkpoint.py` describes the format. A save has two halves. The first copies the arrays to the
host; when it returns, the next update may overwrite them. The second runs in a thread: it writes
the copies, adds the manifest, gives the directory its name and removes old checkpoints.

orbax writes the arrays and merges the files of several processes. Its AsyncCheckpointer could do a
whole save, but it names the directory before there is a manifest, and if the disk of one process is
full, it keeps the others waiting for minutes. Here every process tells the others whether its half
succeeded. Then the first process adds the manifest, or removes what was written.
"""

import asyncio
import contextlib
import glob
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from solrl_jax.errors import RunError
from solrl_jax.parallel import consensus
from solrl_jax.runs import checkpoint
from solrl_jax.runs.checkpoint import (
    ARRAYS,
    FORMAT,
    META,
    REPLACED,
    CheckpointError,
    list_checkpoints,
)
from solrl_jax.storage import files
from solrl_jax.storage.stores import RunPath

# The file that orbax adds to the arrays when it merges the files of all processes.
MERGED = "manifest.ocdbt"
# Prefix of the name of a checkpoint while it is written.
SAVING = ".saving-"


def begin(
    root: Path,
    iteration: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    keep: int | None = None,
    best: int = 0,
) -> Callable[[], Path]:
    """Does the first half of a save, and returns a function that does the second.

    Every process of a run calls both. The first half removes what killed saves left in `root`,
    copies the arrays to the host and starts to write them to a hidden directory. The second half
    waits until they are written, adds metadata and manifest, gives the directory its name (a
    checkpoint of the same iteration is replaced) and removes old checkpoints. If a save fails, the
    existing checkpoints stay as they are.

    Args:
        root: The directory of checkpoints on a disk that all processes share (for an object store,
            see `store_writer.begin`). It is created if necessary.
        iteration: The number of complete iterations, which names the directory.
        state: A pytree of jax arrays. When this returns, they may be overwritten.
        meta: JSON values by name, without NaN and infinity. Those of the first process are saved.
        keep: The number of newest intact checkpoints that are kept afterwards; 0 and negative
            numbers count as 1. None: no checkpoint is removed, and `best` has no effect.
        best: The number of checkpoints that are kept as well because they have the highest
            "eval/reward" in the entry "evaluation" of their `meta`. One that is among the newest
            counts for both.

    Returns:
        The second half, a function without arguments. Call it once, in any thread, before the next
        save begins. It returns the path of the checkpoint when all of it is on the disk.

    Raises:
        RunError: If the disk refuses; both halves raise it. The message names the last checkpoint.
            Also if another process failed or gives no answer.
        TypeError: If a leaf of the state is a random key or not a jax array, or if JSON cannot
            represent `meta`.
    """
    root = root.absolute()
    target = root / f"{iteration:06d}"
    temporary = root / f"{SAVING}{iteration:06d}"
    arrays = named_arrays(state)
    header = meta_json(iteration, arrays, meta)

    def name_last_checkpoint() -> str:
        return f"; the last checkpoint is {next(iter(list_checkpoints(root)), 'none')}"

    # Turns errors of the disk into RunError, as a decorator.
    reports_disk_errors = files.disk_errors_as_run_errors(target, note=name_last_checkpoint)

    @reports_disk_errors
    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        (temporary / ARRAYS).mkdir()

    with _removed_on_failure(temporary):
        consensus.from_first("save/prepare", prepare)
    wait, merge = start_writing_or_fail_later(temporary / ARRAYS, arrays)

    @reports_disk_errors
    def publish() -> None:
        merge()
        (temporary / META).write_text(header)
        files.write_manifest(temporary)
        files.publish(temporary, target, replaced=root / (target.name + REPLACED))

    def finish() -> Path:
        with _removed_on_failure(temporary):
            consensus.on_every("save/write", reports_disk_errors(wait))
            consensus.from_first("save/publish", publish)
        if keep is not None:
            consensus.from_first("save/prune", reports_disk_errors(lambda: prune(root, keep, best)))
        return target

    return finish


def meta_json(iteration: int, arrays: Mapping[str, jax.Array], meta: Mapping[str, Any]) -> str:
    """Returns the content of a checkpoint's `meta.json`, as JSON text.

    Args:
        iteration: The number of complete iterations.
        arrays: The arrays of the state, by key path. Only their shapes and dtypes are written.
        meta: JSON values by name, which are saved with the state. NaN and infinity are written
            without an error, but such a checkpoint cannot be read (`checkpoint.meta_of`).

    Raises:
        TypeError: If JSON cannot represent `meta`.
    """
    index = {
        key: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for key, leaf in arrays.items()
    }
    return json.dumps(
        {"format": FORMAT, "iteration": iteration, "meta": meta, "arrays": index}, indent=1
    )


def start_writing_or_fail_later(
    folder: Path, arrays: dict[str, jax.Array]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Calls `start_writing`, but puts off its error until the caller waits for the files.

    All processes wait before the save reports an error. By then no process is writing any more, so
    the first process can clean up.

    Args:
        folder: The directory that `start_writing` writes to.
        arrays: The arrays to save, by key path (`named_arrays`).

    Returns:
        The pair of functions of `start_writing`: the first waits until this process's files are
        written, the second merges the files of all processes. If `start_writing` failed, the first
        function raises its error and the second does nothing.
    """
    try:
        return start_writing(folder, arrays)
    except Exception as error:
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed.result, _do_nothing


def start_writing(
    folder: Path, arrays: dict[str, jax.Array]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies this process's shards to the host, and starts to write the copies to a directory.

    Every process of a run calls this. When it returns, the arrays may be overwritten or donated.

    Args:
        folder: An existing directory. It may be an empty one that all processes share. Otherwise
            each process has its own, which holds only an empty subdirectory `array_metadatas`
            (orbax creates it in the first process alone), and the caller copies all files to the
            first process's directory before the merge.
        arrays: The arrays to save, by key path (`named_arrays`). Arrays without elements are not
            written.

    Returns:
        A pair of functions without arguments or results. The first waits until this process's files
        are written, and raises what the writing raised. The second merges the files of all
        processes; only the first process calls it, after all have waited. It raises RunError if
        there is nothing to merge.
    """
    stored = {key: leaf for key, leaf in arrays.items() if leaf.size}
    if not stored:
        return _do_nothing, _do_nothing
    ocp, epath = checkpoint.orbax()
    handler = ocp.PyTreeCheckpointHandler()
    directory = epath.Path(folder)
    commits = _run_coroutine(handler.async_save(directory, args=ocp.args.PyTreeSave(stored)))

    def wait() -> None:
        for commit in commits:
            commit.result()

    def merge() -> None:
        with _path_without_patterns(folder) as plain:
            handler.finalize(epath.Path(plain))
        # orbax only warns if it finds nothing to merge.
        if not (folder / MERGED).exists():
            raise RunError(f"{folder}: the files of the processes were not merged")

    return wait, merge


@contextlib.contextmanager
def _path_without_patterns(folder: Path) -> Iterator[Path]:
    """Yields a path of a directory that `glob` takes literally, for the body of a `with` statement.

    orbax looks for files with `glob` and the whole path of their directory, in which brackets,
    asterisks and question marks would be a pattern.

    Args:
        folder: The directory.

    Yields:
        `folder` itself, or a temporary symbolic link to it if its path has such characters.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    temporary = tempfile.gettempdir()
    if glob.escape(temporary) != temporary:
        temporary = "/tmp"
    with tempfile.TemporaryDirectory(dir=temporary) as parent:
        link = Path(parent) / ARRAYS
        link.symlink_to(folder.absolute())
        yield link


def prune(root: RunPath, keep: int, best: int = 0) -> None:
    """Removes old checkpoints. Damaged ones are never removed. One process of a run calls it.

    From the newest on, checkpoints are read in full until one is intact in every byte. The older
    ones are checked quickly (only files of at most 1 MiB are read). In an object store only names
    and sizes are compared.

    Args:
        root: The directory of checkpoints. If it does not exist, nothing happens.
        keep: The number of newest intact checkpoints to keep. At least one is kept.
        best: The number of intact checkpoints with the highest "eval/reward" to keep as well. One
            that is among the newest counts for both.

    Raises:
        RunError: If a checkpoint cannot be removed, or the directory cannot be read.
    """
    num_intact = 0
    best_paths = checkpoint.rank_by_reward(root)[:best] if best else []
    for path in list_checkpoints(root):
        with contextlib.suppress(CheckpointError):
            checkpoint.verify(path, contents=num_intact == 0)
            if num_intact >= max(keep, 1) and path not in best_paths:
                files.remove_directory(path)
            num_intact += 1


def _do_nothing() -> None:
    """Does nothing. Stands in for a step of a save when there is nothing to write."""


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a pytree by their key path, as `jax.tree_util.keystr` writes it.

    Args:
        state: A pytree of jax arrays.

    Returns:
        The arrays by key path, e.g. ".ema['blocks/attn/to_q/kernel']['a']", in the order of the
        tree's leaves.

    Raises:
        TypeError: If a leaf is not a jax array, or has an extended dtype, such as a random key.
    """
    arrays = {
        jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    for key, leaf in arrays.items():
        if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"{key} is a {kind}, not a plain jax array")
    return arrays


@contextlib.contextmanager
def _removed_on_failure(temporary: Path) -> Iterator[None]:
    """A context manager that removes a directory if its body raises. The error propagates.

    Only the first process of the run removes it. Errors of the removal are ignored.

    Args:
        temporary: The directory. It need not exist.
    """
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new thread and waits for it.

    Unlike `asyncio.run`, it works where the caller's thread has a running event loop, as in a
    notebook, and does not touch the tasks of other threads.

    Args:
        coroutine: The coroutine, not yet started.

    Returns:
        The result of the coroutine. What it raises is raised here.
    """
    loop = asyncio.new_event_loop()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(loop.run_until_complete, coroutine).result()
    finally:
        loop.close()


def _remove_leftovers(root: Path) -> None:
    """Removes what killed saves and removals left among checkpoints. The first process calls it.

    These are unfinished checkpoints (`.saving-...`), half-removed ones (`.removing-...`), and
    replaced ones (`NNNNNN.replaced`) if `NNNNNN` exists, intact or not.

    Args:
        root: The directory of checkpoints. It must exist.

    Raises:
        RunError: If one of them cannot be removed.
        OSError: If the directory cannot be read.
    """
    for path in list(root.iterdir()):
        is_replaced = (
            path.name.endswith(REPLACED)
            and checkpoint.iteration_of(path) is not None
            and path.with_suffix("").exists()
        )
        if is_replaced or path.name.startswith((SAVING, files.REMOVING)):
            files.remove_directory(path)
