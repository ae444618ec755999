"""The layout of the SANA authors' own checkpoints (`SanaMS` and `SanaMSLinearFFN` in their code) as that of diffusers.

Both layouts hold the same numbers. The authors keep queries, keys and values of the self-attention in one tensor, and keys and
values of the attention to the text in another. Their second kind of MLP ("linear", made for products in FP4) has linears in
place of 1x1 convolutions, whose weights lack the two axes of size one. No tensor is opened here: names and shapes tell all.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from flax import nnx

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel

Shape = tuple[int, ...]
# a native tensor, and the tensors of diffusers, separated by spaces, that its rows make in equal parts
Table = dict[str, str]


def _layers(layers: Mapping[str, str]) -> Table:
    """The weight and the bias of each layer."""
    return {f"{ours}.{kind}": " ".join(f"{name}.{kind}" for name in theirs.split()) for ours, theirs in layers.items()
            for kind in ("weight", "bias")}  # fmt: skip


OUTER = _layers({
    "x_embedder.proj": "patch_embed.proj",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
    "t_block.1": "time_embed.linear",
    "final_layer.linear": "proj_out",
}) | {
    "attention_y_norm.weight": "caption_norm.weight",
    "final_layer.scale_shift_table": "scale_shift_table",
}  # fmt: skip
# under `blocks.N` in native files, under `transformer_blocks.N` in diffusers; FFN: "conv" or "linear"
BLOCK = _layers({
    "attn.proj": "attn1.to_out.0",
    "cross_attn.q_linear": "attn2.to_q",
    "cross_attn.kv_linear": "attn2.to_k attn2.to_v",
    "cross_attn.proj": "attn2.to_out.0",
    "mlp.depth_conv.conv": "ff.conv_depth",
    "mlp.inverted_conv.FFN": "ff.conv_inverted",
}) | {
    "scale_shift_table": "scale_shift_table",
    "attn.qkv.weight": "attn1.to_q.weight attn1.to_k.weight attn1.to_v.weight",
    "mlp.point_conv.FFN.weight": "ff.conv_point.weight",
}  # fmt: skip
QK_NORM = {
    f"{native}.{x}_norm.weight": f"{target}.norm_{x}.weight"
    for native, target in (("attn", "attn1"), ("cross_attn", "attn2"))
    for x in "qk"
}

# Not needed: positions, which are a formula, and the embedding of the empty prompt, which the pipeline computes instead.
IGNORED = ("pos_embed", "y_embedder.y_embedding")


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of diffusers: the rows `start` to `stop` of the native tensor `source`, in the shape it has in diffusers."""

    name: str
    source: str
    start: int
    stop: int
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a native checkpoint becomes a component of diffusers."""

    config: SanaConfig
    parts: tuple[Part, ...]
    ffn: str  # "conv" or "linear"
    ignored: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


def is_native(names: Iterable[str]) -> bool:
    """Whether these are the names in a native SANA checkpoint. No other network has this MLP in blocks of this name."""
    return any(re.match(r"blocks\.\d+\.mlp\.(inverted|depth|point)_conv\.", name) for name in names)


def plan(shapes: Mapping[str, Shape], base: SanaConfig) -> Plan:
    """From the native tensors' names and shapes: what each tensor of diffusers is made of, and the configuration.

    base: the configuration of a released transformer of the same width. Depth, hidden width and query-key norms are the
    checkpoint's own.
    Raises ValueError for another width, and one that lists every tensor that is missing, unexpected or of another shape.
    """
    if (width := (shapes.get("t_block.1.bias") or (6 * base.width,))[0] // 6) != base.width:
        raise ValueError(f"has width {width}, but the base has {base.width}")
    ffn = "linear" if any(".inverted_conv.linear." in name for name in shapes) else "conv"
    depth = len({m[1] for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))})
    normed = any(
        re.fullmatch(r"blocks\.\d+\.(cross_)?attn\.[qk]_norm\.weight", name) for name in shapes
    )
    hidden = (
        shapes.get("blocks.0.mlp.depth_conv.conv.weight", (2 * int(base.mlp_ratio * base.width),))[
            0
        ]
        // 2
    )
    config = dataclasses.replace(
        base,
        num_layers=depth,
        mlp_ratio=mlp_ratio(hidden, base.width),
        qk_norm="rms_norm_across_heads" if normed else None,
    )
    table = _table(depth, ffn, normed)
    network = nnx.eval_shape(lambda: SanaTransformer2DModel(config, rngs=nnx.Rngs(0)))
    targets = {
        name: e.torch_shape for e in parameter_table(nnx.split(network)[1]) for name in e.names
    }
    parts: list[Part] = []
    wanted: dict[str, Shape] = {}
    for native, names in table.items():
        rows = 0
        for name in names.split():
            shape = targets[name]
            parts.append(Part(name, native, rows, rows + shape[0], shape))
            rows += shape[0]
        wanted[native] = (
            rows,
            *(shape[1:2] if native.endswith("_conv.linear.weight") else shape[1:]),
        )
    _check(wanted, shapes)
    return Plan(config, tuple(parts), ffn, tuple(name for name in IGNORED if name in shapes))


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio r with `int(r * width) == hidden`. All readers of a config use this formula; rounding must not make it less."""
    ratio = hidden / width
    while int(ratio * width) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _table(depth: int, ffn: str, normed: bool) -> Table:
    """The whole table of a network, with full names."""
    block = BLOCK | (QK_NORM if normed else {})

    def name(i, names):
        return " ".join(f"transformer_blocks.{i}.{name}" for name in names.split())

    return OUTER | {
        f"blocks.{i}.{native.replace('FFN', ffn)}": name(i, names)
        for i in range(depth)
        for native, names in block.items()
    }


def _check(wanted: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    problems = [f"missing {n} {s}" for n, s in wanted.items() if n not in shapes]
    problems += [
        f"unexpected {n} {s}" for n, s in shapes.items() if n not in wanted and n not in IGNORED
    ]
    problems += [
        f"{n} has shape {shapes[n]}, expected {s}"
        for n, s in wanted.items()
        if n in shapes and shapes[n] != s
    ]
    if problems:
        raise ValueError(
            f"{len(problems)} tensor(s) do not fit a SANA transformer: " + "; ".join(problems)
        )
