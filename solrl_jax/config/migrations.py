"""Field names of earlier configuration layouts, and how they map to the present ones.

A run directory keeps its resolved configuration in `config.yaml`, whose `version` field says which
layout it is written in. Version 2 used other names for some fields. Files of version 2, and
overrides that use its names, are translated for one version.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final

VERSION: Final = 3

# Sections and fields of version 2 by their dotted names, and the present names. A renamed section
# renames all its fields.
RENAMED = {
    "policy": "algorithm",
    "policy.kl_weight": "algorithm.kl_coef",
    "policy.ratio_clip": "algorithm.clip_range",
    "policy.advantage_clip": "algorithm.adv_clip_max",
    "policy.advantage_mode": "algorithm.adv_mode",
    "model.max_tokens": "model.max_sequence_length",
    "model.cache": "model.prompt_cache_dir",
    "model.tile": "model.vae_tile_size",
    "model.remat": "model.gradient_checkpointing",
    "model.quantize": "model.quantization",
    "model.quantize.skip": "model.quantization.modules_to_not_convert",
    "model.quantize.min_dim": "model.quantization.min_width_ratio",
    "rollout.steps": "rollout.num_steps",
    "rollout.eta": "rollout.noise_level",
    "rollout.window": "rollout.sde_window_size",
    "rollout.window_every": "rollout.sde_window_every",
    "rollout.guidance": "rollout.guidance_scale",
    "rollout.true_guidance": "rollout.true_cfg_scale",
    "rollout.chunk": "rollout.per_device_batch_size",
    "rollout.scoring": "rollout.scoring_precision",
    "rollout.explore.steps": "rollout.explore.num_steps",
    "rollout.explore.correction": "rollout.explore.correction_rank",
    "rollout.explore.floor": "rollout.explore.min_rank_correlation",
    "reward.watched": "reward.eval_only",
    "lora.targets": "lora.target_modules",
    "lora.init": "lora.path",
    "optimizer.micro_batch": "optimizer.per_device_batch_size",
    "train.prompts": "train.num_prompts",
    "eval.prompts": "eval.num_prompts",
    "eval.steps": "eval.num_steps",
    "eval.images_per_prompt": "eval.num_images_per_prompt",
    "eval.grid": "eval.num_grid_images",
}

# Values of version 2 that have another name, by the dotted name that version 2 gave to the field.
RENAMED_VALUES = {
    "model.attention": {"own": "default"},
    "model.remat": {"products": "matmuls"},
    "rollout.explore.attention": {"own": "default"},
    "rollout.explore.sigmas": {"own": "default"},
}


def current_name(key: str) -> str:
    """Returns the present name of a field or section that an earlier version named differently.

    Args:
        key: A dotted name of version 2 of the configuration, e.g. "policy.kl_weight".

    Returns:
        The present name, here "algorithm.kl_coef". A renamed section renames all names in it, also
        unknown ones. A name that did not change is returned as it is.
    """
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if new := RENAMED.get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return key


def current_value(key: str, value: Any) -> Any:
    """Translates a value from version 2 of the configuration.

    Args:
        key: The dotted name, in version 2, of the field or section that has the value; "" for a
            whole configuration.
        value: The value. For a section it is a dict, whose keys and values are all translated.

    Returns:
        The value with the current names in it; for a section, a new dict. For example, the value
        "products" of "model.remat" becomes "matmuls". No field moves to another section, and
        unknown names stay. Values that did not change are returned as they are, also that of
        `version`.
    """
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        translated = {}
        for name, inner in value.items():
            # A key without an entry keeps its name: those of free fields may contain dots.
            renamed = RENAMED.get(f"{prefix}{name}")
            new_name = name if renamed is None else renamed.rpartition(".")[2]
            translated[new_name] = current_value(f"{prefix}{name}", inner)
        return translated
    if isinstance(value, str):
        return RENAMED_VALUES.get(key, {}).get(value, value)
    return value


def migrate_override(key: str, value: Any) -> tuple[str, Any]:
    """Translates an override `key=value` that uses names of version 2 of the configuration, with a
    FutureWarning.

    Args:
        key: The dotted name of a field or section, present or of version 2. It is not checked.
        value: Its value.

    Returns:
        (name, value), as they are called now. Both are returned as they are, without a warning, if
        nothing in them has another name now.
    """
    new_key = current_name(key)
    new_value = current_value(key, value)
    if new_key != key:
        warnings.warn(
            f"{key} is now called {new_key}; the old name will be refused",
            FutureWarning,
            stacklevel=2,
        )
    elif repr(new_value) != repr(value):  # NaN differs from itself
        warnings.warn(
            f"{key}={value} is now written {new_value}; the old form will be refused",
            FutureWarning,
            stacklevel=2,
        )
    return new_key, new_value


def migrate(tree: Any) -> Any:
    """Translates the content of a configuration file from version 2, without a warning.

    Args:
        tree: The content as YAML gives it, a nested dict.

    Returns:
        If `tree` has `version: 2`: a new dict with the present names, values (e.g. "products"
        becomes "matmuls") and version; unknown names stay. Otherwise `tree` as it is.
    """
    if not isinstance(tree, dict) or tree.get("version") != 2:
        return tree
    return {**current_value("", tree), "version": VERSION}
