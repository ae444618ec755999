"""Converts checkpoints of the SANA authors (`SanaMS` and `SanaMSLinearFFN` in their code) to the
layout of diffusers.

Both layouts hold the same numbers. The authors keep queries, keys and values of the self-attention
in one tensor, and keys and values of the cross-attention in another. Their second kind of MLP
("linear", made for FP4 matmuls) has linear layers in place of 1x1 convolutions, so that the weights
lack two axes of size one. The conversion is planned here from the names and shapes of the tensors
alone; `cli/convert.py` carries it out.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from flax import nnx

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel

Shape = tuple[int, ...]
# The name of a native tensor -> the names of the diffusers tensors that its rows consist of, in
# order.
Table = dict[str, list[str]]


def _weights_and_biases(layers: Mapping[str, str]) -> Table:
    """Expands a table of layers to a table of their weights and biases.

    Args:
        layers: native layers (of the SANA authors) and the diffusers layers that they consist of,
            in the order of their rows, separated by spaces: for example "attn2.to_k attn2.to_v" for
            "cross_attn.kv_linear".

    Returns:
        Two entries per native layer, ".weight" and ".bias": from the name of the native tensor,
        such as "cross_attn.kv_linear.bias", to the list of the diffusers tensors, such as
        ["attn2.to_k.bias", "attn2.to_v.bias"].
    """
    table = {}
    for native, names in layers.items():
        for kind in ("weight", "bias"):
            table[f"{native}.{kind}"] = [f"{name}.{kind}" for name in names.split()]
    return table


# Tensors outside of the blocks.
OUTER = _weights_and_biases({
    "x_embedder.proj": "patch_embed.proj",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
    "t_block.1": "time_embed.linear",
    "final_layer.linear": "proj_out",
}) | {
    "attention_y_norm.weight": ["caption_norm.weight"],
    "final_layer.scale_shift_table": ["scale_shift_table"],
}  # fmt: skip
# Tensors of a block: below `blocks.N` in native files, below `transformer_blocks.N` in diffusers.
# FFN stands for "conv" or "linear".
BLOCK = _weights_and_biases({
    "attn.proj": "attn1.to_out.0",
    "cross_attn.q_linear": "attn2.to_q",
    "cross_attn.kv_linear": "attn2.to_k attn2.to_v",
    "cross_attn.proj": "attn2.to_out.0",
    "mlp.depth_conv.conv": "ff.conv_depth",
    "mlp.inverted_conv.FFN": "ff.conv_inverted",
}) | {
    "scale_shift_table": ["scale_shift_table"],
    "attn.qkv.weight": ["attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight"],
    "mlp.point_conv.FFN.weight": ["ff.conv_point.weight"],
}  # fmt: skip
# Further tensors of a block with normalized queries and keys.
QK_NORM = {
    "attn.q_norm.weight": ["attn1.norm_q.weight"],
    "attn.k_norm.weight": ["attn1.norm_k.weight"],
    "cross_attn.q_norm.weight": ["attn2.norm_q.weight"],
    "cross_attn.k_norm.weight": ["attn2.norm_k.weight"],
}

# Native tensors that are not needed: the positions, which are a formula, and the embedding of the
# empty prompt, which the pipeline computes instead.
IGNORED = ("pos_embed", "y_embedder.y_embedding")


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The rows of a native tensor (of a checkpoint of the SANA authors) that become one tensor in
    the layout of diffusers.

    Attributes:
        name: name of the diffusers tensor.
        source: name of the native tensor.
        start: index of the first of these rows in the native tensor.
        stop: index after the last of these rows in the native tensor.
        shape: shape of the diffusers tensor. The rows are reshaped to it.
    """

    name: str
    source: str
    start: int
    stop: int
    shape: Shape


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """How a native checkpoint (of the SANA authors) becomes a transformer in the layout of
    diffusers.

    Attributes:
        config: configuration of the converted transformer.
        parts: for each tensor of the converted transformer, the rows of a native tensor that it
            consists of.
        ffn: layers of the native MLP: "conv" (1x1 convolutions) or "linear" (linear layers).
        ignored: names of native tensors that are not converted: "pos_embed" (positions) and
            "y_embedder.y_embedding" (embedding of the empty prompt), if the checkpoint has them.
    """

    config: SanaConfig
    parts: tuple[TensorPart, ...]
    ffn: str
    ignored: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """The number of values in all converted tensors."""
        return sum(math.prod(part.shape) for part in self.parts)


def is_native(names: Iterable[str]) -> bool:
    """Whether a checkpoint is a SANA checkpoint in the layout of its authors, judged by its tensor
    names.

    Args:
        names: names of all tensors of the checkpoint.

    Returns:
        True if a name belongs to an MLP of that layout (to its `inverted_conv`, `depth_conv` or
        `point_conv`), such as "blocks.0.mlp.depth_conv.conv.weight". Names begin with "blocks.";
        one with a prefix such as "module." is not recognized.
    """
    return any(re.match(r"blocks\.\d+\.mlp\.(inverted|depth|point)_conv\.", name) for name in names)


