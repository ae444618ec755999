"""Finds and opens the model that `model.path` names: a directory, a repository of the hub, or an
embedded pipeline.
"""

from collections.abc import Sequence
from pathlib import Path

from solrl_jax.config.schema import Model
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.layers.mhla import Mhla
from solrl_jax.models.loading.tensor_files import without_variants
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.registry import open_pipeline
from solrl_jax.models.sana.pipeline import MhlaOverride
from solrl_jax.storage import hub

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "pipelines"


def open_model(
    path: str, gradient_checkpointing: str = "none", mhla: MhlaOverride | None = None
) -> Pipeline:
    """Opens the pipeline that `path` names: reads its configurations and loads its tokenizers.

    No weight is read, but a hub repository is downloaded, weights included: the files of its newest
    revision that a pipeline needs and the hub's cache lacks. Without a network, the newest revision
    in the cache is used.

    Args:
        path: `embedded:NAME` for a small pipeline that this package carries with its trained
            weights, the directory of a diffusers pipeline ("~" is not expanded), or OWNER/NAME of a
            hub repository. A directory takes precedence over a repository of the same name.
        gradient_checkpointing: what the backward pass of the transformer recomputes instead of
            storing: "none" (nothing), "matmuls" (everything except matmuls and attention kernels)
            or "blocks" (everything inside a block; only the inputs of blocks are stored). Another
            value raises KeyError when the transformer is traced.
        mhla: for SANA: replaces its linear attention by MHLA, token-level multi-head linear
            attention (arXiv 2601.07832), with the settings and the image size that `mhla_override`
            returns. None keeps the model's own attention.

    Returns:
        The pipeline, an instance of the class that its `model_index.json` names.

    Raises:
        InputError: the model is missing, incomplete or not supported; a download fails, or the hub
            cannot be reached and its cache has no revision; `mhla` is given for another model than
            SANA; or the tokens of the image size in `mhla` cannot be divided into `mhla`'s number
            of blocks.
    """
    folder = find_model(path)
    with as_input_error():
        return open_pipeline(folder, gradient_checkpointing, mhla)


def mhla_override(model: Model) -> MhlaOverride | None:
    """Returns the attention that a configuration sets instead of SANA's own, for `open_model`.

    Args:
        model: the configuration section `model`. The fields `attention`, `mhla_blocks`,
            `mhla_released`, `mhla_norm`, `height` and `width` are read.

    Returns:
        None if `attention` is "default"; otherwise ("mhla") an `MhlaOverride` with the fields
        `mhla`, the settings (number of blocks, whether the released code is followed instead of the
        paper, whether norms of queries and keys are added), and `size`, the image size (height,
        width) in pixels.
    """
    if model.attention == "default":
        return None
    mhla = Mhla(model.mhla_blocks, model.mhla_released, model.mhla_norm)
    return MhlaOverride(mhla, (model.height, model.width))


def find_model(path: str) -> Path:
    """Returns the directory of a model, which is downloaded if it is a hub repository.

    The files that a pipeline needs (`pipeline_files`) are downloaded to the hub's cache in their
    newest revision, unless they are there already. Without a network, the newest revision in the
    cache is returned as it is, even if files are missing. A directory is checked for its
    `model_index.json` only, and a repository for no file.

    Args:
        path: `embedded:NAME` for a pipeline that this package carries, a directory ("~" is not
            expanded), or OWNER/NAME of a hub repository; tried in this order. A path that begins
            with "embedded:" is never a directory.

    Returns:
        The directory: `path` itself, a folder of this package, or a folder of the hub's cache.

    Raises:
        InputError: there is no embedded pipeline of this name, no `model_index.json` in the
            directory, or neither a directory nor a repository of this name; or a download fails,
            for example because the repository is not in the cache and HF_HUB_OFFLINE is set.
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
        f"model.path={path!r}: no such directory, and not the name OWNER/NAME of a Hub repository"
    )


def pipeline_files(files: Sequence[str]) -> list[str]:
    """Selects the files of a hub repository that a pipeline needs: configurations, tokenizers and
    weights.

    Only top-level folders with a file `*config.json` count, without their subfolders. If the name
    of such a folder begins with "tokenizer", all of its files are selected, otherwise its JSON
    files and its safetensors files with their indices. Other forms of the same weights are left
    out: pickles with their indices, single files at the top level, and variants such as
    `model.fp16.safetensors` if the folder also has weights that are not variants.

    Args:
        files: paths of all files, relative to the repository, with "/" between the parts.

    Returns:
        The selected paths, sorted. `model_index.json` is always one of them, even if it is not in
        `files`.
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
    """Asks the hub for the files of a repository, and selects those that a pipeline needs
    (`pipeline_files`).

    If the hub gives no list, for whatever reason, no error is raised; the caller then uses the
    files in the hub's cache as they are.

    Args:
        name: the repository, OWNER/NAME.

    Returns:
        The selected paths, sorted, relative to the repository, such as "vae/config.json". Only
        `model_index.json` if the hub gives no list.
    """
    from huggingface_hub import HfApi

    try:
        return pipeline_files(HfApi().list_repo_files(name))
    except Exception:
        # Without a network, the cache is used as it is; loading reports what is missing.
        return pipeline_files(["model_index.json"])
