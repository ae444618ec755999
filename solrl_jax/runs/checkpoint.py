"""What a checkpoint is: its format on disk, how one is found, checked and restored. `checkpoint_writer.py` writes them.

    000012/arrays/         the arrays, written by orbax
    000012/meta.json       format, iteration, the caller's own facts, and shape and dtype of every array
    000012/manifest.json   size and SHA-256 of every other file

A state is saved as a flat dict {key path: array} and rebuilt from the abstract state that the caller gives. So no container
class is stored, and what one mesh saved, any other can restore.

Several processes share one file system. Each reads and writes its own shards. The first process checks the files and tells
the others which checkpoint is good.
"""

import contextlib
import functools
import json
import logging
import math
import re
import sys
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

FORMAT = 1
ARRAYS = "arrays"
META = "meta.json"
# A checkpoint that is being replaced has this suffix until the new one has its name: at every instant there is a whole one.
REPLACED = ".replaced"
_NAME = re.compile(rf"(\d{{6,}})({re.escape(REPLACED)})?")
T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message is one line that names it and says why."""


def candidates(root: Path) -> list[Path]:
    """Directories of `root` that are named like checkpoints, good or bad, the newest first."""
    try:
        found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(
            f"{files.disk_reason(error)} while looking for checkpoints in {root}"
        ) from error
    return sorted(
        found, key=lambda path: (iteration_of(path), not path.name.endswith(REPLACED)), reverse=True
    )


def whole(root: Path) -> Iterator[Path]:
    """Checkpoints of `root` whose files have the right names and sizes, the newest first."""
    for path in candidates(root):
        with contextlib.suppress(CheckpointError):
            verify(path, contents=False)
            yield path


def ranked(root: Path) -> list[Path]:
    """Checkpoints of `root` whose meta has an "evaluation", by its "eval/reward", the best first; of equal ones the newest.

    Only the names and sizes of their files are checked, and the contents of small ones.
    """
    rows = {path: meta_of(path).get("evaluation") for path in whole(root)}
    rewards = {path: row.get("eval/reward") for path, row in rows.items() if isinstance(row, dict)}
    finite = {path: reward for path, reward in rewards.items() if isinstance(reward, int | float)}
    return sorted(
        finite, key=finite.__getitem__, reverse=True
    )  # stable: of equal ones the newest come first


def verify(path: Path, *, contents: bool = True) -> None:
    """Raises CheckpointError unless `path` holds exactly the files that were saved.

    contents: compare every byte; else only names, sizes and small files, which does not read large arrays.
    """
    if (reason := files.damage(path, contents=contents)) is not None:
        raise CheckpointError(f"{path}: {reason}")
    header = _header(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {header.get('format')}, not {FORMAT}; another version of solrl_jax saved it"
        )
    if (named := iteration_of(path)) not in (None, header.get("iteration")):
        raise CheckpointError(f"{path}: holds iteration {header.get('iteration')}, not {named}")


def restore(
    path: Path, abstract_state: Any, expect: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint, bit for bit. Every process calls this.

    abstract_state: a pytree of jax.ShapeDtypeStruct or arrays. The result has its structure and its shardings; a leaf without a
    sharding goes to the first device. expect: what the checkpoint's meta must hold. Returns the state, and the saved meta with
    "iteration" added. Raises CheckpointError if the checkpoint fails `verify`, or if names, shapes or dtypes of its arrays are
    not those of `abstract_state`; InputError if the meta does not hold what is expected: it belongs to another run.
    """
    meta = consensus.first(
        "restore/judge", functools.partial(_judge, path, expect or {}), CheckpointError
    )
    return _load(path, abstract_state), meta


def meta_of(path: Path) -> dict[str, Any]:
    """The meta that a checkpoint was saved with, and its "iteration". Reads one small file and checks no other."""
    header = _header(path)
    return {**header["meta"], "iteration": header["iteration"]}


def restore_latest(
    root: Path, abstract_state: Any, expect: dict[str, Any]
) -> tuple[Any, dict[str, Any], list[str]] | None:
    """Restores the newest good checkpoint of `root` as `restore` does. All processes restore the same one.

    Returns the state, its meta, and a line for each newer checkpoint that is damaged; None if `root` has no checkpoint. Raises
    RunError if there are checkpoints and all are damaged: to start again would overwrite what is left of them.
    """
    found = newest(root, lambda path: restore(path, abstract_state, expect))
    return found and (*found[0], found[1])


