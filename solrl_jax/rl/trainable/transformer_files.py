"""Exports a policy with parameters trained in full, as a directory of diffusers' transformer.

`from_pretrained` of the transformer reads it. It holds:

    config.json
    diffusion_pytorch_model.safetensors   the base with the trained parameters; or, if it is large,
                                          files numbered 00001-of-00002 and on, and an index
    pytorch_lora_weights.safetensors      the adapters on other parameters, if any (`lora_files`)
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from solrl_jax.errors import InputError
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.loading.weights import to_torch_order
from solrl_jax.rl.trainable.lora_files import DIFFUSERS_FILE, export_diffusers
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import Trainable, flatten, split_adapters
from solrl_jax.storage import files

NAME = "diffusion_pytorch_model"
SUFFIX = ".safetensors"
MAX_FILE_BYTES = (
    10 * 10**9
)  # largest bytes of tensors in one file, as in `save_pretrained` of diffusers


def check_directory(folder: Path) -> None:
    """Checks that `export_transformer` would replace nothing but an earlier export. Whether the
    disk takes the files is not checked.

    Args:
        folder: The directory to be written. It need not exist. It may hold an earlier export:
            `config.json`, `pytorch_lora_weights.safetensors`, and files whose names begin with
            "diffusion_pytorch_model".

    Raises:
        InputError: If the name ends in .safetensors, the path is a file, or the directory holds an
            entry with another name. Whether an entry is a file or a subdirectory is not checked.
    """
    if folder.suffix == SUFFIX or (folder.exists() and not folder.is_dir()):
        raise InputError(
            f"{folder}: a transformer with parameters trained in full is a directory; name one"
        )

    def is_exported(name):
        return name.startswith(NAME) or name in ("config.json", DIFFUSERS_FILE)

    if folder.is_dir() and (
        others := sorted(f.name for f in folder.iterdir() if not is_exported(f.name))
    ):
        raise InputError(
            f"{folder}: holds {', '.join(others)}, which an export would remove; name another "
            "directory"
        )


def refuse_component(path: Path, base: Path) -> None:
    """Checks that the path of an export does not belong to a component of the base model.

    Args:
        path: The file or directory to be written. It need not exist. It is refused as it is named,
            and also where links lead to.
        base: The directory of the base model, whose `model_index.json` lists the components.

    Raises:
        InputError: If `path` is the directory of a component, or lies in one.
        ValueError: If `model_index.json` cannot be read.
    """
    # The file itself may be a link to a place outside, as in the cache of the Hugging Face Hub.
    paths = (path.absolute(), path.parent.resolve() / path.name, path.resolve())
    index = read_json(base / "model_index.json")
    for name in (name for name, entry in index.items() if isinstance(entry, list)):
        component = base / name
        for folder in (component.absolute(), component.resolve()):
            if any(path.is_relative_to(folder) for path in paths):
                raise InputError(
                    f"{path}: belongs to the base model; name another path for the export"
                )


def export_transformer(
    folder: Path,
    backbone: Backbone,
    trained: Trainable,
    settings: LoraSettings,
    *,
    dtype: Any = jnp.float32,
    most: int = MAX_FILE_BYTES,
) -> None:
    """Writes a policy that has parameters trained in full, as the directory of a transformer.

    The directory appears whole, by a rename. An earlier export in its place is replaced; it stays
    if an error is raised. The host holds the tensors of one file at a time; several files get an
    index beside them. All arrays must be on devices of the calling process. `config.json` is that
    of the base: it does not mention parameters that the configuration adds to the network
    (`model.attention`), though they are written.

    Args:
        folder: The directory to write. Missing parent directories are created.
        backbone: The base, and the directory whose `transformer/config.json` is copied.
        trained: The trainable parameters by path: whole arrays take the place of the base's, and
            adapters are written to `pytorch_lora_weights.safetensors` in the same directory.
        settings: Rank and alpha of the adapters. They have no effect without adapters.
        dtype: The dtype of all tensors, also of the adapters, e.g. `jnp.float32` (the default) or
            `jnp.bfloat16`.
        most: The largest number of bytes of tensors in one file, by default 10 GB (10^10). A single
            larger tensor has a file of its own.

    Raises:
        InputError: If the name ends in .safetensors, the path is a file, the directory belongs to
            the base model (`refuse_component`) or holds files other than an earlier export; if a
            value is not finite in `dtype`; or if there are adapters that do not fit the network or
            that change nothing (every product B A is zero).
        RunError: If the disk refuses, `transformer/config.json` of the base cannot be copied, or
            the file of the adapters does not read back as it was written.
    """
    folder = folder.absolute()
    table = backbone.parameter_table()
    refuse_component(folder, backbone.pipeline.folder)
    check_directory(folder)
    adapters, arrays = split_adapters(trained)
    params = flatten(backbone.transformer) | arrays
    where = {name: (e, i) for e in table for i, name in enumerate(e.names)}

    def read(name: str) -> np.ndarray:
        e, layer = where[name]
        array = params[e.key]
        with np.errstate(over="ignore"):  # values too large for `dtype` are reported below
            array = np.asarray(array[layer] if e.stacked else array)
            tensor = to_torch_order(array, e.layout).astype(dtype, order="C")
        if not np.isfinite(tensor).all():
            raise InputError(f"{folder}: {name} is not finite in {jnp.dtype(dtype)}")
        return tensor

    sizes = {
        name: int(np.prod(e.shape)) * jnp.dtype(dtype).itemsize for name, (e, _) in where.items()
    }
    shards = divide(sizes, most)
    with files.atomic_directory(folder) as filled, files.disk_errors_as_run_errors(folder):
        shutil.copyfile(
            backbone.pipeline.folder / "transformer" / "config.json", filled / "config.json"
        )
        for file, names in shards.items():
            with files.atomic(filled / file) as partial:
                save_file({name: read(name) for name in names}, partial, metadata={"format": "pt"})
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            files.atomic_write(
                filled / f"{NAME}{SUFFIX}.index.json",
                json.dumps(index, indent=2, sort_keys=True) + "\n",
            )
        if adapters:
            export_diffusers(filled / DIFFUSERS_FILE, adapters, settings, table, dtype=dtype)


def divide(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Divides tensors over files, in their order: a file is filled until the next tensor does not
    fit.

    Args:
        sizes: The bytes of each tensor by its name, in the order in which files are filled.
        most: The largest number of bytes of one file. A larger tensor has a file of its own.

    Returns:
        The names of the tensors in each file, by the name of the file:
        `diffusion_pytorch_model.safetensors` if there is one file, else numbered from
        `diffusion_pytorch_model-00001-of-00002.safetensors` on. Empty without tensors.
    """
    parts: list[list[str]] = []
    free_bytes = 0
    for name, size in sizes.items():
        if not parts or size > free_bytes:
            parts = [*parts, []]
            free_bytes = most
        parts[-1].append(name)
        free_bytes -= size
    if len(parts) == 1:
        return {f"{NAME}{SUFFIX}": parts[0]}
    return {
        f"{NAME}-{i:05d}-of-{len(parts):05d}{SUFFIX}": names for i, names in enumerate(parts, 1)
    }
