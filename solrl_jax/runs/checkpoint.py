"""The format of a checkpoint on disk, and how one is found, verified and restored.

`checkpoint_writer.py` writes checkpoints. A checkpoint is a directory that is named by its
iteration:

    000012/arrays/         the arrays, written by orbax
    000012/meta.json       format, iteration, the caller's metadata, shape and dtype of every array
    000012/manifest.json   size and SHA-256 of every other file

A state is saved as a flat dict from key path to array, and rebuilt from the abstract state that the
caller gives. No container class is stored, and a state that was saved on one mesh can be restored
on any other.

The processes of a run share one file system, and each reads and writes the shards of its own
devices. The first process verifies the files and tells the others which checkpoint to use.

In an object store a checkpoint has the same files. Its manifest is written last and removed first,
so a directory without a manifest does not count. orbax cannot read S3, so each process restores
from a copy on its own disk.
"""

import contextlib
import functools
import json
import logging
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.parallel import consensus
from solrl_jax.storage import files
from solrl_jax.storage.readers import parse_json, read_bytes
from solrl_jax.storage.stores import RunPath, StorePath

FORMAT = 1
ARRAYS = "arrays"
META = "meta.json"
# Suffix of an old checkpoint while a new one of the same iteration takes its name, so that a
# complete checkpoint exists at any instant.
REPLACED = ".replaced"
# Parameters that networks gained later. An older checkpoint lacks them, and they were 0 in its run.
ADDED_PARAMETERS = re.compile(r"\['[^']*/lepe/bias'\]")
_NAME = re.compile(rf"(\d{{6,}})({re.escape(REPLACED)})?")
T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message is one line with its path and the reason.

    `verify`, `meta_of` and `restore` raise it. `newest_usable` then tries the next older one.
    """


def list_checkpoints(root: RunPath) -> list[RunPath]:
    """Lists the directories in `root` that are named like checkpoints, intact or not.

    The names have at least six digits, with or without the suffix `.replaced`. Links to directories
    count. In a store, directories without a manifest do not, because they were never complete.

    Args:
        root: The directory of checkpoints, which has one directory per saved iteration, e.g.
            `000010`.

    Returns:
        The paths, sorted by the iteration in their name, the highest first. `000010.replaced`,
        which a newer save of iteration 10 has replaced, follows `000010`. An empty list if `root`
        does not exist or is a file.

    Raises:
        RunError: If the directory cannot be read.
    """
    try:
        paths: list[RunPath] = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
        if isinstance(root, StorePath):
            paths = [path for path in paths if (path / files.MANIFEST).is_file()]
        else:
            paths = [path for path in paths if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = files.disk_reason(error)
        raise RunError(f"{reason} while looking for checkpoints in {root}") from error

    def age(path: RunPath) -> tuple[int | None, bool]:
        return iteration_of(path), not path.name.endswith(REPLACED)

    return sorted(paths, key=age, reverse=True)


def iteration_of(path: RunPath) -> int | None:
    """Returns the iteration in the name of a checkpoint's directory.

    Args:
        path: The directory, e.g. `.../000010` or `.../000010.replaced`, both of which give 10. It
            need not exist.

    Returns:
        The iteration; None if the directory is not named like a checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def iterate_intact(root: RunPath) -> Iterator[RunPath]:
    """Yields the checkpoints in `root` that pass a quick check, newest first.

    The check (`verify` with `contents=False`) compares the names and sizes of all files and, unless
    in an object store, the contents of those of at most 1 MiB. Each checkpoint is checked when the
    iterator reaches it; one that fails is left out. `NNNNNN.replaced`, which a newer save of that
    iteration has replaced, counts as a checkpoint, too.

    Args:
        root: The directory of checkpoints. If it does not exist, nothing is yielded.

    Raises:
        RunError: If the directory cannot be read.
    """
    for path in list_checkpoints(root):
        with contextlib.suppress(CheckpointError):
            verify(path, contents=False)
            yield path