def newest(root: Path, use: Callable[[Path], T]) -> tuple[T, list[str]] | None:
    """What `use` returns for the newest checkpoint of `root` for which it raises no CheckpointError; None if there is none.

    Beside it a line for each newer one. Every process calls this. Raises RunError if there are checkpoints and all are damaged.
    """
    warnings: list[str] = []
    tried: list[str] = []
    while (
        names := consensus.first(
            "restore/candidates", lambda: [path.name for path in candidates(root)]
        )
    ) != tried:
        # again, if a run beside this one has saved, and removed what was listed
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


def iteration_of(path: Path) -> int | None:
    """The iteration in a directory's name; None if it is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _judge(path: Path, expect: dict[str, Any]) -> dict[str, Any]:
    """The meta of a checkpoint. Raises CheckpointError if it is damaged, InputError if it does not hold what is expected."""
    verify(path)
    # as JSON returns it: tuples are lists
    meta = meta_of(path)
    expect = json.loads(json.dumps(expect))
    if differing := [key for key in expect if meta.get(key) != expect[key]]:
        pairs = ", ".join(
            f"{key} ({meta.get(key)!r} there, {expect[key]!r} here)" for key in differing
        )
        raise InputError(f"checkpoint {path} belongs to another run: {pairs}")
    return meta


def _compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError if shapes and dtypes differ between a checkpoint and an abstract state; names the leaves."""
    there = {key: f"{entry['dtype']}{entry['shape']}" for key, entry in saved.items()}
    here = {key: f"{leaf.dtype}{list(leaf.shape)}" for key, leaf in wanted.items()}
    differences = [f"{key} is missing" for key in here.keys() - there.keys()]
    differences += [f"{key} is unknown here" for key in there.keys() - here.keys()]
    common = here.keys() & there.keys()
    differences += [
        f"{key} is {there[key]}, not {here[key]}" for key in common if there[key] != here[key]
    ]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"{path}: another state: {'; '.join(sorted(differences)[:5])}{more}")


@functools.cache
def orbax() -> tuple[Any, Any]:
    """orbax and its module of paths, imported at the first call because that is slow.

    Its log is muted, and what asyncio logs of its tasks: both show a stack for each error that is also raised here. So are
    threads of its library in C++, which go on after a failure and find their event loop closed.
    """
    import absl.logging

    def of_others(record: logging.LogRecord) -> bool:
        frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
        return all(
            "orbax" not in Path(name).parts
            for name in (record.pathname, *(frame.filename for frame in frames))
        )

    for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
        logger.addFilter(of_others)
    show = sys.unraisablehook
    sys.unraisablehook = lambda told: (
        None if "Event loop is closed" in str(told.exc_value) else show(told)
    )
    import orbax.checkpoint
    from etils import epath

    return orbax.checkpoint, epath


def _load(path: Path, abstract_state: Any) -> Any:
    """The state of a verified checkpoint, see `restore`. If one process cannot read it, all raise CheckpointError."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
    wanted = {jax.tree_util.keystr(key): leaf for key, leaf in leaves}
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {key: getattr(leaf, "sharding", None) or first for key, leaf in wanted.items()}
    arrays: dict[str, jax.Array] = {}

    def read() -> None:
        _compare(path, _header(path)["arrays"], wanted)
        ocp, epath = orbax()
        full = {
            key: leaf for key, leaf in wanted.items() if math.prod(leaf.shape)
        }  # orbax refuses to save empty arrays
        for key in wanted.keys() - full.keys():
            arrays[key] = jax.device_put(
                np.zeros(wanted[key].shape, wanted[key].dtype), shardings[key]
            )
        how = {
            k: ocp.ArrayRestoreArgs(sharding=shardings[k], global_shape=x.shape, dtype=x.dtype)
            for k, x in full.items()
        }
        try:
            if full:
                args = ocp.args.PyTreeRestore(full, restore_args=how)
                arrays.update(
                    ocp.PyTreeCheckpointHandler().restore(
                        epath.Path(path.absolute() / ARRAYS), args=args
                    )
                )
        except Exception as error:
            # The bytes are as saved, so it is another version of orbax or a device without room.
            raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error

    consensus.together("restore/read", read, CheckpointError)
    return jax.tree_util.tree_unflatten(structure, [arrays[key] for key in wanted])


def _header(path: Path) -> dict[str, Any]:
    """The content of `meta.json`. Raises CheckpointError if it cannot be read."""
    try:
        header = parse_json(read_bytes(path / META))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {META} cannot be read: {first_line(error)}") from error
    parts = (
        [header.get(name) for name in ("meta", "arrays")] if isinstance(header, dict) else [None]
    )

    def described(entry):
        return isinstance(entry, dict) and {"shape", "dtype"} <= entry.keys()

    if not all(isinstance(part, dict) for part in parts) or not all(
        map(described, header["arrays"].values())
    ):
        raise CheckpointError(f"{path}: {META} is not that of a checkpoint")
    return header
