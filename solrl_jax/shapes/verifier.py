"""A verifier of the embedded world's pictures, in pure JAX: how well does a picture show what its caption asks?

    pixels -> coverage by a palette colour -> connected components -> colour, shape, size, place -> score and strict verdict

The score is continuous in the pixels: candidates of one prompt are ranked by it, and ties would waste information. Every
picture is judged alone; nothing is reduced over the batch, so the batch axis may be sharded at will.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.shapes import scenes

# Displacement of each colour from the background, RGB in [0, 1]: a pixel covered to a share a lies at a times this.
_BACKGROUND = np.asarray(scenes.BACKGROUND, np.float32) / 255
_TINTS = np.asarray([scenes.PALETTE[c] for c in scenes.COLOURS], np.float32) / 255 - _BACKGROUND

_KEPT = 8  # components looked at, the largest; a right picture has four at most
# Rounds of label propagation: ragged blobs settle in two or three, nearly all random percolation clusters in four. A stain so
# contorted that it stays in pieces is no shape either way.
_ROUNDS = 4
_NEIGHBOURS = ((-1, 0), (1, 0), (0, -1), (0, 1))
# Areas in pixels of a picture 32 wide; the smallest shape, a small triangle, has 18.
_LEAST_AREA = 8.0
_SIZE_EDGE = (max(scenes.DIAMETERS["small"]) + min(scenes.DIAMETERS["large"])) / 2
# Intersection over union with an ideal shape: (worst, best) of the soft ramp, and the least a strict verdict takes. Right
# shapes reach 0.95 clean and 0.8 blurred; the next best shape stays 0.12 behind, blurred 0.02.
_FIT = (0.5, 0.8)
_FIT_STRICT = 0.6
_FIT_SCALE = 0.02
_EDGES = (1.0, 1.7, 2.4)  # widths of an edge in pixels, as drawn and under a Gaussian blur of 0.6; the better fit counts
# Distance of a component's colour from the palette's, RGB in [0, 1]. The palette's own distances are 0.6 and above.
_HUE = (0.45, 0.15)
_HUE_STRICT = 0.3
_HUE_SCALE = 0.18
_PEAK = (0.45, 0.8)  # cover of an object's most covered pixel: a pale object is not of its colour
_PEAK_STRICT = 0.6
# Weights of the score's terms; the relation's goes to the others where none is asked.
_WEIGHTS = {"objects": 0.4, "colours": 0.12, "shapes": 0.12, "relation": 0.26, "alone": 0.1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What N captions ask for, two groups each: indices into scenes.COLOURS, SHAPES, SIZES, RELATIONS.

    A group whose count is 0 is absent. Size -1: any; relation -1: none.
    """

    count: Int[Array, "n 2"]
    colour: Int[Array, "n 2"]
    shape: Int[Array, "n 2"]
    size: Int[Array, "n 2"]
    relation: Int[Array, " n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """`score` in [0, 1] is soft; `strict` is true when the picture shows exactly what was asked and nothing else."""

    score: Float[Array, " n"]
    strict: Bool[Array, " n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Things:
    """The objects of n pictures as the strict verdict names them, at most k a picture, the largest first.

    colour, shape, size: indices into scenes.COLOURS, SHAPES, SIZES; -1 where none is clear, and where there is no object.
    centre (x, y), diameter: of the bounding box, a square, in pixels of a picture 32 wide.
    """

    colour: Int[Array, "n k"]
    shape: Int[Array, "n k"]
    size: Int[Array, "n k"]
    centre: Float[Array, "n k 2"]
    diameter: Float[Array, "n k"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Objects:
    """The components of one picture, largest first. Lengths in pixels of a picture 32 wide."""

    area: Float[Array, " k"]  # hard: pixels covered by more than half
    present: Float[Array, " k"]  # soft, in [0, 1]
    hue: Float[Array, "k colours"]  # soft membership of each colour, in [0, 1]
    hue_gap: Float[Array, "k colours"]  # RGB distance
    peak: Float[Array, " k"]  # cover of the most covered pixel
    fit: Float[Array, "k shapes"]  # intersection over union with the ideal shape
    shape: Float[Array, "k shapes"]  # soft membership of each shape, in [0, 1]
    diameter: Float[Array, " k"]  # width of the bounding box
    centre: Float[Array, "k 2"]  # (x, y) of the bounding box
    specks: Float[Array, ""]  # area of all that is too small or too many to be looked at


def targets(prompts: Sequence[str]) -> Targets:
    """What the captions ask for. Raises ValueError for one that is not of this world."""
    parsed = [scenes.parse(prompt) for prompt in prompts]
    rows = np.zeros((4, len(parsed), 2), np.int32)
    for i, scene in enumerate(parsed):
        for j, group in enumerate(scene.groups):
            sized = -1 if group.size is None else scenes.SIZES.index(group.size)
            rows[:, i, j] = group.count, scenes.COLOURS.index(group.colour), scenes.SHAPES.index(group.shape), sized
    relation = [-1 if s.relation is None else scenes.RELATIONS.index(s.relation) for s in parsed]
    count, colour, shape, size = map(jnp.asarray, rows)
    return Targets(count, colour, shape, size, jnp.asarray(relation, jnp.int32))


@jax.jit
def verify(images: Float[Array, "n h w 3"], targets: Targets) -> Verdict:
    """Judges pictures (RGB in [0, 1], square) one by one against what their captions ask."""

    def one(image: Float[Array, "h w 3"], target: Targets) -> Verdict:
        objects = _observe(image.astype(jnp.float32))
        return Verdict(_score(objects, target), _strict(objects, target))

    return jax.vmap(one)(images, targets)


@jax.jit
def find(images: Float[Array, "n h w 3"]) -> Things:
    """What pictures (RGB in [0, 1], square) show, whatever was asked."""

    def one(image: Float[Array, "h w 3"]) -> Things:
        found = _observe(image.astype(jnp.float32))
        colour, shape, size = jnp.where(found.area >= _LEAST_AREA, jnp.stack(_named(found)), -1)
        return Things(colour, shape, size, found.centre, found.diameter)

    return jax.vmap(one)(images)


def _observe(image: Float[Array, "h w 3"]) -> _Objects:
    """Finds a picture's components and describes them."""
    unit = image.shape[1] / scenes.BASE
    offset = [image[..., c] - _BACKGROUND[c] for c in range(3)]  # planes: a last axis of three would not vectorise
    kind = _classify(offset)
    labels = _label(kind)
    area, roots = _largest(labels, kind >= 0)
    solid = (labels == roots[:, None, None]) & (kind >= 0)
    # An object's soft mask: how far its colour covers its pixels and those around them, which its edge only grazes.
    reach = _dilate(solid) & (solid | (kind < 0))
    tint = jnp.asarray(_TINTS / np.sum(_TINTS**2, -1, keepdims=True))[jnp.maximum(kind.ravel()[roots], 0)]
    along = sum(offset[c] * tint[:, c, None, None] for c in range(3))
    mask = jnp.where(reach, jnp.clip(along, 0, 1), 0)
    mass = jnp.maximum(mask.sum((1, 2)), 1e-3)
    ticks = jnp.arange(image.shape[1]) + 0.5
    centroid = jnp.stack([(mask.sum(1) * ticks).sum(-1), (mask.sum(2) * ticks).sum(-1)], -1) / mass[:, None]
    # Least squares over the object's pixels: the colour at full cover, edges included.
    colour = [(mask * plane).sum((1, 2)) / jnp.maximum((mask**2).sum((1, 2)), 1e-3) for plane in offset]
    hue_gap = jnp.sqrt(jnp.sum((jnp.stack(colour, -1)[:, None] - _TINTS) ** 2, -1) + 1e-12)
    peak = mask.max((1, 2))
    hue = jax.nn.softmax(-0.5 * (hue_gap / _HUE_SCALE) ** 2, -1) * _ramp(hue_gap, *_HUE) * _ramp(peak, *_PEAK)[:, None]
    diameters = jnp.sqrt(mass[:, None] * jnp.asarray([4 / np.pi, 1.0, 2.0]))  # of a circle, square, triangle of that area
    fit = _fit(mask, centroid, diameters)
    share = jax.nn.softmax(fit / _FIT_SCALE, -1)
    diameter = (share * diameters).sum(-1)
    # A triangle's centroid lies a sixth of its height below the middle of its bounding box.
    centre = centroid - jnp.stack([jnp.zeros_like(diameter), share[:, 2] * diameter / 6], -1)
    return _Objects(
        area=area / unit**2,
        present=_ramp(mass / unit**2, 5.0, 12.0) * (area > 0),
        hue=hue,
        hue_gap=hue_gap,
        peak=peak,
        fit=fit,
        shape=share * _ramp(fit, *_FIT),
        diameter=diameter / unit,
        centre=centre / unit,
        specks=((kind >= 0).sum() - jnp.where(area >= _LEAST_AREA * unit**2, area, 0).sum()) / unit**2,
    )


def _classify(offset: list[Float[Array, "h w"]]) -> Int[Array, "h w"]:
    """The colour that covers most of each pixel, -1 where none covers half of it; `offset` from the background, by channel.

    A pixel belongs to the colour whose line to the background it lies closest to. Nearest colours would not do: halfway to the
    background, every edge comes close to some paler colour.
    """
    kind, cover, least = jnp.full(offset[0].shape, -1), jnp.zeros(offset[0].shape), jnp.full(offset[0].shape, jnp.inf)
    for i, tint in enumerate(_TINTS):
        power = float(np.sum(tint**2))
        along = sum(plane * float(t / power) for plane, t in zip(offset, tint, strict=True))
        on_line = jnp.clip(along, 0, 1.1)
        gap = power * on_line * (on_line - 2 * along)  # squared distance from the line, less the pixel's own square
        closer = gap < least
        kind, cover, least = jnp.where(closer, i, kind), jnp.where(closer, along, cover), jnp.where(closer, gap, least)
    return jnp.where(cover > 0.5, kind, -1)


def _label(kind: Int[Array, "h w"]) -> Int[Array, "h w"]:
    """Labels every 4-connected component of one kind by the largest flat index within it (-1, the background, included)."""
    labels = jnp.arange(kind.size).reshape(kind.shape)
    joined = [kind == _shift(kind, dy, dx, -2) for dy, dx in _NEIGHBOURS]
    for _ in range(_ROUNDS):
        best = labels
        for (dy, dx), same in zip(_NEIGHBOURS, joined, strict=True):
            best = jnp.maximum(best, jnp.where(same, _shift(best, dy, dx, 0), 0))
        # Hooking: what a pixel learns, the pixel it is named after learns too; else a ragged edge, whose every tooth is a
        # local maximum, would spread by one pixel a round. Then pointer jumping shortens the paths.
        flat = best.ravel().at[labels.ravel()].max(best.ravel())
        flat = flat[flat]
        labels = flat[flat].reshape(kind.shape)
    return labels


def _largest(labels: Int[Array, "h w"], covered: Bool[Array, "h w"]) -> tuple[Int[Array, " k"], Int[Array, " k"]]:
    """Areas in pixels (0: there is none) and labels of the largest components, largest first."""
    areas = jnp.zeros(labels.size, jnp.int32).at[labels.ravel()].add(covered.ravel().astype(jnp.int32))
    # Area and label in one number (31 bits hold it up to 215 x 215 pixels): a few maxima cost less than a general top_k.
    keys = areas * labels.size + jnp.arange(labels.size)
    tops = [keys.max()]
    for _ in range(_KEPT - 1):
        tops.append(jnp.where(keys < tops[-1], keys, 0).max())
    return jnp.divmod(jnp.stack(tops), labels.size)


def _shift(x: Array, dy: int, dx: int, fill: int) -> Array:
    """`x[..., i + dy, j + dx]`, `fill` beyond the edge; shifts of one pixel."""
    h, w = x.shape[-2:]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 1), (1, 1)], constant_values=fill)
    return padded[..., 1 + dy : 1 + dy + h, 1 + dx : 1 + dx + w]


