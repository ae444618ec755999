"""Reading what others wrote. Text, JSON and YAML come from regular files alone, and are bounded in size and depth.

What cannot be read raises OSError or ValueError, in one line that does not name the file.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

MOST_TEXT = 2**26  # bytes of a text file: a vocabulary has 2**25
MOST_YAML = 2**16  # bytes of a configuration: a run's has 2**12
MOST_NESTED = (
    2**21
)  # lists and mappings of a JSON value, which take many times their text: a vocabulary's merges are 2**19
_BASE_8_OR_60 = re.compile(
    r"[-+]?(0[\d_]+|\d[\d_]*(:\d\d?)+(\.[\d_]*)?)"
)  # 010 and 1:30 are 8 and 90 in YAML 1.1: text here
DEPTH = 32  # levels of lists and mappings in each other


def read_bytes(path: str | Path, most: int = MOST_TEXT) -> bytes:
    """The content of a regular file of at most `most` bytes. Pipes and devices are refused, and are not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > most:
            raise ValueError(f"more than {most} bytes")
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read(most + 1) or b""  # None: a file of the kernel with nothing in it yet
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def read_text(path: str | Path, most: int = MOST_TEXT) -> str:
    """A UTF-8 file as `read_bytes` reads it, without a byte-order mark. Every line ends with a line feed."""
    return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The mapping of these pairs. Raises ValueError for a key that comes twice, because either value may be meant."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {str(key)[:80]!r} comes twice")
        made[key] = value
    return made


def parse_json(text: str | bytes, *, number: Callable[[str], float] = _finite) -> Any:
    """A JSON value at most `DEPTH` levels deep. No key comes twice.

    number: makes a number of its text; `float` accepts infinity and NaN, which Python writes though JSON has none.
    """
    nested = (
        text.count(b"[") + text.count(b"{")
        if isinstance(text, bytes)
        else text.count("[") + text.count("{")
    )
    if nested > MOST_NESTED:
        raise ValueError(f"more than {MOST_NESTED} lists and objects")
    try:
        value = json.loads(
            text, parse_constant=number, parse_float=number, object_pairs_hook=_distinct
        )
    except RecursionError:
        raise ValueError(f"more than {DEPTH} levels deep") from None
    level = [value]
    for _ in range(DEPTH):
        level = [
            x
            for one in level
            if isinstance(one, list | dict)
            for x in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"more than {DEPTH} levels deep")
    return value


def strict(value: Any) -> Any:
    """The value as strict JSON has it: null for a number that is not finite."""
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_yaml(text: str) -> Any:
    """A YAML value of plain data, at most `DEPTH` levels deep. Tags, aliases and a key that comes twice are refused.

    Raises yaml.YAMLError too.
    """
    if len(text) > MOST_YAML:
        raise ValueError(f"more than {MOST_YAML} characters")
    return yaml.load(text, _PlainLoader)


def is_number(text: str) -> bool:
    """Whether a text is a whole number of up to nine digits: no "1_0", no digits of other scripts."""
    return text.isascii() and text.isdecimal() and len(text) < 10


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader that refuses what can grow while it is read, or is more than plain data."""

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0] and _BASE_8_OR_60.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return super().resolve(kind, value, implicit)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            raise yaml.composer.ComposerError(
                None, None, "tags and aliases are not accepted", event.start_mark
            )
        if self.depth == DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"more than {DEPTH} levels deep", event.start_mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        made = super().construct_mapping(node, deep)
        _distinct([(self.construct_object(key), None) for key, _ in node.value])
        return made