def rank_by_reward(root: RunPath) -> list[RunPath]:
    """Lists the checkpoints that were saved with an evaluation, the highest held-out reward first.

    The reward is the "eval/reward" of the entry "evaluation" in the checkpoint's metadata.
    Checkpoints where either is missing or None, and those that a quick check (`iterate_intact`)
    finds damaged, are left out.

    Args:
        root: The directory of checkpoints. It need not exist.

    Returns:
        The paths. If rewards are equal, the newer checkpoint comes first.

    Raises:
        RunError: If the directory cannot be read.
    """
    rewards = {}
    for path in iterate_intact(root):
        try:
            evaluation = meta_of(path).get("evaluation")
        except CheckpointError:  # a run that saves meanwhile has removed it
            continue
        reward = evaluation.get("eval/reward") if isinstance(evaluation, dict) else None
        if isinstance(reward, int | float):
            rewards[path] = reward
    # `sorted` is stable, also in reverse, and `iterate_intact` yields the newest first.
    return sorted(rewards, key=rewards.__getitem__, reverse=True)


def verify(path: RunPath, *, contents: bool = True) -> None:
    """Checks that a checkpoint holds exactly the files that were saved.

    In an object store (gs://, s3://), only the names and sizes of the files are compared, even if
    `contents` is True; `restore` compares the contents of its copy.

    Args:
        path: The directory of the checkpoint.
        contents: True: every byte is compared. False: the names and sizes of all files, but only
            the contents of those of at most 1 MiB (`files.SMALL`), so that no large array is read.

    Raises:
        CheckpointError: If files are missing, unknown, altered or cannot be read, if `meta.json` is
            not that of a checkpoint or its "format" is not `FORMAT`, or if the directory is named
            after another iteration than the one it holds.
    """
    if isinstance(path, StorePath):
        reason = files.stored_damage(path)
    else:
        reason = files.find_damage(path, contents=contents)
    if reason is not None:
        raise CheckpointError(f"{path}: {reason}")
    header = _read_header(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {header.get('format')}, not {FORMAT}; another version of solrl_jax "
            "saved it"
        )
    named = iteration_of(path)
    if named is not None and named != header.get("iteration"):
        raise CheckpointError(f"{path}: holds iteration {header.get('iteration')}, not {named}")


def meta_of(path: RunPath) -> dict[str, Any]:
    """Returns the metadata that a checkpoint was saved with.

    Reads `meta.json`. Neither the number under "format" nor any other file is checked.

    Args:
        path: The directory of the checkpoint.

    Returns:
        The metadata by name, with "iteration", the number of complete iterations. A training run
        saves "fingerprint" (the hash of its settings), the hashes of its input files, e.g.
        "prompts" or "weights/vae", and "evaluation" (the metrics of an evaluation by name, or
        None).

    Raises:
        CheckpointError: If `meta.json` cannot be read, or is not that of a checkpoint.
    """
    header = _read_header(path)
    return {**header["meta"], "iteration": header["iteration"]}


def restore_latest(
    root: RunPath, abstract_state: Any, expected: dict[str, Any]
) -> tuple[Any, dict[str, Any], list[str]] | None:
    """Restores the newest intact checkpoint in `root`, the same one in all processes.

    Every process of a run calls this with the same arguments.

    Args:
        root: The directory of checkpoints. It need not exist.
        abstract_state: A pytree of `jax.ShapeDtypeStruct` or arrays with the structure, shapes,
            dtypes and shardings of the state. Values are not read. A leaf without a sharding is
            placed on the first device of the process.
        expected: Names and values that the metadata of the checkpoint must have, e.g.
            {"fingerprint": ...}, so that it belongs to this run. {} accepts any checkpoint.

    Returns:
        A tuple: the state; its metadata by name, with "iteration"; and one line "skipped checkpoint
        PATH: REASON" for each newer checkpoint that cannot be used. None if there is no checkpoint.

    Raises:
        RunError: If there are checkpoints and none can be used, if `root` cannot be read, or if
            another process gives no answer.
        InputError: If the metadata of the newest intact checkpoint differs from `expected`. Older
            ones are not tried then.
    """
    newest = newest_usable(root, lambda path: restore(path, abstract_state, expected))
    if newest is None:
        return None
    (state, meta), warnings = newest
    return state, meta, warnings


