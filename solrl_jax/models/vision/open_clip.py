"""OpenCLIP's files (the layout of HPS v2.1) as parameters of `models.vision.clip.CLIPModel`: a table of names; nothing is computed.

OpenCLIP has other names than transformers. It holds queries, keys and values in one tensor, whose thirds are contiguous in the
file. It stores the two projections to the shared space as [in, out].
"""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
from flax import nnx

from solrl_jax.models.loading.tensor_files import STORED_DTYPES, StoredTensor
from solrl_jax.models.loading.weights import ParameterEntry, match_tensors, parameter_table

# transformers' name -> OpenCLIP's name, of the tensors outside the layers
NAMES = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
    "visual_projection.weight": "visual.proj",
}
TOWERS = {
    "text_model.encoder.layers": "transformer.resblocks",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
}
LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
} | {"self_attn.out_proj": "attn.out_proj"}
THIRDS = ("q_proj", "k_proj", "v_proj")  # of attn.in_proj_weight and attn.in_proj_bias
TRANSPOSED = ("text_projection.weight", "visual_projection.weight")


def locate_open_clip_tensors(
    file: Path, state: nnx.State
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """The table of a `CLIPModel`, and where in a safetensors file of OpenCLIP each of its tensors lies: for `load_tensors`.

    Raises ValueError listing every tensor that is missing, unexpected, of another shape or not floating-point, by its name in
    the file.
    """
    table = parameter_table(state)
    shapes = {name: e.torch_shape for e in table for name in e.names}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        theirs, third = open_clip_name(name)
        if third is not None:
            shape = (len(THIRDS) * shape[0], *shape[1:])
        wanted[theirs] = shape[::-1] if name in TRANSPOSED else shape
    stored = match_tensors([file], wanted, str(file), lambda name: False)
    return (
        [dataclasses.replace(e, layout="same") if e.names[0] in TRANSPOSED else e for e in table],
        {
            name: _part(stored[theirs], third)
            for name in shapes
            for theirs, third in [open_clip_name(name)]
        },
    )


def open_clip_name(name: str) -> tuple[str, int | None]:
    """OpenCLIP's name for a tensor of transformers' CLIP, and which third of OpenCLIP's tensor it is (None: all of it)."""
    if name in NAMES:
        return NAMES[name], None
    found = re.fullmatch(r"(\w+\.encoder\.layers)\.(\d+)\.(.+)\.(weight|bias)", name)
    if found is None or found[1] not in TOWERS:
        raise ValueError(f"{name}: CLIP has no such tensor")
    block = f"{TOWERS[found[1]]}.{found[2]}"
    inside = found[3]
    last = found[4]
    projection = inside.removeprefix("self_attn.")
    if projection in THIRDS:
        return f"{block}.attn.in_proj_{last}", THIRDS.index(projection)
    return f"{block}.{LAYER[inside]}.{last}", None


def _part(tensor: StoredTensor, third: int | None) -> StoredTensor:
    """A third of a tensor's rows as a tensor: its bytes are contiguous in the file."""
    if third is None:
        return tensor
    shape = (tensor.shape[0] // len(THIRDS), *tensor.shape[1:])
    size = math.prod(shape) * np.dtype(STORED_DTYPES[tensor.dtype]).itemsize
    return dataclasses.replace(tensor, shape=shape, start=tensor.start + third * size)
