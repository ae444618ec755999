"""Where the files of released rewards are: at a path of the configuration, in the hub or its cache, or in `weights/`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from solrl_jax.errors import InputError
from solrl_jax.storage import hub

TOKENIZER = ("config.json", "tokenizer_config.json", "tokenizer.json")
# In place of `reward.paths`: the configurations that the package carries. They have no weights, and serve for plans.
CARRIED: dict[str, str] = {}  # known by its identity
FOLDER = "weights"  # where converted files are looked for, relative to the working directory


@dataclasses.dataclass(frozen=True)
class Hub:
    """A repository of the hub, and its files that are read. A path may name a directory or another repository instead."""

    name: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Converted:
    """A safetensors file that `solrl convert` makes from a released pickle. A path may name the file or its directory."""

    file: str
    pickle: str
    origin: str  # where to download the pickle


CLIP = ("config.json", "model.safetensors")
SOURCES: dict[str, Hub | Converted] = {  # by their names in `reward.paths`
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
    """The directory of a `Hub` source, with all its files, or the file of a `Converted` source.

    name: a key of `SOURCES`. paths: `reward.paths`, or `CARRIED`.
    Raises InputError in one line that says what is missing, where to get it and where to put it.
    """
    source = SOURCES[name]
    if paths is CARRIED:
        return hub.CARRIED / (source.file if isinstance(source, Converted) else source.name)
    reward = f"reward '{name.split('/')[0]}'"
    if isinstance(source, Converted):
        return _find_converted(name, reward, source, paths)
    return _find_hub(name, reward, source, paths)


def _find_converted(name: str, reward: str, source: Converted, paths: Mapping[str, str]) -> Path:
    path = Path(paths.get(name, Path(FOLDER, source.file)))
    if path.is_dir():
        path /= source.file
    if path.is_file() and path.suffix == ".safetensors":
        return path
    wrong = "no such file" if not path.is_file() else "not a .safetensors file"
    raise InputError(
        f"{reward}: {path}: {wrong}; download {source.pickle} from {source.origin}, then run"
        f" `solrl convert {source.pickle} --out {Path(FOLDER, source.file)}`, or say where it is: reward.paths.{name}=PATH"
    )


def _find_hub(name: str, reward: str, source: Hub, paths: Mapping[str, str]) -> Path:
    given = paths.get(name, source.name)
    remedy = f"reward.paths.{name}=DIRECTORY with {', '.join(source.files)} of https://huggingface.co/{source.name}"
    folder = Path(given)
    if not folder.is_dir():
        if not hub.is_name(given):
            raise InputError(f"{reward}: {given}: no such directory; expected {remedy}")
        what = f"{reward}: {given}: {', '.join(source.files)}"
        folder = hub.snapshot(given, lambda: source.files, what, f"; or give {remedy}")
    if missing := [file for file in source.files if not (folder / file).is_file()]:
        raise InputError(f"{reward}: {folder}: no {', '.join(missing)}; expected {remedy}")
    return folder
