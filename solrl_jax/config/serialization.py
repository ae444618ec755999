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
    """Returns a configuration as YAML text with all of its fields, which `from_yaml` reads back.

    Args:
        config: The configuration.
    """
    # ASCII only (the default): PyYAML does not read back all the line breaks that it would write
    # unescaped.
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=128)


def to_tree(config: Config) -> dict[str, Any]:
    """Returns a configuration as nested dicts by section and field, with all of its fields.

    Args:
        config: The configuration. Its tuples become lists.
    """
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    """Returns a field's value as YAML reads it back: with dicts for mappings and lists for
    sequences.

    Args:
        value: A mapping, list or tuple of such values, or a scalar, which is returned as it is.
    """
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def from_yaml(text: str) -> Config:
    """Reads a configuration from YAML text, of this version or the one before, which is translated
    without a warning.

    Fields that are missing get their defaults.

    Args:
        text: The YAML text, as `to_yaml` writes it, of at most 65,536 characters. It must have the
            key `version`.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: If the text is not YAML, or not a valid configuration of these versions. The
            message names all problems.
    """
    tree = parse_config_text(text, "configuration")
    if isinstance(tree, dict) and "version" not in tree:
        raise ConfigError("missing key 'version'")
    return build_config(migrate(tree))


def drop_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns only the fields of a configuration that differ from their defaults.

    A hash of the result stays the same when a later version of the package adds a field.

    Args:
        tree: The configuration as nested dicts by section and field, as `to_tree` returns it.
            Fields may be missing. It is not changed.

    Returns:
        New nested dicts. Sections that equal their defaults are left out.

    Raises:
        KeyError: If `tree` has a key that is not a field.
    """
    return _drop_defaults(tree, to_tree(Config()), "")


def _drop_defaults(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Returns only the fields of a section that differ from their defaults.

    Args:
        tree: The section as nested dicts by subsection and field. Fields may be missing.
        defaults: The same section with all fields and their defaults.
        prefix: The dotted name of the section with a dot at its end, e.g. "rollout."; "" for the
            whole configuration. It distinguishes subsections from fields that are mappings, such as
            `reward.weights`.

    Returns:
        New nested dicts. Subsections that equal their defaults are left out.

    Raises:
        KeyError: If `tree` has a key that is not a field.
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


def parse_config_text(text: str, name: str) -> Any:
    """Reads YAML text, with limits on its length and depth.

    Args:
        text: The YAML text, of at most 65,536 characters.
        name: What error messages call the text, e.g. "configuration".

    Returns:
        Nested dicts and lists of text, numbers, booleans, dates and None; None for empty text.

    Raises:
        ConfigError: If the text is not YAML, is too long, or has a value inside 32 or more lists
            and mappings. Also for repeated keys, tags and aliases.
    """
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}: not YAML (line {line}: {error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: for instance a date that does not exist.
        raise ConfigError(f"{name}: not YAML ({' '.join(str(error).split())})") from None
