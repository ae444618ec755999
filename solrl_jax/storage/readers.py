"""Reads text, JSON and YAML that others wrote, with limits on size and depth.

Only regular files are read, so that no command waits for a pipe or reads a device forever. Whatever
cannot be read raises OSError or ValueError with a message of one line that does not name the file.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from typing import Any

import yaml

from solrl_jax.storage.stores import RunPath, StorePath

# The largest text file in bytes. A large vocabulary has 2**25.
MOST_TEXT = 2**26
# The largest YAML text in characters. The configuration of a run has about 2**12.
MOST_YAML = 2**16
# The most lists and objects in a JSON value. They take many times the memory of their text. The
# merges of a large vocabulary are 2**19.
MOST_NESTED = 2**21
# The most levels of lists and objects inside each other.
DEPTH = 32
# YAML 1.1 reads 010 as 8 and 1:30 as 90. Here both are text.
_OCTAL_OR_SEXAGESIMAL = re.compile(r"[-+]?(0[\d_]+|\d[\d_]*(:\d\d?)+(\.[\d_]*)?)")


def read_bytes(path: str | RunPath, most: int = MOST_TEXT) -> bytes:
    """Reads a whole file, up to a maximum size. It does not block on a pipe.

    Args:
        path: The file, here or in a store; a text is a path of this machine. Links are followed.
        most: The largest accepted size in bytes, by default 64 MiB.

    Returns:
        The content.

    Raises:
        OSError: If the file does not exist, or cannot be opened or read.
        ValueError: If the file is larger, or is a pipe, a device or a directory. The message does
            not name it.
    """
    if isinstance(path, StorePath):
        if path.size() > most:
            raise ValueError(f"more than {most} bytes")
        return path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > most:
            raise ValueError(f"more than {most} bytes")
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read(most + 1) or b""  # None: a kernel's file that has no content yet
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def read_start(path: RunPath, count: int) -> bytes:
    """Reads the beginning of a file.

    Args:
        path: The file, here or in a store. Links are followed. Its kind is not checked: a pipe
            would block.
        count: The number of bytes, at least 1.

    Returns:
        The first `count` bytes, or all if the file has fewer.

    Raises:
        OSError: If the file does not exist or cannot be read.
    """
    if isinstance(path, StorePath):
        return path.read_start(count)
    with path.open("rb") as stream:
        return stream.read(count)


def read_text(path: str | RunPath, most: int = MOST_TEXT) -> str:
    r"""Reads a whole file as UTF-8 text, up to a maximum size. It does not block on a pipe.

    Args:
        path: The file, here or in a store; a text is a path of this machine. Links are followed.
        most: The largest accepted size in bytes, by default 64 MiB.

    Returns:
        The text, with "\n" as line ends and without a byte-order mark.

    Raises:
        OSError: If the file does not exist, or cannot be opened or read.
        ValueError: If the file is larger, not UTF-8, or a pipe, a device or a directory. The
            message does not name it.
    """
    return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _parse_finite(text: str) -> float:
    """Converts the text of a number to a float, and refuses NaN and infinity.

    Args:
        text: The text of a number in JSON, or "NaN", "Infinity" or "-Infinity".

    Returns:
        The number.

    Raises:
        ValueError: If the text is no number, or the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _unique_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Builds a dictionary from pairs of key and value, and refuses repeated keys.

    Args:
        pairs: The pairs. Keys must be hashable.

    Returns:
        The dictionary, in the order of the pairs.

    Raises:
        ValueError: If a key is repeated. The message contains it.
    """
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {str(key)[:80]!r} comes twice")
        result[key] = value
    return result


def parse_json(text: str | bytes, *, number: Callable[[str], float] = _parse_finite) -> Any:
    """Parses a JSON text, with limits on the number and the depth of its lists and objects.

    Args:
        text: The text. Bytes may be UTF-8, UTF-16 or UTF-32.
        number: A function that converts the text of a number with a fraction or an exponent, and
            the words NaN, Infinity and -Infinity. The default refuses numbers that are not finite;
            `float` accepts them.

    Returns:
        The value: dictionaries, lists, text, numbers, booleans and None.

    Raises:
        ValueError: If the text is not JSON, repeats a key in an object, has a value inside 32
            (`DEPTH`) or more lists and objects, or has more than 2**21 (`MOST_NESTED`) characters
            "[" and "{" together, also inside strings; or if `number` refuses.
    """
    if isinstance(text, bytes):
        num_nested = text.count(b"[") + text.count(b"{")
    else:
        num_nested = text.count("[") + text.count("{")
    if num_nested > MOST_NESTED:
        raise ValueError(f"more than {MOST_NESTED} lists and objects")
    too_deep = f"more than {DEPTH} levels deep"
    try:
        value = json.loads(
            text, parse_constant=number, parse_float=number, object_pairs_hook=_unique_dict
        )
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise ValueError(too_deep)
    return value


def _children(value: Any) -> list[Any]:
    """Returns the items of a list or the values of a dictionary; [] for any other value.

    Args:
        value: A value that was parsed from JSON.
    """
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def to_strict_json(value: Any) -> Any:
    """Copies a value so that it can be written as strict JSON: floats that are not finite become
    None, and tuples become lists.

    Args:
        value: Nested dictionaries, lists, tuples and plain values. It is not changed. Values of
            other types (also NumPy's arrays and float32 scalars) and keys of dictionaries stay as
            they are.

    Returns:
        The copy.
    """
    if isinstance(value, dict):
        return {key: to_strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def parse_yaml(text: str) -> Any:
    """Parses a YAML 1.1 text of plain data, with limits on its size and depth.

    Whole numbers with a leading zero such as 010 or 08, and numbers to the base 60 such as 1:30,
    are read as text.

    Args:
        text: The text of one YAML document, possibly empty.

    Returns:
        The value: dictionaries, lists, text, numbers (also NaN and infinity), booleans, dates and
        None; None for an empty text.

    Raises:
        ValueError: If the text is longer than 65,536 characters (`MOST_YAML`), repeats a key, or
            has an impossible date.
        yaml.YAMLError: If the text is not YAML; if it has several documents, tags, aliases, or keys
            that are lists or dictionaries; or if a value lies inside 32 (`DEPTH`) or more lists and
            dictionaries.
    """
    if len(text) > MOST_YAML:
        raise ValueError(f"more than {MOST_YAML} characters")
    return yaml.load(text, _PlainLoader)


def is_short_digits(text: str) -> bool:
    """Whether a text is a whole number of one to nine digits, without a sign or anything else.

    Args:
        text: The text. Leading zeros are allowed.
    """
    return text.isascii() and text.isdecimal() and len(text) < 10


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader of PyYAML that refuses tags, aliases, repeated keys and deep nesting, and reads
    octal and base-60 numbers as text.

    Aliases are refused because a short text with aliases can stand for a giant value.

    Attributes:
        depth: The number of nodes around the one that is being read.
    """

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Returns the tag of a node, which decides its type. Overrides PyYAML's method.

        A plain scalar that YAML 1.1 would read as an octal or base-60 number is read as text.

        Args:
            kind: The class of the node: `yaml.ScalarNode`, `yaml.SequenceNode` or
                `yaml.MappingNode`.
            value: The text of a scalar, otherwise None.
            implicit: PyYAML's two flags: whether the tag may be derived from a plain value, and
                from a quoted one.

        Returns:
            The tag.
        """
        is_plain_scalar = kind is yaml.ScalarNode and implicit[0]
        if is_plain_scalar and _OCTAL_OR_SEXAGESIMAL.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return super().resolve(kind, value, implicit)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Reads the next node of the text with everything inside it. Overrides PyYAML's method.

        Args:
            parent: The node that contains it, or None.
            index: Its position or key in `parent`.

        Returns:
            The node (`yaml.Node`).

        Raises:
            yaml.composer.ComposerError: If the node is an alias, has a tag, or lies inside 32
                (`DEPTH`) or more others.
        """
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            problem = "tags and aliases are not accepted"
        elif self.depth == DEPTH:
            problem = f"more than {DEPTH} levels deep"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Builds the dictionary of a mapping node, and refuses repeated keys. Overrides PyYAML's
        method.

        Args:
            node: The mapping node (`yaml.MappingNode`).
            deep: Whether nested values are complete when this returns. If not, PyYAML completes
                them later.

        Returns:
            The dictionary.

        Raises:
            ValueError: If a key is repeated.
            yaml.constructor.ConstructorError: If a key is not hashable.
        """
        mapping = super().construct_mapping(node, deep)
        _unique_dict([(self.construct_object(key), None) for key, _ in node.value])
        return mapping
