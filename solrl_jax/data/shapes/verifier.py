"""A verifier of the embedded world's pictures, in pure JAX: how well does a picture show what its caption asks?

    pixels -> coverage by a palette colour -> connected components -> colour, shape, size, place -> score and strict verdict

The score is continuous in the pixels, because it ranks the candidates of a prompt: ties would waste information. Every picture
is judged by itself. Nothing is summed over the batch, so the batch axis may be sharded in any way.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.data.shapes import scenes

# Each colour minus the background, RGB in [0, 1]. A pixel that an object covers to a share differs by this share of the tint.
_BACKGROUND = np.asarray(scenes.BACKGROUND, np.float32) / 255
_TINTS = np.asarray([scenes.PALETTE[c] for c in scenes.COLOURS], np.float32) / 255 - _BACKGROUND

_KEPT = 8  # the largest components are looked at; a right picture has four at most
# Rounds of label propagation in a picture 32 wide, and one more for each doubling. Ragged blobs are labelled in two or three,
# nearly all random percolation clusters in four. A component that needs more stays in pieces, and matches no shape either way.
_ROUNDS = 4
_NEIGHBOURS = ((-1, 0), (1, 0), (0, -1), (0, 1))
# Areas are in pixels of a picture 32 wide. The smallest shape, a small triangle, has an area of 18.
_LEAST_AREA = 8.0
_SIZE_EDGE = (max(scenes.DIAMETERS["small"]) + min(scenes.DIAMETERS["large"])) / 2
# Intersection over union with an ideal shape: (worst, best) of the soft ramp, and the least that the strict verdict accepts.
# The right shape reaches 0.95, or 0.8 when blurred. The second best shape is 0.12 below it, or 0.02 when blurred.
_FIT = (0.5, 0.8)
_FIT_STRICT = 0.6
_FIT_SCALE = 0.02
_EDGES = (
    1.0,
    1.7,
    2.4,
)  # widths of an edge in pixels: as drawn, and for two Gaussian blurs; the best fit counts
# Distance of a component's colour from the palette's, RGB in [0, 1]. Two colours of the palette are at least 0.6 apart.
_HUE = (0.45, 0.15)
_HUE_STRICT = 0.3
_HUE_SCALE = 0.18
_PEAK = (0.45, 0.8)  # cover of an object's most covered pixel: a pale object is not of its colour
_PEAK_STRICT = 0.6
# Weights of the score's terms. Without a relation in the caption, the other terms share its weight.
_WEIGHTS = {"objects": 0.4, "colours": 0.12, "shapes": 0.12, "relation": 0.26, "alone": 0.1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What n captions ask for, two groups each; without the axis n, what one caption asks for.

    The values are indices into scenes.COLOURS, SHAPES, SIZES and RELATIONS. A group with count 0 is absent. Size -1 accepts any
    size. Relation -1 is no relation.
    """

    count: Int[Array, "*n 2"]
    colour: Int[Array, "*n 2"]
    shape: Int[Array, "*n 2"]
    size: Int[Array, "*n 2"]
    relation: Int[Array, "*n"]


class Verdict(NamedTuple):
    """score: partial credit in [0, 1]. strict: the picture shows exactly what the caption asks, and nothing else."""

    score: Float[Array, "*n"]
    strict: Bool[Array, "*n"]


class Things(NamedTuple):
    """The objects of n pictures as the strict verdict sees them, at most k in each picture, the largest first.

    colour, shape, size: indices into scenes.COLOURS, SHAPES and SIZES; -1 where none is clear, or where there is no object.
    centre (x, y), diameter: of the bounding box, which is a square, in pixels of a picture 32 wide.
    """

    colour: Int[Array, "*n k"]
    shape: Int[Array, "*n k"]
    size: Int[Array, "*n k"]
    centre: Float[Array, "*n k 2"]
    diameter: Float[Array, "*n k"]


class _Objects(NamedTuple):
    """The components of one picture, the largest first. Lengths are in pixels of a picture 32 wide."""

    area: Float[Array, " k"]  # number of pixels that are covered by more than half
    present: Float[Array, " k"]  # whether this is an object, soft, in [0, 1]
    hue: Float[Array, "k colours"]  # how far the component has each colour, soft, in [0, 1]
    hue_gap: Float[Array, "k colours"]  # RGB distance from each colour
    peak: Float[Array, " k"]  # cover of the most covered pixel
    fit: Float[Array, "k shapes"]  # intersection over union with the ideal shape
    shape: Float[Array, "k shapes"]  # how far the component has each shape, soft, in [0, 1]
    diameter: Float[Array, " k"]  # width of the bounding box
    centre: Float[Array, "k 2"]  # (x, y) of the bounding box
    specks: Float[Array, ""]  # area of the components that are too small, or beyond the first _KEPT


