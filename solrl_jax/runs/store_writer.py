"""Writes checkpoints to an object store, see `storage.stores`.

orbax cannot write to S3. So each process writes its arrays to a staging directory of its own
machine, as `checkpoint_writer` does to a shared one, and all but the first upload them. The first
process downloads these files, because it merges their indices and computes all checksums. Then it
uploads its own files, the manifest last. From then on the checkpoint counts.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from solrl_jax.errors import RunError
from solrl_jax.parallel import consensus
from solrl_jax.runs.checkpoint import ARRAYS, META, REPLACED, iteration_of, list_checkpoints
from solrl_jax.runs.checkpoint_writer import (
    meta_json,
    named_arrays,
    prune,
    start_writing_or_fail_later,
)
from solrl_jax.storage import files
from solrl_jax.storage.stores import StorePath


def begin(
    root: StorePath,
    iteration: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    keep: int | None = None,
    best: int = 0,
) -> Callable[[], StorePath]:
    """Does the first half of a save to an object store, and returns a function for the second.

    Every process of a run calls both. The first half removes what killed saves left in `root` and
    on this machine, and moves an existing checkpoint of the same iteration to `NNNNNN.replaced`. It
    copies the arrays to the host and starts to write them to a staging directory, a temporary
    directory of this machine. The second half waits until they are written and uploads them; the
    first process uploads last, with the merged indices and the manifest. Then the second half
    removes old checkpoints and `NNNNNN.replaced`, which stays if the save fails.

    Args:
        root: The directory of checkpoints in the store. The first process must own the run
            directory around it (`files.exclusive_lock`).
        iteration: The number of complete iterations, which names the directory.
        state: A pytree of jax arrays. When this returns, they may be overwritten.
        meta: JSON values by name, without NaN and infinity. Those of the first process are saved.
        keep: The number of newest intact checkpoints that are kept afterwards; below 1, one is
            kept. None: no checkpoint is removed, and `best` has no effect.
        best: The number of checkpoints that are kept as well because they have the highest
            "eval/reward". One that is among the newest counts for both.

    Returns:
        The second half, a function without arguments. Call it once, in any thread, before the next
        save begins. It returns the path of the checkpoint when all of it is in the store.

    Raises:
        RunError: If the store or the disk of the staging directory refuses; both halves raise it.
            The message names the last checkpoint if the store can still be listed. Also if a later
            start of the run has taken over its directory, or if another process failed or gives no
            answer.
        TypeError: If a leaf of the state is a random key or not a jax array, or if JSON cannot
            represent `meta`.
    """
    target = root / f"{iteration:06d}"
    replaced = root / (target.name + REPLACED)
    arrays = named_arrays(state)
    header = meta_json(iteration, arrays, meta)

    def name_last_checkpoint() -> str:
        with contextlib.suppress(RunError):
            return f"; the last checkpoint is {next(iter(list_checkpoints(root)), 'none')}"
        return ""

    # Turns errors of the store and the disk into RunError, as a decorator.
    reports_errors = files.disk_errors_as_run_errors(target, note=name_last_checkpoint)

    staging = Path(tempfile.gettempdir()) / f"{_staging_prefix(root)}{uuid.uuid4().hex}"

    published = threading.Event()

    @reports_errors
    def prepare() -> None:
        if jax.process_index() == 0:
            files.check_owner(root.parent)
        _remove_stagings(root)
        staging.mkdir(mode=0o700)
        (staging / ARRAYS).mkdir()
        # orbax creates this directory in the first process only, and waits for it in the others.
        (staging / ARRAYS / "array_metadatas").mkdir()
        if jax.process_index() == 0:
            _make_room(root, target, replaced)

    try:
        consensus.on_every("save/prepare", prepare)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    wait, merge = start_writing_or_fail_later(staging / ARRAYS, arrays)

    @reports_errors
    def write() -> None:
        wait()
        if jax.process_index():
            files.upload_directory(staging, target)

    @reports_errors
    def publish() -> None:
        files.check_owner(root.parent)
        uploaded = files.download_directory(target, staging)
        merge()
        (staging / META).write_text(header)
        files.write_manifest(staging)
        files.upload_directory(staging, target, without=uploaded)
        published.set()

    @reports_errors
    def remove_old() -> None:
        files.check_owner(root.parent)
        files.remove_directory(replaced)
        if keep is not None:
            prune(root, keep, best)

    def finish() -> StorePath:
        try:
            consensus.on_every("save/write", write)
            consensus.from_first("save/publish", publish)
        except BaseException:
            # The other processes do not wait for this. A checkpoint that is complete stays, even if
            # they could not be told so.
            if jax.process_index() == 0 and not published.is_set():
                with contextlib.suppress(RunError):
                    files.check_owner(root.parent)  # a later start may have saved it, too
                    files.remove_directory(target)
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        consensus.from_first("save/prune", remove_old)
        return target

    return finish


def _staging_prefix(root: StorePath) -> str:
    """Returns the prefix of the names of this process's staging directories for a run.

    A staging directory is a temporary directory in which a checkpoint is written before its upload.
    The name depends on the run and the index of the process, so that a later start finds what a
    killed save left.

    Args:
        root: The directory of checkpoints in the store.
    """
    owner = hashlib.sha256(f"{root} {jax.process_index()}".encode()).hexdigest()[:16]
    return f"{files.STAGING}save-{owner}-"


def _remove_stagings(root: StorePath) -> None:
    """Removes the staging directories on this machine that killed saves left.

    Only those of this run and this process index are removed, including those of earlier starts of
    the run. Those of other users stay.

    Args:
        root: The directory of checkpoints in the store, which tells the run.

    Raises:
        OSError: If another process removes one at the same time.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_staging_prefix(root)}*"):
        if path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def _make_room(root: StorePath, target: StorePath, replaced: StorePath) -> None:
    """Makes a store ready for a new checkpoint. One process of a run calls it.

    Removes the leftovers of killed saves and removals: directories that are named like checkpoints
    but have no manifest, and `NNNNNN.replaced` if `NNNNNN` has a manifest. Also renames an existing
    checkpoint of the same iteration, by copying it to `replaced` and removing the original.

    Args:
        root: The directory of checkpoints.
        target: The checkpoint that will be written. It need not exist.
        replaced: The name that an existing checkpoint `target` gets.

    Raises:
        RunError: If the store refuses to list, copy or remove.
    """
    complete = list_checkpoints(root)
    for path in root.glob("*"):
        is_replaced = path.name.endswith(REPLACED) and path.with_suffix("") in complete
        if iteration_of(path) is not None and (is_replaced or path not in complete):
            files.remove_directory(path)
    if target in complete:
        target.copy_all(replaced, last=files.MANIFEST)
        files.remove_directory(target)
