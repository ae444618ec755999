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
      part: a name of `PARTS`, e.g. "model".
    """
    return sorted(path.stem for path in (CONFIGS / part).glob("*.yaml"))


def preset_files() -> list[str]:
    """The presets that have a file of their own, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@functools.cache
def read_file(name: str) -> dict[str, Any]:
    """The content of a file, which callers must not change.

    Args:
      name: its path in `configs/` without ending, e.g. "model/sana".
    """
    path = CONFIGS / f"{name}.yaml"
    return parse(path.read_text(encoding="utf-8"), f"configs/{name}.yaml") or {}
