"""Writes checkpoints in a thread beside the training, and removes old ones.

`checkpoint.py` describes the format. A save has two halves. The first copies the arrays to the
host; when it returns, the next update may overwrite them. The second runs in the thread: it writes
the copies, adds the manifest, gives the directory its name and removes old checkpoints.

orbax writes the arrays and merges the files of several processes. Its AsyncCheckpointer could do a
whole save, but it names the directory before there is a manifest, and if the disk of one process is
full, it keeps the others waiting for minutes. Here every process tells the others whether its half
succeeded. Then the first process adds the manifest, or removes what was written.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from solrl_jax.parallel import consensus
from solrl_jax.runs import checkpoint
from solrl_jax.runs.checkpoint import ARRAYS, FORMAT, META, REPLACED, CheckpointError, candidates
from solrl_jax.storage import files

# Prefix of the name of a checkpoint while it is written.
SAVING = ".saving-"


class Saver:
    """Saves checkpoints to one directory, one at a time, in a thread.

    Every process of a run has one. An error in the thread is raised by the next call of `save` or
    `wait`. As a context manager, it waits at the end for the save in progress, also if the body
    raised, and ends the thread.
    """

    def __init__(self, root: Path, *, keep: int, best: int) -> None:
        """Creates the saver without writing anything.

        Args:
            root: The directory of checkpoints. It is created by the first save.
            keep: The number of newest intact checkpoints to keep after each save. At least one is
                kept.
            best: The number of checkpoints with the highest "eval/reward" to keep beside them. 0:
                none.
        """
        self._root = root
        self._keep = keep
        self._best = best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[Path] | None = None
        self._last: int | None = None

    def save(self, iteration: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Waits for the previous save and starts a new one.

        When this returns, the arrays of `state` may be overwritten, and the thread writes their
        copies. If it is called twice in a row for an iteration, the second call saves nothing,
        unless the first save failed. Every process of a run calls it. When the save is complete,
        the thread removes checkpoints that are neither among the newest nor among the best that
        the saver keeps.

        Args:
            iteration: The number of iterations behind the state, which names the directory.
            state: A pytree of plain jax arrays, such as `TrainState`.
            meta: JSON values by name that are saved with the state. Those of the first process
                count.

        Raises:
            RunError: If the disk refused the previous save, which is then not retried, or refuses
                the beginning of this one. Also if another process failed or gives no answer.
            TypeError: If a leaf of the state is no plain jax array, or JSON has no value of `meta`.
        """
        self.wait()
        if iteration == self._last:
            return
        finish = begin(self._root, iteration, state, meta, keep=self._keep, best=self._best)
        self._pending = self._thread.submit(finish)
        self._last = iteration

    def wait(self) -> None:
        """Waits for the save in progress. Returns at once if there is none.

        Raises:
            RunError: If the disk refused it, or another process failed or gives no answer. If the
                disk is the cause, the message names the last checkpoint. The next call does not
                raise the error again, and the save may be repeated.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            # Forgotten until it has succeeded, so that a failed save may be tried again.
            last = self._last
            self._last = None
            pending.result()
            self._last = last

    def __enter__(self) -> "Saver":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the save in progress, then ends the thread, also if `wait` raises.

        Args:
            *_: The exception of the body, if it raised one. Not read.

        Raises:
            RunError: If the disk refused the save in progress, or another process failed or gives
                no answer. It replaces an exception of the body.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()


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
        root: The directory of checkpoints. It is created if necessary.
        iteration: The number of complete iterations, which names the directory.
        state: A pytree of jax arrays. When this returns, they may be overwritten.
        meta: JSON values by name. Those of the first process are saved.
        keep: The number of newest intact checkpoints that are kept afterwards, at least one. None:
            no checkpoint is removed, and `best` has no effect.
        best: The number of checkpoints with the highest "eval/reward" that are kept beside them.

    Returns:
        The second half, a function without arguments. Call it once, in any thread. It returns the
        path of the checkpoint when all of it is on the disk.

    Raises:
        RunError: If the disk refuses; both halves raise it. The message names the last checkpoint.
            Also if another process failed or gives no answer.
        TypeError: If a leaf of the state is no jax array or a random key, or JSON has no value of
            `meta`.
    """
    root = root.absolute()
    target = root / f"{iteration:06d}"
    temporary = root / f"{SAVING}{iteration:06d}"
    arrays = _named_arrays(state)
    index = {
        key: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for key, leaf in arrays.items()
    }
    header = json.dumps(
        {"format": FORMAT, "iteration": iteration, "meta": meta, "arrays": index}, indent=1
    )

    def name_last_checkpoint() -> str:
        return f"; the last checkpoint is {next(iter(candidates(root)), 'none')}"

    # Turns errors of the disk into RunError, as a decorator.
    reports_disk_errors = files.writing(target, note=name_last_checkpoint)

    @reports_disk_errors
    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        (temporary / ARRAYS).mkdir()

    with _removed_on_failure(temporary):
        consensus.first("save/prepare", prepare)
    try:
        wait, merge = start_writing(temporary / ARRAYS, arrays)
    except Exception as error:
        # Raised in the second half, when no process writes any more.
        failed: Future[None] = Future()
        failed.set_exception(error)
        wait = failed.result
        merge = _do_nothing

    @reports_disk_errors
    def publish() -> None:
        merge()
        (temporary / META).write_text(header)
        files.seal(temporary)
        files.publish(temporary, target, replaced=root / (target.name + REPLACED))

    def finish() -> Path:
        with _removed_on_failure(temporary):
            consensus.together("save/write", reports_disk_errors(wait))
            consensus.first("save/publish", publish)
        if keep is not None:
            consensus.first("save/prune", reports_disk_errors(lambda: prune(root, keep, best)))
        return target

    return finish


