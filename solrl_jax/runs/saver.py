"""Saves the checkpoints of a run in a thread beside the training."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from solrl_jax.runs import checkpoint_writer, store_writer
from solrl_jax.storage.stores import RunPath, StorePath


class Saver:
    """Saves checkpoints to one directory, one at a time, in a thread beside the training.

    It is created with the directory and two numbers of checkpoints to keep: of the newest ones, and
    of those with the highest evaluation reward. Every process of a run has one. An error in the
    thread is raised by the next call of `save` or `wait`. As a context manager, it waits at the end
    for the save in progress, also if the body raised, and ends the thread. An error of that save
    replaces one of the body.
    """

    def __init__(self, root: RunPath, *, keep: int, best: int) -> None:
        """Creates the saver without writing anything.

        Args:
            root: The directory of checkpoints. It is created by the first save.
            keep: The number of newest intact checkpoints to keep after each save. At least one is
                kept.
            best: The number of checkpoints with the highest "eval/reward" to keep as well. One that
                is among the newest counts for both. 0: none.
        """
        self._root = root
        self._keep = keep
        self._best = best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[RunPath] | None = None
        self._last: int | None = None

    def save(self, iteration: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Waits for the previous save and starts a new one. Every process of a run calls it.

        When this returns, the arrays of `state` have been copied and may be overwritten. The thread
        writes the copies, and then removes checkpoints that are neither among the newest nor among
        the best that the saver keeps. A second call in a row for the same iteration saves nothing.
        If the first save failed, the second call raises, and a third one saves again.

        Args:
            iteration: The number of complete iterations, which names the directory.
            state: A pytree of jax arrays, such as `TrainState`. Random keys are not accepted.
            meta: JSON values by name, without NaN and infinity, that are saved with the state.
                Those of the first process count. `meta["evaluation"]["eval/reward"]` decides which
                checkpoints are the best; one without it is never among them.

        Raises:
            RunError: If the disk refused the previous save, which is not retried (this one is not
                started then), or refuses the beginning of this one. Also if another process failed
                or gives no answer.
            TypeError: If a leaf of the state is a random key or not a jax array, or if JSON cannot
                represent `meta`.
        """
        self.wait()
        if iteration == self._last:
            return
        options = {"keep": self._keep, "best": self._best}
        finish: Callable[[], RunPath]
        if isinstance(self._root, StorePath):
            finish = store_writer.begin(self._root, iteration, state, meta, **options)
        else:
            finish = checkpoint_writer.begin(self._root, iteration, state, meta, **options)
        self._pending = self._thread.submit(finish)
        self._last = iteration

    def wait(self) -> None:
        """Waits for the save in progress. Returns at once if there is none.

        Raises:
            RunError: If the disk refused the save (the message names the last checkpoint), or
                another process failed or gives no answer. The error is raised once, and the save
                may then be repeated.
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