def targets(prompts: Sequence[str]) -> Targets:
    """Reads what the captions ask for. Raises ValueError for a caption that does not follow the grammar of `scenes`."""
    parsed = [scenes.parse(prompt) for prompt in prompts]
    rows = np.zeros((4, len(parsed), 2), np.int32)
    for i, scene in enumerate(parsed):
        for j, group in enumerate(scene.groups):
            sized = -1 if group.size is None else scenes.SIZES.index(group.size)
            rows[:, i, j] = (
                group.count,
                scenes.COLOURS.index(group.colour),
                scenes.SHAPES.index(group.shape),
                sized,
            )
    relation = [-1 if s.relation is None else scenes.RELATIONS.index(s.relation) for s in parsed]
    count, colour, shape, size = map(jnp.asarray, rows)
    return Targets(count, colour, shape, size, jnp.asarray(relation, jnp.int32))


@jax.jit
def verify(images: Float[Array, "n h w 3"], targets: Targets) -> Verdict:
    """Judges each picture against what its caption asks. images: RGB in [0, 1]."""

    def one(image: Float[Array, "h w 3"], target: Targets) -> Verdict:
        objects = _observe(image.astype(jnp.float32))
        return Verdict(_score(objects, target), _strict(objects, target))

    return jax.vmap(one)(images, targets)


@jax.jit
def find(images: Float[Array, "n h w 3"]) -> Things:
    """Finds the objects in pictures, whatever their captions ask. images: RGB in [0, 1]."""

    def one(image: Float[Array, "h w 3"]) -> Things:
        found = _observe(image.astype(jnp.float32))
        colour, shape, size = jnp.where(found.area >= _LEAST_AREA, jnp.stack(_named(found)), -1)
        return Things(colour, shape, size, found.centre, found.diameter)

    return jax.vmap(one)(images)


def _observe(image: Float[Array, "h w 3"]) -> _Objects:
    """Finds the components of a picture and measures them, in units of a square 32 wide that has the picture's area."""
    unit = math.sqrt(image.shape[0] * image.shape[1]) / scenes.BASE
    offset = [
        image[..., c] - _BACKGROUND[c] for c in range(3)
    ]  # one plane a channel: a last axis of three is slow
    kind = _classify(offset)
    labels = _label(kind)
    area, roots = _largest(labels, kind >= 0)
    solid = (labels == roots[:, None, None]) & (kind >= 0)
    # The soft mask of an object: how much its colour covers its pixels and the pixels around them, at its edge.
    reach = _dilate(solid) & (solid | (kind < 0))
    tint = jnp.asarray(_TINTS / np.sum(_TINTS**2, -1, keepdims=True))[
        jnp.maximum(kind.ravel()[roots], 0)
    ]
    along = sum(offset[c] * tint[:, c, None, None] for c in range(3))
    mask = jnp.where(reach, jnp.clip(along, 0, 1), 0)
    mass = jnp.maximum(mask.sum((1, 2)), 1e-3)
    ys, xs = (jnp.arange(side) + 0.5 for side in image.shape[:2])
    centroid = (
        jnp.stack([(mask.sum(1) * xs).sum(-1), (mask.sum(2) * ys).sum(-1)], -1) / mass[:, None]
    )
    # Least squares over the object's pixels gives the colour at full cover. Pixels at the edge are used too.
    colour = [
        (mask * plane).sum((1, 2)) / jnp.maximum((mask**2).sum((1, 2)), 1e-3) for plane in offset
    ]
    hue_gap = jnp.sqrt(jnp.sum((jnp.stack(colour, -1)[:, None] - _TINTS) ** 2, -1) + 1e-12)
    peak = mask.max((1, 2))
    hue = (
        jax.nn.softmax(-0.5 * (hue_gap / _HUE_SCALE) ** 2, -1)
        * _ramp(hue_gap, *_HUE)
        * _ramp(peak, *_PEAK)[:, None]
    )
    diameters = jnp.sqrt(
        mass[:, None] * jnp.asarray([4 / np.pi, 1.0, 2.0])
    )  # of the circle, square, triangle of this area
    fit = _fit(mask, centroid, diameters)
    share = jax.nn.softmax(fit / _FIT_SCALE, -1)
    diameter = (share * diameters).sum(-1)
    # The centroid of a triangle is a sixth of its height below the middle of its bounding box.
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
        specks=((kind >= 0).sum() - jnp.where(area >= _LEAST_AREA * unit**2, area, 0).sum())
        / unit**2,
    )


