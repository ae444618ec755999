"""Maps the tensors in files of OpenCLIP (the layout of HPS v2.1) to the parameters of `CLIPModel`.

`models.vision.clip.CLIPModel` has the names of transformers; OpenCLIP has others. OpenCLIP also
holds queries, keys and values in one tensor, and stores the projections to the shared space as
[in, out]. The thirds of that tensor are contiguous in the file, so a table of names is enough, and
nothing is computed.
"""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
from flax import nnx

from solrl_jax.models.loading.tensor_files import STORED_DTYPES, StoredTensor
from solrl_jax.models.loading.weights import ParameterEntry, check_tensors, parameter_table

# For the tensors outside of the layers: the name in transformers -> the name in OpenCLIP.
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
# The same for the lists of layers, and for the modules within a layer.
LAYER_LISTS = {
    "text_model.encoder.layers": "transformer.resblocks",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
}
MODULES = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
# The consecutive thirds of attn.in_proj_weight and attn.in_proj_bias.
THIRDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Tensors that OpenCLIP stores as [in, out], in the names of transformers.
TRANSPOSED = ("text_projection.weight", "visual_projection.weight")


def locate_open_clip_tensors(
    file: Path, state: nnx.State
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """Finds the tensors of a `CLIPModel` in a file in OpenCLIP's layout, and checks that they fit.
    Only the header of the file is read.

    OpenCLIP keeps queries, keys and values of a layer in one tensor, and stores the two projections
    to the shared space as [in, out], where transformers has [out, in]. The function serves as the
    argument `locate` of a `Component`, which reads the tensors that it finds.

    Args:
        file: The safetensors file.
        state: Abstract state of the `CLIPModel`.

    Returns:
        (table, tensors). The table has one entry per parameter, with the names of its tensors in
        transformers. The `layout` of the two projections is "same" (not transposed when read),
        because [in, out] is also this package's order of axes. The dictionary `tensors` has the
        position of each tensor under its name in transformers. The position of queries, keys or
        values is that of their third of a tensor.

    Raises:
        ValueError: If the file is missing or cannot be read, or if tensors are missing, unexpected,
            or of another shape or dtype than the network takes. The message lists all such tensors
            by their names in the file.
    """
    table = parameter_table(state)
    expected: dict[str, tuple[int, ...]] = {}
    for entry in table:
        for name in entry.names:
            shape = entry.torch_shape
            open_clip, third = open_clip_name(name)
            if third is not None:
                shape = (len(THIRDS) * shape[0], *shape[1:])
            expected[open_clip] = shape[::-1] if name in TRANSPOSED else shape
    tensors = check_tensors([file], expected, str(file), lambda name: False)

    stored = {}
    for entry in table:
        for name in entry.names:
            open_clip, third = open_clip_name(name)
            tensor = tensors[open_clip]
            stored[name] = tensor if third is None else _third(tensor, third)
    # The transposed tensors are already in our order of axes.
    table = [
        dataclasses.replace(entry, layout="same") if entry.names[0] in TRANSPOSED else entry
        for entry in table
    ]
    return table, stored


def open_clip_name(name: str) -> tuple[str, int | None]:
    """Translates the name of a CLIP tensor in transformers to OpenCLIP.

    Args:
        name: Name in transformers, e.g. "text_model.encoder.layers.0.mlp.fc1.bias".

    Returns:
        (name, third). The name in OpenCLIP, e.g. "transformer.resblocks.0.mlp.c_fc.bias"; and which
        third of that tensor it is: 0 (query), 1 (key), 2 (value), or None for the whole tensor.

    Raises:
        ValueError: If CLIP has no tensor of this name.
        KeyError: If the name is that of a layer of CLIP, but not of a module in it.
    """
    if name in NAMES:
        return NAMES[name], None
    match = re.fullmatch(r"(\w+\.encoder\.layers)\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None or match[1] not in LAYER_LISTS:
        raise ValueError(f"{name}: CLIP has no such tensor")
    layers, index, module, kind = match.groups()
    layer = f"{LAYER_LISTS[layers]}.{index}"
    if module in THIRDS:
        return f"{layer}.attn.in_proj_{kind}", THIRDS.index(module)
    return f"{layer}.{MODULES[module]}.{kind}", None


def _third(tensor: StoredTensor, index: int) -> StoredTensor:
    """Returns the position of one third of a tensor that holds queries, keys and values.

    Args:
        tensor: Position of the whole tensor in its file.
        index: 0 for the query, 1 for the key, 2 for the value.

    Returns:
        A `StoredTensor` for these rows: with a third of the rows in its shape, and the offset of
        their first byte in the file as `byte_offset`. Its name is that of the whole tensor.
    """
    shape = (tensor.shape[0] // len(THIRDS), *tensor.shape[1:])
    size = math.prod(shape) * np.dtype(STORED_DTYPES[tensor.dtype]).itemsize
    return dataclasses.replace(tensor, shape=shape, byte_offset=tensor.byte_offset + index * size)
