"""Presets: names for configurations that the files in `solrl_jax/configs/` describe.

A preset combines one file for each part, later ones winning over earlier ones, and all of them over
the defaults of `config.schema`:

    model <- family <- explore <- objective <- reward <- the preset's own file <- overrides

`<model>_<family>_<reward>` names the combination of these three with the paper's exploration and
the objective `nft`, for each released model; 48 of these presets are the paper's. A preset with a
file of its own, such as `tiny`, names its parts under `compose`. Any file may also have settings
that apply to one choice of a part, under `when`, e.g. `family=sol_rl: {rollout: ...}`. They follow
the other settings of all files.
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
    """Names of all presets: those with a file of their own, sorted, then the combinations.

    The combinations are ordered by model (sorted), then by family and reward in the order of
    `FAMILIES` and `REWARDS`.
    """
    return [*preset_files(), *_combined_presets()]


def released_models() -> list[str]:
    """Names of the models in `configs/model/` that are not shipped with the package, sorted.

    These are all files but those whose name begins with "tiny-".
    """
    return [name for name in part_files("model") if not name.startswith("tiny-")]


@functools.cache
def _combined_presets() -> dict[str, dict[str, str]]:
    """The parts of each preset that has no file of its own, by its name. Cached.

    Returns:
        By the name `<model>_<family>_<reward>`, for each released model, family of `FAMILIES` and
        reward of `REWARDS`: the three parts, e.g. {"model": "sana", "family": "sol_rl", "reward":
        "pickscore"}.
    """
    combinations = itertools.product(released_models(), FAMILIES, REWARDS)
    return {
        f"{model}_{family}_{reward}": {"model": model, "family": family, "reward": reward}
        for model, family, reward in combinations
    }


def resolve(preset: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a preset.

    Files apply in the order model, family, explore, objective, reward, the preset's own; then the
    conditional settings (`when`) of all files in the same order; then the overrides. Later ones
    win. Warns with a FutureWarning for names that the previous version of the configuration used.

    Args:
        preset: The name of a preset, e.g. "tiny" or "sana_sol_rl_pickscore" (one of
            `preset_names()`).
        overrides: Texts `key=value`: fields by their dotted names with values in YAML
            ("rollout.kept=12"), or a choice of one of the files that make up the preset ("model=",
            "family=", "explore=", "objective=" or "reward=NAME"). Later ones win, but a chosen file
            never wins over a field, in whatever order they come.

    Returns:
        The checked configuration. `preset` and `family` record the choices. If `run.dir` would be
        empty, it is "runs/<preset>-<family>-seed<seed>".

    Raises:
        ConfigError: If an argument is no text or the preset is unknown (reported alone); else with
            all problems of the overrides and of the resulting configuration.
    """
    _check_texts(preset, *overrides)
    if preset not in preset_names():
        raise ConfigError(f"unknown preset {brief_repr(preset)}: {suggest(preset, preset_names())}")
    parsed = parse_overrides(overrides)
    if preset in preset_files():
        own = copy.deepcopy(read_file(preset))
        composed = own.pop("compose")
    else:
        own = {}
        composed = _combined_presets()[preset]
    parts = {**DEFAULT_PARTS, **composed, **parsed.choices}
    files = {f"{part}/{parts[part]}": read_file(f"{part}/{parts[part]}") for part in PARTS}
    files[preset] = {**own, "preset": preset, "family": parts["family"]}
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
    """A configuration, for instance that of a run, with some fields changed.

    Warns with a FutureWarning for names that the previous version of the configuration used.

    Args:
        config: The configuration, which stays as it is.
        overrides: Texts `key=value`: fields by their dotted names with values in YAML; later ones
            win. Of the files that make up a preset only `explore=NAME` can be chosen; explicit
            fields win over its settings. (A reward or an objective that is no file counts as a
            field.) `explore=NAME` also replaces `model.quantization` by the rules of the model's
            file for this recipe, if `config` has those of this file for some recipe; other rules
            are the user's and stay.

    Returns:
        The new configuration. `preset`, `family` and `run.dir` are not derived anew.

    Raises:
        ConfigError: If an override is no text (reported alone); with all problems of the overrides
            and of the resulting configuration; or if the file of the recipe has settings under
            `when` for a choice that a configuration does not record (`objective=` or `reward=`).
    """
    _check_texts(*overrides)
    parsed = parse_overrides(overrides)
    problems = list(parsed.problems)
    for part, name in parsed.choices.items():
        if part != "explore":
            problems.append(f"{part}={name}: can be chosen for a preset, not for a run")
    tree = to_tree(config)
    if recipe := parsed.choices.get("explore"):
        parts = {"model": config.model.name, "family": config.family, "explore": recipe}
        _apply_files(tree, {f"explore/{recipe}": read_file(f"explore/{recipe}")}, parts)
        _apply_quantization_rules(tree, config.model.name, recipe)
    for key, value in parsed.settings:
        assign(tree, key, value)
    return build_config(tree, problems)


