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
    """Builds a configuration from plain data, and checks it.

    Args:
        tree: Nested dicts by section and field. Missing fields get their defaults; unknown ones are
            a problem.
        problems: Messages on problems that the caller has found already, e.g. in overrides. They
            are reported together with those that are found here.

    Returns:
        The configuration.

    Raises:
        ConfigError: If there is any problem. Its message joins all of them by "; ". For each
            section, it has only the first broken rule between fields. Rules between sections are
            checked only if all sections are valid, and only the first broken one is reported.
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
    """Formats an error of pydantic as a message such as "lora.rank=0: must be at least 1".

    Args:
        error: An entry of the list that `pydantic.ValidationError.errors()` returns.
        root: What the message names if the error is about the whole value and not about a field.
        describe_unknown_key: A function that returns the message for an unknown key, from its
            dotted name. None: `unknown_key_message`.

    Returns:
        The message in one line. The value in it is cut to 80 characters, and URLs in it lose what
        seems to be a secret (`brief_repr`). None if the error is that a nonempty value is too
        short: pydantic counts only its valid items, and the others have errors of their own.
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
    """Returns the dotted names of all fields and subsections of a section, each subsection followed
    by its own fields.

    Args:
        section: The class of the section.
        prefix: The dotted name of the section with a dot at its end, e.g. "rollout.", with which
            all names begin; "" for the whole configuration.
    """
    names = []
    for field in dataclasses.fields(section):
        names.append(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            names += field_names(field.type, f"{prefix}{field.name}.")
    return names


@functools.cache
def section_names() -> frozenset[str]:
    """Returns the dotted names of all sections, e.g. "rollout" and "rollout.explore". Cached."""
    return frozenset(name.rpartition(".")[0] for name in field_names()) - {""}


def unknown_key_message(key: str) -> str:
    """Returns the error message for a dotted key that is not a field, with a proposal.

    The proposal is the field of the same section with the most similar name, else a field of
    another section with the same name, else a list of the fields of the section. If there is no
    such section, it is the field with the most similar dotted name, else a list of the fields and
    sections at the top level.

    Args:
        key: The dotted key.
    """
    section, _, name = key.rpartition(".")
    in_section = {f.rpartition(".")[2]: f for f in field_names() if f.rpartition(".")[0] == section}
    # Only last parts are compared here, because the dotted names of a section all begin alike.
    if near := difflib.get_close_matches(name[:80], in_section, n=1):
        return f"unknown key '{key}': did you mean '{in_section[near[0]]}'?"
    fields = [f for f in field_names() if f not in section_names()]
    if namesakes := [f for f in fields if f.rpartition(".")[2] == name]:
        return f"unknown key '{key}': did you mean '{namesakes[0]}'?"
    if section and in_section:
        return f"unknown key '{key}': expected one of {', '.join(in_section.values())}"
    at_top = [f for f in field_names() if "." not in f]
    return f"unknown key '{key}': {suggest(key, fields, at_top)}"


def suggest(name: str, accepted: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """Returns a phrase that proposes an accepted name in place of a wrong one.

    Args:
        name: The wrong name.
        accepted: All accepted names.
        listed: The names to list if no accepted name is similar. None: all accepted names.

    Returns:
        "did you mean 'SIMILAR'?", or "expected one of A, B, ..." if no name is similar.
    """
    if near := difflib.get_close_matches(name[:80], accepted, n=1):
        return f"did you mean '{near[0]}'?"
    return f"expected one of {', '.join(accepted if listed is None else listed)}"
