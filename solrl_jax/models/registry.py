"""The pipelines that are ported, by their class in diffusers. To add one: a file with its `open_...`, and a line here.

Those raise FileNotFoundError or ValueError for what is missing, not supported or made for other components.
"""

import dataclasses
from pathlib import Path
from typing import Any

from solrl_jax.models.flux.pipeline import open_flux
from solrl_jax.models.flux2.pipeline import open_flux2
from solrl_jax.models.loading.pipeline import Pipeline
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.sana.pipeline import open_sana
from solrl_jax.models.sd3.pipeline import open_sd3
from solrl_jax.models.zimage.pipeline import open_zimage

PIPELINES = {
    "SanaPipeline": open_sana,
    "FluxPipeline": open_flux,
    "StableDiffusion3Pipeline": open_sd3,
    "ZImagePipeline": open_zimage,
    "Flux2KleinPipeline": open_flux2,
}


def open_pipeline(folder: Path, remat: str = "none", **attention: Any) -> Pipeline:
    """Opens the directory of a released pipeline. No weight is loaded.

    remat: what gradients through the transformer recompute, a key of `models.layers.stack.REMAT`. attention: SANA's, in place of its
    own; keywords of `open_sana`.
    Raises FileNotFoundError or ValueError, in one line, for what is missing, does not fit or is not ported.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    kind = read_json(folder / "model_index.json").get("_class_name")
    if not isinstance(kind, str) or kind not in PIPELINES:
        raise ValueError(
            f"{folder / 'model_index.json'}: _class_name={kind!r}; accepted: {', '.join(PIPELINES)}"
        )
    if attention and PIPELINES[kind] is not open_sana:
        raise ValueError(
            f"model.attention=mhla: {folder} is a {kind}; accepted is a SanaPipeline, whose attention is linear"
        )
    return dataclasses.replace(PIPELINES[kind](folder, remat, **attention), remat=remat)
