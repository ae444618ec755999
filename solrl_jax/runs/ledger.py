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

from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.files import atomic, writing
from solrl_jax.storage.readers import MOST_TEXT, read_bytes

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
    [
        pa.field(name, dtype, name in _NULLABLE, {"description": what})
        for name, (dtype, what) in _COLUMNS.items()
    ],
    metadata={"description": "every candidate that was explored, one row each"},
)

MOST_ROWS = 2**18  # candidates of an iteration whose file is read

_NAME = re.compile(r"iteration-(\d{6}|[1-9]\d{6,})\.parquet")


def path_of(root: Path, iteration: int) -> Path:
    """Where the ledger below `root` keeps an iteration."""
    return root / f"iteration-{iteration:06d}.parquet"


def write(root: Path, iteration: int, columns: Mapping[str, Any]) -> Path:
    """Writes the rows of one iteration, in the order given, and returns the file's path.

    columns: for every other name of SCHEMA an array [rows], or one value for all rows. A nullable column is null where a masked
    array (numpy.ma) masks it, or everywhere if it is None. NaN stays NaN.

    Raises KeyError for a column that is missing, ValueError or TypeError for one of another length or type, RunError if the
    disk refuses.
    """
    columns = {"iteration": iteration, **columns}
    table = pa.table(
        [_column(field, columns[field.name], len(columns["kept"])) for field in SCHEMA],
        schema=SCHEMA,
    )
    path = path_of(root, iteration)
    with atomic(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path


def read(root: Path, iteration: int) -> pa.Table:
    """The rows of one iteration. Raises InputError if its file cannot be read, is no ledger, or claims to be a giant one."""
    path = path_of(root, iteration)
    try:
        file = pq.ParquetFile(pa.BufferReader(read_bytes(path)))
        if (rows := file.metadata.num_rows) > MOST_ROWS:
            raise ValueError(f"{rows} rows; accepted are {MOST_ROWS}")
        batches = []
        size = 0
        for batch in file.iter_batches(
            64
        ):  # one text, which the file has once, may be that of all rows
            batches.append(batch)
            if (size := size + batch.nbytes) > MOST_TEXT:
                raise ValueError(f"more than {MOST_TEXT} bytes of text")
        table = pa.Table.from_batches(batches, file.schema_arrow)
    except (OSError, ValueError, pa.ArrowException) as error:
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


def _column(field: pa.Field, values: Any, rows: int) -> pa.Array:
    """`values` [rows], or one value for all rows, as an Arrow array of the field's type."""
    if values is None:
        return pa.nulls(rows, field.type)
    array = values if np.ndim(values) else np.full(rows, values)
    if not isinstance(array, np.ma.MaskedArray):
        return pa.array(array, field.type)
    return pa.array(
        array.filled(0), field.type, mask=np.ma.getmaskarray(array)
    )  # what is masked must not change the bytes
