"""Files from the Hugging Face hub or its local cache; an error is one line.

The package contains the configurations of the released models that presets name, for plans. They hold no weights and no
vocabularies, and no model is loaded from them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from solrl_jax.errors import InputError

CARRIED = Path(__file__).parents[1] / "assets" / "released"


def is_name(path: str) -> bool:
    """Whether `path`, which is not a directory, has the form OWNER/NAME of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return "/" in path


def snapshot(name: str, patterns: Callable[[], Sequence[str]], what: str, remedy: str = "") -> Path:
    """The directory with the files of the repository `name`: downloaded, or from the cache if HF_HUB_OFFLINE is set.

    patterns: returns the names of the files, and may ask the hub. Raises InputError that begins with `what` and ends with
    `remedy`.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns())))
    except Exception as error:  # the hub client raises a dozen unrelated types
        state = " (HF_HUB_OFFLINE is set)" if offline() else ""
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{what} cannot be had from the hub{state}: {reason}{remedy}") from error


def cached(name: str, file: str = "model_index.json") -> Path | None:
    """The directory of the repository `name` in the local cache, or None if `file` is not there. The hub is not asked."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found).parent if isinstance(found, str) else None


def offline() -> bool:
    """Whether the hub is not to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    )  # as the hub's client reads it


def is_carried(path: Path) -> bool:
    """Whether `path` is in the folder of configurations without weights."""
    return path.is_relative_to(CARRIED)
