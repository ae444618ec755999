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
from solrl_jax.config.serialization import parse_config_text
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
        settings: Pairs (name, value), in the order in which they apply: later ones win. The name is
            the dotted name of a field, of a section, or of an entry such as
            "reward.weights.shapes". The value is parsed from YAML and not checked.
        choices: The files that are chosen for parts of a preset, e.g. {"model": "flux1"}. Parts are
            "model", "family" (one of the paper's methods, e.g. "sol_rl"), "explore", "objective"
            and "reward". A function, URL or entry point that is chosen for an objective or a reward
            is in `settings` instead.
        problems: One message for each override that cannot be used.
    """

    settings: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def quote_override(key: str, text: str) -> str:
    """Returns the override that sets a field to a text, quoted so that YAML reads exactly this
    text.

    Args:
        key: The dotted name of the field.
        text: Its value, e.g. a path that contains a "#".
    """
    quoted = yaml.safe_dump(text, default_style='"').strip()
    return f"{key}={quoted}"


def parse_overrides(overrides: Sequence[str]) -> Overrides:
    """Parses overrides `key=value`. Errors are collected in the result and not raised.

    Names of version 2 of the configuration, the previous one, are accepted, with a FutureWarning.
    Nothing is imported.

    Args:
        overrides: The overrides; later ones win. Spaces around key and value are dropped, and an
            empty value is the text "". There are two kinds. The key may be the dotted name of a
            field, of a section or of an entry such as "reward.weights.shapes", whose value is YAML
            ("rollout.kept=12"); text without quotes is taken as it is, "#" included. Or the key may
            be "model", "family", "explore", "objective" or "reward", and the value the name of a
            file in this folder of `solrl_jax/configs/` ("model=flux1"). "objective" and "reward"
            also accept a function `module:function`, and "reward" the URL of a service or an entry
            point of another package. A value that is a YAML mapping chooses no file: with "model"
            and "reward" it sets fields of the section of this name, with "explore" and "objective"
            it is a problem, and with "family" it is a setting that `build_config` refuses.

    Returns:
        The settings, the chosen files, and a message for each override that cannot be used. A
        function, URL or entry point becomes the first setting: `algorithm.objective`, or
        `reward.weights` with this reward alone, of weight 1. All other overrides of this field
        therefore win over it, wherever they stand.
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
            value = parse_config_text(raw, f"override {brief_repr(override)}") if raw else ""
        except ConfigError as error:
            parsed.problems.append(str(error))
            continue
        if isinstance(value, str) and not raw.startswith(_YAML_QUOTES):
            value = raw  # as it is, so that a path may contain " #", which begins a comment in YAML
        key, value = migrate_override(key, value)
        if key in PARTS and not isinstance(value, Mapping):
            _choose(parsed, plugins, key, value if isinstance(value, str) else raw)
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
    """Records the choice of a file or of a function for a part of a preset.

    Args:
        parsed: The overrides that were parsed so far. It gets a file in its `choices`, or a message
            in its `problems` if `name` is unknown.
        plugins: Functions, services and entry points that were chosen, by part. A choice that is no
            file is added, in place of an earlier one of its part; an earlier file of the part stays
            in `choices`. Choosing a file removes the entry of its part.
        part: "model", "family", "explore", "objective" or "reward".
        name: The name of a file in the folder of the part; for an objective or a reward also
            `module:function`, and for a reward also a URL or an entry point.
    """
    if name in part_files(part):
        parsed.choices[part] = name
        plugins.pop(part, None)
    elif (part == "reward" and _is_reward(name)) or (part == "objective" and is_plugin(name)):
        plugins[part] = name
    else:
        parsed.problems.append(
            f"unknown {part} {brief_repr(name)}: {suggest(name, part_files(part))}"
        )


def _is_reward(name: str) -> bool:
    """Returns whether a text can name a reward outside the package. Nothing is imported.

    Such names are functions `module:function`, URLs of services, and entry points of installed
    packages in the group "solrl_jax.rewards" (`ENTRY_POINTS`).

    Args:
        name: The text. Any text with a colon counts as a function or URL.
    """
    return ":" in name or name in importlib.metadata.entry_points(group=ENTRY_POINTS).names


def merge(tree: dict[str, Any], new: Mapping[Any, Any], prefix: str = "") -> None:
    """Copies settings into a configuration, in place.

    Args:
        tree: The configuration as nested dicts by section and field. It is changed.
        new: Nested dicts of the same form with the settings to copy. It is not changed, and `tree`
            shares no list or dict with it. Other fields of a section stay; a field that is a list
            or a dict is replaced as a whole, and so is a section that is not a dict in `tree` or in
            `new`. Unknown names are copied too; nothing is checked.
        prefix: The dotted name of the section that `tree` and `new` are, with a dot at its end,
            e.g. "rollout."; "" for the whole configuration. It distinguishes sections from fields
            that are dicts.
    """
    for key, value in new.items():
        name = f"{prefix}{key}"
        old = tree.get(key)
        if name in section_names() and isinstance(value, Mapping) and isinstance(old, dict):
            merge(old, value, f"{name}.")
        else:
            tree[key] = copy.deepcopy(value)


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets one field of a configuration, in place.

    Args:
        tree: The configuration as nested dicts by section and field. It is changed.
        key: The dotted name of the field, e.g. "rollout.kept", or of an entry in `reward.weights`,
            `reward.paths` or `reward.options`, e.g. "reward.weights.shapes". Names of such entries
            may contain dots. Below `reward.options`, however, the last dot separates the reward
            from its option unless the value is a dict. The key may also name a section, whose other
            fields stay. An unknown name is added, and `build_config` refuses it. If an earlier
            override put a value that is not a dict in place of a section that contains the field
            (e.g. "rollout=3" before "rollout.kept=12"), nothing happens, because `build_config`
            refuses that value.
        value: The new value, which is copied and not checked; for a section a dict of fields
            (anything else replaces the section).
    """
    *parents, last = _split_key(key, value)
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return  # an earlier override replaced the section by a value, which validation reports
    merge(tree, {last: value}, "".join(f"{name}." for name in parents))


def _free_field(key: str) -> str | None:
    """Returns the field that a dotted key names an entry of, or None if it names a field or
    section.

    Fields with entries of any name are `reward.weights`, `reward.paths` and `reward.options`. For
    example, "reward.weights.shapes" gives "reward.weights".

    Args:
        key: The dotted key.
    """
    return next((field for field in _FREE_FIELDS if key.startswith(f"{field}.")), None)


def _split_key(key: str, value: Any) -> list[str]:
    """Splits a dotted key into the names of sections, field and entry of a field.

    In `reward.weights`, `reward.paths` and `reward.options`, dots in the names of rewards do not
    split: "reward.weights.a.b:f" gives ["reward", "weights", "a.b:f"].

    Args:
        key: The dotted key, e.g. "rollout.kept", which gives ["rollout", "kept"].
        value: The value that the key is set to. It only matters below `reward.options`: a dict is
            all options of one reward, whose name may contain dots; another value is that of one
            option, whose name follows the last dot.

    Returns:
        The names, outermost first.
    """
    field = _free_field(key)
    if field is None:
        return key.split(".")
    name = key.removeprefix(f"{field}.")
    reward, dot, option = name.rpartition(".")
    if field == _OPTIONS and dot and not isinstance(value, dict):
        return [*field.split("."), reward, option]
    return [*field.split("."), name]