def _check_texts(*arguments: object) -> None:
    """Checks that the name of a preset and overrides are text.

    Args:
        *arguments: The name, if there is one, and the overrides.

    Raises:
        ConfigError: If one is no text. The message has the first such argument.
    """
    for argument in arguments:
        if not isinstance(argument, str):
            raise ConfigError(
                f"{brief_repr(argument)}: expected text, a preset's name and overrides 'key=value'"
            )


def preset_rows() -> list[dict[str, str]]:
    """One row per preset, for a table, in the order of `preset_names`.

    Returns:
        Text by column: "preset", "model", "family"; "reward", with several names joined by "+";
        "candidates", e.g. "24-in-96" for 24 kept of 96; "explore", e.g. "nvfp4, 6 steps"; "train
        on", e.g. "bf16, 10 steps", or "the explored samples" if they are not regenerated.
    """
    return [_preset_row(resolve(name)) for name in preset_names()]


def _preset_row(config: Config) -> dict[str, str]:
    """Returns the row of a preset in the table of `solrl presets`.

    Args:
        config: The complete configuration of the preset, as `resolve` returns it.

    Returns:
        Text by column: "preset", "model", "family"; "reward", with several names joined by "+";
        "candidates", e.g. "24-in-96"; "explore", e.g. "nvfp4, 6 steps"; "train on", e.g. "bf16, 10
        steps", or "the explored samples" if they are not regenerated.
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
    """Merges the settings of files into a tree, then those that they have under `when`.

    Args:
        tree: The configuration as nested dicts, changed in place.
        files: The content of each file by its name in `configs/` without ending, e.g. "model/sana",
            in the order in which they are merged; later ones win. The settings under `when` of all
            files follow in this order, and win over all others.
        parts: The chosen file of each part, e.g. {"model": "sana", "family": "sol_rl", "explore":
            "paper"}. The settings under `when: family=sol_rl` count if "family" is "sol_rl" here.

    Raises:
        ConfigError: If what stands under `when` is no "PART=FILE" of an existing file, or its part
            is not in `parts`. The tree is then partly changed.
    """
    for content in files.values():
        merge(tree, {key: value for key, value in content.items() if key != "when"})
    for name, content in files.items():
        for condition, settings in content.get("when", {}).items():
            part, _, choice = condition.partition("=")
            where = f"configs/{name}.yaml: "
            if part not in PARTS or choice not in part_files(part):
                raise ConfigError(f"{where}unknown condition '{condition}' under 'when'")
            if part not in parts:
                raise ConfigError(
                    f"{where}condition '{condition}' under 'when' is for a preset, not for a run"
                )
            if parts[part] == choice:
                merge(tree, settings)


def _apply_quantization_rules(tree: dict[str, Any], model: str, recipe: str) -> None:
    """Writes the quantization rules of a model for an exploration recipe into a tree, in place.

    The section `model.quantization` is replaced only if it equals what the model's file has for
    some recipe. Otherwise it is the user's own and stays.

    Args:
        tree: The whole configuration as nested dicts, changed in place.
        model: The name of a file in `configs/model/`. Other names change nothing.
        recipe: The name of a file in `configs/explore/`.
    """
    if model not in part_files("model"):
        return
    rules = {name: _quantization_rules(model, name) for name in part_files("explore")}
    if tree["model"]["quantization"] in rules.values():
        tree["model"]["quantization"] = rules[recipe]


def _quantization_rules(model: str, recipe: str) -> dict[str, Any]:
    """Returns the section `model.quantization` of a model with an exploration recipe.

    Args:
        model: The name of a file in `configs/model/`.
        recipe: The name of a file in `configs/explore/`.

    Returns:
        The section as a new dict: the defaults, changed by the model's file, changed by its
        settings under `when: explore=<recipe>` if it has any.
    """
    content = read_file(f"model/{model}")
    tree = to_tree(Config())
    merge(tree, {"model": content.get("model", {})})
    merge(tree, content.get("when", {}).get(f"explore={recipe}", {}))
    return tree["model"]["quantization"]
