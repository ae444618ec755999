"""SANA's own checkpoint layout (`SanaMS` and `SanaMSLinearFFN` of its authors' code) as diffusers': a table of names.

The two hold the same numbers. The authors have q, k, v of the attention to itself in one tensor, k, v of that to the text in
another, and, where the MLP is of the linear kind (products in FP4 instead of 1x1 convolutions), two weights without the unit
axes of a convolution. No tensor is opened here: what goes where follows from names and shapes.
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
    """A native tensor, the tensors of diffusers that its rows make in equal parts, and its shape in the letters below.

    d: width; f: hidden width of the MLP; t: width of the text; c: channels of the latent; p: patch; o: `p * p *` channels out.
    """

    native: str
    targets: str
    shape: str
    unit: str = ""  # axes of one that the targets have and the native tensor lacks


OUTER = (
    Row("x_embedder.proj.weight", "patch_embed.proj.weight", "d c p p"),
    Row("x_embedder.proj.bias", "patch_embed.proj.bias", "d"),
    Row("y_embedder.y_proj.fc1.weight", "caption_projection.linear_1.weight", "d t"),
    Row("y_embedder.y_proj.fc1.bias", "caption_projection.linear_1.bias", "d"),
    Row("y_embedder.y_proj.fc2.weight", "caption_projection.linear_2.weight", "d d"),
    Row("y_embedder.y_proj.fc2.bias", "caption_projection.linear_2.bias", "d"),
    Row("attention_y_norm.weight", "caption_norm.weight", "d"),
    Row("t_embedder.mlp.0.weight", "time_embed.emb.timestep_embedder.linear_1.weight", "d 256"),
    Row("t_embedder.mlp.0.bias", "time_embed.emb.timestep_embedder.linear_1.bias", "d"),
    Row("t_embedder.mlp.2.weight", "time_embed.emb.timestep_embedder.linear_2.weight", "d d"),
    Row("t_embedder.mlp.2.bias", "time_embed.emb.timestep_embedder.linear_2.bias", "d"),
    Row("t_block.1.weight", "time_embed.linear.weight", "6d d"),
    Row("t_block.1.bias", "time_embed.linear.bias", "6d"),
    Row("final_layer.linear.weight", "proj_out.weight", "o d"),
    Row("final_layer.linear.bias", "proj_out.bias", "o"),
    Row("final_layer.scale_shift_table", "scale_shift_table", "2 d"),
)
# below `blocks.N` there, below `transformer_blocks.N` here
BLOCK = (
    Row("scale_shift_table", "scale_shift_table", "6 d"),
    Row("attn.qkv.weight", "attn1.to_q.weight attn1.to_k.weight attn1.to_v.weight", "3d d"),
    Row("attn.proj.weight", "attn1.to_out.0.weight", "d d"),
    Row("attn.proj.bias", "attn1.to_out.0.bias", "d"),
    Row("cross_attn.q_linear.weight", "attn2.to_q.weight", "d d"),
    Row("cross_attn.q_linear.bias", "attn2.to_q.bias", "d"),
    Row("cross_attn.kv_linear.weight", "attn2.to_k.weight attn2.to_v.weight", "2d d"),
    Row("cross_attn.kv_linear.bias", "attn2.to_k.bias attn2.to_v.bias", "2d"),
    Row("cross_attn.proj.weight", "attn2.to_out.0.weight", "d d"),
    Row("cross_attn.proj.bias", "attn2.to_out.0.bias", "d"),
    Row("mlp.depth_conv.conv.weight", "ff.conv_depth.weight", "2f 1 3 3"),
    Row("mlp.depth_conv.conv.bias", "ff.conv_depth.bias", "2f"),
)
FFN = {
    "conv": (
        Row("mlp.inverted_conv.conv.weight", "ff.conv_inverted.weight", "2f d 1 1"),
        Row("mlp.inverted_conv.conv.bias", "ff.conv_inverted.bias", "2f"),
        Row("mlp.point_conv.conv.weight", "ff.conv_point.weight", "d f 1 1"),
    ),
    "linear": (
        Row("mlp.inverted_conv.linear.weight", "ff.conv_inverted.weight", "2f d", "1 1"),
        Row("mlp.inverted_conv.linear.bias", "ff.conv_inverted.bias", "2f"),
        Row("mlp.point_conv.linear.weight", "ff.conv_point.weight", "d f", "1 1"),
    ),
}
QK_NORM = (
    Row("attn.q_norm.weight", "attn1.norm_q.weight", "d"),
    Row("attn.k_norm.weight", "attn1.norm_k.weight", "d"),
    Row("cross_attn.q_norm.weight", "attn2.norm_q.weight", "d"),
    Row("cross_attn.k_norm.weight", "attn2.norm_k.weight", "d"),
)

# Positions, which are a formula, and the text of no prompt, which the pipeline encodes instead.
POSITIONS = "pos_embed"
IGNORED = (POSITIONS, "y_embedder.y_embedding")

HEAD = 32  # width of a head of the linear attention, in every network of the authors
# heads of the attention to the text, by width: those of the authors' networks of 1.6B (also 4.8B) and 0.6B parameters
CROSS_HEADS = {2240: 20, 1152: 16}


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of diffusers: the rows `start` to `stop` of the native tensor `source`, in the shape it has there."""

    name: str
    source: str
    start: int
    stop: int
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """A native checkpoint as a component of diffusers."""

    config: dict[str, Any]  # its config.json
    parts: tuple[Part, ...]
    ffn: str  # a key of FFN
    ignored: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


