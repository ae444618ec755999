"""Reads the names in LoRA files: which linear layers of a network a key belongs to.

diffusers and PEFT use the module names of diffusers. Other trainers (kohya's sd-scripts,
ai-toolkit) and ComfyUI use the names of the model's authors, in which query, key and value are one
fused layer for most models. `LAYOUTS` is the table of those names. The factor B of a fused layer is
split by outputs; all parts share its factor A.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

# The ends of the keys of a LoRA, by what the tensor is.
PARTS = {
    "lora_A.weight": "a",
    "lora_A.default.weight": "a",  # the state dict of a PEFT model
    "lora_down.weight": "a",
    "lora.down.weight": "a",  # older diffusers
    "lora_B.weight": "b",
    "lora_B.default.weight": "b",
    "lora_up.weight": "b",
    "lora.up.weight": "b",
    "alpha": "alpha",
}
# What programs put before the name of a module. kohya also replaces the dots of the name.
KOHYA = "lora_unet_"
PREFIXES = {
    "transformer.": "diffusers",
    "base_model.model.": "PEFT",
    "diffusion_model.": "ComfyUI",
    KOHYA: "kohya",
}
_KEY = re.compile(rf"(?P<name>.+)\.(?P<part>{'|'.join(map(re.escape, PARTS))})")
_TEXT_ENCODER = re.compile(r"(text_encoder(_\d)?|text_encoders|lora_te\d?)[._]")
_DORA = re.compile(r".*(dora_scale|lora_magnitude_vector(\.default\.weight)?|\.w_norm)")
_BIAS = re.compile(r".*(lora_[AB](\.default)?\.bias|lora_(up|down)\.bias|\.diff_b|\.diff)")

# The names of the model's authors, with the diffusers modules whose outputs the layer holds one
# after another. `#` is the index of a block. An entry applies where the network has all its
# modules.
_ATTENTION = "transformer_blocks.#.attn."
_QKV = (f"{_ATTENTION}to_q", f"{_ATTENTION}to_k", f"{_ATTENTION}to_v")
_TEXT_QKV = (
    f"{_ATTENTION}add_q_proj",
    f"{_ATTENTION}add_k_proj",
    f"{_ATTENTION}add_v_proj",
)
_FINAL = {
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_BLACK_FOREST_LABS = {
    "double_blocks.#.img_attn.qkv": _QKV,
    "double_blocks.#.txt_attn.qkv": _TEXT_QKV,
    "double_blocks.#.img_attn.proj": (f"{_ATTENTION}to_out.0",),
    "double_blocks.#.txt_attn.proj": (f"{_ATTENTION}to_add_out",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **_FINAL,
}
LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "FLUX.1": {
        **_BLACK_FOREST_LABS,
        "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
        "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
        "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
        "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
        "double_blocks.#.img_mod.lin": ("transformer_blocks.#.norm1.linear",),
        "double_blocks.#.txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
        "single_blocks.#.linear1": (
            "single_transformer_blocks.#.attn.to_q",
            "single_transformer_blocks.#.attn.to_k",
            "single_transformer_blocks.#.attn.to_v",
            "single_transformer_blocks.#.proj_mlp",
        ),
        "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
        "single_blocks.#.modulation.lin": ("single_transformer_blocks.#.norm.linear",),
        "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
        "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
        "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    },
    "FLUX.2": {
        **_BLACK_FOREST_LABS,
        "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.linear_in",),
        "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.linear_out",),
        "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.linear_in",),
        "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.linear_out",),
        "single_blocks.#.linear1": ("single_transformer_blocks.#.attn.to_qkv_mlp_proj",),
        "single_blocks.#.linear2": ("single_transformer_blocks.#.attn.to_out",),
        "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    },
    "SD3": {
        **_FINAL,
        "joint_blocks.#.x_block.attn.qkv": _QKV,
        "joint_blocks.#.x_block.attn.proj": (f"{_ATTENTION}to_out.0",),
        "joint_blocks.#.x_block.attn2.qkv": tuple(
            f"transformer_blocks.#.attn2.to_{name}" for name in "qkv"
        ),
        "joint_blocks.#.x_block.attn2.proj": ("transformer_blocks.#.attn2.to_out.0",),
        "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
        "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
        "joint_blocks.#.x_block.adaLN_modulation.1": ("transformer_blocks.#.norm1.linear",),
        "joint_blocks.#.context_block.attn.qkv": _TEXT_QKV,
        "joint_blocks.#.context_block.attn.proj": (f"{_ATTENTION}to_add_out",),
        "joint_blocks.#.context_block.mlp.fc1": ("transformer_blocks.#.ff_context.net.0.proj",),
        "joint_blocks.#.context_block.mlp.fc2": ("transformer_blocks.#.ff_context.net.2",),
        "joint_blocks.#.context_block.adaLN_modulation.1": (
            "transformer_blocks.#.norm1_context.linear",
        ),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    },
    "Wan": {
        **{
            f"blocks.#.{theirs}_attn.{name}": (f"blocks.#.{ours}.{module}",)
            for theirs, ours in (("self", "attn1"), ("cross", "attn2"))
            for name, module in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
        },
        "blocks.#.ffn.0": ("blocks.#.ffn.net.0.proj",),
        "blocks.#.ffn.2": ("blocks.#.ffn.net.2",),
        "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
        "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
        "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
        "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
        "time_projection.1": ("condition_embedder.time_proj",),
        "head.head": ("proj_out",),
    },
    "Z-Image": {
        f"{stack}.#.attention.{theirs}": ours
        for stack in ("layers", "noise_refiner", "context_refiner")
        for theirs, ours in {
            "qkv": tuple(f"{stack}.#.attention.to_{name}" for name in "qkv"),
            "out": (f"{stack}.#.attention.to_out.0",),
        }.items()
    },
}


@dataclasses.dataclass
class FileLayer:
    """One linear layer as a LoRA file names it.

    Attributes:
        modules: The diffusers modules that it stands for: one, or several fused ones, whose outputs
            follow one another in this order.
        has_author_name: Whether the file has the name that the model's authors use, and not that of
            diffusers. A modulation layer of shift and scale then has the shift first; in diffusers
            the scale is first.
        keys: The keys of its tensors in the file, by part: "a", "b" and, if the file has one,
            "alpha". `parse_keys` adds them one by one, so parts may be missing.
    """

    modules: tuple[str, ...]
    has_author_name: bool
    keys: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ParsedKeys:
    """The keys of a LoRA file, sorted into five groups: linear layers, text encoders, DoRA, biases,
    unknown.

    Attributes:
        layers: The linear layers with their keys, by the name of the layer in the file, without a
            prefix such as "transformer." (kohya's "lora_unet_" stays).
        layout: The program that wrote the file, by the prefix of its keys: "diffusers", "PEFT",
            "ComfyUI", "kohya" or "no prefix". Used in messages.
        text_encoders: Keys of text encoders, sorted.
        dora: Keys of the magnitudes of DoRA, sorted.
        biases: Keys of trained biases and of whole weights, sorted.
        unknown: Keys that belong to no linear layer of the network, and keys of a part (such as the
            factor A) that an earlier key already gave for one of the same modules, sorted.
    """

    layers: dict[str, FileLayer]
    layout: str
    text_encoders: list[str]
    dora: list[str]
    biases: list[str]
    unknown: list[str]


def parse_keys(keys: Iterable[str], modules: Collection[str]) -> ParsedKeys:
    """Sorts the keys of a LoRA file by the linear layers that they belong to. Nothing is refused
    here.

    Args:
        keys: The keys of the tensors in the file. They are iterated twice, so this must not be an
            iterator.
        modules: The diffusers names of all linear layers of the network.

    Returns:
        The layers of the file, each with the keys of its tensors (a layer may lack a part), the
        layout (the program that wrote the file, e.g. "kohya"), and the sorted keys of text
        encoders, of DoRA, of biases and unknown ones.
    """
    names = _file_names(modules)
    parsed = ParsedKeys({}, _layout(keys), [], [], [], [])
    owners: dict[tuple[str, str], str] = {}  # (module, part) -> the name in the file
    for key in sorted(keys):
        match = _KEY.fullmatch(key)
        name = _without_prefix(match["name"]) if match else ""
        if _TEXT_ENCODER.match(key):
            parsed.text_encoders.append(key)
        elif _DORA.fullmatch(key):
            parsed.dora.append(key)
        elif match is None and _BIAS.fullmatch(key):
            parsed.biases.append(key)
        elif match is None or name not in names:
            parsed.unknown.append(key)
        else:
            part = PARTS[match["part"]]
            layer = parsed.layers.setdefault(name, FileLayer(*names[name], {}))
            repeated = [module for module in layer.modules if (module, part) in owners]
            if repeated:
                parsed.unknown.append(key)
            else:
                owners |= {(module, part): name for module in layer.modules}
                layer.keys[part] = key
    return parsed


def _file_names(modules: Collection[str]) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Lists the names that linear layers may have in a LoRA file, with the modules of each name.

    A layer may have its diffusers name; the name that the model's authors use (an entry of
    `LAYOUTS`, which applies if the network has all modules of the entry); and either of these in
    kohya's form: "lora_unet_" and the name with "_" in place of each dot. If a name has several
    meanings, the first in this order counts.

    Args:
        modules: The diffusers names of all linear layers of the network.

    Returns:
        By name, without a prefix such as "transformer." or an ending such as ".lora_A.weight", a
        pair: the diffusers modules that it stands for (one, or those of a fused layer in the order
        of their outputs), and whether it is the authors' name, also in kohya's form.
    """
    names: dict[str, tuple[tuple[str, ...], bool]] = {
        module: ((module,), False) for module in modules
    }
    for layout in LAYOUTS.values():
        for theirs, ours in layout.items():
            for index in _indices(ours[0], modules):
                targets = tuple(module.replace("#", index) for module in ours)
                if all(module in modules for module in targets):
                    names.setdefault(theirs.replace("#", index), (targets, True))
    for name, meaning in list(names.items()):
        names.setdefault(f"{KOHYA}{name.replace('.', '_')}", meaning)
    return names


def _indices(pattern: str, modules: Collection[str]) -> list[str]:
    """Finds the block numbers for which the network has a module that matches a pattern.

    Args:
        pattern: A module name in which at most one `#` stands for a number, such as
            "transformer_blocks.#.ff.net.2".
        modules: The diffusers names of all linear layers of the network.

    Returns:
        The numbers as text, in the order of `modules`. [""] for a pattern without `#`, whether or
        not there is such a module.
    """
    if "#" not in pattern:
        return [""]
    expression = re.compile(re.escape(pattern).replace(re.escape("#"), r"(\d+)"))
    matches = [expression.fullmatch(module) for module in modules]
    return [match[1] for match in matches if match]


def _without_prefix(name: str) -> str:
    """Removes the prefix that a program writes before the name of a module.

    Args:
        name: The name in a file, without the ending of the tensor.

    Returns:
        The name without a leading "transformer.", "base_model.model." or "diffusion_model."; a
        second prefix stays. Names without these are returned as they are. kohya's "lora_unet_" is
        not removed.
    """
    for prefix in PREFIXES:
        if prefix != KOHYA and name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _layout(keys: Iterable[str]) -> str:
    """Returns the program that wrote the keys of a file.

    Args:
        keys: The keys of the tensors in the file, such as "transformer.x_embedder.lora_A.weight".

    Returns:
        "diffusers", "PEFT", "ComfyUI" or "kohya": the value in `PREFIXES` of the prefix of the
        first key that has one; "no prefix" if none has.
    """
    for key in keys:
        for prefix, program in PREFIXES.items():
            if key.startswith(prefix):
                return program
    return "no prefix"
