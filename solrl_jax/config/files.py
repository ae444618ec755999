"""The YAML files in `solrl_jax/configs/`, which presets are combined from.

Each part of a preset has a folder with one file per choice, e.g. `configs/model/sana.yaml`. The
files directly in `configs/` are presets with settings of their own.
"""

import functools
from pathlib import Path
from typing import Any

from solrl_jax.config.serialization import parse

CONFIGS = Path(__file__).parents[1] / "configs"
PARTS = (
    "model",
    "family",
    "explore",
    "objective",
    "reward",
)  # in the order in which they are merged


def part_files(part: str) -> list[str]:
    """The choices for a part, sorted: the files in its folder, without their ending.

    Args:
        part: "model", "family", "explore", "objective" or "reward" (`PARTS`). For another name
            without a folder the list is empty.
    """
    return sorted(path.stem for path in (CONFIGS / part).glob("*.yaml"))


def preset_files() -> list[str]:
    """The names of the presets that have a file of their own, sorted, without the ending."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@functools.cache
def read_file(name: str) -> dict[str, Any]:
    """The content of a configuration file. It is cached, so callers must not change it.

    Args:
        name: The path of the file in `configs/` without ending, e.g. "model/sana".

    Returns:
        Nested dicts and lists as YAML gives them; {} for an empty file.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigError: If it is not YAML.
    """
    path = CONFIGS / f"{name}.yaml"
    return parse(path.read_text(encoding="utf-8"), f"configs/{name}.yaml") or {}
