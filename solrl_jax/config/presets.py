"""Presets: names for configurations that the files in `solrl_jax/configs/` describe.

A preset combines one file for each part, later ones winning over earlier ones, and all of them over
the defaults of `config.schema`:

    model <- family <- explore <- objective <- reward <- the preset's own file <- overrides

`<model>_<family>_<reward>` names the combination of these three with the paper's exploration and
the objective `nft`, for each released model; 48 of these presets are the paper's. A preset with a
file of its own, such as `tiny`, names its parts under `compose`. Any file may also have settings
that apply to one choice of a part, under `when`, e.g. `family=sol_rl: {rollout: ...}`. They follow
the other settings of all files. Under `compose`, `when` names other parts for one choice of a part,
e.g. `model=tiny-wan: {reward: motion}`.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from solrl_jax.config.files import PARTS, part_files, preset_files, read_file
from solrl_jax.config.overrides import assign, merge, parse_overrides
from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import to_tree
from solrl_jax.config.validation import build_config, suggest
from solrl_jax.config.values import ConfigError, brief_repr

DEFAULT_PARTS = {"explore": "paper", "objective": "nft"}  # for presets that do not name these parts
FAMILIES = ("diffusionnft", "naive_scaling", "naive_quant", "sol_rl")
REWARDS = ("pickscore", "clipscore", "hpsv2", "imagereward")  # the paper's


def preset_names() -> list[str]:
    """Returns the names of all presets.

    First those that have a YAML file of their own, e.g. "tiny", sorted; then all combinations
    MODEL_FAMILY_REWARD of the released models, e.g. "sana_sol_rl_pickscore", ordered by model
    (`released_models`), then by family (`FAMILIES`), then by reward (`REWARDS`).
    """
    return [*preset_files(), *_combined_presets()]


def released_models() -> list[str]:
    """Returns the names of the released models that presets can train, e.g. "sana", sorted.

    They are the files of `solrl_jax/configs/model/` but those of the tiny models inside this
    package, whose names begin with "tiny-".
    """
    return [name for name in part_files("model") if not name.startswith("tiny-")]


@functools.cache
def _combined_presets() -> dict[str, dict[str, str]]:
    """Returns the presets that combine a model, a family and a reward. The result is cached.

    Returns:
        For each preset, by its name such as "sana_sol_rl_pickscore", the names of its files by
        part: {"model": "sana", "family": "sol_rl", "reward": "pickscore"}. The other parts are
        those of `DEFAULT_PARTS`.
    """
    combinations = itertools.product(released_models(), FAMILIES, REWARDS)
    return {
        f"{model}_{family}_{reward}": {"model": model, "family": family, "reward": reward}
        for model, family, reward in combinations
    }


def resolve(preset: str, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a preset with overrides.

    A preset combines files of `solrl_jax/configs/`: one each for the model, the family, the
    exploration, the objective and the reward, and then its own file if it has one; later ones win.
    Field names of version 2 of the configuration, the previous one, are accepted, with a
    FutureWarning. Nothing is imported or loaded.

    Args:
        preset: The name of the preset, e.g. "tiny" or "sana_sol_rl_pickscore".
        overrides: Texts `key=value` that change it; later ones win. A key is the dotted name of a
            field, with a value in YAML ("rollout.kept=12"). Or it is "model", "family", "explore",
            "objective" or "reward", and chooses another file ("model=flux1") or, for the last two,
            e.g. a user's function (`parse_overrides`). Fields win over files.

    Returns:
        The checked configuration. If `run.dir` is "", the default, it becomes
        "runs/PRESET-FAMILY-seedSEED", with the family and the seed after all overrides.

    Raises:
        ConfigError: If the preset is unknown, an argument is not text, or an override or the
            resulting configuration is invalid. The message names all problems of the latter two.
    """
    _check_texts(preset, *overrides)
    if preset not in preset_names():
        raise ConfigError(f"unknown preset {brief_repr(preset)}: {suggest(preset, preset_names())}")
    parsed = parse_overrides(overrides)
    if preset in preset_files():
        preset_settings = copy.deepcopy(read_file(preset))
        composed = preset_settings.pop("compose")
    else:
        preset_settings = {}
        composed = dict(_combined_presets()[preset])
    conditional = composed.pop("when", {})
    parts = {**DEFAULT_PARTS, **composed, **parsed.choices}
    for condition, other_parts in conditional.items():
        if _holds(condition, parts, preset):
            parts |= {**other_parts, **parsed.choices}  # what the user has chosen stays
    files = {f"{part}/{parts[part]}": read_file(f"{part}/{parts[part]}") for part in PARTS}
    files[preset] = {**preset_settings, "preset": preset, "family": parts["family"]}
    tree = to_tree(Config())
    _apply_files(tree, files, parts)
    for key, value in parsed.settings:
        assign(tree, key, value)
    config = build_config(tree, parsed.problems)
    if config.run.dir:
        return config
    folder = f"runs/{config.preset}-{config.family}-seed{config.seed}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=folder))


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a copy of a configuration, for example that of a run, with some fields changed.

    Args:
        config: The configuration. It is not changed.
        overrides: Texts `key=value`; later ones win. A key is the dotted name of a field, with a
            value in YAML ("rollout.kept=12"). "explore=NAME" sets the fields of a file in
            `solrl_jax/configs/explore/`; explicit fields win over it. "explore=NAME" also sets
            `model.quantization` to the rules that a preset of the model has with this file, unless
            the user has changed the present rules, i.e. they are not those of any file in this
            folder. No other file can be chosen: "objective=nft", for instance, is an error (set the
            field `algorithm.objective`). With "objective" and "reward", only a function, service or
            entry point outside of the package can be chosen (`parse_overrides`). Field names of
            version 2 of the configuration, the previous one, are accepted, with a FutureWarning.

    Returns:
        The new configuration, checked.

    Raises:
        ConfigError: If an override is not text, or an override or the resulting configuration is
            invalid. The message names all problems of the latter two.
    """
    _check_texts(*overrides)
    parsed = parse_overrides(overrides)
    problems = list(parsed.problems)
    for part, name in parsed.choices.items():
        if part != "explore":
            problems.append(f"{part}={name}: can be chosen for a preset, not for a run")
    tree = to_tree(config)
    if option_set := parsed.choices.get("explore"):
        parts = {"model": config.model.name, "family": config.family, "explore": option_set}
        _apply_files(tree, {f"explore/{option_set}": read_file(f"explore/{option_set}")}, parts)
        _apply_quantization_rules(tree, config.model.name, option_set)
    for key, value in parsed.settings:
        assign(tree, key, value)
    return build_config(tree, problems)


def _check_texts(*arguments: object) -> None:
    """Checks that values are text.

    Args:
        *arguments: The name of a preset and overrides, as the user passed them.

    Raises:
        ConfigError: If one of them is not text.
    """
    for argument in arguments:
        if not isinstance(argument, str):
            raise ConfigError(
                f"{brief_repr(argument)}: expected text, a preset's name and overrides 'key=value'"
            )


def preset_rows() -> list[dict[str, str]]:
    """Returns the table of all presets, one row per preset in the order of `preset_names`.

    Returns:
        Dicts of text by the name of the column: "preset", "model", "family" (the method, e.g.
        "sol_rl"), "reward" (several names joined by "+"), "candidates" ("24-in-96": 24 of 96 are
        kept), "explore" (e.g. "nvfp4, 6 steps") and "train on" (e.g. "bf16, 10 steps": how samples
        are regenerated; "the explored samples" if they are not).
    """
    return [_preset_row(resolve(name)) for name in preset_names()]


def _preset_row(config: Config) -> dict[str, str]:
    """Returns the row of a preset in the table of all presets.

    Args:
        config: The configuration of the preset.

    Returns:
        Text by the name of the column: "preset", "model", "family" (the method, e.g. "sol_rl"),
        "reward" (several names joined by "+"), "candidates" ("24-in-96": 24 of 96 are kept),
        "explore" (e.g. "nvfp4, 6 steps") and "train on" (e.g. "bf16, 10 steps": how samples are
        regenerated; "the explored samples" if they are not).
    """
    rollout = config.rollout
    explore = rollout.explore
    regenerated = f"{rollout.precision}, {rollout.num_steps} steps"
    return {
        "preset": config.preset,
        "model": config.model.name,
        "family": config.family,
        "reward": "+".join(config.reward.weights),
        "candidates": f"{rollout.kept}-in-{rollout.candidates}",
        "explore": f"{explore.precision}, {explore.num_steps} steps",
        "train on": regenerated if rollout.regenerate else "the explored samples",
    }


def _apply_files(
    tree: dict[str, Any], files: Mapping[str, Mapping[str, Any]], parts: Mapping[str, str]
) -> None:
    """Copies the settings of the files that make up a preset into a configuration, in place.

    A field is replaced as a whole, also if it is a list or a dict such as `reward.weights`. Other
    fields of a section stay. Nothing but the conditions is checked.

    Conditional settings of a file, such as `family=sol_rl: {rollout: ...}` under `when`, only apply
    if the named file was chosen for the named part. They are copied after the other settings of all
    files, in the order of the files. The key `when` itself is not copied.

    Args:
        tree: The configuration as nested dicts. It is changed.
        files: The content of each file by its name, e.g. "model/sana". Later files win.
        parts: The names of the chosen files by part, e.g. {"model": "sana", "family": "sol_rl"},
            with which conditions are compared.

    Raises:
        ConfigError: If a condition names a file that is not in `solrl_jax/configs/`, or a part that
            is not in `parts`.
    """
    for content in files.values():
        merge(tree, {key: value for key, value in content.items() if key != "when"})
    for name, content in files.items():
        for condition, settings in content.get("when", {}).items():
            if _holds(condition, parts, name):
                merge(tree, settings)


def _holds(condition: str, parts: Mapping[str, str], name: str) -> bool:
    """Returns whether a condition under `when` holds.

    Args:
        condition: The condition, PART=FILE, e.g. "model=tiny-wan".
        parts: The names of the chosen files by part.
        name: The name of the file that has the condition, e.g. "model/sana", for messages.

    Raises:
        ConfigError: If the condition names a file that is not in `solrl_jax/configs/`, or a part
            that is not in `parts`.
    """
    part, _, choice = condition.partition("=")
    where = f"configs/{name}.yaml: "
    if part not in PARTS or choice not in part_files(part):
        raise ConfigError(f"{where}unknown condition '{condition}' under 'when'")
    if part not in parts:
        raise ConfigError(
            f"{where}condition '{condition}' under 'when' is for a preset, not for a run"
        )
    return parts[part] == choice


def _apply_quantization_rules(tree: dict[str, Any], model: str, option_set: str) -> None:
    """Updates the section `model.quantization` of a configuration for a set of exploration options,
    in place.

    The section of a preset depends on its model and its exploration options
    (`_quantization_rules`). A section that no option set gives this model was changed by the user,
    and is kept.

    Args:
        tree: The configuration as nested dicts. It is changed.
        model: The name of the model, a file in `solrl_jax/configs/model/`. For any other name
            nothing is changed.
        option_set: The name of the set, a file in `solrl_jax/configs/explore/`.
    """
    if model not in part_files("model"):
        return
    rules = {name: _quantization_rules(model, name) for name in part_files("explore")}
    if tree["model"]["quantization"] in rules.values():
        tree["model"]["quantization"] = rules[option_set]


def _quantization_rules(model: str, option_set: str) -> dict[str, Any]:
    """Returns the section `model.quantization` that a preset of a model has with a set of
    exploration options.

    Args:
        model: The name of a file in `solrl_jax/configs/model/`.
        option_set: The name of the set, a file in `solrl_jax/configs/explore/`.

    Returns:
        The section as a new dict, with the defaults of fields that the model's file does not set.
    """
    content = read_file(f"model/{model}")
    tree = to_tree(Config())
    merge(tree, {"model": content.get("model", {})})
    merge(tree, content.get("when", {}).get(f"explore={option_set}", {}))
    return tree["model"]["quantization"]
