"""Configurations as YAML text, which a run directory keeps in `config.yaml`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from solrl_jax.config.migrations import migrate
from solrl_jax.config.schema import Config
from solrl_jax.config.validation import build_config, section_names
from solrl_jax.config.values import ConfigError
from solrl_jax.storage.readers import parse_yaml


def to_yaml(config: Config) -> str:
    """The configuration as YAML text, which `from_yaml` reads back exactly.

    Args:
        config: The configuration.

    Returns:
        ASCII text with all fields, also those with default values, in the order of the schema.
        Tuples become lists, and other characters are escaped. It can be longer than the 65,536
        characters that `from_yaml` accepts, e.g. with very long mappings in `reward.options`.
    """
    # ASCII only (the default): PyYAML does not read back all the line breaks that it would write
    # unescaped.
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=128)


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as plain values, as YAML text gives them.

    Args:
        config: The configuration.

    Returns:
        New nested dicts of sections and fields, with all fields in the order of the schema. Tuples
        are lists.
    """
    return yaml.safe_load(to_yaml(config))


def from_yaml(text: str) -> Config:
    """The configuration in YAML text of the present version or the one before it.

    A field that is missing has been added since the text was written, and gets its default. Names
    of version 2 are translated without a warning.

    Args:
        text: The YAML text, with the key `version`.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: If the text is not YAML, has no `version` or another one than 2 and 3, or is
            not a configuration, with all problems.
    """
    tree = parse(text, "configuration")
    if isinstance(tree, dict) and "version" not in tree:
        raise ConfigError("missing key 'version'")
    return build_config(migrate(tree))


def drop_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that differs from `Config()`.

    What is derived from it, such as a hash, stays the same when a field is added, as long as the
    field has its default.

    Args:
        tree: Nested mappings of plain values as `to_tree` returns them, also with fields left out.
            It is not changed.

    Returns:
        New nested dicts with the fields whose value is not the default. A section that equals its
        default is left out. A section in which fields are left out differs from it and stays,
        possibly empty.

    Raises:
        KeyError: For a key that is no field.
    """
    return _drop_defaults(tree, to_tree(Config()), "")


def _drop_defaults(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Returns the entries of a section that differ from their defaults.

    Args:
        tree: A section as nested dicts, possibly with fields left out.
        defaults: The same section with default values, complete.
        prefix: The dotted name of the section, with a dot at the end; "" for the whole
            configuration.

    Returns:
        A new dict. A section within it that differs from its default has only its own differing
        entries (none, if it differs in that `tree` leaves fields out). Other entries, also mappings
        that are fields, are compared and taken as a whole.

    Raises:
        KeyError: For a key that `defaults` does not have.
    """
    changed = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if value == defaults[key]:
            continue
        if name in section_names():
            changed[key] = _drop_defaults(value, defaults[key], f"{name}.")
        else:
            changed[key] = value
    return changed


def parse(text: str, name: str) -> Any:
    """The value of YAML text, read with limits on its length and depth.

    Args:
        text: The YAML, up to 65,536 characters.
        name: What the text is, with which a message begins, e.g. "configuration".

    Returns:
        Nested dicts and lists of text, numbers, booleans, dates and None; None for empty text.

    Raises:
        ConfigError: If the text is not YAML, too long or too deep, or has a repeated key, a tag or
            an alias. The message is one line, with the number of the line at fault where it is
            known.
    """
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}: not YAML (line {line}: {error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: for instance a date that does not exist.
        raise ConfigError(f"{name}: not YAML ({' '.join(str(error).split())})") from None
