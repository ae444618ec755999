"""Reads configurations that older versions wrote.

A run directory keeps its resolved configuration. Version 1 is that of solrl_jax 0.1.0, which wrote no version.
"""

from typing import Any

VERSION = 2


def migrate(tree: Any) -> Any:
    """The tree of a configuration in the current layout; what is no mapping, or of an unknown version, stays as it is."""
    if isinstance(tree, dict) and "version" not in tree:
        return _from_version_1(tree)
    return tree


def _from_version_1(tree: dict[str, Any]) -> dict[str, Any]:
    """Drops what version 2 has no more: another decoder for candidates, audits, and two variants of NVFP4."""
    tree = {"version": VERSION, **tree}
    explore = tree.get("rollout", {}).get("explore", {}) if isinstance(tree.get("rollout"), dict) else {}
    if isinstance(explore, dict):
        for field in ("vae", "audit_every"):
            explore.pop(field, None)
        if explore.get("precision") in ("nvfp4_w", "nvfp4_46"):
            explore["precision"] = "nvfp4"
    return tree
