"""Reads configurations that older versions wrote.

A run directory keeps its resolved configuration. Version 1 is that of solrl_jax 0.1.0, which wrote no version.
"""

from typing import Any

VERSION = 2
# settings that version 1 had not, with the values that it ran with
ADDED: dict[str, dict[str, Any]] = {
    "rollout": {"size": None, "window": None, "window_every": 25, "scoring": "auto"},
    "policy": {"objective": "nft", "ratio_clip": 1e-4},
    "model": {"attention": "own", "mhla_blocks": 16, "mhla_released": False, "mhla_norm": False},
    "train": {"parameters": "adapters"},
    "eval": {"size": None},
}


def migrate(tree: Any) -> Any:
    """The tree of a configuration in the current layout; what is no mapping, or of an unknown version, stays as it is.

    Version 2 has no other decoder for candidates, no audits, and one NVFP4; and it has other objectives.
    """
    if not isinstance(tree, dict) or "version" in tree:
        return tree
    tree = {"version": VERSION, **tree}
    for section, added in ADDED.items():
        if isinstance(tree.get(section), dict):
            tree[section] = {**added, **tree[section]}
    explore = (
        tree.get("rollout", {}).get("explore", {}) if isinstance(tree.get("rollout"), dict) else {}
    )
    if isinstance(explore, dict):
        for field in ("vae", "audit_every"):
            explore.pop(field, None)
        explore.setdefault("attention", "own")
        if explore.get("precision") in ("nvfp4_w", "nvfp4_46"):
            explore["precision"] = "nvfp4"
    return tree
