"""Overrides `key=value`: parsing them, and writing their values into a configuration tree.

A key is a dotted field name (`rollout.kept=12`), and its value is YAML
(`reward.weights={pickscore: 1}`). Text needs no quotes. `model=`, `family=`, `explore=`,
`objective=` and `reward=` choose a file of `solrl_jax/configs/` instead. `reward=` and `objective=`
also take a function `module:function` or, for rewards, the name of an entry point or the URL of a
service.
"""

import copy
import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from solrl_jax.config.files import PARTS, part_files
from solrl_jax.config.migrations import migrate_override
from solrl_jax.config.schema import is_plugin
from solrl_jax.config.serialization import parse
from solrl_jax.config.validation import field_names, section_names, suggest, unknown_key_message
from solrl_jax.config.values import ConfigError, brief_repr

ENTRY_POINTS = (
    "solrl_jax.rewards"  # the group of entry points under which other packages name rewards
)
_OPTIONS = "reward.options"
_FREE_FIELDS = (
    "reward.weights",
    "reward.paths",
    _OPTIONS,
)  # mappings whose keys are names, not fields
_YAML_QUOTES = (
    "'",
    '"',
    "|",
    ">",
)  # text that begins with one of these is quoted YAML and not taken as it is


@dataclasses.dataclass
class Overrides:
    """Parsed overrides.

    Attributes:
        settings: Dotted field names and their parsed values, in the order in which they apply:
            later ones win. Names of older versions have been replaced by those of today.
        choices: The file that is chosen for each part, e.g. {"model": "flux1"}. Parts that are not
            chosen are missing.
        problems: One message for each override that cannot be used.
    """

    settings: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def text_override(key: str, text: str) -> str:
    """The override that sets a field to exactly this text, whatever YAML would make of it.

    Args:
        key: The dotted name of the field.
        text: Its value, for instance a path with a `#`.

    Returns:
        `key="text"`, with the text quoted and escaped for YAML. A text of more than about 80
        characters with spaces is folded over several lines.
    """
    quoted = yaml.safe_dump(text, default_style='"').strip()
    return f"{key}={quoted}"


def parse_overrides(overrides: Sequence[str]) -> Overrides:
    """Parses overrides. Problems are collected, not raised.

    Warns with a FutureWarning for a name or value that the previous version of the configuration
    used.

    Args:
        overrides: Texts `key=value`; later ones win. The key is the dotted name of a field or
            section, and its value is YAML ("rollout.kept=12", "reward.weights={pickscore: 1}"); or
            it is "model", "family", "explore", "objective" or "reward", and its value the name of a
            file in the folder of this name in `solrl_jax/configs/` ("model=flux1"). "objective"
            also takes `module:function`, and "reward" such a function, an entry point or the URL of
            a service. Spaces around key and value do not count, an empty value is "", and text that
            begins with no quote is taken as it is written, so that " #" begins no comment.

    Returns:
        The settings, the chosen files and the problems: one message for each override that is no
        `key=value`, whose value is not YAML, whose key or choice is unknown, or whose key is
        "preset". A reward or objective that is no file becomes a setting, `reward.weights={NAME:
        1.0}` or `algorithm.objective=NAME`, before all other settings, so that explicit fields win
        over it.
    """
    parsed = Overrides()
    plugins: dict[str, str] = {}  # the last choice for "reward" and "objective", if that is no file
    for override in overrides:
        key, equals, raw = (piece.strip() for piece in override.partition("="))
        if not key or not equals:
            parsed.problems.append(
                f"override {brief_repr(override)}: expected key=value, e.g. train.iterations=100"
            )
            continue
        try:
            value = parse(raw, f"override {brief_repr(override)}") if raw else ""
        except ConfigError as error:
            parsed.problems.append(str(error))
            continue
        if isinstance(value, str) and not raw.startswith(_YAML_QUOTES):
            value = raw  # as it is, so that a path may contain " #", which begins a comment in YAML
        key, value = migrate_override(key, value)
        if key in PARTS and not isinstance(value, Mapping):
            _choose(parsed, plugins, key, raw)
        elif key == "preset":
            parsed.problems.append(
                f"preset={brief_repr(value)}: a preset is chosen by name, not by an override"
            )
        elif key in field_names() or _free_field(key) is not None:
            parsed.settings.append((key, value))
        else:
            parsed.problems.append(unknown_key_message(key))
    # They come first, so that explicit settings win over them as they win over the files of parts.
    if "reward" in plugins:
        parsed.settings.insert(0, ("reward.weights", {plugins["reward"]: 1.0}))
    if "objective" in plugins:
        parsed.settings.insert(0, ("algorithm.objective", plugins["objective"]))
    return parsed


