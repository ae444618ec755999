"""From the name of a preset and `key=value` overrides to a `Config`: composition of the files in `configs/`.

    base <- model <- family <- explore <- objective <- reward <- the preset's own file <- overrides

`<model>_<family>_<reward>` names a preset without a file of its own, for each released model of `configs/model`; 48 are the
paper's. A preset with a file names its parts under `compose`. Any file may hold settings for one choice of a part under `when`,
e.g. `family=diffusionnft: {rollout: ...}`; they follow the other settings of all files.
"""

import copy
import dataclasses
import difflib
import functools
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from solrl_jax.config.migrations import migrate, migrate_override
from solrl_jax.config.schema import Config
from solrl_jax.config.values import ConfigError, Section, brief_repr
from solrl_jax.storage.readers import parse_yaml

PARTS = (
    "model",
    "family",
    "explore",
    "objective",
    "reward",
)  # in the order in which they are merged
DEFAULTS = {"explore": "paper", "objective": "nft"}  # of a preset that does not name the part
FAMILIES = ("diffusionnft", "naive_scaling", "naive_quant", "sol_rl")
REWARDS = ("pickscore", "clipscore", "hpsv2", "imagereward")  # the paper's
ENTRY_POINTS = "solrl_jax.rewards"  # the group under which other packages name rewards
_OPTIONS = "reward.options"
_FREE = ("reward.weights", "reward.paths", _OPTIONS)  # the fields whose own keys are free
_QUOTES = (
    "'",
    '"',
    "|",
    ">",
)  # with which text begins that YAML reads otherwise than it is written
_ADAPTER = pydantic.TypeAdapter(Config)


def preset_names() -> list[str]:
    """The presets with a file of their own, then the others."""
    own = sorted(path.stem for path in _configs().glob("*.yaml") if path.stem != "base")
    return [*own, *_composed()]


def released_models() -> list[str]:
    """The files of `configs/model` but for the pipelines that are shipped with the package."""
    return [name for name in _choices("model") if not name.startswith("tiny-")]


@functools.cache
def _composed() -> dict[str, dict[str, str]]:
    """The parts of each preset that has no file."""
    of = itertools.product(released_models(), FAMILIES, REWARDS)
    return {
        "_".join(parts): dict(zip(("model", "family", "reward"), parts, strict=True))
        for parts in of
    }


