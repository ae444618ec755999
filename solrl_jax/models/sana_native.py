"""The layout of the SANA authors' own checkpoints (`SanaMS` and `SanaMSLinearFFN` in their code) as that of diffusers.

Both layouts hold the same numbers. The authors keep queries, keys and values of the self-attention in one tensor, and keys and
values of the attention to the text in another. Their second kind of MLP ("linear", made for products in FP4) has linears in
place of 1x1 convolutions, whose weights lack the two axes of size one. No tensor is opened here: names and shapes tell all.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from solrl_jax.models.sana import SanaConfig

Shape = tuple[int, ...]


class Row(NamedTuple):
    """A native tensor, and the tensors of diffusers that its rows make in equal parts.

    Letters in the shape: d: width. f: hidden width of the MLP. t: width of the text. c: channels of the latent. p: patch.
    o: p * p * channels out.
    """

    native: str
    targets: str  # names, separated by spaces
    shape: str  # of the native tensor
    unit: str = ""  # axes of size one that the targets have and the native tensor lacks


def _layer(native: str, targets: str, shape: str, unit: str = "") -> tuple[Row, Row]:
    """The weight and the bias of a layer; shape, unit: of the weight."""
    name = lambda layers, kind: " ".join(f"{layer}.{kind}" for layer in layers.split())
    weight = Row(name(native, "weight"), name(targets, "weight"), shape, unit)
    return weight, Row(name(native, "bias"), name(targets, "bias"), shape.split()[0])


OUTER = (
    *_layer("x_embedder.proj", "patch_embed.proj", "d c p p"),
    *_layer("y_embedder.y_proj.fc1", "caption_projection.linear_1", "d t"),
    *_layer("y_embedder.y_proj.fc2", "caption_projection.linear_2", "d d"),
    Row("attention_y_norm.weight", "caption_norm.weight", "d"),
    *_layer("t_embedder.mlp.0", "time_embed.emb.timestep_embedder.linear_1", "d 256"),
    *_layer("t_embedder.mlp.2", "time_embed.emb.timestep_embedder.linear_2", "d d"),
    *_layer("t_block.1", "time_embed.linear", "6d d"),
    *_layer("final_layer.linear", "proj_out", "o d"),
    Row("final_layer.scale_shift_table", "scale_shift_table", "2 d"),
)
# under `blocks.N` in native files, under `transformer_blocks.N` in diffusers
BLOCK = (
    Row("scale_shift_table", "scale_shift_table", "6 d"),
    Row("attn.qkv.weight", "attn1.to_q.weight attn1.to_k.weight attn1.to_v.weight", "3d d"),
    *_layer("attn.proj", "attn1.to_out.0", "d d"),
    *_layer("cross_attn.q_linear", "attn2.to_q", "d d"),
    *_layer("cross_attn.kv_linear", "attn2.to_k attn2.to_v", "2d d"),
    *_layer("cross_attn.proj", "attn2.to_out.0", "d d"),
    *_layer("mlp.depth_conv.conv", "ff.conv_depth", "2f 1 3 3"),
)
FFN = {
    kind: (
        *_layer(f"mlp.inverted_conv.{kind}", "ff.conv_inverted", f"2f d{native}", unit),
        Row(f"mlp.point_conv.{kind}.weight", "ff.conv_point.weight", f"d f{native}", unit),
    )
    for kind, native, unit in (("conv", " 1 1", ""), ("linear", "", "1 1"))
}
QK_NORM = tuple(
    Row(f"{native}.{x}_norm.weight", f"{target}.norm_{x}.weight", "d")
    for native, target in (("attn", "attn1"), ("cross_attn", "attn2"))
    for x in "qk"
)

# Not needed: positions, which are a formula, and the embedding of the empty prompt, which the pipeline computes instead.
POSITIONS = "pos_embed"
IGNORED = (POSITIONS, "y_embedder.y_embedding")

HEAD = 32  # width of a head of the linear attention, in all networks of the authors
# heads of the attention to the text, by width: in the authors' networks with 1.6B (also 4.8B) and 0.6B parameters
CROSS_HEADS = {2240: 20, 1152: 16}


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

    config: dict[str, Any]  # its config.json
    parts: tuple[Part, ...]
    ffn: str  # a key of FFN
    ignored: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


def is_native(names: Iterable[str]) -> bool:
    """Whether these are the names in a native SANA checkpoint. No other network has this MLP in blocks of this name."""
    return any(re.match(r"blocks\.\d+\.mlp\.(inverted|depth|point)_conv\.", name) for name in names)


def plan(shapes: Mapping[str, Shape], base: SanaConfig | None = None, positions: bool = False) -> Plan:
    """From the native tensors' names and shapes: what each tensor of diffusers is made of, and the config.json.

    base: the config of a released transformer of the same kind, for what shapes do not tell. positions: whether `pos_embed` is
    there and not all zeros.
    Raises ValueError that lists every tensor that is missing, unexpected or of another shape, or says what only a base tells.
    """
    ffn = max(FFN, key=lambda kind: sum(f".mlp.inverted_conv.{kind}." in name for name in shapes))
    qk_norm = any(re.fullmatch(r"blocks\.\d+\.(cross_)?attn\.[qk]_norm\.weight", name) for name in shapes)
    depth = len({m[1] for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))})
    rows = _rows(depth, ffn, qk_norm)
    sizes = _sizes(rows, shapes)
    _check(rows, shapes, sizes)
    config = _config(sizes, depth, qk_norm, base, shapes.get(POSITIONS), positions)
    return Plan(config, tuple(_parts(rows, sizes)), ffn, tuple(name for name in IGNORED if name in shapes))


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio r with `int(r * width) == hidden`. All readers of a config use this formula; rounding must not make it less."""
    ratio = hidden / width
    while int(ratio * width) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _rows(depth: int, ffn: str, qk_norm: bool) -> list[Row]:
    """The whole table of a network, with full names."""
    rows = list(OUTER)
    for i in range(depth):
        for row in (*BLOCK, *FFN[ffn], *(QK_NORM if qk_norm else ())):
            targets = " ".join(f"transformer_blocks.{i}.{name}" for name in row.targets.split())
            rows.append(row._replace(native=f"blocks.{i}.{row.native}", targets=targets))
    return rows


