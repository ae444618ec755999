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
    """Returns which diffusers tensors the weight and the bias of each native layer consist of.

    Args:
        layers: for each native layer, the names of the diffusers layers that its rows consist of,
            in order, separated by spaces: "attn2.to_k attn2.to_v" for "cross_attn.kv_linear".

    Returns:
        From the name of each native tensor, such as "cross_attn.kv_linear.bias", to the list of the
        diffusers tensors that its rows consist of: ["attn2.to_k.bias", "attn2.to_v.bias"]. Each
        layer has two entries, its ".weight" and its ".bias".
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
# Further tensors of a block with normalised queries and keys.
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
    """A tensor of diffusers as consecutive rows of a native tensor.

    Attributes:
        name: name of the tensor in diffusers.
        source: name of the native tensor.
        start: index of the first row in the native tensor.
        stop: index of the row after the last one.
        shape: shape of the tensor in diffusers. The rows are reshaped to it.
    """

    name: str
    source: str
    start: int
    stop: int
    shape: Shape


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """How a native checkpoint becomes a component of diffusers.

    Attributes:
        config: configuration of the converted transformer.
        parts: all tensors of the converted transformer, each as rows of a native tensor.
        ffn: kind of the native MLP: "conv" (1x1 convolutions) or "linear" (linear layers).
        ignored: names of the native tensors that the checkpoint has but that are not needed:
            "pos_embed" (positions), "y_embedder.y_embedding" (embedding of the empty prompt), both
            or neither.
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
    """Whether these are the tensor names of a native SANA checkpoint, in the layout of its authors.

    One tensor of an MLP, such as "blocks.0.mlp.depth_conv.conv.weight", is enough: no other network
    has this MLP in blocks of this name.

    Args:
        names: names of all tensors of a checkpoint.

    Returns:
        True if one name is that of such a tensor of an MLP; False for no names.
    """
    return any(re.match(r"blocks\.\d+\.mlp\.(inverted|depth|point)_conv\.", name) for name in names)


def plan_conversion(shapes: Mapping[str, Shape], base: SanaConfig) -> ConversionPlan:
    """Plans the conversion of a native checkpoint. No tensor is read.

    The number of blocks, the hidden width of the MLP (that of block 0), its kind, and whether
    queries and keys are normalised are taken from the checkpoint.

    Args:
        shapes: shapes of all native tensors, by name.
        base: configuration of a released transformer whose width is the checkpoint's. Everything
            but these four properties is taken from it, such as the number of heads and the
            channels. The shapes cannot tell the number of heads, so it is not checked.

    Returns:
        The plan: `config`, the configuration of the converted transformer; `parts`, for every
        tensor of that the native tensor, the range of rows in it and the shape to give them; `ffn`,
        the kind of the native MLP, "conv" or "linear"; and `ignored`, the names of the native
        tensors that are not needed.

    Raises:
        ValueError: the width of the checkpoint is not that of `base`; or tensors are missing, of
            another shape, or unexpected. "pos_embed" and "y_embedder.y_embedding" may be there or
            not. The message lists all tensors at fault.
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
    _check(expected, shapes)
    ignored = tuple(name for name in IGNORED if name in shapes)
    return ConversionPlan(config, tuple(parts), ffn, ignored)


def mlp_ratio(hidden: int, width: int) -> float:
    """Returns a ratio with `int(ratio * width) == hidden`, the formula of all readers of a
    configuration.

    It is `hidden / width`; where rounding makes its product with the width less than `hidden`, the
    smallest larger float for which the formula holds.

    Args:
        hidden: hidden width of the MLP after its gate, not negative.
        width: width of the tokens, a positive number.

    Returns:
        The value for the field `mlp_ratio` of the configuration.
    """
    ratio = hidden / width
    # rounding may have made the product a little less than `hidden`
    while int(ratio * width) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _full_table(depth: int, ffn: str, qk_norm: bool) -> Table:
    """Returns the table of all tensors of a network: for each native name, the diffusers names of
    the tensors that its rows consist of, in order.

    Args:
        depth: number of blocks.
        ffn: name of the feed-forward layer in the native names, "conv" or "linear".
        qk_norm: whether queries and keys are normalised.

    Returns:
        The table: first the tensors outside of the blocks, then those of each block, such as
        "blocks.0.attn.qkv.weight" with the list of "transformer_blocks.0.attn1.to_q.weight",
        "...to_k.weight" and "...to_v.weight". Most native tensors have one diffusers tensor.
    """
    block = BLOCK | (QK_NORM if qk_norm else {})
    table = dict(OUTER)
    for i in range(depth):
        for native, names in block.items():
            full_names = [f"transformer_blocks.{i}.{name}" for name in names]
            table[f"blocks.{i}.{native.replace('FFN', ffn)}"] = full_names
    return table


def _check(expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    """Checks that native tensors have the expected names and shapes.

    "pos_embed" and "y_embedder.y_embedding" (`IGNORED`) may be there without being expected.

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
