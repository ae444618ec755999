"""Checkpoints: `root/000012/`, whole or absent, checked byte by byte before they are believed.

    000012/arrays/         the arrays, written by orbax
    000012/meta.json       format, iteration, the caller's own facts, and shape and dtype of every array
    000012/manifest.json   size and SHA-256 of every other file

A state is saved as a flat dict {key path -> array} and rebuilt from the abstract state that the caller gives, so no
container class is stored and any mesh can restore what any other mesh saved.  One process saves and restores.
"""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from solrl_jax import files
from solrl_jax.files import InputError, RunError

FORMAT = 1
_ARRAYS, _META = "arrays", "meta.json"
# A checkpoint that is being replaced waits under this name until the new one has its own: no instant is without one.
_REPLACED = ".replaced"
_NAME = re.compile(rf"(\d{{6,}})({re.escape(_REPLACED)})?")
_SAVING = ".saving-"


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message is one line that names it and says why."""


def save(root: Path, iteration: int, state: Any, meta: dict[str, Any], *, keep: int | None = None) -> Path:
    """Writes `state` (a pytree of jax arrays) and `meta` (JSON values) as checkpoint `iteration`; returns its path.

    Returns when all of it is on the disk.  What a killed save left behind is removed first, an older checkpoint of the
    same iteration is replaced, and with `keep` given only the newest `keep` good ones stay.  Raises RunError, naming
    the last checkpoint, when the disk refuses; TypeError for a leaf that is not a plain jax array.
    """
    if jax.process_count() > 1:
        raise InputError("checkpoints are written by one process; this run has several")
    root = root.absolute()
    target, temporary = root / f"{iteration:06d}", root / f"{_SAVING}{iteration:06d}"
    arrays = _arrays(state)
    index = {key: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for key, leaf in arrays.items()}
    header = json.dumps({"format": FORMAT, "iteration": iteration, "meta": meta, "arrays": index}, indent=1)
    with files.writing(target, note=lambda: f"; the last checkpoint is {next(iter(candidates(root)), 'none')}"):
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        try:
            temporary.mkdir()
            _write_arrays(temporary / _ARRAYS, arrays)
            (temporary / _META).write_text(header)
            files.seal(temporary)
            files.publish(temporary, target, replaced=root / (target.name + _REPLACED))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if keep is not None:
            prune(root, keep)
    return target


def candidates(root: Path) -> list[Path]:
    """Directories of `root` that are named like checkpoints, newest first; good or bad, see `verify`."""
    try:
        found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{files.disk_reason(error)} while looking for checkpoints in {root}") from error
    return sorted(found, key=lambda path: (_iteration(path), not path.name.endswith(_REPLACED)), reverse=True)


def verify(path: Path, *, contents: bool = True) -> None:
    """Raises CheckpointError unless `path` holds exactly the files that were saved, byte for byte.

    With `contents=False` only names and sizes are compared, which does not read the arrays.
    """
    if (reason := files.damage(path, contents=contents)) is not None:
        raise CheckpointError(f"{path}: {reason}")
    header = _header(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {header.get('format')}, not {FORMAT}; another version of solrl_jax saved it")
    if (named := _iteration(path)) not in (None, header.get("iteration")):
        raise CheckpointError(f"{path}: holds iteration {header.get('iteration')}, not {named}")


def restore(path: Path, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """Reads checkpoint `path` into the structure and onto the shardings of `abstract_state`, bit for bit.

    `abstract_state` is a pytree of jax.ShapeDtypeStruct (or arrays); a leaf without a sharding goes to the first
    device.  Returns the state and the saved meta with "iteration" added.  Raises CheckpointError when the checkpoint
    fails `verify` or when its leaves, shapes or dtypes are others, and names the leaves.
    """
    verify(path)
    return _load(path, abstract_state), meta_of(path)


def meta_of(path: Path) -> dict[str, Any]:
    """The meta that checkpoint `path` was saved with, "iteration" added.  Reads one small file and checks nothing else."""
    header = _header(path)
    return {**header["meta"], "iteration": header["iteration"]}


def restore_latest(root: Path, abstract_state: Any, expect: dict[str, Any]) -> tuple[Any, dict[str, Any], list[str]] | None:
    """Restores the newest good checkpoint of `root`: (state, meta, one line for each newer one that was skipped).

    None when there is none at all.  Raises InputError when a good checkpoint differs from `expect` in any of its keys,
    because it belongs to another run; RunError when there are checkpoints and none can be used, because starting
    again over them would lose what is left.
    """
    expect = json.loads(json.dumps(expect))  # as it reads after a save: tuples are lists
    warnings: list[str] = []
    for path in candidates(root):
        try:
            verify(path)
            meta = meta_of(path)
            if differing := [key for key in expect if meta.get(key) != expect[key]]:
                pairs = ", ".join(f"{key} ({meta.get(key)!r} there, {expect[key]!r} here)" for key in differing)
                raise InputError(f"checkpoint {path} belongs to another run: {pairs}")
            return _load(path, abstract_state), meta, warnings
        except CheckpointError as error:
            warnings.append(f"skipped checkpoint {error}")
    if warnings:
        raise RunError(f"no checkpoint in {root} can be used; {'; '.join(warnings)}")
    return None


def prune(root: Path, keep: int) -> None:
    """Removes what is older than the newest `keep` good checkpoints, at least one; never the last good one.

    The newest good one is read in full, the others are judged by names and sizes: hashing all of them at every save
    would cost more than the save.  A directory without a manifest is not ours to remove.
    """
    good = 0
    for path in candidates(root):
        if good < max(keep, 1):
            with contextlib.suppress(CheckpointError):
                verify(path, contents=good == 0)
                good += 1
        elif (path / files.MANIFEST).exists():
            files.remove_directory(path)


def _arrays(state: Any) -> dict[str, jax.Array]:
    """{key path: array} of a pytree; TypeError names a leaf that cannot be saved."""
    arrays = {jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
    for key, leaf in arrays.items():
        if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{key} is a {getattr(leaf, 'dtype', type(leaf).__name__)}, not a plain jax array")
    return arrays


def _compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError that names the leaves in which a checkpoint's index and an abstract state differ."""
    there = {key: f"{entry['dtype']}{entry['shape']}" for key, entry in saved.items()}
    here = {key: f"{leaf.dtype}{list(leaf.shape)}" for key, leaf in wanted.items()}
    differences = [f"{key} is missing" for key in here.keys() - there.keys()]
    differences += [f"{key} is unknown here" for key in there.keys() - here.keys()]
    common = here.keys() & there.keys()
    differences += [f"{key} is {there[key]}, not {here[key]}" for key in common if there[key] != here[key]]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"{path}: another state: {'; '.join(sorted(differences)[:5])}{more}")


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """orbax with its progress notes muted.  Imported here, because it is slow to import."""
    from absl import logging

    # Errors too: orbax logs a stack for each of its threads, then raises the same error here.
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        import orbax.checkpoint

        yield orbax.checkpoint
    finally:
        logging.set_verbosity(before)