def newest_usable(root: RunPath, use: Callable[[RunPath], T]) -> tuple[T, list[str]] | None:
    """Calls a function with the checkpoints in `root`, newest first, until it succeeds.

    Every process calls this, and all try the same checkpoints in the same order. If all fail,
    `root` is listed again, and a changed list is tried from its newest checkpoint on, because a run
    that trains meanwhile may have removed the listed checkpoints. This ends when the list stays the
    same.

    Args:
        root: The directory of checkpoints. It need not exist.
        use: Called with the path of a checkpoint, e.g. to restore it. If it raises CheckpointError,
            the next older one is tried; any other error propagates. It must succeed in all
            processes, or raise CheckpointError in all of them.

    Returns:
        A tuple: the result of `use`, and one line "skipped checkpoint PATH: REASON" for each newer
        checkpoint that failed. None if there is no checkpoint.

    Raises:
        RunError: If there are checkpoints and `use` raised CheckpointError for all of them, if
            `root` cannot be read, or if another process gives no answer.
    """

    def list_names() -> list[str]:
        return [path.name for path in list_checkpoints(root)]

    warnings: list[str] = []
    tried: list[str] = []
    # The list is read again after a failure: a run that saves at the same time may have written a
    # new checkpoint and removed the listed ones.
    while (names := consensus.from_first("restore/candidates", list_names)) != tried:
        warnings = []
        tried = names
        for name in names:
            try:
                return use(root / name), warnings
            except CheckpointError as error:
                warnings.append(f"skipped checkpoint {error}")
    if warnings:
        raise RunError(f"no checkpoint in {root} can be used; {'; '.join(warnings)}")
    return None


