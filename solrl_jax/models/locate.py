"""Where a pipeline is found: a directory, a name of the hub, or a pipeline that is shipped with the package."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solrl_jax.config.schema import Model
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.layers.mhla import Mhla
from solrl_jax.models.loading.pipeline import Pipeline
from solrl_jax.models.loading.tensor_files import without_variants
from solrl_jax.models.registry import open_pipeline
from solrl_jax.storage import hub

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "pipelines"


def open_model(path: str, remat: str = "none", **attention: Any) -> Pipeline:
    """The pipeline that `path` names, without its weights.

    remat: what gradients compute again instead of keeping it (`config.Model.remat`). attention: see `attention_of`.
    Raises InputError for a pipeline that is absent or of an unknown kind.
    """
    folder = find_model(path)
    with in_one_line():
        return open_pipeline(folder, remat, **attention)


def attention_of(model: Model) -> dict[str, Any]:
    """What of a pipeline's attention a configuration replaces: keywords of `open_model`."""
    if model.attention == "default":
        return {}
    return {
        "mhla": Mhla(model.mhla_blocks, model.mhla_released, model.mhla_norm),
        "size": (model.height, model.width),
    }


def find_model(path: str) -> Path:
    """The directory that `model.path` names: a directory, `embedded:NAME`, or OWNER/NAME of the hub.

    Raises InputError that says what was tried.
    """
    if path.startswith(EMBEDDED):
        folder = EMBEDDED_FOLDER / path.removeprefix(EMBEDDED)
        if not (folder / "model_index.json").exists():
            shipped = ", ".join(
                sorted(p.parent.name for p in EMBEDDED_FOLDER.glob("*/model_index.json"))
            )
            raise InputError(f"model.path={path!r}: no such embedded pipeline; there are {shipped}")
        return folder
    if Path(path).is_dir():
        if not os.path.lexists(Path(path) / "model_index.json"):
            raise InputError(
                f"model.path={path!r}: has no model_index.json; expected the directory of a diffusers pipeline"
            )
        return Path(path)
    if hub.is_name(path):
        return hub.snapshot(path, lambda: _listed(path), f"model.path={path!r}:")
    raise InputError(
        f"model.path={path!r}: no such directory (and not of the form OWNER/NAME of a hub)"
    )


def pipeline_files(files: Sequence[str]) -> list[str]:
    """The files of a repository that a pipeline is read from: configs, tokenizers and weights of its components.

    Repositories hold other files too: the same weights in another precision or as pickles, or in another program's layout.
    Those lie at the top level, or in a folder without a config, or carry a variant in their name.
    """
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    wanted = ["model_index.json"]
    for folder, names in folders.items():
        if "/" in folder or not folder or not any(name.endswith("config.json") for name in names):
            continue
        weights = without_variants(names)
        rest = [
            n
            for n in names
            if folder.startswith("tokenizer") or (n.endswith(".json") and ".index." not in n)
        ]
        wanted += [f"{folder}/{name}" for name in {*weights, *rest}]
    return sorted(wanted)


def _listed(name: str) -> list[str]:
    """The files of a hub repository that a pipeline is read from."""
    from huggingface_hub import HfApi

    try:
        return pipeline_files(HfApi().list_repo_files(name))
    except (
        Exception
    ):  # no network: take what the cache has; loading will tell whether that is complete
        return pipeline_files(["model_index.json"])