def _choose(parsed: Overrides, plugins: dict[str, str], part: str, name: str) -> None:
    """Records a choice for a part, which replaces an earlier one where it is a file.

    A function or service is applied later than files, so an earlier choice of a file stays below
    it.

    Args:
        parsed: Gets the choice in `choices` if it is a file, or a message in `problems` if it is
            nothing that can be chosen.
        plugins: Gets the choice, by the part, if it names a function, service or entry point. A
            file removes the entry.
        part: "model", "family", "explore", "objective" or "reward" (`PARTS`).
        name: The choice, as it was written: the name of a file in the folder of the part, or a
            function, service or entry point.
    """
    if name in part_files(part):
        parsed.choices[part] = name
        plugins.pop(part, None)
    elif (part == "reward" and _is_reward(name)) or (part == "objective" and is_plugin(name)):
        plugins[part] = name
    else:
        parsed.problems.append(f"unknown {part} '{name}': {suggest(name, part_files(part))}")


def _is_reward(name: str) -> bool:
    """Whether a text can name a reward that is no file.

    Args:
        name: The text.

    Returns:
        True if it contains a colon, as functions `module:function` and URLs do, or is an entry
        point of the group `ENTRY_POINTS` in the installed packages. Nothing is imported.
    """
    return ":" in name or name in importlib.metadata.entry_points(group=ENTRY_POINTS).names


def merge(tree: dict[str, Any], new: Mapping[Any, Any], prefix: str = "") -> None:
    """Writes the fields of a tree into another, in place.

    Args:
        tree: Nested dicts of sections and fields, changed in place.
        new: Nested dicts of sections and the fields to change, which are copied. Sections are
            merged if both sides have a mapping; the value of a field is replaced whole, also if it
            is a list or a mapping. Unknown keys are written, too, and validation refuses them
            later.
        prefix: The dotted name of the section that `tree` and `new` are, with a dot behind, e.g.
            "rollout."; "" for the whole configuration.
    """
    for key, value in new.items():
        name = f"{prefix}{key}"
        old = tree.get(key)
        if name in section_names() and isinstance(value, Mapping) and isinstance(old, dict):
            merge(old, value, f"{name}.")
        else:
            tree[key] = copy.deepcopy(value)


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Writes the value of a field into a configuration tree, in place.

    Missing sections are created. If an earlier override replaced a section on the way by a plain
    value, nothing is written, and validation reports that value.

    Args:
        tree: The configuration as nested dicts of sections and fields, changed in place.
        key: The dotted name of a field or section, e.g. "rollout.kept", or of an entry of
            `reward.weights`, `reward.paths` or `reward.options`, e.g. "reward.weights.shapes".
        value: Its new value, which is copied. A mapping for a section is merged into it.
    """
    *parents, last = _split_key(key, value)
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return  # an earlier override replaced the section by a value, which validation reports
    merge(tree, {last: value}, "".join(f"{name}." for name in parents))


def _free_field(key: str) -> str | None:
    """The field with free keys that a dotted key lies below, or None.

    These fields are `reward.weights`, `reward.paths` and `reward.options`. For example
    "reward.weights" for "reward.weights.shapes"; None for "reward.weights" itself.

    Args:
        key: A dotted key.
    """
    return next((field for field in _FREE_FIELDS if key.startswith(f"{field}.")), None)


def _split_key(key: str, value: Any) -> list[str]:
    """Splits a dotted key into the names of sections, field and keys within the field.

    The part after `reward.weights`, `reward.paths` or `reward.options` is the name of an entry,
    which may contain dots itself.

    Args:
        key: The dotted key. `reward.options.NAME.OPTION` names one option of a reward, unless
            `value` is a mapping, which holds all options of the reward NAME.OPTION.
        value: The value that is assigned to the key. Only whether it is a dict matters.

    Returns:
        The names from the top, at least one: ["rollout", "kept"] for "rollout.kept"; ["reward",
        "weights", "a.b:f"] for "reward.weights.a.b:f"; and ["reward", "options", "judge", "model"]
        for "reward.options.judge.model", whose option is the part after the last dot.
    """
    field = _free_field(key)
    if field is None:
        return key.split(".")
    name = key.removeprefix(f"{field}.")
    reward, dot, option = name.rpartition(".")
    if field == _OPTIONS and dot and not isinstance(value, dict):
        return [*field.split("."), reward, option]
    return [*field.split("."), name]
