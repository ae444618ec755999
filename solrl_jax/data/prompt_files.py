"""The formats of prompt files: plain text, JSON, JSON lines, CSV, TSV and Parquet."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError
from solrl_jax.storage.readers import parse_json, read_text, strict

# The most lines, rows or items of a prompt file.
MAX_PROMPTS = 2**20
# The columns, or keys of JSON objects, that hold the prompt unless another is named. The first one
# that a file has is used.
PROMPT_COLUMNS = ("prompt", "Prompt", "Prompts", "caption", "text")
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (*DELIMITERS, ".parquet")
# All but the endings of text files, which may have any other.
ENDINGS = (".json", *JSON_LINES, *TABLES)


class Row(NamedTuple):
    """One entry of a prompt file.

    Attributes:
        text: The text of the prompt, without white space around it.
        metadata: Everything else that the file says about the prompt, as values of JSON by name.
        position: Where it is in the file, e.g. "line 3".
    """

    text: str
    metadata: dict[str, Any]
    position: str


def split_column(path: str) -> tuple[Path, str | None]:
    """Splits the name of a column from a path such as "prompts.csv:caption".

    Args:
        path: A path, with or without a column. It has none if a file of this whole name exists, or
            if the part before the last colon has no ending of `ENDINGS`.

    Returns:
        The file and the name of the column, or None.
    """
    file, colon, column = path.rpartition(":")
    has_column = colon and column and Path(file).suffix.lower() in ENDINGS
    if has_column and not Path(path).exists():
        return Path(file), column
    return Path(path), None


def read_rows(file: Path, column: str | None, where: str) -> list[Row]:
    """Reads a prompt file. Its ending, in any case, decides the format.

    Args:
        file: A .json, .jsonl, .ndjson, .jsonlines, .csv, .tsv or .parquet file. Any other file is
            read as text with one prompt per line.
        column: The column or key of the prompt. None: the first of `PROMPT_COLUMNS` that is there.
        where: The setting and its value, for messages.

    Raises:
        InputError: If the file does not exist, has another content than its ending says, has no
            column with prompts or has too many rows.
    """
    ending = file.suffix.lower()
    if ending == ".parquet":
        rows = _read_parquet(file, column, where)
    else:
        text = read_file(
            file, where, f"a text file with one prompt per line, or {', '.join(ENDINGS)}"
        )
        if ending == ".json":
            rows = _read_json(text, column, where)
        elif ending in JSON_LINES:
            rows = _rows_of_objects(_parse_lines(text, where), column, where)
        elif ending in DELIMITERS:
            rows = _read_table(text, ending, column, where)
        else:
            rows = _read_lines(text, where)
    if len(rows) > MAX_PROMPTS:
        raise InputError(f"{where}: more than {MAX_PROMPTS} prompts")
    return rows


def read_file(file: Path, where: str, expected: str) -> str:
    """Reads a text file.

    Args:
        file: The file.
        where: The setting and its value, for messages.
        expected: What the file should be, for messages.

    Returns:
        Its content without a byte-order mark. Every line ends with a line feed.

    Raises:
        InputError: If the file does not exist or is not UTF-8 text.
    """
    try:
        return read_text(file)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text that are not blank, with their numbers, without white space around
    them.

    `str.splitlines` would also split at characters such as U+2028, at which editors do not.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _read_lines(text: str, where: str) -> list[Row]:
    """Reads the text of a file with one prompt per line.

    Args:
        text: The content of the file.
        where: The setting and its value, for messages.

    Raises:
        InputError: If the file looks like JSON.
    """
    rows = [Row(line, {}, f"line {number}") for number, line in _numbered_lines(text)]
    if rows and (_is_json(rows[0].text) or _is_json(text)):
        raise InputError(
            f"{where}: its lines look like JSON; a file of JSON lines must end in .jsonl, and one "
            "with a JSON list in .json"
        )
    return rows


def _is_json(text: str) -> bool:
    """Whether a text is a list or an object of JSON."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _read_json(text: str, column: str | None, where: str) -> list[Row]:
    """Reads a JSON list of texts or objects, or JSON lines in a file that ends in .json.

    Args:
        text: The content of the file.
        column: The key of the prompt. None: the first of `PROMPT_COLUMNS` in the first object.
        where: The setting and its value, for messages.

    Raises:
        InputError: If the text is neither, or if an entry has no prompt.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        lines = list(_numbered_lines(text))
        if not lines or not _is_json(lines[0][1]):
            raise InputError(f"{where}: not JSON ({error})") from error
        return _rows_of_objects(_parse_lines(text, where), column, where)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a JSON list of texts or of objects")
    items = [(f"item {number}", item) for number, item in enumerate(value, start=1)]
    return _rows_of_objects(items, column, where)


def _parse_lines(text: str, where: str) -> list[tuple[str, Any]]:
    """Parses JSON lines.

    Args:
        text: The content of the file.
        where: The setting and its value, for messages.

    Returns:
        The position (e.g. "line 3") and the value of each line that is not blank.

    Raises:
        InputError: If a line is no JSON.
    """
    values = []
    for number, line in _numbered_lines(text):
        try:
            values.append((f"line {number}", parse_json(line)))
        except ValueError as error:
            raise InputError(f"{where}: line {number}: not JSON ({error})") from error
    return values


def _rows_of_objects(items: list[tuple[str, Any]], column: str | None, where: str) -> list[Row]:
    """Returns the rows of values of JSON.

    Args:
        items: The position and the value of each row: an object, or a text without metadata.
        column: The key of the prompt. None: it is found in the first object.
        where: The setting and its value, for messages.

    Raises:
        InputError: If a value is something else.
    """
    objects = [value for _, value in items if isinstance(value, dict)]
    if column is None and objects:
        names = [name for name in PROMPT_COLUMNS if name in objects[0]]
        column = names[0] if names else PROMPT_COLUMNS[0]
    rows = []
    for position, value in items:
        metadata = dict(value) if isinstance(value, dict) else {}
        text = value if isinstance(value, str) else metadata.pop(column, None)
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"{where}: {position}: expected an object with the text under "
                f'"{column or PROMPT_COLUMNS[0]}"'
            )
        rows.append(Row(text.strip(), metadata, position))
    return rows


def _read_table(text: str, ending: str, column: str | None, where: str) -> list[Row]:
    """Reads a CSV or TSV file with a header.

    Quotation marks are read as in CSV. If a TSV file has others, they are ordinary characters.

    Args:
        text: The content of the file.
        ending: ".csv" or ".tsv".
        column: The column of the prompt, or None.
        where: The setting and its value, for messages.
    """
    delimiter = DELIMITERS[ending]
    try:
        lines = _split_table(text, delimiter, csv.QUOTE_MINIMAL)
    except csv.Error as error:
        if ending != ".tsv":
            raise InputError(f"{where}: not CSV ({error})") from error
        lines = _split_table(text, delimiter, csv.QUOTE_NONE)
    if not lines:
        return []
    _, header = lines[0]
    header = [name.strip() for name in header]
    column = _find_column(header, column, where)
    rows = []
    for number, values in lines[1:]:
        position = f"line {number}"
        if len(values) > len(header):
            raise InputError(
                f"{where}: {position}: {len(values)} values, but the header has {len(header)}"
            )
        values = values + [""] * (len(header) - len(values))
        metadata: dict[str, Any] = dict(zip(header, values, strict=True))
        rows.append(_row_of_table(metadata, column, position, where))
    return rows


def _split_table(text: str, delimiter: str, quoting: Any) -> list[tuple[int, list[str]]]:
    """Splits a table into rows and values.

    Args:
        text: The content of the file.
        delimiter: The character between values.
        quoting: `csv.QUOTE_MINIMAL`, or `csv.QUOTE_NONE` if quotation marks are plain characters.

    Returns:
        For each row that is not blank: the number of its last line in the file, and its values.

    Raises:
        csv.Error: If quotation marks are not as in CSV.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    return [(reader.line_num, values) for values in reader if any(v.strip() for v in values)]


