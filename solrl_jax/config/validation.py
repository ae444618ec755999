"""Builds a `Config` from plain data, or describes what is wrong with the data."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pydantic

from solrl_jax.config.schema import Config
from solrl_jax.config.values import ConfigError, Section, brief_repr

_ADAPTER = pydantic.TypeAdapter(Config)

# What is accepted in place of a value, by the type of pydantic's error. Braces are filled from the
# error's context.
_ACCEPTED = {
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text (in quotes if it looks like a number or a date)",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "dataclass_type": "expected a mapping of its fields",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}


def build_config(tree: Any, problems: Sequence[str] = ()) -> Config:
    """A checked configuration.

    Args:
        tree: Nested mappings of the sections and their fields, as YAML gives them. Fields that are
            missing get their defaults. Anything else than a mapping is a problem.
        problems: Messages of problems that the caller found before, e.g. in overrides. Any makes
            this raise.

    Returns:
        The configuration, if there is no problem at all.

    Raises:
        ConfigError: With all problems joined by "; ", those of `problems` first, and equal ones
            once. The rules between the fields of a section are checked only if each field is right
            by itself.
    """
    messages = list(problems)
    try:
        config = _ADAPTER.validate_python(tree)
    except pydantic.ValidationError as errors:
        described = [describe_error(error) for error in errors.errors()]
        messages += [message for message in described if message is not None]
    if messages:
        raise ConfigError("; ".join(dict.fromkeys(messages)))
    return config


def describe_error(
    error: Any,
    root: str = "configuration",
    describe_unknown_key: Callable[[str], str] | None = None,
) -> str | None:
    """One of pydantic's errors as "field=value: what is accepted".

    Args:
        error: An entry of `pydantic.ValidationError.errors()`: a dict with "type", "input" (the
            value at fault), "loc" (the names on the way to it) and possibly "ctx".
        root: What the message calls the value if the error is about the whole of it and not about a
            field.
        describe_unknown_key: Makes the message for a key that is no field from its dotted name.
            None: `unknown_key_message`, which proposes the nearest field of `Config`.

    Returns:
        The message in one line, or None for an error that only follows from another one (a
        collection that is too short because its items are invalid). A missing key gives "missing
        key 'FIELD'"; a ConfigError of a section gives its own message; a value outside a fixed
        choice also gets a proposal of the nearest one. Errors of kinds that this module does not
        know keep pydantic's text.
    """
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    field = ".".join(map(str, error["loc"])) or root
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return (describe_unknown_key or unknown_key_message)(field)
    if kind == "missing":
        return f"missing key '{field}'"
    if kind == "too_short" and value:
        return None  # pydantic counts only the valid items, and the others have errors of their own
    if kind == "value_error":
        cause = context["error"]
        return (
            str(cause)
            if isinstance(cause, ConfigError)
            else f"{field}={brief_repr(value)}: {cause}"
        )
    if kind == "literal_error":
        accepted = f"expected {context['expected']}"
        names = re.findall("'(.*?)'", context["expected"])
        if near := difflib.get_close_matches(str(value)[:80], names, n=1):
            accepted += f", did you mean '{near[0]}'?"
        return f"{field}={brief_repr(value)}: {accepted}"
    accepted = _ACCEPTED[kind].format(**context) if kind in _ACCEPTED else error["msg"]
    return f"{field}={brief_repr(value)}: {accepted}"


def field_names(section: type = Config, prefix: str = "") -> list[str]:
    """Returns the dotted names of all sections and fields below a section.

    Args:
        section: The class of the section; a dataclass.
        prefix: Text before each name: the dotted name of the section, with a dot at the end; "" for
            the top.

    Returns:
        The names in the order of the schema. The name of a section comes before those of its
        fields.
    """
    names = []
    for field in dataclasses.fields(section):
        names.append(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            names += field_names(field.type, f"{prefix}{field.name}.")
    return names


@functools.cache
def section_names() -> frozenset[str]:
    """Dotted names of all sections of `Config`, e.g. "rollout" and "rollout.explore". Cached.

    The configuration as a whole has no name and is not among them.
    """
    return frozenset(name.rpartition(".")[0] for name in field_names()) - {""}


def unknown_key_message(key: str) -> str:
    """The message for a dotted key that is no field: "unknown key 'KEY': PROPOSAL".

    It proposes the nearest field of `Config`. If none is near, it lists the fields of the section
    that the key lies in; those at the top, if there is no such section.

    Args:
        key: The dotted key.
    """
    section = key.rpartition(".")[0]
    if section not in section_names():
        section = ""
    siblings = [name for name in field_names() if name.rpartition(".")[0] == section]
    return f"unknown key '{key}': {suggest(key, field_names(), siblings)}"


def suggest(name: str, accepted: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """Proposes the accepted name that is most like a given one.

    Args:
        name: What was given. Its first 80 characters are compared.
        accepted: All names that are accepted.
        listed: The names to list if none of them is like `name`; None lists `accepted`.

    Returns:
        The phrase "did you mean 'NEAREST'?", or "expected one of A, B, ..." if none is near (a
        similarity of 0.6 by `difflib`).
    """
    if near := difflib.get_close_matches(name[:80], accepted, n=1):
        return f"did you mean '{near[0]}'?"
    return f"expected one of {', '.join(accepted if listed is None else listed)}"