def start_writing(
    folder: Path, arrays: dict[str, jax.Array]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies this process's shards to the host, and starts to write the copies to a directory.

    When this returns, the arrays may be overwritten or donated.

    Args:
        folder: An existing, empty directory, to which all processes write.
        arrays: The arrays to save, by key path. Empty ones are not written.

    Returns:
        A pair of functions without arguments or results. The first waits until this process's files
        are written, and raises what the writing raised. The second merges the files of all
        processes; only the first process calls it, after all have waited.
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
        handler.finalize(directory)

    return wait, merge


def prune(root: Path, keep: int, best: int = 0) -> None:
    """Removes old checkpoints. Damaged ones are never removed.

    What counts as intact is checked quickly (only files of at most 1 MiB are read), except for the
    newest: it is read in full, so that at least one checkpoint is known to be intact in every byte.

    Args:
        root: The directory of checkpoints. If it does not exist, nothing happens.
        keep: The number of newest intact checkpoints to keep. At least one is kept.
        best: The number of intact checkpoints with the highest "eval/reward" to keep as well. One
            that is among the newest counts for both.

    Raises:
        RunError: If a checkpoint cannot be removed, or the directory cannot be read.
    """
    num_intact = 0
    best_paths = checkpoint.rank_by_reward(root)[:best]
    for path in candidates(root):
        with contextlib.suppress(CheckpointError):
            checkpoint.verify(path, contents=num_intact == 0)
            if num_intact >= max(keep, 1) and path not in best_paths:
                files.remove_directory(path)
            num_intact += 1


def _do_nothing() -> None:
    """Does nothing. Stands in for a step of a save when there is nothing to write."""


def _named_arrays(state: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a pytree by their key path, as `jax.tree_util.keystr` writes it.

    Args:
        state: A pytree of jax arrays.

    Returns:
        The arrays by key path, e.g. ".ema['blocks/attn/to_q/kernel']['a']", in the order of the
        tree's leaves.

    Raises:
        TypeError: If a leaf is no jax array, or one of an extended dtype such as a random key.
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
    """A context manager that removes a directory if its body raises, then raises the error again.

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
    """Removes what killed saves and removals left in the directory of checkpoints.

    These are unfinished checkpoints (`.saving-...`), half-removed ones (`.removing-...`), and
    replaced ones (`NNNNNN.replaced`) if the checkpoint that replaced them is there.

    Args:
        root: The directory of checkpoints. It must exist.

    Raises:
        RunError: If the disk refuses.
    """
    for path in list(root.iterdir()):
        is_replaced = (
            path.name.endswith(REPLACED)
            and checkpoint.iteration_of(path) is not None
            and path.with_suffix("").exists()
        )
        if is_replaced or path.name.startswith((SAVING, files.REMOVING)):
            files.remove_directory(path)
