"""The YAML files in `solrl_jax/configs/`, which presets are combined from.

Each part of a preset has a folder with one file per choice, e.g. `configs/model/sana.yaml`. The
files directly in `configs/` are presets with settings of their own.
"""

import functools
from pathlib import Path
from typing import Any

from solrl_jax.config.serialization import parse_config_text

CONFIGS = Path(__file__).parents[1] / "configs"
PARTS = (
    "model",
    "family",
    "explore",
    "objective",
    "reward",
)  # in the order in which they are merged


def part_files(part: str) -> list[str]:
    """Returns the names of the files that a part of a preset can be chosen from, sorted.

    They are the YAML files in the part's folder of `solrl_jax/configs/`, e.g. "sana" for
    `model/sana.yaml`.

    Args:
        part: "model", "family", "explore", "objective" or "reward". A part without a folder gives
            an empty list.
    """
    return sorted(path.stem for path in (CONFIGS / part).glob("*.yaml"))


def preset_files() -> list[str]:
    """Returns the names of the presets that have a YAML file directly in `solrl_jax/configs/`,
    sorted.

    All other presets are combinations of a model, a family and a reward.
    """
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@functools.cache
def read_file(name: str) -> dict[str, Any]:
    """Returns the content of a configuration file of the package. The result is cached; do not
    change it.

    Args:
        name: The path of the file in `solrl_jax/configs/` without its ending, e.g. "model/sana".

    Returns:
        Nested dicts and lists, as the file has them; no field is checked. {} for an empty file.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigError: If it is not YAML.
    """
    path = CONFIGS / f"{name}.yaml"
    return parse_config_text(path.read_text(encoding="utf-8"), f"configs/{name}.yaml") or {}