def resolve(preset: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `preset` with `key=value` overrides, later ones winning. Raises ConfigError with all problems.

    A key is dotted (`rollout.kept=12`), its value YAML (`reward.weights={pickscore: 1, clipscore: 1}`); `model=`, `family=`,
    `objective=` and so on choose another file for that part; `reward=` also takes a plug-in's name, to be trained on alone.
    Text without quotes is taken as it is: a path may hold ` #`, with which a comment begins in YAML.
    """
    if wrong := [given for given in (preset, *overrides) if not isinstance(given, str)]:
        raise ConfigError(
            f"{brief_repr(wrong[0])}: accepted: the name of a preset and overrides 'key=value', all of them text"
        )
    if preset not in preset_names():
        raise ConfigError(
            f"unknown preset {brief_repr(preset)}: {_nearest(preset, preset_names())}"
        )
    settings, chosen, problems = _parse_overrides(overrides)
    own = copy.deepcopy(_read(f"{preset}.yaml")) if (_configs() / f"{preset}.yaml").exists() else {}
    parts = DEFAULTS | (own.pop("compose", None) or _composed()[preset]) | chosen
    tree = copy.deepcopy(_read("base.yaml"))
    files = {name: _read(f"{name}.yaml") for name in (f"{part}/{parts[part]}" for part in PARTS)}
    files[preset] = {**own, "preset": preset, "family": parts["family"]}
    _apply(tree, files, parts)
    for key, value in settings:
        _assign(tree, key, value)
    config = _build(tree, problems)
    folder = config.run.dir or f"runs/{config.preset}-{config.family}-seed{config.seed}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=folder))


def _apply(
    tree: dict[str, Any], files: Mapping[str, Mapping[str, Any]], parts: Mapping[str, str]
) -> None:
    """Merges files, by name, then those of their `when` whose condition (`family=sol_rl` and the like) is what was chosen.

    Raises ConfigError for a condition that cannot be told.
    """
    for file in files.values():
        _merge(tree, {key: value for key, value in file.items() if key != "when"})
    for name, condition, extra in (
        (name, *when) for name, file in files.items() for when in file.get("when", {}).items()
    ):
        part, _, choice = condition.partition("=")
        if part not in PARTS or choice not in _choices(part):
            raise ConfigError(f"configs/{name}.yaml: unknown condition '{condition}' under 'when'")
        if part not in parts:
            raise ConfigError(
                f"configs/{name}.yaml: condition '{condition}' under 'when' is for a preset, not for a run"
            )
        if parts[part] == choice:
            _merge(tree, extra)


def text_override(key: str, text: str) -> str:
    """The override that gives a field this very text, whatever YAML would read in it."""
    quoted = yaml.safe_dump(text, default_style='"').strip()
    return f"{key}={quoted}"


def override(config: Config, overrides: Sequence[str]) -> Config:
    """A resolved configuration with fields changed by `key=value`. Raises ConfigError with all problems.

    Of the parts, `explore=` can still be chosen.
    """
    settings, chosen, problems = _parse_overrides(overrides)
    problems += [
        f"{p}={name}: can be chosen for a preset, not for a run"
        for p, name in chosen.items()
        if p != "explore"
    ]
    tree = yaml.safe_load(to_yaml(config))
    if recipe := chosen.get("explore"):
        parts = {"model": config.model.name, "family": config.family, "explore": recipe}
        _apply(tree, {f"explore/{recipe}": _read(f"explore/{recipe}.yaml")}, parts)
    for key, value in settings:
        _assign(tree, key, value)
    return _build(tree, problems)


def describe() -> list[dict[str, str]]:
    """One row a preset for a table: its parts, `<K>-in-<N>`, how it explores and what it trains on."""
    return [_described(resolve(name)) for name in preset_names()]


def _described(config: Config) -> dict[str, str]:
    rollout = config.rollout
    explore = config.rollout.explore
    return {
        "preset": config.preset,
        "model": config.model.name,
        "family": config.family,
        "reward": "+".join(config.reward.weights),
        "candidates": f"{rollout.kept}-in-{rollout.candidates}",
        "explore": f"{explore.precision}, {explore.num_steps} steps",
        "train on": f"{rollout.precision}, {rollout.num_steps} steps"
        if rollout.regenerate
        else "the explored samples",
    }


def to_yaml(config: Config) -> str:
    """The configuration as text that `from_yaml` reads back exactly."""
    # Plain ASCII (the default): PyYAML does not read back all the line breaks that it would write unescaped.
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=128)


def from_yaml(text: str) -> Config:
    """The configuration that `to_yaml` wrote, in this version or an older one. Raises ConfigError with all problems."""
    return _build(migrate(_parse(text, "configuration")), [])


def field_names(section: type = Config, prefix: str = "") -> list[str]:
    """Dotted names of all sections and fields."""
    keys = []
    for field in dataclasses.fields(section):
        keys.append(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            keys += field_names(field.type, f"{prefix}{field.name}.")
    return keys


@functools.cache
def _section_keys() -> frozenset[str]:
    return frozenset(key.rpartition(".")[0] for key in field_names()) - {""}


def _configs() -> Path:
    return Path(__file__).parents[1] / "configs"


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return _parse((_configs() / name).read_text(encoding="utf-8"), f"configs/{name}")


def _parse(text: str, what: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{what}: not YAML (line {line}: {error.problem})") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: a date that does not exist, an endless number
        raise ConfigError(f"{what}: not YAML ({' '.join(str(error).split())})") from None


def _choices(part: str) -> list[str]:
    return sorted(path.stem for path in (_configs() / part).glob("*.yaml"))


def _merge(tree: dict[str, Any], new: Mapping[Any, Any], prefix: str = "") -> None:
    """Writes `new` over `tree`: sections key by key, a field whole, also when its value is a list or a mapping."""
    for key, value in new.items():
        name = f"{prefix}{key}"
        if (
            name in _section_keys()
            and isinstance(value, Mapping)
            and isinstance(tree.get(key), dict)
        ):
            _merge(tree[key], value, f"{name}.")
        else:
            tree[key] = copy.deepcopy(value)


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = _path(key, value)
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(
            tree, dict
        ):  # an earlier override put something else in the section's place: `_build` says so
            return
    _merge(tree, {last: value}, "".join(f"{name}." for name in parents))


def _free(key: str) -> str | None:
    """The field, if any, that `key` is one of the free keys of."""
    return next((field for field in _FREE if key.startswith(f"{field}.")), None)


def _path(key: str, value: Any) -> list[str]:
    """`key` name by name. A free key is one name, dots and all; `reward.options.NAME.OPTION` sets one option of a reward."""
    field = _free(key)
    if field is None:
        return key.split(".")
    own = key.removeprefix(f"{field}.")
    reward, dot, option = own.rpartition(".")
    return [
        *field.split("."),
        *(
            (reward, option)
            if field == _OPTIONS and dot and not isinstance(value, dict)
            else (own,)
        ),
    ]


def _parse_overrides(
    overrides: Sequence[str],
) -> tuple[list[tuple[str, Any]], dict[str, str], list[str]]:
    """(fields to set, in order; files chosen for parts; problems)."""
    settings: list[tuple[str, Any]] = []
    chosen: dict[str, str] = {}
    problems: list[str] = []
    plugged = None  # the reward of a plug-in, if the last one that was named is one
    for text in overrides:
        key, equals, raw = (piece.strip() for piece in text.partition("="))
        if not (key and equals):
            problems.append(
                f"override {brief_repr(text)}: expected key=value, e.g. train.iterations=100"
            )
            continue
        try:
            value = _parse(raw, f"override {brief_repr(text)}") if raw else ""
        except ConfigError as error:
            problems.append(str(error))
            continue
        if isinstance(value, str) and raw[:1] not in _QUOTES:
            value = raw
        key, value = migrate_override(key, value)
        if key in PARTS and not isinstance(value, Mapping):
            if raw in _choices(key):
                chosen[key], plugged = raw, None if key == "reward" else plugged
            elif key == "reward" and (
                ":" in raw or raw in importlib.metadata.entry_points(group=ENTRY_POINTS).names
            ):
                plugged = raw
            else:
                problems.append(f"unknown {key} '{raw}': {_nearest(raw, _choices(key))}")
        elif key == "preset":
            problems.append(f"preset={brief_repr(value)}: is chosen by name, not by an override")
        elif key in field_names() or _free(key):
            settings.append((key, value))
        else:
            problems.append(_unknown_key(key))
    if plugged is not None:  # first: weights that are given win, as over a file of a reward
        settings.insert(0, ("reward.weights", {plugged: 1.0}))
    return settings, chosen, problems


def _build(tree: Any, problems: list[str]) -> Config:
    """The checked configuration of a tree. Raises ConfigError with `problems` and those of the tree."""
    found = list(problems)
    try:
        config = _ADAPTER.validate_python(tree)
    except pydantic.ValidationError as errors:
        found += [text for error in errors.errors() if (text := describe_error(error))]
    if found:
        raise ConfigError("; ".join(dict.fromkeys(found)))
    return config


_EXPECTED = {
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


def describe_error(
    error: Any, whole: str = "configuration", unknown: Callable[[str], str] | None = None
) -> str | None:
    """One of pydantic's errors in our words; None for a mere consequence of another.

    whole: what has no name of a field; unknown: what is said of an unknown key.
    """
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    field = ".".join(map(str, error["loc"])) or whole
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return (unknown or _unknown_key)(field)
    if kind == "missing":
        return f"missing key '{field}'"
    if kind == "too_short" and value:  # items that are wrong are counted as absent
        return None
    if kind == "value_error" and isinstance(context["error"], ConfigError):
        return str(context["error"])
    if kind == "value_error":
        return f"{field}={brief_repr(value)}: {context['error']}"
    if kind == "literal_error":
        near = difflib.get_close_matches(
            str(value)[:80], re.findall("'(.*?)'", context["expected"]), n=1
        )
        return f"{field}={brief_repr(value)}: expected {context['expected']}" + (
            f", did you mean '{near[0]}'?" if near else ""
        )
    return f"{field}={brief_repr(value)}: {_EXPECTED[kind].format(**context) if kind in _EXPECTED else error['msg']}"


def _unknown_key(key: str) -> str:
    section = key.rpartition(".")[0]
    section = section if section in _section_keys() else ""
    return f"unknown key '{key}': {_nearest(key, field_names(), [k for k in field_names() if k.rpartition('.')[0] == section])}"


def _nearest(name: str, accepted: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """Proposes the accepted name nearest to `name`; when none is near, lists `listed`, or all that are accepted."""
    if near := difflib.get_close_matches(name[:80], accepted, n=1):  # longer ones take minutes
        return f"did you mean '{near[0]}'?"
    return f"expected one of {', '.join(accepted if listed is None else listed)}"