def plan_conversion(shapes: Mapping[str, Shape], base: SanaConfig) -> ConversionPlan:
    """Plans the conversion of a native checkpoint (of the SANA authors) to the layout of diffusers.
    No tensor is read.

    Four properties are taken from the checkpoint: the number of blocks, the hidden width of the
    MLP, the kind of its layers, and whether queries and keys are normalized. The network is traced
    for its shapes, which computes no array.

    Args:
        shapes: shapes of all native tensors, by name.
        base: configuration of a released transformer of the same width. All other properties are
            taken from it, such as the number of heads, which the shapes cannot tell.

    Returns:
        The plan.

    Raises:
        ValueError: the width of the checkpoint is not that of `base`; or tensors are missing,
            unexpected or of another shape. The message lists all of them.
    """
    modulation = shapes.get("t_block.1.bias", (6 * base.width,))
    if modulation[0] // 6 != base.width:
        raise ValueError(f"has width {modulation[0] // 6}, but the base has {base.width}")
    ffn = "linear" if any(".inverted_conv.linear." in name for name in shapes) else "conv"
    qk_norm = any(
        re.fullmatch(r"blocks\.\d+\.(cross_)?attn\.[qk]_norm\.weight", name) for name in shapes
    )
    blocks = {match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    default_hidden = 2 * int(base.mlp_ratio * base.width)
    hidden = shapes.get("blocks.0.mlp.depth_conv.conv.weight", (default_hidden,))[0] // 2
    config = dataclasses.replace(
        base,
        num_layers=len(blocks),
        mlp_ratio=mlp_ratio(hidden, base.width),
        qk_norm="rms_norm_across_heads" if qk_norm else None,
    )

    network = nnx.eval_shape(lambda: SanaTransformer2DModel(config, rngs=nnx.Rngs(0)))
    _, state = nnx.split(network)
    target_shapes = {
        name: entry.torch_shape for entry in parameter_table(state) for name in entry.names
    }
    parts: list[TensorPart] = []
    expected: dict[str, Shape] = {}
    for native, names in _full_table(len(blocks), ffn, qk_norm).items():
        rows = 0
        for name in names:
            shape = target_shapes[name]
            parts.append(TensorPart(name, native, rows, rows + shape[0], shape))
            rows += shape[0]
        is_linear = native.endswith("_conv.linear.weight")
        expected[native] = (rows, *(shape[1:2] if is_linear else shape[1:]))
    _check_tensors(expected, shapes)
    ignored = tuple(name for name in IGNORED if name in shapes)
    return ConversionPlan(config, tuple(parts), ffn, ignored)


def mlp_ratio(hidden: int, width: int) -> float:
    """Returns the value of `mlp_ratio` in a configuration that gives an exact hidden width.

    Readers of a configuration compute the width as `int(ratio * width)`. The result is `hidden /
    width`, or slightly more where rounding would give one feature less.

    Args:
        hidden: hidden width of the MLP after its gate.
        width: number of features of a token.

    Returns:
        A ratio with `int(ratio * width) == hidden`.
    """
    ratio = hidden / width
    # rounding may have made the product a little less than `hidden`
    while int(ratio * width) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _full_table(depth: int, ffn: str, qk_norm: bool) -> Table:
    """Returns which diffusers tensors each tensor of a native checkpoint consists of.

    Args:
        depth: number of blocks of the network.
        ffn: layers of the native MLP: "conv" (1x1 convolutions) or "linear" (linear layers).
        qk_norm: whether the network normalizes queries and keys.

    Returns:
        From the name of each native tensor to the names of the diffusers tensors in the order of
        its rows: for example from "blocks.0.attn.qkv.weight" to
        ["transformer_blocks.0.attn1.to_q.weight", "...to_k.weight", "...to_v.weight"]. Most native
        tensors have one diffusers tensor; those in `IGNORED` have no entry.
    """
    block = BLOCK | (QK_NORM if qk_norm else {})
    table = dict(OUTER)
    for i in range(depth):
        for native, names in block.items():
            full_names = [f"transformer_blocks.{i}.{name}" for name in names]
            table[f"blocks.{i}.{native.replace('FFN', ffn)}"] = full_names
    return table


def _check_tensors(expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    """Checks that a native checkpoint has exactly the expected tensors.

    "pos_embed" and "y_embedder.y_embedding" (`IGNORED`) are allowed in addition.

    Args:
        expected: shape of each expected tensor by native name.
        shapes: shape of each tensor of the checkpoint by native name.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape. The message lists all of
            them.
    """
    problems = []
    for name, shape in expected.items():
        if name not in shapes:
            problems.append(f"missing {name} {shape}")
    for name, shape in shapes.items():
        if name not in expected and name not in IGNORED:
            problems.append(f"unexpected {name} {shape}")
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            problems.append(f"{name} has shape {shapes[name]}, expected {shape}")
    if problems:
        raise ValueError(
            f"{len(problems)} tensor(s) do not fit a SANA transformer: " + "; ".join(problems)
        )
