"""Files from the Hugging Face hub or its local cache. Errors are InputErrors of one line.

The package contains the configurations of the released models that presets name (`CARRIED`), which
`solrl plan` needs. They come without weights and vocabularies, and no model is loaded from them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from solrl_jax.errors import InputError

# The directory of the configurations in the package.
CARRIED = Path(__file__).parents[1] / "assets" / "released"


def is_name(path: str) -> bool:
    """Whether a text has the form OWNER/NAME of a repository on the hub.

    Args:
        path: The text. A relative path can have this form too, so check for a directory first.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return "/" in path


def snapshot(name: str, patterns: Callable[[], Sequence[str]], what: str, remedy: str = "") -> Path:
    """Downloads files of a repository, or finds them in the cache if HF_HUB_OFFLINE is set.

    Args:
        name: The repository, OWNER/NAME.
        patterns: Returns the names of the files, or patterns such as "*.json". It may ask the hub,
            and its errors are reported like those of the download.
        what: The subject of the error message, e.g. the configuration field and its value.
        remedy: The end of the error message.

    Returns:
        The local directory with the files.

    Raises:
        InputError: If a file is not available.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns())))
    except Exception as error:  # the client raises a dozen unrelated types
        state = " (HF_HUB_OFFLINE is set)" if offline() else ""
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{what} cannot be had from the hub{state}: {reason}{remedy}") from error


def cached(name: str, file: str = "model_index.json") -> Path | None:
    """Finds a repository in the local cache, without asking the hub.

    Args:
        name: The repository, OWNER/NAME.
        file: A file that must be there.

    Returns:
        The local directory of the repository's files, or None if `file` is not in the cache.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file)
    return Path(path).parent if isinstance(path, str) else None


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub, read as the hub's client reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_carried(path: Path) -> bool:
    """Whether `path` is in the package's directory of configurations, which have no weights."""
    return path.is_relative_to(CARRIED)
