"""The formats of prompt files: plain text, JSON, JSON lines, CSV, TSV and Parquet."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import InputError
from solrl_jax.storage.readers import parse_json, read_text, to_strict_json

# The most lines, rows or items of a prompt file.
MAX_PROMPTS = 2**20
# The columns, or keys of JSON objects, that hold the prompt unless another is named. The first one
# that a file has is used.
PROMPT_COLUMNS = ("prompt", "Prompt", "Prompts", "caption", "text")
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (*DELIMITERS, ".parquet")
# All endings that are not read as text. Text files may have any other ending.
ENDINGS = (".json", *JSON_LINES, *TABLES)


class Row(NamedTuple):
    """One entry of a prompt file.

    Attributes:
        text: The text of the prompt, without white space around it; not empty.
        metadata: Everything else that the file says about the prompt: values of JSON by the name of
            the column or key. Values of CSV and TSV files are text. Empty if the file gives nothing
            but the text.
        position: The place in the file, counted from 1, e.g. "line 3" (the last line of a CSV
            row), "item 3" of a JSON list or "row 3" of a Parquet file.
    """

    text: str
    metadata: dict[str, Any]
    position: str


def split_column(path: str) -> tuple[Path, str | None]:
    """Splits the name of a column from a path such as "prompts.csv:caption".

    Args:
        path: FILE or FILE:COLUMN. Only a FILE that ends in .json, .jsonl, .ndjson, .jsonlines,
            .csv, .tsv or .parquet (`ENDINGS`, in any case of letters) can have a column, which
            follows the last colon and is not empty. If a file of the whole name exists, colon
            included, that file is meant.

    Returns:
        The file, which need not exist, and the name of the column, or None without one.
    """
    file, colon, column = path.rpartition(":")
    has_column = colon and column and Path(file).suffix.lower() in ENDINGS
    if has_column and not Path(path).exists():
        return Path(file), column
    return Path(path), None


def read_rows(file: Path, column: str | None, where: str) -> list[Row]:
    """Reads a prompt file. Its ending, in any case of letters, decides the format.

    Args:
        file: A .json, .jsonl, .ndjson, .jsonlines, .csv, .tsv or .parquet file. Any other file is
            read as text with one prompt per line.
        column: The name of the column, or the key of JSON objects, with the prompts. None: the
            first of "prompt", "Prompt", "Prompts", "caption" and "text" that the table or the first
            JSON object has. No effect for text files, and for JSON items that are texts.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        The rows (text, metadata and position of each prompt) in the order of the file, without
        blank lines and with repetitions; [] for a file without prompts. (A blank .json file raises
        instead.)

    Raises:
        InputError: If the file cannot be read in this format, has no column with prompts, has a row
            without a prompt, or is too large: more than 2**20 rows, or (except for .parquet) more
            than 64 MiB.
    """
    ending = file.suffix.lower()
    if ending == ".parquet":
        rows = _read_parquet(file, column, where)
    else:
        text = read_text_file(
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


def read_text_file(file: Path, where: str, expected: str) -> str:
    """Reads a UTF-8 text file of at most 64 MiB.

    Args:
        file: The file. Links are followed.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".
        expected: A description of the file that is expected, for the message if there is none.

    Returns:
        The content of the file, without a byte-order mark and with line feeds as line ends.

    Raises:
        InputError: If the file does not exist, is a directory or a pipe, is larger, cannot be
            opened, or is not UTF-8 text.
    """
    try:
        return read_text(file)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read as UTF-8 text ({error})") from error


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text that are not blank.

    `str.splitlines` would also split at characters such as U+2028, at which editors do not.

    Args:
        text: The text. Only a line feed ends a line.

    Yields:
        Pairs: the number of the line, from 1 and with blank lines counted, and the line without
        white space around it.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _read_lines(text: str, where: str) -> list[Row]:
    """Reads the text of a file with one prompt per line.

    Args:
        text: The content of the file.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        One row without metadata per line that is not blank, with the text of the line without white
        space around it.

    Raises:
        InputError: If the whole text, or its first line that is not blank, is a list or an object
            of JSON, so that the file should have another ending.
    """
    rows = [Row(line, {}, f"line {number}") for number, line in _numbered_lines(text)]
    if rows and (_is_json(rows[0].text) or _is_json(text)):
        raise InputError(
            f"{where}: its lines look like JSON; a file of JSON lines must end in .jsonl, and one "
            "with a JSON list in .json"
        )
    return rows


def _is_json(text: str) -> bool:
    """Returns whether a text is a list or an object of JSON that `parse_json` accepts.

    Args:
        text: Any text.
    """
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _read_json(text: str, column: str | None, where: str) -> list[Row]:
    """Reads the text of a .json file.

    It may be a list of texts or objects, a single object, or JSON lines of which the first is an
    object.

    Args:
        text: The content of the file.
        column: The key of the prompt in objects. None: the first of "prompt", "Prompt", "Prompts",
            "caption" and "text" that the first object has.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        One row per item or line, in order. All keys of an object but that of the prompt become
        metadata.

    Raises:
        InputError: If the text is not of one of these forms, e.g. blank, or an item has no prompt.
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
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        The position (e.g. "line 3") and the value of each line that is not blank. Any value of JSON
        passes.

    Raises:
        InputError: If a line is not JSON, has a repeated key or a number that is not finite, or is
            nested too deeply (`parse_json`).
    """
    values = []
    for number, line in _numbered_lines(text):
        try:
            values.append((f"line {number}", parse_json(line)))
        except ValueError as error:
            raise InputError(f"{where}: line {number}: not JSON ({error})") from error
    return values


def _rows_of_objects(items: list[tuple[str, Any]], column: str | None, where: str) -> list[Row]:
    """Converts values of JSON, one per prompt, to rows.

    Args:
        items: Pairs of the position in the file, e.g. "line 3", and the value: a text, or an object
            with the prompt and metadata.
        column: The key of the prompt in all objects; no effect for texts. None: the first of
            "prompt", "Prompt", "Prompts", "caption" and "text" that the first object has.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        One row per item. All keys of an object but that of the prompt become metadata.

    Raises:
        InputError: If an item is neither a text nor an object, or its prompt is missing or blank.
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

    Args:
        text: The content of the file. Values may be in quotation marks; a doubled mark inside
            stands for one. If a TSV file breaks these rules, all its quotation marks are read as
            ordinary characters.
        ending: ".csv", whose values are separated by commas, or ".tsv" by tabs.
        column: The column of the prompt, by its name without white space around it. None: the first
            of "prompt", "Prompt", "Prompts", "caption" and "text" that the header has.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        One row per row of the table after the header, without blank ones; none for a blank file.
        The metadata are the texts of the other columns as they are written, by the names in the
        header, which are read without white space around them. Values that are missing at the end
        of a row are "". If two columns have the same name, only the later one is read, even for the
        prompt.

    Raises:
        InputError: If the quotation marks of a CSV file break the rules above, a value is longer
            than 131,072 characters, there is no column of the prompt, a row has more values than
            the header, or a row has no text in the column of the prompt.
    """
    delimiter = DELIMITERS[ending]
    try:
        try:
            lines = _split_table(text, delimiter, csv.QUOTE_MINIMAL)
        except csv.Error:
            if ending != ".tsv":
                raise
            lines = _split_table(text, delimiter, csv.QUOTE_NONE)
    except csv.Error as error:
        raise InputError(f"{where}: not {ending[1:].upper()} ({error})") from error
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
        delimiter: The character between values: "," or a tab.
        quoting: `csv.QUOTE_MINIMAL`, or `csv.QUOTE_NONE` if quotation marks are plain characters.

    Returns:
        For each row with a value that is not blank, the header included: the number of its last
        line in the file, from 1, and its values as they are written.

    Raises:
        csv.Error: If quotation marks are not as in CSV, or a value has more than 131,072
            characters.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    return [(reader.line_num, values) for values in reader if any(v.strip() for v in values)]


def _read_parquet(file: Path, column: str | None, where: str) -> list[Row]:
    """Reads a Parquet file.

    Columns whose types JSON does not have, such as images and dates, are left out. Numbers that are
    not finite become None.

    Args:
        file: The path of the file.
        column: The column of the prompt. None: the first of "prompt", "Prompt", "Prompts",
            "caption" and "text" that the table has.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Returns:
        One row per row of the table. All other columns that are not left out are metadata.

    Raises:
        InputError: If the file is missing or cannot be read, has no such column, has more than
            2**20 rows (`MAX_PROMPTS`), has a text that is not UTF-8 in a column that is read, or
            has a row without a text in the column of the prompt. The latter is true of every row if
            the prompt column has a type that is left out.
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
            # Also decodes the texts, which the file does not guarantee to be UTF-8.
            rows = parquet.read(columns=names).to_pylist()
    except InputError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        message = " ".join(str(error).split())
        raise InputError(f"{where}: cannot be read as Parquet ({message})") from error
    return [
        _row_of_table(to_strict_json(values), column, f"row {number}", where)
        for number, values in enumerate(rows, start=1)
    ]