def _dilate(mask: Bool[Array, "k h w"]) -> Bool[Array, "k h w"]:
    """The mask and the eight neighbours of each of its pixels."""
    rows = mask | _shift(mask, -1, 0, 0) | _shift(mask, 1, 0, 0)
    return rows | _shift(rows, 0, -1, 0) | _shift(rows, 0, 1, 0)


def _fit(
    mask: Float[Array, "k h w"], centroid: Float[Array, "k 2"], diameters: Float[Array, "k shapes"]
) -> Float[Array, "k shapes"]:
    """Soft intersection over union of each mask with the circle, square and triangle of its own area and centroid."""
    ticks = jnp.arange(mask.shape[1]) + 0.5
    x, y = (ticks - centroid[:, :1])[:, None, :], (ticks - centroid[:, 1:])[:, :, None]
    circle, square, triangle = (diameters[:, i, None, None] for i in range(3))
    radius = jnp.sqrt(x**2 + y**2 + 1e-12)
    depth = y + 2 * triangle / 3  # below the apex; the flanks fall two down for one across
    slope = 2 / np.sqrt(5)
    fits = []
    for width in _EDGES:
        ideals = [
            _cover(circle / 2 - radius, width),
            _cover(square / 2 - jnp.abs(x), width) * _cover(square / 2 - jnp.abs(y), width),
            _cover(slope * (depth / 2 - jnp.abs(x)), width) * _cover(triangle - depth, width),
        ]
        overlap = jnp.stack([jnp.minimum(mask, ideal).sum((1, 2)) for ideal in ideals], -1)
        union = jnp.stack([ideal.sum((1, 2)) for ideal in ideals], -1) + diameters[:, 1:2] ** 2 - overlap
        fits.append(overlap / jnp.maximum(union, 1e-3))
    return jnp.stack(fits).max(0)


