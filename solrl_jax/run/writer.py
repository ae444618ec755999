"""Saving checkpoints (`checkpoint.py` says what they are) while training goes on.

A save has two halves. The first copies every process's shards to its host, and only then returns: the next update may overwrite
the state. The second writes them, seals the directory, gives it its name and removes old ones, in a thread of its own.

orbax copies, writes and merges what several processes wrote. Its AsyncCheckpointer, which would do all of it, gives a directory
its name before a manifest could be in it, and leaves the processes whose disks are well at a barrier for minutes when another
one's is full. Here every process tells the others how its half went, and only then the first one seals or sweeps up.
"""

import asyncio
import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from solrl_jax.parallel import consensus
from solrl_jax.run import checkpoint
from solrl_jax.run.checkpoint import ARRAYS, FORMAT, META, REPLACED, CheckpointError, candidates
from solrl_jax.storage import files

SAVING = ".saving-"  # what is being written is named so


class Saver:
    """Saves to one directory, at most one checkpoint at a time; what goes wrong is raised by the next call, never lost.

    As a context manager it waits at the end for the save under way, however the end came.  Every process has one.
    """

    def __init__(self, root: Path, *, keep: int, best: int) -> None:
        """keep, best: see `prune`."""
        self._root, self._keep, self._best = root, keep, best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[Path] | None = None
        self._last: int | None = None

    def save(self, iteration: int, state: Any, meta: dict[str, Any]) -> None:
        """Returns when `state` has been copied, which may then be overwritten; first waits for the save before.

        An iteration that it saved already is not saved again.  Raises what `save` and `wait` raise.
        """
        self.wait()
        if iteration != self._last:
            finish = begin(self._root, iteration, state, meta, keep=self._keep, best=self._best)
            self._under_way, self._last = self._thread.submit(finish), iteration

    def wait(self) -> None:
        """Returns when nothing is under way.  Raises RunError, naming the last checkpoint, when the disk refused."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def save(root: Path, iteration: int, state: Any, meta: dict[str, Any], *, keep: int | None = None, best: int = 0) -> Path:
    """Writes `state` (a pytree of jax arrays) and `meta` (JSON values) as checkpoint `iteration`; returns its path.

    Returns when all of it is on the disk.  What a killed save left behind is removed first, an older checkpoint of the
    same iteration is replaced, and with `keep` given `prune` follows.  Raises RunError, naming the last checkpoint, when
    the disk refuses; TypeError for a leaf that is not a plain jax array.  Every process calls it; the first one's meta counts.
    """
    return begin(root, iteration, state, meta, keep=keep, best=best)()


def begin(
    root: Path, iteration: int, state: Any, meta: dict[str, Any], *, keep: int | None = None, best: int = 0
) -> Callable[[], Path]:
    """The first half of `save`; the second is what it returns, to be called once, in any thread."""
    root = root.absolute()
    target, temporary = root / f"{iteration:06d}", root / f"{SAVING}{iteration:06d}"
    arrays = _arrays(state)
    index = {key: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for key, leaf in arrays.items()}
    header = json.dumps({"format": FORMAT, "iteration": iteration, "meta": meta, "arrays": index}, indent=1)

    refusable = files.writing(target, note=lambda: f"; the last checkpoint is {next(iter(candidates(root)), 'none')}")

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
    except Exception as error:  # is told in the second half, when no process writes any more
        wait, merge = functools.partial(_raise, error), lambda: None

    def finish() -> Path:
        with _or_nothing(temporary):
            consensus.together("save/write", refusable(wait))
            consensus.first("save/publish", publish)
        if keep is not None:
            consensus.first("save/prune", refusable(lambda: prune(root, keep, best)))
        return target

    return finish


def prune(root: Path, keep: int, best: int = 0) -> None:
    """Removes all but the newest `keep` good checkpoints, at least one, and the `best` with the highest `eval/reward`.

    The newest good one is read in full, the others are judged by names and sizes: hashing all of them at every save
    would cost more than the save.  A directory without a manifest is not ours to remove.
    """
    good, prized = 0, checkpoint.ranked(root)[:best]
    for path in candidates(root):
        if good < max(keep, 1):
            with contextlib.suppress(CheckpointError):
                checkpoint.verify(path, contents=good == 0)
                good += 1
        elif path not in prized and (path / files.MANIFEST).exists():
            files.remove_directory(path)


def _raise(error: Exception) -> None:
    raise error


def _arrays(state: Any) -> dict[str, jax.Array]:
    """{key path: array} of a pytree; TypeError names a leaf that cannot be saved."""
    arrays = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
    for key, leaf in arrays.items():
        if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{key} is a {getattr(leaf, 'dtype', type(leaf).__name__)}, not a plain jax array")
    return arrays


@contextlib.contextmanager
def _or_nothing(temporary: Path) -> Iterator[None]:
    """Removes the directory when the body fails.  The first process does, which no other one hears of."""
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _start_writing(folder: Path, arrays: dict[str, jax.Array]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies this process's shards of the arrays to the host, and starts to write them to the directory `folder`.

    Returns what waits until they are written, and what then merges the files of all processes.  On CPU the copies are views,
    and XLA donates no buffer that has one.  Arrays that hold nothing are left out: orbax refuses them, and the index is enough.
    """
    full = {key: leaf for key, leaf in arrays.items() if leaf.size}
    if not full:
        return lambda: None, lambda: None
    ocp, epath = checkpoint.orbax()
    handler, directory = ocp.PyTreeCheckpointHandler(), epath.Path(folder)
    commits = _awaited(handler.async_save(directory, args=ocp.args.PyTreeSave(full)))

    def wait() -> None:
        for commit in commits:
            commit.result()

    return wait, lambda: handler.finalize(directory)


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, run in a thread of its own: the caller's may be in a loop already, as a notebook's is.

    Not by asyncio.run, which ends by going through the tasks of all threads, those that write among them.
    """
    loop = asyncio.new_event_loop()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(loop.run_until_complete, coroutine).result()
    finally:
        loop.close()


def _sweep(root: Path) -> None:
    """Removes what a killed save left: unfinished directories, and replaced checkpoints whose successor is there."""
    for path in list(root.iterdir()):
        replaced = path.name.endswith(REPLACED) and checkpoint.iteration_of(path) is not None and path.with_suffix("").exists()
        if replaced or path.name.startswith((SAVING, files.REMOVING)):
            files.remove_directory(path)
