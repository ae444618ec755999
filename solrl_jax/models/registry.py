"""The supported pipelines by their class name in diffusers.

A new model needs a subclass of `Pipeline` and one line in `PIPELINES`.
"""

from pathlib import Path

from solrl_jax.models.flux.pipeline import FluxPipeline
from solrl_jax.models.flux2.pipeline import Flux2KleinPipeline
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.qwen_image.pipeline import QwenImagePipeline
from solrl_jax.models.sana.pipeline import MhlaOverride, SanaPipeline
from solrl_jax.models.sd3.pipeline import StableDiffusion3Pipeline
from solrl_jax.models.wan.pipeline import WanPipeline
from solrl_jax.models.zimage.pipeline import ZImagePipeline

PIPELINES: dict[str, type[Pipeline]] = {
    kind.kind: kind
    for kind in (
        SanaPipeline,
        FluxPipeline,
        StableDiffusion3Pipeline,
        ZImagePipeline,
        Flux2KleinPipeline,
        QwenImagePipeline,
        WanPipeline,
    )
}


def open_pipeline(
    folder: Path, gradient_checkpointing: str = "none", mhla: MhlaOverride | None = None
) -> Pipeline:
    """Opens the directory of a diffusers pipeline: reads its configurations and loads its
    tokenizers (each path once per process), but reads no weight. The hub is not asked.

    Args:
        folder: directory with a `model_index.json`, whose `_class_name` selects the class among
            `PIPELINES`.
        gradient_checkpointing: what the backward pass of the transformer recomputes instead of
            storing: "none" (nothing), "matmuls" (everything except matmuls and attention kernels)
            or "blocks" (everything inside a block; only the inputs of blocks are stored). Another
            value raises KeyError when the transformer is traced.
        mhla: for SANA: replaces its linear attention by MHLA, token-level multi-head linear
            attention (arXiv 2601.07832): the settings of MHLA, and the (height, width) in pixels of
            the images for which its blocks are arranged. None keeps the model's own attention.

    Returns:
        The pipeline, an instance of a class in `PIPELINES`.

    Raises:
        FileNotFoundError: the directory, a configuration or a tokenizer is missing. Weights are not
            looked for.
        ValueError: `_class_name` is not in `PIPELINES`, a configuration or tokenizer cannot be read
            or is not supported, the networks do not fit each other, or `mhla` is given for another
            model than SANA or its blocks do not divide the tokens of its image size.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    index = folder / "model_index.json"
    name = read_json(index).get("_class_name")
    if not isinstance(name, str) or name not in PIPELINES:
        raise ValueError(f"{index}: _class_name={name!r}; accepted: {', '.join(PIPELINES)}")
    kind = PIPELINES[name]
    if mhla is None:
        return kind(folder, gradient_checkpointing)
    if not issubclass(kind, SanaPipeline):
        raise ValueError(
            f"model.attention=mhla: {folder} is a {name}; "
            "only SanaPipeline has linear attention to replace"
        )
    return kind(folder, gradient_checkpointing, mhla)