def _cover(inside: Array, width: float) -> Array:
    """Coverage of a pixel whose centre lies `inside` pixels within a straight edge that is `width` pixels wide."""
    return jnp.clip(0.5 + inside / width, 0, 1)


def _ramp(x: Array, lo: float, hi: float) -> Array:
    """About 0 at `lo` and 1 at `hi`, and strictly rising throughout (falling where lo > hi)."""
    return jax.nn.sigmoid(8 * (x - (lo + hi) / 2) / (hi - lo))


def _score(found: _Objects, target: Targets) -> Float[Array, ""]:
    """The soft score of one picture, in [0, 1]; `target` without its batch axis."""
    asked = target.count > 0
    want = target.count.astype(jnp.float32)
    hue, shape = found.hue[:, target.colour], found.shape[:, target.shape]
    large = _ramp(found.diameter, _SIZE_EDGE - 1.2, _SIZE_EDGE + 1.2)[:, None]
    size = jnp.where(target.size < 0, 1.0, jnp.where(target.size == 1, large, 1 - large))
    match = found.present[:, None] * hue * shape * size * asked  # [k, 2]
    n_found, n_asked = match.sum(0), jnp.maximum(asked.sum(), 1)

    def tally(total: Array, wanted: Array) -> Array:
        hits = jnp.clip(1 - jnp.abs(wanted - total) / jnp.maximum(wanted, 1), 0, 1)
        return jnp.where(asked, hits, 0).sum() / n_asked

    # Two groups of one colour (shape) are asked for as one number of things of that colour (shape).
    alike_colour = jnp.where((target.colour[:, None] == target.colour) & asked, want, 0).sum(-1)
    alike_shape = jnp.where((target.shape[:, None] == target.shape) & asked, want, 0).sum(-1)
    shown = jnp.minimum(n_found / jnp.maximum(want, 1), 1)
    extra = jnp.maximum(found.present.sum() - n_found.sum(), 0) + found.specks / 20
    along, across = _displacement(match, found.centre, target.relation)
    related = 0.7 * jax.nn.sigmoid((along - across) / 0.5) + 0.3 * jax.nn.sigmoid((along - 1) / 2)
    terms = {
        "objects": tally(n_found, want),
        "colours": tally((found.present[:, None] * hue).sum(0), alike_colour),
        "shapes": tally((found.present[:, None] * shape).sum(0), alike_shape),
        "relation": related * shown[0] * shown[1],
        "alone": jnp.exp(-extra) * jnp.where(asked, shown, 0).sum() / n_asked,
    }
    weights = {name: jnp.where(target.relation < 0, 0, w) if name == "relation" else w for name, w in _WEIGHTS.items()}
    return jnp.clip(sum(terms[name] * weights[name] for name in terms) / sum(weights.values()), 0, 1)


