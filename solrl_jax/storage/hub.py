"""Files from the Hugging Face hub or its local cache. Errors are InputErrors of one line.

The package contains the configurations of the released models that presets name (`CARRIED`), which
`solrl plan` needs. They come without weights and vocabularies, and no model is loaded from them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from solrl_jax.errors import InputError, RunError, first_line

# The directory of the configurations in the package.
CARRIED = Path(__file__).parents[1] / "assets" / "released"


def is_name(path: str) -> bool:
    """Whether a text has the form OWNER/NAME of a repository on the hub. The hub is not asked.

    Args:
        path: The text. A relative path can have this form too, so check for a directory first.

    Returns:
        True if the hub's client accepts the text as the name of a repository and it has a slash.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return "/" in path


def snapshot(
    name: str,
    patterns: Callable[[], Sequence[str]],
    what: str,
    remedy: str = "",
    *,
    repo_type: Literal["model", "dataset"] = "model",
) -> Path:
    """Downloads files of a repository to the hub's cache, unless they are there already.

    The hub is asked for the newest revision on each call. If it cannot be reached, or if
    HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE was set when its client was imported, the newest revision
    in the cache is used.

    Args:
        name: The repository, OWNER/NAME.
        patterns: Returns the names of the files, as paths in the repository, or patterns such as
            "*.json". It may ask the hub, and an error that it raises becomes the InputError below.
        what: The subject of the error message, e.g. the configuration field and its value.
        remedy: The end of the error message, e.g. advice. It follows without a space.
        repo_type: The kind of the repository, "model" or "dataset".

    Returns:
        The local directory with the files, a revision in the hub's cache.

    Raises:
        InputError: If the repository is not available: whatever `patterns` or the hub's client
            raised.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type=repo_type, allow_patterns=list(patterns())))
    except Exception as error:  # the client raises a dozen unrelated types
        raise unavailable(what, error, remedy) from error


def unavailable(what: str, error: Exception, remedy: str = "") -> InputError:
    """Returns the error for a repository that the hub's client could not provide.

    Args:
        what: The subject of the message, e.g. the configuration field and its value.
        error: What the client raised. The first line of its message is the reason.
        remedy: The end of the message, e.g. advice. It follows without a space.

    Returns:
        The error with a message of one line, to be raised.
    """
    variable = offline_variable()
    state = f" ({variable} is set)" if variable else ""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return InputError(f"{what} cannot be had from the hub{state}: {reason}{remedy}")


def read_card(folder: Path, repo_type: Literal["model", "dataset"]) -> dict[str, Any]:
    """Reads the metadata of the card of a repository, its `README.md`.

    Args:
        folder: The local directory of the repository.
        repo_type: The kind of the repository, "model" or "dataset".

    Returns:
        The metadata by name; an empty dict if there is no card, or if its metadata cannot be read.
    """
    from huggingface_hub import DatasetCard, ModelCard

    kind = {"model": ModelCard, "dataset": DatasetCard}[repo_type]
    path = folder / "README.md"
    if not path.is_file():
        return {}
    try:
        return dict(kind.load(path, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # a card that cannot be read says nothing
        return {}


def check_login(name: str) -> None:
    """Checks that the user is logged in to the hub, by asking it.

    Args:
        name: The repository that is to be written, OWNER/NAME, for the message.

    Raises:
        InputError: If HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, or the hub cannot be reached
            or knows no such user.
    """
    from huggingface_hub import HfApi

    remedy = "; log in with `hf auth login`, or write the folder alone with dry_run=True"
    if variable := offline_variable():
        raise InputError(f"hub={name!r}: {variable} is set, so nothing can be uploaded{remedy}")
    try:
        HfApi().whoami()
    except Exception as error:  # the client raises a dozen unrelated types
        raise InputError(f"hub={name!r}: the hub refuses ({first_line(error)}){remedy}") from error


def push(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Uploads all files of a directory to a model repository, which is created if necessary.

    Files of the repository that the directory lacks stay.

    Args:
        folder: The directory whose files are uploaded, with their paths in it.
        name: The repository, OWNER/NAME.
        private: Whether a new repository is private. An existing one stays as it is.
        message: The message of the commit.

    Returns:
        The address of the repository.

    Raises:
        RunError: If the hub refuses or cannot be reached. The directory stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=message)
    except Exception as error:  # the client raises a dozen unrelated types
        raise RunError(
            f"hub={name!r}: cannot be uploaded: {first_line(error)}; {folder} holds all files, "
            f"which `hf upload {name} {folder}` uploads"
        ) from error
    return str(url)


def cached(name: str, file: str = "model_index.json") -> Path | None:
    """Finds a repository in the local cache of the hub, without asking the hub.

    Args:
        name: The repository, OWNER/NAME.
        file: A file that must be there, as a path within the repository.

    Returns:
        The local directory that holds `file`. This is the top of the repository unless `file` is in
        a folder. None if `file` is not in the cache, or if the cache has recorded that the
        repository lacks it.

    Raises:
        HFValidationError: If the hub's client does not accept `name`. It is a ValueError.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file)
    return Path(path).parent if isinstance(path, str) else None


def offline_variable() -> str | None:
    """Returns the environment variable that forbids to ask the hub; None if it may be asked.

    It is HF_HUB_OFFLINE, or if that is empty or not set, TRANSFORMERS_OFFLINE. It forbids it if it
    is "1", "on", "yes" or "true" in any case, as for the hub's client. The client reads it once,
    when it is imported; this function reads it on each call.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if value := os.environ.get(variable):
            return variable if value.upper() in ("1", "ON", "YES", "TRUE") else None
    return None


def is_carried(path: Path) -> bool:
    """Whether a path is in `CARRIED`, the package's directory of released configurations without
    weights.

    Args:
        path: The path, which need not exist. Links and ".." are not resolved.
    """
    return path.is_relative_to(CARRIED)
