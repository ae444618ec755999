"""Writes checkpoints in a thread beside the training, and removes old ones. `checkpoint.py` says what a checkpoint is.

A save has two halves. The first copies the arrays to the host; when it returns, the next update may overwrite them. The second
runs in the thread: it writes the copies, adds the manifest, gives the directory its name and removes old checkpoints.

orbax writes the arrays and merges the files of several processes. Its AsyncCheckpointer would do all of a save, but it names
the directory before there is a manifest, and if one process's disk is full, it keeps the others waiting for minutes. Here every
process tells the others whether its half succeeded. Then the first process adds the manifest, or removes what was written.
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

SAVING = ".saving-"  # how the name of a checkpoint begins while it is written


class Saver:
    """Saves to one directory, one checkpoint at a time. An error in the thread is raised by the next call.

    Every process has one. As a context manager it waits at the end for the save under way, also when the body raised.
    """

    def __init__(self, root: Path, *, keep: int, best: int) -> None:
        """keep, best: see `prune`."""
        self._root = root
        self._keep = keep
        self._best = best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[Path] | None = None
        self._last: int | None = None

    def save(self, iteration: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Waits for the previous save and starts one of `state`. When this returns, `state` may be overwritten.

        The same iteration twice in a row is saved once. Raises what `wait` and `begin` raise.
        """
        self.wait()
        if iteration != self._last:
            finish = begin(self._root, iteration, state, meta, keep=self._keep, best=self._best)
            self._under_way = self._thread.submit(finish)
            self._last = iteration

    def wait(self) -> None:
        """Waits for the save under way. Raises RunError, which names the last checkpoint, if the disk refused."""
        under_way = self._under_way
        self._under_way = None
        if under_way is not None:
            # a save that failed may be tried again
            last = self._last
            self._last = None
            under_way.result()
            self._last = last

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
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
    """The first half of a save. Every process calls this.

    What a killed save left is removed first. An older checkpoint of the same iteration is replaced.

    Args:
      root: directory of the checkpoints.
      state: a pytree of jax arrays. When this returns, they may be overwritten.
      meta: JSON values; those of the first process are saved.
      keep, best: see `prune`, which follows; None: it does not.

    Returns the second half, to be called once, in any thread; that returns the checkpoint's path when all of it is on the disk.
    Both raise RunError, which names the last checkpoint, if the disk refuses. Raises TypeError for a leaf that is no plain jax
    array.
    """
    root = root.absolute()
    target = root / f"{iteration:06d}"
    temporary = root / f"{SAVING}{iteration:06d}"
    arrays = _arrays(state)
    index = {
        key: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for key, leaf in arrays.items()
    }
    header = json.dumps(
        {"format": FORMAT, "iteration": iteration, "meta": meta, "arrays": index}, indent=1
    )

    refusable = files.writing(
        target, note=lambda: f"; the last checkpoint is {next(iter(candidates(root)), 'none')}"
    )

    @refusable
    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        temporary.mkdir()
        (temporary / ARRAYS).mkdir()

    @refusable
    def publish() -> None:
        merge()
        (temporary / META).write_text(header)
        files.seal(temporary)
        files.publish(temporary, target, replaced=root / (target.name + REPLACED))

    with _or_nothing(temporary):
        consensus.first("save/prepare", prepare)
    try:
        wait, merge = _start_writing(temporary / ARRAYS, arrays)
    except Exception as error:  # is raised in the second half, when no process writes any more
        failed: Future[None] = Future()
        failed.set_exception(error)
        wait = failed.result

        def merge():
            return None

    def finish() -> Path:
        with _or_nothing(temporary):
            consensus.together("save/write", refusable(wait))
            consensus.first("save/publish", publish)
        if keep is not None:
            consensus.first("save/prune", refusable(lambda: prune(root, keep, best)))
        return target

    return finish


def prune(root: Path, keep: int, best: int = 0) -> None:
    """Removes all checkpoints but the newest `keep` good ones, at least one, and the `best` with the highest "eval/reward".

    The newest good one is read in full, of the others only small files: to read all of them would take longer than the save.
    What is damaged is not removed: it may be what is left of the best, or not be this program's.
    """
    good = 0
    prized = checkpoint.ranked(root)[:best]
    for path in candidates(root):
        with contextlib.suppress(CheckpointError):
            checkpoint.verify(path, contents=good == 0)
            if good >= max(keep, 1) and path not in prized:
                files.remove_directory(path)
            good += 1


def _arrays(state: Any) -> dict[str, jax.Array]:
    """The arrays of a pytree by key path. Raises TypeError, which names the leaf, for one that cannot be saved."""
    arrays = {
        jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    for key, leaf in arrays.items():
        if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{key} is a {getattr(leaf, 'dtype', type(leaf).__name__)}, not a plain jax array"
            )
    return arrays


@contextlib.contextmanager
def _or_nothing(temporary: Path) -> Iterator[None]:
    """Removes the directory, in the first process, if the body raises. The other processes do not wait for that."""
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _start_writing(
    folder: Path, arrays: dict[str, jax.Array]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies this process's shards of the arrays to the host, and starts to write the copies to `folder`.

    Returns two functions: the first waits until they are written, the second then merges the files of all processes. On CPU the
    copies are views, and XLA donates no buffer that has a view. Empty arrays are left out, because orbax refuses them: their
    shape and dtype are in `meta.json`.
    """
    full = {key: leaf for key, leaf in arrays.items() if leaf.size}
    if not full:
        return lambda: None, lambda: None
    ocp, epath = checkpoint.orbax()
    handler = ocp.PyTreeCheckpointHandler()
    directory = epath.Path(folder)
    commits = _awaited(handler.async_save(directory, args=ocp.args.PyTreeSave(full)))

    def wait() -> None:
        for commit in commits:
            commit.result()

    return wait, lambda: handler.finalize(directory)


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new thread: the caller's thread may have an event loop already, as a notebook's has.

    asyncio.run will not do: before it returns it goes through the tasks of all threads, and some of them are still writing.
    """
    loop = asyncio.new_event_loop()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(loop.run_until_complete, coroutine).result()
    finally:
        loop.close()


def _sweep(root: Path) -> None:
    """Removes what a killed save left: unfinished directories, and checkpoints that were replaced."""
    for path in list(root.iterdir()):
        replaced = (
            path.name.endswith(REPLACED)
            and checkpoint.iteration_of(path) is not None
            and path.with_suffix("").exists()
        )
        if replaced or path.name.startswith((SAVING, files.REMOVING)):
            files.remove_directory(path)
