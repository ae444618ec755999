"""A policy with parameters trained in full, as the directory that `from_pretrained` of diffusers' transformer reads.

config.json
diffusion_pytorch_model.safetensors              the base with those parameters; or, if that is large,
diffusion_pytorch_model-00001-of-00002.safetensors, ..., and diffusion_pytorch_model.safetensors.index.json
pytorch_lora_weights.safetensors                 the adapters on others, if there are any (`lora_files`)
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
from solrl_jax.models.loading.weights import to_torch_order
from solrl_jax.rl.trainable.lora_files import DIFFUSERS_FILE, export_diffusers
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import Trainable, flatten
from solrl_jax.storage import files

NAME = "diffusion_pytorch_model"
SUFFIX = ".safetensors"
MOST = 10 * 10**9  # bytes of tensors in a file: the default of diffusers' `save_pretrained`


def check_directory(folder: Path) -> None:
    """Raises InputError in one line where `export_transformer` cannot write."""
    if folder.suffix == SUFFIX or (folder.exists() and not folder.is_dir()):
        raise InputError(
            f"{folder}: a transformer with parameters trained in full is a directory; name one"
        )

    def mine(name):
        return name.startswith(NAME) or name in ("config.json", DIFFUSERS_FILE)

    if folder.is_dir() and (
        strange := sorted(f.name for f in folder.iterdir() if not mine(f.name))
    ):
        raise InputError(
            f"{folder}: holds {', '.join(strange)}, which an export would remove; name another directory"
        )


def export_transformer(
    folder: Path,
    backbone: Backbone,
    trained: Trainable,
    settings: LoraSettings,
    *,
    dtype: Any = jnp.float32,
    most: int = MOST,
) -> None:
    """Writes the directory `folder`; it appears whole, by rename. An earlier export there is replaced.

    most: bytes of tensors in a file, unless one tensor alone has more. The host holds one file's tensors at a time.
    Raises InputError for values that are not finite in `dtype`, and where `folder` cannot be written.
    """
    folder = folder.absolute()
    table = backbone.parameter_table()
    check_directory(folder)
    adapters = {path: own for path, own in trained.items() if isinstance(own, dict)}
    params = flatten(backbone.transformer) | {
        path: own for path, own in trained.items() if path not in adapters
    }
    where = {name: (e, i) for e in table for i, name in enumerate(e.names)}

    def tensor(name: str) -> np.ndarray:
        e, layer = where[name]
        array = params[e.key]
        with np.errstate(over="ignore"):  # what is too large for `dtype` is found below, by name
            made = to_torch_order(
                np.asarray(array[layer] if e.stacked else array), e.layout
            ).astype(dtype, order="C")
        if not np.isfinite(made).all():
            raise InputError(f"{folder}: {name} is not finite in {jnp.dtype(dtype)}")
        return made

    sizes = {
        name: int(np.prod(e.shape)) * jnp.dtype(dtype).itemsize for name, (e, _) in where.items()
    }
    shards = divide(sizes, most)
    with files.atomic_directory(folder) as filled, files.writing(folder):
        shutil.copyfile(
            backbone.pipeline.folder / "transformer" / "config.json", filled / "config.json"
        )
        for file, names in shards.items():
            with files.atomic(filled / file) as partial:
                save_file(
                    {name: tensor(name) for name in names}, partial, metadata={"format": "pt"}
                )
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
    """Tensors in order, as many a file as `most` bytes hold: {name of the file: names of tensors}."""
    parts: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not parts or size > left:
            parts = [*parts, []]
            left = most
        parts[-1].append(name)
        left -= size
    if len(parts) == 1:
        return {f"{NAME}{SUFFIX}": parts[0]}
    return {
        f"{NAME}-{i:05d}-of-{len(parts):05d}{SUFFIX}": names for i, names in enumerate(parts, 1)
    }