def _axes(shape: str) -> list[tuple[int, str]]:
    """Each axis as (factor, letter). A plain number has no letter: "6d 3" is [(6, "d"), (3, "")]."""
    parts = [re.fullmatch(r"(\d*)([a-z]?)", axis) for axis in shape.split()]
    return [(int(part[1] or 1), part[2]) for part in parts if part]


def _sizes(rows: Iterable[Row], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """What each letter stands for, by a majority of the tensors: so one tensor of a wrong shape is found."""
    votes: dict[str, Counter[int]] = {}
    for row in rows:
        axes, shape = _axes(row.shape), shapes.get(row.native, ())
        for (factor, letter), size in zip(axes, shape, strict=False) if len(axes) == len(shape) else ():
            if letter and size % factor == 0:
                votes.setdefault(letter, Counter())[size // factor] += 1
    return {letter: counter.most_common(1)[0][0] for letter, counter in votes.items()}


def _shape(axes: str, sizes: Mapping[str, int]) -> Shape | str:
    """The shape in numbers; in letters, if no tensor tells what one of them stands for."""
    if any(letter and letter not in sizes for _, letter in _axes(axes)):
        return f"({axes.replace(' ', ', ')})"
    return tuple(factor * sizes.get(letter, 1) for factor, letter in _axes(axes))


def _check(rows: Iterable[Row], shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> None:
    wanted = {row.native: _shape(row.shape, sizes) for row in rows}
    problems = [f"missing {n} {s}" for n, s in wanted.items() if n not in shapes]
    problems += [f"unexpected {n} {s}" for n, s in shapes.items() if n not in wanted and n not in IGNORED]
    problems += [f"{n} has shape {shapes[n]}, expected {s}" for n, s in wanted.items() if n in shapes and shapes[n] != s]
    if problems:
        raise ValueError(f"{len(problems)} tensor(s) do not fit a SANA transformer: " + "; ".join(problems))


def _parts(rows: Iterable[Row], sizes: Mapping[str, int]) -> Iterable[Part]:
    for row in rows:
        targets, shape = row.targets.split(), _shape(row.shape, sizes)
        assert not isinstance(shape, str)  # checked before
        count, rest = shape[0] // len(targets), (*shape[1:], *map(int, row.unit.split()))
        for i, name in enumerate(targets):
            yield Part(name, row.native, i * count, (i + 1) * count, (count, *rest))


def _config(
    sizes: Mapping[str, int], depth: int, qk_norm: bool, base: SanaConfig | None, grid: Shape | None, positions: bool
) -> dict[str, Any]:
    """The fields of diffusers' config.json. grid: the shape of `pos_embed`, [1, patches at the training size, d]."""
    width, patch = sizes["d"], sizes["p"]
    if sizes["o"] % patch**2:
        raise ValueError(f"final_layer.linear has {sizes['o']} rows; expected a multiple of {patch**2}, the patch squared")
    told = {
        "_class_name": "SanaTransformer2DModel",
        "in_channels": sizes["c"],
        "out_channels": sizes["o"] // patch**2,
        "num_layers": depth,
        "cross_attention_dim": width,
        "caption_channels": sizes["t"],
        "mlp_ratio": mlp_ratio(sizes["f"], width),
        "patch_size": patch,
        "qk_norm": "rms_norm_across_heads" if qk_norm else None,
        "attention_bias": False,
        "norm_elementwise_affine": False,
        "guidance_embeds": False,
    }
    if base is not None:
        cross = base.num_cross_attention_heads * base.cross_attention_head_dim
        if (base.width, cross) != (width, width):
            raise ValueError(f"has width {width}, but the base has {base.width}, and {cross} in its attention to the text")
    elif width not in CROSS_HEADS:
        known = ", ".join(map(str, CROSS_HEADS))
        raise ValueError(f"has width {width}; shapes do not tell the number of heads (known: {known}), but a base does: --base")
    elif positions:
        raise ValueError(f"{POSITIONS} is not zero: the network may add positions. Only a base tells their scale: --base")
    else:
        side = math.isqrt(grid[1]) * patch if grid and len(grid) == 3 else SanaConfig.sample_size
        heads, cross_heads = width // HEAD, CROSS_HEADS[width]
        base = SanaConfig(
            num_attention_heads=heads, attention_head_dim=HEAD, num_cross_attention_heads=cross_heads,
            cross_attention_head_dim=width // cross_heads, sample_size=side)  # fmt: skip
    names = ("num_attention_heads", "attention_head_dim", "num_cross_attention_heads", "cross_attention_head_dim",
             "sample_size", "norm_eps", "interpolation_scale", "timestep_scale")  # fmt: skip
    return told | {name: getattr(base, name) for name in names}