def _strict(found: _Objects, target: Targets) -> Bool[Array, ""]:
    """The hard verdict on one picture; `target` without its batch axis."""
    counted = found.area >= _LEAST_AREA
    colour, shape, size = _named(found)
    member = counted[:, None] & (colour[:, None] == target.colour) & (shape[:, None] == target.shape)
    member &= ((target.size < 0) | (size[:, None] == target.size)) & (target.count > 0)
    exact = (member.sum(0) == target.count).all() & (counted.sum() == target.count.sum()) & (found.specks < _LEAST_AREA)
    along, across = _displacement(member.astype(jnp.float32), found.centre, target.relation)
    x, y = found.centre.T
    place = jnp.stack([y, -y, x, -x])[target.relation]  # grows from the first group to the second
    parted = jnp.where(member[:, 0], place, -jnp.inf).max() < jnp.where(member[:, 1], place, jnp.inf).min()
    return exact & ((target.relation < 0) | (along > across) & parted)


def _named(found: _Objects) -> tuple[Int[Array, " k"], Int[Array, " k"], Int[Array, " k"]]:
    """The colour, shape and size that the strict verdict gives each component: indices, -1 where none is clear."""
    coloured = (found.hue_gap.min(-1) < _HUE_STRICT) & (found.peak > _PEAK_STRICT)
    colour = jnp.where(coloured, jnp.argmin(found.hue_gap, -1), -1)
    shape = jnp.where(found.fit.max(-1) > _FIT_STRICT, jnp.argmax(found.fit, -1), -1)
    return colour, shape, (found.diameter > _SIZE_EDGE).astype(jnp.int32)


def _displacement(
    member: Float[Array, "k 2"], centre: Float[Array, "k 2"], relation: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How far the groups' middles lie apart along the relation's axis (positive: as asked) and across it (at least 0)."""
    # A sum, not a dot: accelerators round the operands of a float32 dot.
    middles = (member[:, :, None] * centre[:, None]).sum(0) / jnp.maximum(member.sum(0), 1e-3)[:, None]
    dx, dy = middles[1] - middles[0]
    along = jnp.stack([dy, -dy, dx, -dx])[relation]
    return along, jnp.where(relation < 2, jnp.abs(dx), jnp.abs(dy))
