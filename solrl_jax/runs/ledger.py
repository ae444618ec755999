"""The ledger: every candidate of every iteration, one Parquet file per iteration.

`root/iteration-000012.parquet` appears whole or not at all. The same columns give the same bytes,
so an iteration that a resumed run repeats overwrites its file with the same content. Any Parquet
reader opens a file. The metadata of the schema describes each column.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.files import atomic, disk_errors_as_run_errors
from solrl_jax.storage.readers import MOST_TEXT, read_bytes
from solrl_jax.storage.stores import RunPath

_COLUMNS = {
    "iteration": (pa.int32(), "training iteration, from 1"),
    "prompt": (pa.string(), "the prompt's text"),
    "prompt_uid": (pa.uint32(), "number of the prompt that its noise seeds depend on"),
    "candidate": (pa.int32(), "index of the candidate within its prompt, from 0"),
    "seed": (pa.uint64(), "seed of the initial noise, the same in exploration and regeneration"),
    "precision": (pa.string(), "number format of the weights and activations in exploration"),
    "steps": (pa.int32(), "solver steps in exploration"),
    "proxy_reward": (pa.float32(), "reward of the explored image; NaN when it was not finite"),
    "rank": (pa.int32(), "place in the ranking of its prompt for selection, 0 is the best"),
    "kept": (pa.bool_(), "whether the candidate was selected for training"),
    "regenerated_reward": (
        pa.float32(),
        "reward of the regenerated image; null when it was not regenerated",
    ),
    "advantage": (pa.float32(), "standardized regenerated reward of training; null when not kept"),
    "policy_revision": (
        pa.int32(),
        "iteration whose sync made the policy that explored the candidate, from 1",
    ),
}
_NULLABLE = ("regenerated_reward", "advantage")
SCHEMA = pa.schema(
    [
        pa.field(name, dtype, name in _NULLABLE, {"description": what})
        for name, (dtype, what) in _COLUMNS.items()
    ],
    metadata={"description": "every candidate that was explored, one row each"},
)

# The largest number of candidates in a file that is read.
MAX_ROWS = 2**18
# The number of rows that are decoded at once.
ROWS_PER_BATCH = 64

_NAME = re.compile(r"iteration-(\d{6}|[1-9]\d{6,})\.parquet")


def path_of(root: RunPath, iteration: int) -> RunPath:
    """Returns the path of an iteration's file, whether it exists or not.

    Args:
        root: The directory of the ledger.
        iteration: The number of the iteration, from 1, which becomes `iteration-NNNNNN.parquet`,
            with at least six digits.
    """
    return root / f"iteration-{iteration:06d}.parquet"


def write(root: RunPath, iteration: int, columns: Mapping[str, Any]) -> RunPath:
    """Writes the candidates of one iteration to a file, one row each, in the order given.

    The file appears whole or not at all, and replaces an existing one of the iteration. One process
    of a run calls it.

    Args:
        root: The directory of the ledger. It is created if necessary.
        iteration: The number of the iteration, from 1, which becomes the column "iteration".
        columns: The values of every other column of `SCHEMA`, by name: an array or list [rows], or
            one value for all rows (not for "kept"). In "regenerated_reward" and "advantage", masked
            entries (numpy.ma) or a None for all rows become null. Other names are ignored.

    Returns:
        The path of the file.

    Raises:
        KeyError: If a column is missing.
        ValueError: If a column has another number of rows than "kept", or a value does not fit the
            type of its column, such as -1 or 1.5 for a uint32, or a null in a column other than
            "regenerated_reward" and "advantage".
        TypeError: If a column has values of another kind, such as text for a number.
        RunError: If the disk refuses.
    """
    columns = {**columns, "iteration": iteration}
    num_rows = len(columns["kept"])
    table = pa.table(
        [_column(field, columns[field.name], num_rows) for field in SCHEMA], schema=SCHEMA
    )
    path = path_of(root, iteration)
    with atomic(path) as partial, partial.open("wb") as file:
        # An open file, because pyarrow takes some paths, such as "flux:seed1/...", for a URI.
        pq.write_table(table, file, compression="zstd")
    return path


def read(root: RunPath, iteration: int) -> pa.Table:
    """Reads the candidates of one iteration.

    Args:
        root: The directory of the ledger.
        iteration: The number of the iteration.

    Returns:
        A table with one row per candidate, prompt by prompt, and these columns (`SCHEMA`):
          * "iteration": from 1, an int32 as all integers but the seeds and "prompt_uid";
          * "prompt" and "prompt_uid": its text, and the uint32 that its noise seeds depend on;
          * "candidate": the index within its prompt, from 0;
          * "seed": the uint64 seed of the initial noise, also of the regeneration;
          * "precision" and "steps": the number format and the solver steps of exploration;
          * "proxy_reward": the float32 reward of the explored image, NaN also if it was infinite;
          * "rank": the place among the candidates of the prompt by proxy reward (with
            `reward.combine=advantages` by the weighted sum of the candidate's standardized scores),
            0 is the best;
          * "kept": whether it was selected for training;
          * "regenerated_reward": the float32 reward of the regenerated image, null if there is
            none;
          * "advantage": the float32 advantage that is trained on (the standardized reward of the
            kept sample, `rl.advantages`), 0 if that reward is not finite, null if not kept;
          * "policy_revision": the same number as "iteration", because every iteration prepares the
            policy that explores (quantizes it, if the format quantizes) at its start.

    Raises:
        InputError: If the file does not exist, cannot be read or is no Parquet file, if its columns
            are not those of `SCHEMA`, or if it has more than 64 MiB on disk, `MAX_ROWS` (2**18)
            rows or `MOST_TEXT` (64 MiB) bytes in memory.
    """
    path = path_of(root, iteration)
    try:
        file = pq.ParquetFile(pa.BufferReader(read_bytes(path)))
        num_rows = file.metadata.num_rows
        if num_rows > MAX_ROWS:
            raise ValueError(f"{num_rows} rows; accepted are {MAX_ROWS}")
        batches = []
        size = 0
        # In batches, because a text that the file stores once may be repeated in all rows.
        for batch in file.iter_batches(ROWS_PER_BATCH):
            batches.append(batch)
            size += batch.nbytes
            if size > MOST_TEXT:
                raise ValueError(f"more than {MOST_TEXT} bytes of text")
        table = pa.Table.from_batches(batches, file.schema_arrow)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from error
    if not table.schema.equals(SCHEMA):
        raise InputError(f"{path}: its columns are not a ledger's")
    return table


def discard_after(root: RunPath, iteration: int) -> None:
    """Removes the files of all iterations after a given one, which a resumed run writes again.

    Args:
        root: The directory of the ledger. It need not exist.
        iteration: The number of the last iteration that is kept. 0 removes all.

    Raises:
        RunError: If a file cannot be removed.
    """
    for later in iterations_in(root):
        if later > iteration:
            path = path_of(root, later)
            with disk_errors_as_run_errors(path):
                path.unlink()


def iterations_in(root: RunPath) -> list[int]:
    """Returns the numbers of the iterations that have a file in the ledger, ascending.

    Args:
        root: The directory of the ledger. If it does not exist, the list is empty.
    """
    matches = (_NAME.fullmatch(path.name) for path in root.glob("iteration-*.parquet"))
    return sorted(int(match[1]) for match in matches if match)


def _column(field: pa.Field, values: Any, num_rows: int) -> pa.Array:
    """Converts the values of a column to Arrow.

    Args:
        field: The field of the schema, which gives the type.
        values: An array [rows], of which masked entries become null; or one value, or None (null),
            for all rows.
        num_rows: The number of rows that one value or None is repeated for.

    Returns:
        The column, with the type of `field`.

    Raises:
        ValueError: If a value does not fit the type, such as -1 or 1.5 for a uint32.
        TypeError: If the values are of another kind, such as text for a number.
    """
    if values is None:
        return pa.nulls(num_rows, field.type)
    array = values if np.ndim(values) else np.full(num_rows, values)
    if not isinstance(array, np.ma.MaskedArray):
        return pa.array(array, field.type)
    # Masked values are replaced, because they must not change the bytes of the file.
    return pa.array(array.filled(0), field.type, mask=np.ma.getmaskarray(array))
