"""Finds and opens the model that `model.path` names: a directory, a repository of the hub, or an
embedded pipeline.
"""

from collections.abc import Sequence
from pathlib import Path

from solrl_jax.config.schema import Model
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.layers.mhla import Mhla
from solrl_jax.models.loading.tensor_files import without_variants
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.registry import open_pipeline
from solrl_jax.models.sana.pipeline import MhlaOverride
from solrl_jax.storage import hub

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "pipelines"


def open_model(path: str, remat: str = "none", mhla: MhlaOverride | None = None) -> Pipeline:
    """Opens the pipeline that `path` names, without reading its weights.

    A repository of the hub that is not in the cache is downloaded, the files of its weights
    included.

    Args:
        path: the directory of a diffusers pipeline, `embedded:NAME` for one that this package
            carries, or OWNER/NAME of a hub repository. An existing directory goes before a
            repository of the same name.
        remat: what the backward pass of the transformer recomputes instead of storing: "none"
            (nothing), "matmuls" (everything except matmuls and attention kernels) or "blocks"
            (everything inside a block; only the inputs of blocks are stored). Another value raises
            KeyError when the transformer is traced.
        mhla: replaces the linear attention of SANA by MHLA, token-level multi-head linear attention
            (arXiv 2601.07832). It holds the variant of MHLA and the image height and width, in
            pixels, that its blocks are arranged for. None keeps the model's own attention.

    Returns:
        The pipeline, an instance of the class that its `model_index.json` names.

    Raises:
        InputError: the model is missing, incomplete, not supported or not to be had from the hub;
            `mhla` is given for another model than SANA, or the tokens of its image size do not
            divide into its number of blocks.
    """
    folder = find_model(path)
    with in_one_line():
        return open_pipeline(folder, remat, mhla)


def mhla_override(model: Model) -> MhlaOverride | None:
    """Returns the attention that a configuration sets in place of the model's own, an argument of
    `open_model`.

    Args:
        model: the configuration section `model`. Its `attention` is "default" or "mhla";
            `mhla_blocks` is the number of blocks, `mhla_released` says whether the released code is
            followed instead of the paper, and `mhla_norm` whether norms of queries and keys are
            added. `height` and `width` give the image size in pixels.

    Returns:
        For `model.attention` "mhla", the variant of MHLA (token-level multi-head linear attention,
        arXiv 2601.07832) with the image size (height, width) in pixels, from which the arrangement
        of its blocks follows. None if it is "default".
    """
    if model.attention == "default":
        return None
    mhla = Mhla(model.mhla_blocks, model.mhla_released, model.mhla_norm)
    return MhlaOverride(mhla, (model.height, model.width))


def find_model(path: str) -> Path:
    """Returns the directory of a model. A repository of the hub is downloaded unless it is in the
    cache.

    Args:
        path: a directory, `embedded:NAME` for a pipeline of this package, or OWNER/NAME of a
            repository of the hub. The prefix `embedded:` comes first, then an existing directory,
            even if its name has the form OWNER/NAME. "~" is not expanded here.

    Returns:
        The directory: `path` itself, a folder of this package, or a folder of the hub's cache. The
        first two have a `model_index.json`; a folder of the hub's cache is not checked.

    Raises:
        InputError: no embedded pipeline has this name; the directory has no `model_index.json`; the
            repository cannot be had from the hub, for example because the name or the network is
            wrong, or because HF_HUB_OFFLINE is set and the cache lacks it; or `path` has none of
            the three forms.
    """
    if path.startswith(EMBEDDED):
        folder = EMBEDDED_FOLDER / path.removeprefix(EMBEDDED)
        if not (folder / "model_index.json").exists():
            indices = EMBEDDED_FOLDER.glob("*/model_index.json")
            names = ", ".join(sorted(index.parent.name for index in indices))
            raise InputError(f"model.path={path!r}: no such embedded pipeline; accepted: {names}")
        return folder
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "model_index.json").exists():
            raise InputError(
                f"model.path={path!r}: has no model_index.json; "
                "expected the directory of a diffusers pipeline"
            )
        return folder
    if hub.is_name(path):
        return hub.snapshot(path, lambda: _repository_files(path), f"model.path={path!r}:")
    raise InputError(
        f"model.path={path!r}: no such directory, and not the name OWNER/NAME of a hub repository"
    )


def pipeline_files(files: Sequence[str]) -> list[str]:
    """Selects the files of a hub repository that a pipeline needs: configurations, tokenizers and
    weights.

    Repositories hold other files too: the same weights in another precision, as pickles, or in the
    layout of another program. Those are at the top level, in a folder without a config, or have a
    variant in their name. Of each top-level folder with a file whose name ends in "config.json",
    these are selected: JSON files other than indices of shards, safetensors files and their indices
    (without variants such as `model.fp16.safetensors` unless all of them are variants), and all
    files if the name of the folder begins with "tokenizer". Deeper folders and files at the top
    level are left out.

    Args:
        files: paths of all files of the repository, relative to it, with "/" between the parts.

    Returns:
        The selected paths, sorted. `model_index.json` is always among them, even if `files` lacks
        it.
    """
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    selected = {"model_index.json"}
    for folder, names in folders.items():
        is_component = folder and "/" not in folder
        if not is_component or not any(name.endswith("config.json") for name in names):
            continue
        weights = without_variants(names)
        for name in names:
            is_config = name.endswith(".json") and ".index." not in name
            if name in weights or is_config or folder.startswith("tokenizer"):
                selected.add(f"{folder}/{name}")
    return sorted(selected)


def _repository_files(name: str) -> list[str]:
    """Returns the files of a hub repository that a pipeline needs: configurations, tokenizers and
    weights (`pipeline_files`).

    Asks the hub for the list of files. If that fails for any reason, no error is raised, and a
    download of the result finds what the cache has.

    Args:
        name: the repository, OWNER/NAME.

    Returns:
        The selected paths, sorted, relative to the repository with "/" between the parts, such as
        "vae/config.json"; `model_index.json` alone if the hub does not answer.
    """
    from huggingface_hub import HfApi

    try:
        return pipeline_files(HfApi().list_repo_files(name))
    except Exception:
        # Without a network, the cache is used as it is; loading reports what is missing.
        return pipeline_files(["model_index.json"])