def _is_json_type(kind: Any) -> bool:
    """Returns whether the values of a column of a Parquet file can be values of JSON.

    True for text, numbers, booleans and nulls, and for lists and structs of them. False, for
    instance, for dates and binary data, and also for decimals, maps and lists of a fixed size. A
    dictionary-encoded column counts as the type of its values.

    Args:
        kind: The type of the column, a `pyarrow.DataType`.
    """
    import pyarrow as pa

    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    if any(check(kind) for check in lists):
        return _is_json_type(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json_type(field.type) for field in kind)
    if pa.types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(check(kind) for check in checks)


def _find_column(names: list[str], column: str | None, where: str) -> str:
    """Returns the name of the column that holds the prompts.

    Args:
        names: The names of all columns of the table.
        column: The column that the user named. None: the first of "prompt", "Prompt", "Prompts",
            "caption" and "text" (`PROMPT_COLUMNS`) that is in `names`.
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Raises:
        InputError: If there is no such column. The message lists `names`.
    """
    for name in PROMPT_COLUMNS if column is None else (column,):
        if name in names:
            return name
    known = brief_repr(names)
    if column is not None:
        raise InputError(f"{where}: no column {column!r}; there are {known}")
    raise InputError(
        f"{where}: no column {', '.join(PROMPT_COLUMNS)}; there are {known}, so name the one with "
        "the prompts as FILE:COLUMN, or hub:OWNER/DATASET:SPLIT:COLUMN"
    )


def _row_of_table(values: dict[str, Any], column: str, position: str, where: str) -> Row:
    """Returns a row of a table as a `Row`.

    Args:
        values: The values of the row by column. The prompt is removed from this dict, and the dict
            itself becomes the metadata of the result.
        column: The column of the prompt.
        position: The place of the row in the file, for messages, e.g. "line 3".
        where: The start of messages: the setting and its value, e.g. "prompts.train='a.csv'".

    Raises:
        InputError: If the row has no such column, or its value there is no text or blank.
    """
    text = values.pop(column, None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: {position}: expected text in the column {column!r}")
    return Row(text.strip(), values, position)