def restore(
    path: RunPath, abstract_state: Any, expected: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Verifies and reads a checkpoint. Every process of a run calls this.

    The first process compares every byte with the manifest. A checkpoint in an object store is
    first copied to a temporary directory of every process, and each compares its copy.

    Args:
        path: The directory of the checkpoint.
        abstract_state: A pytree of `jax.ShapeDtypeStruct` or arrays with the structure, shapes,
            dtypes and shardings of the state. Values are not read. A leaf without a sharding is
            placed on the first device of the process.
        expected: Names and values that the metadata of the checkpoint must have, compared as JSON.
            None: anything is accepted.

    Returns:
        A tuple: the state, a pytree of jax arrays with the structure and shardings of
        `abstract_state`; and the metadata that it was saved with, by name, with "iteration".
        Parameters that the checkpoint lacks because solrl_jax has added them since (their key path
        matches `ADDED_PARAMETERS`) are 0.

    Raises:
        CheckpointError: If files are missing, unknown or altered, if the checkpoint has another
            format number than `FORMAT`, if its directory is named after another iteration, if it
            cannot be copied from a store, if orbax cannot read it (also because a device has too
            little memory), or if its arrays have other names, shapes or dtypes than the leaves of
            `abstract_state`. All processes raise it.
        InputError: If the metadata differs from `expected`: the checkpoint belongs to another run.
        RunError: If another process gives no answer.
    """
    if isinstance(path, StorePath):
        with _local_copy(path) as copy:
            return restore(copy, abstract_state, expected)
    check = functools.partial(_verify_meta, path, expected or {})
    meta = consensus.from_first("restore/judge", check, CheckpointError)
    return _read_state(path, abstract_state), meta


@contextlib.contextmanager
def _local_copy(path: StorePath) -> Iterator[Path]:
    """A context manager that copies a checkpoint from an object store to a temporary directory.

    Every process of a run calls this. The copy is removed at the end. If the body raises
    CheckpointError or InputError, the message names the path in the store in place of the copy.

    Args:
        path: The directory of the checkpoint in the store.

    Yields:
        The path of the copy, whose last part is the name of `path`.

    Raises:
        CheckpointError: In all processes, if one of them could not copy it, or if the copy of a
            process other than the first does not match its manifest. The copy of the first process
            is not checked; the body must verify it.
    """

    def download(copy: Path) -> None:
        try:
            files.download_directory(path, copy)
        except OSError as error:
            reason = files.disk_reason(error)
            raise CheckpointError(f"{path}: cannot be copied: {reason}") from error
        if jax.process_index():  # `restore` verifies the copy of the first process
            damage = files.find_damage(copy)
            if damage is not None:
                raise CheckpointError(f"{path}: {damage}")

    with tempfile.TemporaryDirectory(prefix=files.STAGING) as folder:
        copy = Path(folder) / path.name
        consensus.on_every("restore/copy", lambda: download(copy), CheckpointError)
        try:
            yield copy
        except (CheckpointError, InputError) as error:
            raise type(error)(str(error).replace(str(copy), str(path))) from error


def _verify_meta(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Verifies all files of a checkpoint, byte by byte, and its metadata. One process calls it.

    Args:
        path: The directory of the checkpoint.
        expected: Names and values that the metadata must hold. They are compared as JSON, so that a
            tuple equals the list that was saved.

    Returns:
        The metadata that the checkpoint was saved with, by name, with the number of the iteration
        as "iteration".

    Raises:
        CheckpointError: If files are missing, unknown or altered, if the checkpoint has another
            format number than `FORMAT`, or if its directory is named after another iteration.
        InputError: If the metadata lacks a name of `expected` or has another value.
    """
    verify(path)
    meta = meta_of(path)
    expected = json.loads(json.dumps(expected))  # as it was saved: JSON turns tuples into lists
    differences = [
        f"{key} ({meta.get(key)!r} there, {value!r} here)"
        for key, value in expected.items()
        if meta.get(key) != value
    ]
    if differences:
        raise InputError(f"checkpoint {path} belongs to another run: {', '.join(differences)}")
    return meta


def _read_state(path: Path, abstract_state: Any) -> Any:
    """Reads the state of a checkpoint that has been verified. Every process calls this.

    Args:
        path: The directory of the checkpoint.
        abstract_state: A pytree of `jax.ShapeDtypeStruct` or arrays with the structure, shapes,
            dtypes and shardings to read. Values are not read. A leaf without a sharding is placed
            on the first device of the process.

    Returns:
        The state, with the structure and shardings of `abstract_state`. Two kinds of arrays are not
        read but created here: arrays without elements, and zeros for parameters that solrl_jax
        added later (`ADDED_PARAMETERS`) and that the checkpoint lacks.

    Raises:
        CheckpointError: In all processes, if one of them cannot read its shards, or if the saved
            arrays have other names, shapes or dtypes than the leaves of `abstract_state`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
    abstract_leaves = {jax.tree_util.keystr(key): leaf for key, leaf in leaves}
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {
        key: getattr(leaf, "sharding", None) or first_device
        for key, leaf in abstract_leaves.items()
    }
    arrays: dict[str, jax.Array] = {}

    def read() -> None:
        saved_arrays = _read_header(path)["arrays"]
        added_keys = {
            key
            for key in abstract_leaves.keys() - saved_arrays.keys()
            if ADDED_PARAMETERS.search(key)
        }
        compared_leaves = {
            key: leaf for key, leaf in abstract_leaves.items() if key not in added_keys
        }
        compare_leaves(path, saved_arrays, compared_leaves)
        stored_leaves = {}
        for key, leaf in abstract_leaves.items():
            if math.prod(leaf.shape) and key not in added_keys:
                stored_leaves[key] = leaf
            else:  # orbax refuses empty arrays, so they are not saved
                arrays[key] = _zeros(leaf, shardings[key])
        if not stored_leaves:
            return
        ocp, epath = orbax()
        restore_args = {
            key: ocp.ArrayRestoreArgs(
                sharding=shardings[key], global_shape=leaf.shape, dtype=leaf.dtype
            )
            for key, leaf in stored_leaves.items()
        }
        args = ocp.args.PyTreeRestore(stored_leaves, restore_args=restore_args)
        directory = epath.Path(path.absolute() / ARRAYS)
        try:
            arrays.update(ocp.PyTreeCheckpointHandler().restore(directory, args=args))
        except Exception as error:
            # The bytes are those that were saved. The cause is another version of orbax, or a
            # device without enough memory.
            raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error

    consensus.on_every("restore/read", read, CheckpointError)
    return jax.tree_util.tree_unflatten(structure, [arrays[key] for key in abstract_leaves])


def _zeros(leaf: Any, where: jax.sharding.Sharding) -> jax.Array:
    """Creates an array of zeros, also on a mesh of several processes.

    Args:
        leaf: An array or `jax.ShapeDtypeStruct`, of which only shape and dtype are read.
        where: The sharding of the result.

    Returns:
        A jax array with the shape and dtype of `leaf`.
    """
    values = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, where, lambda index: values[index])


def compare_leaves(path: RunPath, saved: dict[str, Any], abstract_leaves: dict[str, Any]) -> None:
    """Checks that the arrays of a checkpoint are those of a state.

    Args:
        path: The checkpoint, for the message.
        saved: The entry "arrays" of the checkpoint's `meta.json`: for each array, by its key path
            (e.g. ".ema['blocks/attn/to_q/kernel']['a']"), a dict with "shape" (a list of sizes) and
            "dtype" (its name, e.g. "float32").
        abstract_leaves: The leaves that the state needs (`jax.ShapeDtypeStruct` or arrays), by key
            path as `jax.tree_util.keystr` writes it. Only their shape and dtype are compared. The
            caller leaves out parameters that solrl_jax added later (`ADDED_PARAMETERS`) and that
            the checkpoint lacks.

    Raises:
        CheckpointError: If an array is only on one side, or has another shape or dtype. The message
            lists the first five differences, sorted by key path, and the number of the others.
    """
    saved_types = {key: f"{entry['dtype']}{entry['shape']}" for key, entry in saved.items()}
    types = {key: f"{leaf.dtype}{list(leaf.shape)}" for key, leaf in abstract_leaves.items()}
    differences = []
    for key in sorted(saved_types.keys() | types.keys()):
        if key not in saved_types:
            differences.append(f"{key} is missing")
        elif key not in types:
            differences.append(f"{key} is unknown here")
        elif saved_types[key] != types[key]:
            differences.append(f"{key} is {saved_types[key]}, not {types[key]}")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"{path}: another state: {'; '.join(differences[:5])}{more}")


def _read_header(path: RunPath) -> dict[str, Any]:
    """Reads a checkpoint's `meta.json`.

    Args:
        path: The directory of the checkpoint.

    Returns:
        The content: "iteration", "meta" (the metadata by name), "arrays" (a dict with "shape" and
        "dtype" for each array, by key path) and, if the file has it, "format".

    Raises:
        CheckpointError: If the file cannot be read or is not JSON, if "iteration" is not an integer
            or "meta" or "arrays" is not a dict, or if an array lacks its shape or dtype.
    """
    try:
        header = parse_json(read_bytes(path / META))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {META} cannot be read: {first_line(error)}") from error

    def is_valid() -> bool:
        if not isinstance(header, dict) or not isinstance(header.get("meta"), dict):
            return False
        if not isinstance(header.get("iteration"), int):
            return False
        if not isinstance(header.get("arrays"), dict):
            return False
        return all(
            isinstance(entry, dict) and {"shape", "dtype"} <= entry.keys()
            for entry in header["arrays"].values()
        )

    if not is_valid():
        raise CheckpointError(f"{path}: {META} is not that of a checkpoint")
    return header


@functools.cache
def orbax() -> tuple[Any, Any]:
    """Imports `orbax.checkpoint` and `etils.epath` at the first call, because the import is slow.

    The first call also silences orbax, whose failures are raised anyway. From then on, the loggers
    of absl and asyncio drop records that come from orbax's code or report an exception with orbax
    in its traceback. Another rule holds for an exception that has no traceback and is not an
    OSError: its record is dropped only if its message reports an error of the disk, such as "No
    space left on device" (`files.disk_reason`). Also, `sys.unraisablehook` no longer shows "Event
    loop is closed".

    Returns:
        The modules `orbax.checkpoint` and `etils.epath`, in this order.
    """
    import absl.logging

    def is_foreign(record: logging.LogRecord) -> bool:
        _, error, trace = record.exc_info or (None, None, None)
        frames = traceback.extract_tb(trace)
        if error is not None and not frames and not isinstance(error, OSError):
            return files.disk_reason(error) is None
        names = [record.pathname, *(frame.filename for frame in frames)]
        return all("orbax" not in Path(name).parts for name in names)

    for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
        logger.addFilter(is_foreign)
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = show_others
    import orbax.checkpoint
    from etils import epath

    return orbax.checkpoint, epath
