"""Where the files of released rewards are: at a path of the configuration, in the hub or its cache,
or in `weights/`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from solrl_jax.errors import InputError
from solrl_jax.storage import hub

CLIP = ("config.json", "model.safetensors")
TOKENIZER = ("config.json", "tokenizer_config.json", "tokenizer.json")
# In plans, this object replaces `reward.paths`. It stands for the configurations in the package,
# which have no weights. Code recognizes it by identity (`is`), because every empty dict equals it.
PACKAGED_CONFIGS: dict[str, str] = {}
# The folder of converted files, relative to the working directory.
FOLDER = "weights"


@dataclasses.dataclass(frozen=True)
class Hub:
    """A Hugging Face hub repository from which a reward's files come by default.

    An entry of `reward.paths` may name a directory or another repository instead.

    Attributes:
        name: The name of the repository, OWNER/NAME.
        files: The names of the files in it that the reward needs, e.g. "config.json". All are
            required.
    """

    name: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Converted:
    """A safetensors file that `solrl convert` makes from a released pickle.

    By default it is in the folder "weights" of the working directory. An entry of `reward.paths`
    may name another .safetensors file, or another directory that contains `file`.

    Attributes:
        file: The name of the safetensors file, without a directory.
        pickle: The name of the released pickle file, without a directory.
        origin: The address of the page from which the pickle file can be downloaded.
    """

    file: str
    pickle: str
    origin: str


# By their names in `reward.paths`.
SOURCES: dict[str, Hub | Converted] = {
    "clipscore": Hub("openai/clip-vit-large-patch14", (*CLIP, *TOKENIZER[1:])),
    "pickscore": Hub("yuvalkirstain/PickScore_v1", CLIP),
    "pickscore/tokenizer": Hub("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", TOKENIZER),
    "hpsv2": Converted(
        "HPS_v2.1_compressed.safetensors",
        "HPS_v2.1_compressed.pt",
        "https://huggingface.co/xswu/HPSv2",
    ),
    "hpsv2/tokenizer": Hub("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", TOKENIZER),
    "imagereward": Converted(
        "ImageReward.safetensors", "ImageReward.pt", "https://huggingface.co/THUDM/ImageReward"
    ),
    "imagereward/tokenizer": Hub("google-bert/bert-base-uncased", TOKENIZER),
    "aesthetic": Converted(
        "sac+logos+ava1-l14-linearMSE.safetensors",
        "sac+logos+ava1-l14-linearMSE.pth",
        "https://github.com/christophschuhmann/improved-aesthetic-predictor",
    ),
    "aesthetic/clip": Hub("openai/clip-vit-large-patch14", CLIP),
}


def find(name: str, paths: Mapping[str, str]) -> Path:
    """Finds the files of a source. Also downloads missing files of a hub repository to the hub's
    cache; offline, they must be there.

    A source is an entry of `SOURCES`: either a repository of the hub (`Hub`), or one safetensors
    file that `solrl convert` made (`Converted`).

    Args:
        name: A key of `SOURCES`, e.g. "pickscore/tokenizer".
        paths: The setting `reward.paths`, by the same keys: for a `Hub` source a directory or the
            name of another repository (an existing directory wins), for a `Converted` source the
            file or its directory. Without an entry: the repository of the source, or its file in
            the folder "weights" of the working directory. `solrl plan` passes the constant
            `PACKAGED_CONFIGS` itself, which stands for the configurations in the package.

    Returns:
        The directory of a `Hub` source, which has all its files, or the file of a `Converted`
        source. With `PACKAGED_CONFIGS`, the path of the repository or of the file in the package's
        directory of configurations, which has no weights. For a `Converted` source, this path does
        not exist.

    Raises:
        KeyError: If `SOURCES` has no such name.
        InputError: If a file is missing or cannot be downloaded, or if that of a `Converted` source
            does not end in .safetensors. The message says where to get it and where to put it.
    """
    source = SOURCES[name]
    if isinstance(source, Converted):
        if paths is PACKAGED_CONFIGS:
            return hub.CARRIED / source.file
        return _find_converted(name, source, paths)
    if paths is PACKAGED_CONFIGS:
        return hub.CARRIED / source.name
    return _find_in_hub(name, source, paths)


def _find_converted(name: str, source: Converted, paths: Mapping[str, str]) -> Path:
    """Returns the path of a converted safetensors file. Its contents are not read.

    Args:
        name: The key of the source in `SOURCES`, e.g. "hpsv2".
        source: `SOURCES[name]`: the name of the file and, for messages, where to download the
            original.
        paths: The setting `reward.paths`. Under `name` it may have the file, or a directory with a
            file of the name `source.file`. Without an entry: `source.file` in the folder "weights"
            of the working directory.

    Raises:
        InputError: If the file is not there, or its name does not end in .safetensors.
    """
    path = Path(paths.get(name, Path(FOLDER, source.file)))
    if path.is_dir():
        path /= source.file
    if path.is_file() and path.suffix == ".safetensors":
        return path
    problem = "not a .safetensors file" if path.is_file() else "no such file"
    raise InputError(
        f"reward '{name}': {path}: {problem}; download {source.pickle} from {source.origin} and "
        f"convert it to {Path(FOLDER, source.file)} with `solrl convert`, or say where it is: "
        f"reward.paths.{name}=PATH"
    )


def _find_in_hub(name: str, source: Hub, paths: Mapping[str, str]) -> Path:
    """Returns the directory with the files of a hub repository. Also downloads missing ones.

    If HF_HUB_OFFLINE is set or there is no network, the local cache of the hub is searched instead.

    Args:
        name: The key of the source in `SOURCES`, e.g. "pickscore/tokenizer".
        source: `SOURCES[name]`: the default repository, and the files that must be there.
        paths: The setting `reward.paths`. Under `name` it may have a directory, or the name of a
            repository (OWNER/NAME); an existing directory wins. Without an entry: `source.name`.

    Returns:
        The directory, in which every file of `source.files` exists.

    Raises:
        InputError: If there is no such directory and the text is no name of a repository; if a file
            cannot be downloaded; or if the directory lacks a file.
    """
    reward = f"reward '{name.split('/')[0]}'"
    path = paths.get(name, source.name)
    files = ", ".join(source.files)
    remedy = f"reward.paths.{name}=DIRECTORY with {files} of https://huggingface.co/{source.name}"
    folder = Path(path)
    if not folder.is_dir():
        if not hub.is_name(path):
            raise InputError(f"{reward}: {path}: no such directory; expected {remedy}")
        subject = f"{reward}: {path}: {files}"
        folder = hub.snapshot(path, lambda: source.files, subject, f"; or give {remedy}")
    missing = [file for file in source.files if not (folder / file).is_file()]
    if missing:
        raise InputError(f"{reward}: {folder}: no {', '.join(missing)}; expected {remedy}")
    return folder