def _write_arrays(folder: Path, arrays: dict[str, jax.Array]) -> None:
    """Writes the arrays that hold anything (orbax refuses empty ones, and the index is enough for them)."""
    full = {key: leaf for key, leaf in arrays.items() if leaf.size}
    if full:
        with _orbax() as ocp, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(full))


def _load(path: Path, abstract_state: Any) -> Any:
    """The state of a verified checkpoint, see `restore`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
    wanted = {jax.tree_util.keystr(key): leaf for key, leaf in leaves}
    _compare(path, _header(path)["arrays"], wanted)
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = {key: getattr(leaf, "sharding", None) or first for key, leaf in wanted.items()}
    arrays, how = {}, {}
    with _orbax() as ocp, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for key, leaf in wanted.items():
            if math.prod(leaf.shape):
                how[key] = ocp.ArrayRestoreArgs(sharding=shardings[key], global_shape=leaf.shape, dtype=leaf.dtype)
            else:
                arrays[key] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), shardings[key])
        try:
            if how:
                args = ocp.args.PyTreeRestore({key: wanted[key] for key in how}, restore_args=how)
                arrays |= checkpointer.restore(path.absolute() / _ARRAYS, args=args)
        except Exception as error:
            # Its bytes are as saved, so this is another orbax or a device without room: still one line, not a stack.
            raise CheckpointError(f"{path}: cannot be read: {files.first_line(error)}") from error
    return jax.tree_util.tree_unflatten(structure, [arrays[key] for key in wanted])


def _iteration(path: Path) -> int | None:
    """The iteration that a directory's name says; None for a directory that is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _header(path: Path) -> dict[str, Any]:
    """What `meta.json` of a checkpoint holds; CheckpointError when it cannot be read."""
    try:
        header = json.loads((path / _META).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {_META} cannot be read: {files.first_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: {_META} is not that of a checkpoint")
    return header


def _sweep(root: Path) -> None:
    """Removes what a killed save left: unfinished directories, and replaced checkpoints whose successor is there."""
    for path in list(root.iterdir()):
        replaced = path.name.endswith(_REPLACED) and _NAME.fullmatch(path.name) and path.with_suffix("").exists()
        if replaced or path.name.startswith((_SAVING, files.REMOVING)):
            files.remove_directory(path)
