"""Files from the Hugging Face hub or its local cache, and uploads to the hub.

Errors of the hub's client become errors of one line, except in `find_cached`.

The package contains the configurations of the released models that presets name (`CARRIED`), which
`solrl plan` needs. They come without weights and vocabularies, and no model is loaded from them.
"""

import glob
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
        path: The text. A relative path may have this form too, so the caller checks first whether a
            directory exists.

    Returns:
        True if it has this form and the hub allows both parts: each up to 96 letters, digits, "-",
        "_" and ".", without "--" or "..", and without "-" or "." at its ends. NAME must not end in
        ".git".
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
    files: Callable[[], Sequence[str]],
    what: str,
    remedy: str = "",
    *,
    repo_type: Literal["model", "dataset"] = "model",
) -> Path:
    """Downloads files of a repository to the hub's cache, unless they are there already.

    The newest revision is used; without a network or with HF_HUB_OFFLINE, the newest one in the
    cache.

    Args:
        name: The repository, OWNER/NAME.
        files: A function without arguments that returns the exact paths (not patterns) of the files
            in the repository. It is called in any case, also without a network. It may ask the hub;
            its errors become the InputError below, even if the cache has the files.
        what: The subject of the error message, "WHAT cannot be downloaded ...", e.g. the
            configuration field and its value.
        remedy: Text that is appended to the error message as it is, e.g. "; log in".
        repo_type: The kind of the repository, "model" or "dataset".

    Returns:
        The local directory of the revision, in the hub's cache. Without the hub, or if the
        repository does not have them, some of the files may be missing in it.

    Raises:
        InputError: If the hub refuses or cannot be reached, and the cache has no revision; if a
            download fails; or if `files` fails.
    """
    from huggingface_hub import snapshot_download

    try:
        paths = [glob.escape(file) for file in files()]  # the client takes patterns
        return Path(snapshot_download(name, repo_type=repo_type, allow_patterns=paths))
    except Exception as error:  # the client raises a dozen unrelated types
        raise unavailable(what, error, remedy) from error


def unavailable(what: str, error: Exception, remedy: str = "") -> InputError:
    """Returns (does not raise) the error for a repository that the hub's client could not provide.

    Args:
        what: The subject of the message, e.g. the configuration field and its value.
        error: The error that the client raised. The first line of its message becomes REASON.
        remedy: Text that is appended to the message as it is, e.g. "; log in".

    Returns:
        The error, to be raised. Its message is "WHAT cannot be downloaded from the Hub: REASON",
        followed by the remedy. If `offline_variable` names a variable, "(VARIABLE is set)" precedes
        the colon.
    """
    variable = offline_variable()
    state = f" ({variable} is set)" if variable else ""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return InputError(f"{what} cannot be downloaded from the Hub{state}: {reason}{remedy}")


def read_card(folder: Path, repo_type: Literal["model", "dataset"]) -> dict[str, Any]:
    """Reads the metadata of a repository's card (the YAML header of its `README.md`).

    Args:
        folder: The local directory of the repository.
        repo_type: The kind of the repository, "model" or "dataset".

    Returns:
        The metadata by name; an empty dictionary if there are none or they cannot be read.
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
    """Checks, by a request to the hub, that the user is logged in. The right to write is not
    checked.

    Args:
        name: The repository that is to be written, OWNER/NAME, for the error message.

    Raises:
        InputError: If the user is not logged in, the hub cannot be reached, or HF_HUB_OFFLINE or
            TRANSFORMERS_OFFLINE forbids asking it (`offline_variable`).
    """
    from huggingface_hub import HfApi

    remedy = "; log in with `hf auth login`, or write the folder alone with dry_run=True"
    if variable := offline_variable():
        raise InputError(f"hub={name!r}: {variable} is set, so nothing can be uploaded{remedy}")
    try:
        HfApi().whoami()
    except Exception as error:  # the client raises a dozen unrelated types
        raise InputError(f"hub={name!r}: the Hub refuses ({first_line(error)}){remedy}") from error


def push(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Uploads all files of a directory, also those in subdirectories, to a model repository on the
    hub, which is created if it does not exist.

    Files of the same names are replaced, and others in the repository stay. The user's login is
    used (`check_login`).

    Args:
        folder: The directory.
        name: The repository, OWNER/NAME.
        private: Whether a new repository is private. An existing one stays as it is.
        message: The commit message.

    Returns:
        The web address of the repository.

    Raises:
        RunError: If the hub refuses, cannot be reached, or may not be asked (`offline_variable`).
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


def find_cached(name: str, file: str = "model_index.json") -> Path | None:
    """Finds a file of a model repository in the local cache of the hub, without asking the hub.

    Only the last downloaded revision of the branch `main` is searched.

    Args:
        name: The model repository, OWNER/NAME.
        file: The file, as a path in the repository.

    Returns:
        The local directory that contains the file itself (for "vae/config.json", the folder "vae");
        None if it is not in the cache.

    Raises:
        HFValidationError: If `name` is not a valid name of a repository. A ValueError.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file)
    return Path(path).parent if isinstance(path, str) else None


def offline_variable() -> str | None:
    """Returns the name of the environment variable that forbids asking the hub; None if none does.

    HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE forbid it if they are "1", "on", "yes" or "true", in
    upper or lower case. If the first is set to any text but "", the second is not considered.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if value := os.environ.get(variable):
            return variable if value.upper() in ("1", "ON", "YES", "TRUE") else None
    return None


def is_carried(path: Path) -> bool:
    """Whether a path is, or lies in, `CARRIED`: the package's directory with the configurations of
    released models, without their weights and vocabularies.

    Args:
        path: The path, which need not exist. `CARRIED` is absolute, so a relative path gives False.
            Links and ".." are not resolved.
    """
    return path.is_relative_to(CARRIED)