def _classify(offset: list[Float[Array, "h w"]]) -> Int[Array, "h w"]:
    """The colour of each pixel: the one whose line to the background is nearest; -1 where it covers less than half the pixel.

    offset: the picture minus the background, one plane a channel. The nearest colour would be wrong: a pixel at an edge is a
    mixture with the background, which is close to some paler colour.
    """
    kind = jnp.full(offset[0].shape, -1)
    cover = jnp.zeros(offset[0].shape)
    least = jnp.full(offset[0].shape, jnp.inf)
    for i, tint in enumerate(_TINTS):
        power = float(np.sum(tint**2))
        along = sum(plane * float(t / power) for plane, t in zip(offset, tint, strict=True))
        on_line = jnp.clip(along, 0, 1.1)
        gap = (
            power * on_line * (on_line - 2 * along)
        )  # squared distance from the line, less the pixel's own square
        closer = gap < least
        kind = jnp.where(closer, i, kind)
        cover = jnp.where(closer, along, cover)
        least = jnp.where(closer, gap, least)
    return jnp.where(cover > 0.5, kind, -1)


def _label(kind: Int[Array, "h w"]) -> Int[Array, "h w"]:
    """Labels each 4-connected component of equal `kind` by its largest flat index. The background, -1, is labelled too."""
    labels = jnp.arange(kind.size).reshape(kind.shape)
    joined = [kind == _shift(kind, dy, dx, -2) for dy, dx in _NEIGHBOURS]
    for _ in range(_ROUNDS + max(0, math.ceil(math.log2(max(kind.shape) / scenes.BASE)))):
        best = labels
        for (dy, dx), same in zip(_NEIGHBOURS, joined, strict=True):
            best = jnp.maximum(best, jnp.where(same, _shift(best, dy, dx, 0), 0))
        # Hooking: when a pixel gets a larger label, so does the pixel that its old label names. Otherwise labels would move
        # by one pixel a round along a ragged edge, where every tooth is a local maximum. Pointer jumping then shortens paths.
        flat = best.ravel().at[labels.ravel()].max(best.ravel())
        flat = flat[flat]
        labels = flat[flat].reshape(kind.shape)
    return labels


def _largest(
    labels: Int[Array, "h w"], covered: Bool[Array, "h w"]
) -> tuple[Int[Array, " k"], Int[Array, " k"]]:
    """Areas in pixels and labels of the largest components, the largest first. Area 0: there are no more components."""
    left = (
        jnp.zeros(labels.size, jnp.int32).at[labels.ravel()].add(covered.ravel().astype(jnp.int32))
    )
    index = jnp.arange(labels.size)
    areas = []
    roots = []
    for _ in range(_KEPT):  # a few maxima cost less than a general top_k
        areas.append(left.max())
        roots.append(jnp.where(left == areas[-1], index, 0).max())  # of equal ones the last
        left = jnp.where(index == roots[-1], -1, left)
    return jnp.stack(areas), jnp.stack(roots)


def _shift(x: Array, dy: int, dx: int, fill: int) -> Array:
    """`x[..., i + dy, j + dx]` for dy and dx of at most one pixel, with `fill` beyond the edge."""
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
    """Soft intersection over union of each mask with the circle, square and triangle of the same area and centroid."""
    ys, xs = (jnp.arange(side) + 0.5 for side in mask.shape[1:])
    x = (xs - centroid[:, :1])[:, None, :]
    y = (ys - centroid[:, 1:])[:, :, None]
    circle, square, triangle = (diameters[:, i, None, None] for i in range(3))
    radius = jnp.sqrt(x**2 + y**2 + 1e-12)
    depth = (
        y + 2 * triangle / 3
    )  # distance below the apex; the flanks fall by two pixels for each pixel across
    slope = 2 / np.sqrt(5)
    fits = []
    for width in _EDGES:
        ideals = [
            _cover(circle / 2 - radius, width),
            _cover(square / 2 - jnp.abs(x), width) * _cover(square / 2 - jnp.abs(y), width),
            _cover(slope * (depth / 2 - jnp.abs(x)), width) * _cover(triangle - depth, width),
        ]
        overlap = jnp.stack([jnp.minimum(mask, ideal).sum((1, 2)) for ideal in ideals], -1)
        union = (
            jnp.stack([ideal.sum((1, 2)) for ideal in ideals], -1)
            + diameters[:, 1:2] ** 2
            - overlap
        )
        fits.append(overlap / jnp.maximum(union, 1e-3))
    return jnp.stack(fits).max(0)


