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
    """The configuration as YAML text with all fields, which `from_yaml` reads back exactly."""
    # ASCII only (the default): PyYAML does not read back all the line breaks that it would write
    # unescaped.
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=128)


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as nested mappings and lists of plain values, as YAML text gives them."""
    return yaml.safe_load(to_yaml(config))


def from_yaml(text: str) -> Config:
    """The configuration in YAML text of the present version or the one before it.

    A field that is missing has been added since the text was written, and gets its default.

    Raises:
      ConfigError: if the text is not YAML or not a configuration, with all problems.
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
      tree: nested mappings of plain values as `to_tree` returns them, also with fields left out.

    Returns:
      The fields whose value is not the default. Sections without such a field are left out.
    """
    return _drop_defaults(tree, to_tree(Config()), "")


def _drop_defaults(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Returns the entries of a configuration that differ from their defaults.

    Args:
        tree: A section as nested dicts.
        defaults: The same section with default values.
        prefix: The dotted name of the section, with a dot at the end; "" for the whole.
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
    """The value of YAML text.

    Args:
      text: the YAML.
      name: what the text is, for messages.

    Raises:
      ConfigError: if the text is not YAML.
    """
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}: not YAML (line {line}: {error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: for instance a date that does not exist.
        raise ConfigError(f"{name}: not YAML ({' '.join(str(error).split())})") from None