def is_native(names: Iterable[str]) -> bool:
    """Whether these are names of a SANA checkpoint of the authors': nothing else has this MLP in such blocks."""
    return any(re.match(r"blocks\.\d+\.mlp\.(inverted|depth|point)_conv\.", name) for name in names)


def plan(shapes: Mapping[str, Shape], base: SanaConfig | None = None, positions: bool = False) -> Plan:
    """What each tensor of diffusers is made of, and the config.json, from the native tensors' names and shapes.

    base: the config of a released transformer of the same kind, for what shapes cannot tell; positions: whether `pos_embed` is
    there and not all zeros. Raises ValueError listing every tensor that is missing, unexpected or mis-shaped, or saying what
    only a base can tell.
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
    """The ratio r for which `int(r * width)`, the formula of every reader of a config, is `hidden`, and no less by rounding."""
    ratio = hidden / width
    while int(ratio * width) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _rows(depth: int, ffn: str, qk_norm: bool) -> list[Row]:
    """The whole table of a network, names in full."""
    rows = list(OUTER)
    for i in range(depth):
        for row in (*BLOCK, *FFN[ffn], *(QK_NORM if qk_norm else ())):
            targets = " ".join(f"transformer_blocks.{i}.{name}" for name in row.targets.split())
            rows.append(row._replace(native=f"blocks.{i}.{row.native}", targets=targets))
    return rows


def _axes(shape: str) -> list[tuple[int, str]]:
    """Each axis as (factor, letter), letter empty for a plain number: "6d 3" is [(6, "d"), (3, "")]."""
    parts = [re.fullmatch(r"(\d*)([a-z]?)", axis) for axis in shape.split()]
    return [(int(part[1] or 1), part[2]) for part in parts if part]


def _sizes(rows: Iterable[Row], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """What each letter stands for in most tensors, so that one wrong tensor is told from all the others."""
    votes: dict[str, Counter[int]] = {}
    for row in rows:
        axes, shape = _axes(row.shape), shapes.get(row.native, ())
        for (factor, letter), size in zip(axes, shape, strict=False) if len(axes) == len(shape) else ():
            if letter and size % factor == 0:
                votes.setdefault(letter, Counter())[size // factor] += 1
    return {letter: counter.most_common(1)[0][0] for letter, counter in votes.items()}


def _shape(axes: str, sizes: Mapping[str, int]) -> Shape | str:
    """The shape in numbers, or as it stands if a letter of it is in no tensor."""
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
    """The fields of diffusers' config.json. grid: the shape of `pos_embed`, [1, patches of the training size, d]."""
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
            raise ValueError(f"of width {width}, but the base's transformer is of {base.width}, across to the text of {cross}")
        names = ("num_attention_heads", "attention_head_dim", "num_cross_attention_heads", "cross_attention_head_dim",
                 "sample_size", "norm_eps", "interpolation_scale", "timestep_scale")  # fmt: skip
        return told | {name: getattr(base, name) for name in names}
    if width not in CROSS_HEADS:
        known = ", ".join(map(str, CROSS_HEADS))
        raise ValueError(f"of width {width}, whose number of heads shapes do not tell (known are {known}); a base can: --base")
    if positions:
        raise ValueError(f"{POSITIONS} is not zero: the network may add positions, on a scale that only a base tells: --base")
    side = math.isqrt(grid[1]) * patch if grid and len(grid) == 3 else SanaConfig.sample_size
    return told | {
        "num_attention_heads": width // HEAD,
        "attention_head_dim": HEAD,
        "num_cross_attention_heads": CROSS_HEADS[width],
        "cross_attention_head_dim": width // CROSS_HEADS[width],
        "sample_size": side,
        "norm_eps": SanaConfig.norm_eps,
        "interpolation_scale": None,
        "timestep_scale": SanaConfig.timestep_scale,
    }