def _cover(inside: Array, width: float) -> Array:
    """Cover of a pixel whose centre is `inside` pixels within a straight edge that is `width` pixels wide."""
    return jnp.clip(0.5 + inside / width, 0, 1)


def _ramp(x: Array, lo: float, hi: float) -> Array:
    """About 0 at `lo` and 1 at `hi`, strictly rising everywhere (strictly falling where lo > hi)."""
    return jax.nn.sigmoid(8 * (x - (lo + hi) / 2) / (hi - lo))


def _score(found: _Objects, target: Targets) -> Float[Array, ""]:
    """The soft score of one picture, in [0, 1]. `target` has no batch axis."""
    asked = target.count > 0
    want = target.count.astype(jnp.float32)
    hue = found.hue[:, target.colour]
    shape = found.shape[:, target.shape]
    large = _ramp(found.diameter, _SIZE_EDGE - 1.2, _SIZE_EDGE + 1.2)[:, None]
    size = jnp.where(target.size < 0, 1.0, jnp.where(target.size == 1, large, 1 - large))
    match = found.present[:, None] * hue * shape * size * asked  # [k, 2]
    n_found = match.sum(0)
    n_asked = jnp.maximum(asked.sum(), 1)

    def tally(total: Array, wanted: Array) -> Array:
        hits = jnp.clip(1 - jnp.abs(wanted - total) / jnp.maximum(wanted, 1), 0, 1)
        return jnp.where(asked, hits, 0).sum() / n_asked

    # Two groups of the same colour ask for their sum of objects of this colour. The same holds for shapes.
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
    weights = {
        name: jnp.where(target.relation < 0, 0, w) if name == "relation" else w
        for name, w in _WEIGHTS.items()
    }
    return jnp.clip(
        sum(terms[name] * weights[name] for name in terms) / sum(weights.values()), 0, 1
    )


def _strict(found: _Objects, target: Targets) -> Bool[Array, ""]:
    """The strict verdict on one picture. `target` has no batch axis."""
    counted = found.area >= _LEAST_AREA
    colour, shape, size = _named(found)
    member = (
        counted[:, None] & (colour[:, None] == target.colour) & (shape[:, None] == target.shape)
    )
    member &= ((target.size < 0) | (size[:, None] == target.size)) & (target.count > 0)
    exact = (
        (member.sum(0) == target.count).all()
        & (counted.sum() == target.count.sum())
        & (found.specks < _LEAST_AREA)
    )
    along, across = _displacement(member.astype(jnp.float32), found.centre, target.relation)
    x, y = found.centre.T
    place = jnp.stack([y, -y, x, -x])[target.relation]  # grows from the first group to the second
    parted = (
        jnp.where(member[:, 0], place, -jnp.inf).max()
        < jnp.where(member[:, 1], place, jnp.inf).min()
    )
    return exact & ((target.relation < 0) | (along > across) & parted)


def _named(found: _Objects) -> tuple[Int[Array, " k"], Int[Array, " k"], Int[Array, " k"]]:
    """Indices of the colour, shape and size that the strict verdict gives each component; -1 where none is clear."""
    coloured = (found.hue_gap.min(-1) < _HUE_STRICT) & (found.peak > _PEAK_STRICT)
    colour = jnp.where(coloured, jnp.argmin(found.hue_gap, -1), -1)
    shape = jnp.where(found.fit.max(-1) > _FIT_STRICT, jnp.argmax(found.fit, -1), -1)
    return colour, shape, (found.diameter > _SIZE_EDGE).astype(jnp.int32)


def _displacement(
    member: Float[Array, "k 2"], centre: Float[Array, "k 2"], relation: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The distance of the groups' middles along the relation's axis (positive: as asked) and across it (at least 0)."""
    # a sum instead of a dot: accelerators round the operands of a float32 dot
    middles = (member[:, :, None] * centre[:, None]).sum(0) / jnp.maximum(member.sum(0), 1e-3)[
        :, None
    ]
    dx, dy = middles[1] - middles[0]
    along = jnp.stack([dy, -dy, dx, -dx])[relation]
    return along, jnp.where(relation < 2, jnp.abs(dx), jnp.abs(dy))