def _read_parquet(file: Path, column: str | None, where: str) -> list[Row]:
    """Reads a Parquet file. Columns of other types than those of JSON, such as images, are left
    out.

    Args:
        file: The file.
        column: The column of the prompt. None: the first of `PROMPT_COLUMNS` that is there.
        where: The setting and its value, for messages.

    Raises:
        InputError: If the file cannot be read, has no such column, has more than `MAX_PROMPTS`
            rows, or has a row without a text in the column.
    """
    import pyarrow as pa  # not at the top, because worker processes import this file
    import pyarrow.parquet as pq

    if not file.is_file():
        raise InputError(f"{where}: no such file; expected a Parquet file")
    try:
        with open(file, "rb") as stream:
            parquet = pq.ParquetFile(stream)
            schema = parquet.schema_arrow
            column = _find_column(schema.names, column, where)
            if parquet.metadata.num_rows > MAX_PROMPTS:
                raise InputError(f"{where}: more than {MAX_PROMPTS} prompts")
            names = [field.name for field in schema if _is_json_type(field.type)]
            table = parquet.read(columns=names)
    except InputError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        message = " ".join(str(error).split())
        raise InputError(f"{where}: cannot be read as Parquet ({message})") from error
    return [
        _row_of_table(strict(values), column, f"row {number}", where)
        for number, values in enumerate(table.to_pylist(), start=1)
    ]


def _is_json_type(kind: Any) -> bool:
    """Whether the values of a column of this type of pyarrow are values of JSON."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_json_type(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json_type(field.type) for field in kind)
    if pa.types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(check(kind) for check in checks)


def _find_column(names: list[str], column: str | None, where: str) -> str:
    """Returns the column of the prompts.

    Args:
        names: The columns of the table.
        column: The column that the user named, or None.
        where: The setting and its value, for messages.

    Raises:
        InputError: If it is not there.
    """
    for name in PROMPT_COLUMNS if column is None else (column,):
        if name in names:
            return name
    known = brief_repr(names)
    if column is not None:
        raise InputError(f"{where}: no column {column!r}; there are {known}")
    raise InputError(
        f"{where}: no column {', '.join(PROMPT_COLUMNS)}; there are {known}, so name the one with "
        "the prompts as FILE:COLUMN"
    )


def _row_of_table(values: dict[str, Any], column: str, position: str, where: str) -> Row:
    """Returns a row of a table. Raises InputError if it has no text in `column`.

    Args:
        values: The values of the row by column. The prompt is taken out.
        column: The column of the prompt.
        position: Where the row is in the file.
        where: The setting and its value, for messages.
    """
    text = values.pop(column, None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: {position}: expected text in the column {column!r}")
    return Row(text.strip(), values, position)
