"""The ledger: every candidate of every iteration, one Parquet file an iteration.

`root/iteration-000012.parquet` appears whole or not at all. The same columns give the same bytes, so what a resumed run repeats
is overwritten with itself. Any Parquet reader opens a file. The schema's metadata says what each column means.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from solrl_jax.storage.errors import InputError, first_line
from solrl_jax.storage.files import atomic, writing

_COLUMNS = {
    "iteration": (pa.int32(), "training iteration, from 1"),
    "prompt": (pa.string(), "the prompt's text"),
    "prompt_uid": (pa.uint32(), "number of the prompt that its noise seeds depend on"),
    "candidate": (pa.int32(), "index of the candidate within its prompt, from 0"),
    "seed": (pa.uint64(), "seed of the initial noise; it gives the same noise in exploration and regeneration"),
    "precision": (pa.string(), "number format of the weights and activations in exploration"),
    "steps": (pa.int32(), "solver steps in exploration"),
    "proxy_reward": (pa.float32(), "reward of the explored image; NaN when it was not finite"),
    "rank": (pa.int32(), "place by proxy reward within its prompt, 0 is the best"),
    "kept": (pa.bool_(), "whether the candidate was selected for training"),
    "regenerated_reward": (
        pa.float32(), "reward of the full-precision, full-step image of the same seed; null when it was not regenerated",
    ),
    "advantage": (pa.float32(), "standardised regenerated reward that training used; null when the candidate was not kept"),
    "policy_revision": (pa.int32(), "how many syncs the policy that made the candidate had behind it"),
}  # fmt: skip
_NULLABLE = ("regenerated_reward", "advantage")
SCHEMA = pa.schema(
    [pa.field(name, dtype, name in _NULLABLE, {"description": what}) for name, (dtype, what) in _COLUMNS.items()],
    metadata={"description": "every candidate that was explored, one row each"},
)

_NAME = re.compile(r"iteration-(\d{6,})\.parquet")


def path_of(root: Path, iteration: int) -> Path:
    """Where the ledger below `root` keeps an iteration."""
    return root / f"iteration-{iteration:06d}.parquet"


def write(root: Path, iteration: int, columns: Mapping[str, Any]) -> Path:
    """Writes the rows of one iteration, in the order given, and returns the file's path.

    columns: for every name of SCHEMA an array [rows], or one value for all rows; "iteration" may be left out. A nullable column
    is null where a masked array (numpy.ma) masks it, or where "kept" is false if it is a plain array, or everywhere if it is
    None. NaN stays NaN.

    Raises ValueError for a column that is missing, unknown, of another length, or has values that its type cannot hold exactly;
    RunError if the disk refuses.
    """
    columns = {"iteration": iteration, **columns}
    if np.any(np.asarray(columns["iteration"]) != iteration):
        raise ValueError(f"columns of another iteration given for iteration {iteration}")
    if differing := columns.keys() ^ set(SCHEMA.names):
        raise ValueError(f"ledger columns missing or unknown: {', '.join(sorted(differing))}")
    lengths = {name: len(values) for name, values in columns.items() if np.ndim(values)}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"ledger columns must have one length, got {lengths}")
    rows = next(iter(lengths.values()))
    kept = np.broadcast_to(np.asarray(columns["kept"], bool), rows)
    table = pa.table([_column(field, columns[field.name], rows, kept) for field in SCHEMA], schema=SCHEMA)
    path = path_of(root, iteration)
    with atomic(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path


def read(root: Path, iteration: int) -> pa.Table:
    """The rows of one iteration. Raises InputError if its file cannot be read or is no ledger."""
    path = path_of(root, iteration)
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from error
    if not table.schema.equals(SCHEMA):
        raise InputError(f"{path}: its columns are not a ledger's")
    return table


def discard_after(root: Path, iteration: int) -> None:
    """Removes all later iterations: a resumed run writes them again."""
    for later in iterations_in(root):
        if later > iteration:
            with writing(path := path_of(root, later)):
                path.unlink()


def iterations_in(root: Path) -> list[int]:
    """The iterations of the ledger `root`, in order."""
    matches = (_NAME.fullmatch(path.name) for path in root.glob("iteration-*.parquet"))
    return sorted(int(match[1]) for match in matches if match)


def _column(field: pa.Field, values: Any, rows: int, kept: np.ndarray) -> pa.Array:
    """`values` [rows], or one value for all rows, as an Arrow array of the field's type."""
    if values is None and field.nullable:
        return pa.nulls(rows, field.type)
    mask = None
    if field.nullable:
        mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else ~kept
        values = np.where(mask, 0, np.ma.getdata(values))  # masked values must not change the file's bytes
    array = np.broadcast_to(np.asarray(values), rows)
    if pa.types.is_string(field.type):
        return pa.array([str(value) for value in array], field.type)
    dtype = np.dtype(field.type.to_pandas_dtype())
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if dtype.kind != "f" and not (cast == array).all():
        raise ValueError(f"ledger column {field.name} has values that are not {field.type}")
    return pa.array(cast, field.type, mask=mask)
