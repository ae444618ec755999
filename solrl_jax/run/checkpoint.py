"""Checkpoints: `root/000012/`, whole or absent, checked byte by byte before they are believed. `saving.py` writes them.

    000012/arrays/         the arrays, written by orbax
    000012/meta.json       format, iteration, the caller's own facts, and shape and dtype of every array
    000012/manifest.json   size and SHA-256 of every other file

A state is saved as a flat dict {key path -> array} and rebuilt from the abstract state that the caller gives, so no
container class is stored and any mesh can restore what any other mesh saved.  Of several processes, which share a file
system, each writes and reads its own shards; the first one judges what is there, and tells the others.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from solrl_jax.parallel import consensus
from solrl_jax.storage import files
from solrl_jax.storage.errors import InputError, RunError, first_line

FORMAT = 1
ARRAYS, META = "arrays", "meta.json"
# A checkpoint that is being replaced waits under this name until the new one has its own: no instant is without one.
REPLACED = ".replaced"
_NAME = re.compile(rf"(\d{{6,}})({re.escape(REPLACED)})?")


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message is one line that names it and says why."""


def candidates(root: Path) -> list[Path]:
    """Directories of `root` that are named like checkpoints, newest first; good or bad, see `verify`."""
    try:
        found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{files.disk_reason(error)} while looking for checkpoints in {root}") from error
    return sorted(found, key=lambda path: (iteration_of(path), not path.name.endswith(REPLACED)), reverse=True)


def newest(root: Path) -> Path | None:
    """The newest checkpoint of `root` that is good by names and sizes, as `verify` says; None when there is none."""
    return next(iter(_whole(root)), None)


def ranked(root: Path) -> list[Path]:
    """Checkpoints of `root` that hold an evaluation, the best first: by their `eval/reward`, of equal ones the newest.

    The evaluation is what was saved as "evaluation" of the meta.  Only names and sizes are compared, as `verify` says.
    """
    rewards = {path: (meta_of(path).get("evaluation") or {}).get("eval/reward") for path in _whole(root)}
    finite = {path: float(reward) for path, reward in rewards.items() if reward is not None}
    return sorted(finite, key=finite.__getitem__, reverse=True)  # stable: of equal ones the newest come first


def verify(path: Path, *, contents: bool = True) -> None:
    """Raises CheckpointError unless `path` holds exactly the files that were saved, byte for byte.

    With `contents=False` only names and sizes are compared, which does not read the arrays.
    """
    if (reason := files.damage(path, contents=contents)) is not None:
        raise CheckpointError(f"{path}: {reason}")
    header = _header(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {header.get('format')}, not {FORMAT}; another version of solrl_jax saved it")
    if (named := iteration_of(path)) not in (None, header.get("iteration")):
        raise CheckpointError(f"{path}: holds iteration {header.get('iteration')}, not {named}")


def restore(path: Path, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """Reads checkpoint `path` into the structure and onto the shardings of `abstract_state`, bit for bit.

    `abstract_state` is a pytree of jax.ShapeDtypeStruct (or arrays); a leaf without a sharding goes to the first
    device.  Returns the state and the saved meta with "iteration" added.  Raises CheckpointError when the checkpoint
    fails `verify` or when its leaves, shapes or dtypes are others, and names the leaves.  Every process calls it.
    """

    def judge() -> dict[str, Any]:
        verify(path)
        return meta_of(path)

    meta = consensus.first("restore/judge", judge, CheckpointError)
    return _load(path, abstract_state), meta


def meta_of(path: Path) -> dict[str, Any]:
    """The meta that checkpoint `path` was saved with, "iteration" added.  Reads one small file and checks nothing else."""
    header = _header(path)
    return {**header["meta"], "iteration": header["iteration"]}


def restore_latest(root: Path, abstract_state: Any, expect: dict[str, Any]) -> tuple[Any, dict[str, Any], list[str]] | None:
    """Restores the newest good checkpoint of `root`: (state, meta, one line for each newer one that was skipped).

    None when there is none at all.  Raises InputError when a good checkpoint differs from `expect` in any of its keys,
    because it belongs to another run; RunError when there are checkpoints and none can be used, because starting
    again over them would lose what is left.  Every process calls it, and all take the same one.
    """
    expect = json.loads(json.dumps(expect))  # as it reads after a save: tuples are lists
    warnings: list[str] = []
    for name in consensus.first("restore/candidates", lambda: [path.name for path in candidates(root)]):
        path = root / name
        try:
            meta = consensus.first("restore/judge", functools.partial(_judge, path, expect), CheckpointError)
            return _load(path, abstract_state), meta, warnings
        except CheckpointError as error:
            warnings.append(f"skipped checkpoint {error}")
    if warnings:
        raise RunError(f"no checkpoint in {root} can be used; {'; '.join(warnings)}")
    return None


def _whole(root: Path) -> Iterator[Path]:
    """`candidates` that are good by names and sizes, newest first."""
    for path in candidates(root):
        with contextlib.suppress(CheckpointError):
            verify(path, contents=False)
            yield path


def iteration_of(path: Path) -> int | None:
    """The iteration that a directory's name says; None for a directory that is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _judge(path: Path, expect: dict[str, Any]) -> dict[str, Any]:
    """The meta of a good checkpoint of the run that `expect` describes, see `restore_latest`."""
    verify(path)
    meta = meta_of(path)
    if differing := [key for key in expect if meta.get(key) != expect[key]]:
        pairs = ", ".join(f"{key} ({meta.get(key)!r} there, {expect[key]!r} here)" for key in differing)
        raise InputError(f"checkpoint {path} belongs to another run: {pairs}")
    return meta


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


@functools.cache
def orbax() -> tuple[Any, Any]:
    """orbax and its module of paths, imported at the first call because that is slow.

    Its notes are muted, errors too: its threads log stacks, then raise the same error here.
    """
    from absl import logging

    logging.get_absl_logger().addFilter(lambda record: "orbax" not in Path(record.pathname).parts)
    import orbax.checkpoint
    from etils import epath

    return orbax.checkpoint, epath


def _load(path: Path, abstract_state: Any) -> Any:
    """The state of a verified checkpoint, see `restore`; when a process cannot read it, none has it."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
    wanted = {jax.tree_util.keystr(key): leaf for key, leaf in leaves}
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {key: getattr(leaf, "sharding", None) or first for key, leaf in wanted.items()}
    arrays: dict[str, jax.Array] = {}

    def read() -> None:
        _compare(path, _header(path)["arrays"], wanted)
        ocp, epath = orbax()
        how = {}
        for key, leaf in wanted.items():
            if math.prod(leaf.shape):
                how[key] = ocp.ArrayRestoreArgs(sharding=shardings[key], global_shape=leaf.shape, dtype=leaf.dtype)
            else:
                arrays[key] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), shardings[key])
        try:
            if how:
                args = ocp.args.PyTreeRestore({key: wanted[key] for key in how}, restore_args=how)
                arrays.update(ocp.PyTreeCheckpointHandler().restore(epath.Path(path.absolute() / ARRAYS), args=args))
        except Exception as error:
            # Its bytes are as saved, so this is another orbax or a device without room: still one line, not a stack.
            raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error

    consensus.together("restore/read", read, CheckpointError)
    return jax.tree_util.tree_unflatten(structure, [arrays[key] for key in wanted])


def _header(path: Path) -> dict[str, Any]:
    """What `meta.json` of a checkpoint holds; CheckpointError when it cannot be read."""
    try:
        header = json.loads((path / META).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {META} cannot be read: {first_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: {META} is not that of a checkpoint")
    return header
