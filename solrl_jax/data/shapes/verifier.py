"""The verifier of the embedded world: how well does an image show what its caption asks for?

    pixels -> cover by a palette color -> connected components
           -> color, shape, size and position of each -> score and strict verdict

The score is continuous in the pixels, because it ranks the candidates of a prompt and ties would
waste information. Every image is judged by itself; nothing is summed over the batch, so the batch
axis may be sharded in any way.

"Cover" is the share of a pixel that an object covers, in [0, 1]. A "component" is a connected set
of pixels of one color.
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
from solrl_jax.data.shapes.components import dilate, label_components, largest_components

# RGB in [0, 1]. A tint is a color minus the background; a pixel with cover c differs from the
# background by c times the tint.
_BACKGROUND = np.asarray(scenes.BACKGROUND, np.float32) / 255
_PALETTE = np.asarray([scenes.PALETTE[color] for color in scenes.COLORS], np.float32) / 255
_TINTS = _PALETTE - _BACKGROUND

# The largest components of an image that are measured. A correct image has at most four.
_NUM_COMPONENTS = 8
# Smallest area of an object, in pixels of an image 32 wide. The smallest object, a small triangle,
# has an area of 18.
MIN_AREA = 8.0
# Diameter that separates small from large objects, in pixels of an image 32 wide.
_SIZE_THRESHOLD = (max(scenes.DIAMETERS["small"]) + min(scenes.DIAMETERS["large"])) / 2
# Intersection over union with an ideal shape: the ends of the soft ramp, the threshold of the
# strict verdict, and the temperature of the choice among shapes. The right shape reaches 0.95, or
# 0.8 if blurred; the second best is 0.12 below it, or 0.02.
_IOU_RAMP = (0.5, 0.8)
_IOU_STRICT = 0.6
_IOU_TEMPERATURE = 0.02
_EDGE_WIDTHS = (1.0, 1.7, 2.4)  # of ideal shapes, in pixels: sharp, and after two Gaussian blurs
# RGB distance of a component's color from a color of the palette. Two colors of the palette are
# at least 0.6 apart.
_COLOR_RAMP = (0.45, 0.15)
_COLOR_STRICT = 0.3
_COLOR_SCALE = 0.18
# Cover of an object's most covered pixel: a pale object does not have its color.
_PEAK_RAMP = (0.45, 0.8)
_PEAK_STRICT = 0.6
# Weights of the terms of the score. For captions without a relation, the other terms share its
# weight.
_WEIGHTS = {"objects": 0.4, "colors": 0.12, "shapes": 0.12, "relation": 0.26, "alone": 0.1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """The objects that n captions ask for, as indices. Without the axis n: those of one caption.

    The axis of length 2 is for the two groups of a caption. A group with count 0 is absent, and its
    other indices are 0. All arrays are int32. It is a pytree.

    Attributes:
        count: The number of objects, 0 to 3.
        color: Index into `scenes.COLORS`.
        shape: Index into `scenes.SHAPES`.
        size: Index into `scenes.SIZES`; -1 accepts any size.
        relation: Index into `scenes.RELATIONS`; -1 for captions with one group.
    """

    count: Int[Array, "*n 2"]
    color: Int[Array, "*n 2"]
    shape: Int[Array, "*n 2"]
    size: Int[Array, "*n 2"]
    relation: Int[Array, "*n"]


class Verdict(NamedTuple):
    """The judgment of n images, or of one image without the axis n.

    Attributes:
        score: Partial credit in [0, 1], float32.
        strict: Whether the image shows exactly the objects that the caption asks for, in the
            relation that it asks for, and nothing else.
    """

    score: Float[Array, "*n"]
    strict: Bool[Array, "*n"]


class Detections(NamedTuple):
    """The objects that were detected in n images.

    The k = 8 entries of an image are its largest components (connected sets of pixels of one
    color), the largest first. Lengths are scaled as if the image had the area 32 x 32 pixels,
    whatever its size. A component of fewer than 8 such pixels is no object: its color, shape and
    size are -1, and its center and diameter have no meaning.

    Attributes:
        color: Index into `scenes.COLORS`; -1 also for an object without a clear color.
        shape: Index into `scenes.SHAPES`; -1 also for an object without a clear shape.
        size: Index into `scenes.SIZES`.
        center: (x, y) of the center of the bounding box in scaled pixels, with y growing downwards.
            This box is the square around an ideal shape of the component's area, not around its
            pixels.
        diameter: Side of the bounding box in scaled pixels.
    """

    color: Int[Array, "*n k"]
    shape: Int[Array, "*n k"]
    size: Int[Array, "*n k"]
    center: Float[Array, "*n k 2"]
    diameter: Float[Array, "*n k"]


class Components(NamedTuple):
    """Measurements of the k = 8 largest components of one image, the largest `area` first.

    A component is a connected set of pixels of one color. Its cover of a pixel, in [0, 1], is the
    share of the pixel that it fills, seen from the pixel's mixture of the color and the
    background. Lengths and areas are scaled as if the image had the area 32 x 32 pixels. Where the
    image has fewer components, `area` is 0 or less, `present` is 0, and the other entries have no
    meaning.

    Attributes:
        area: The number of pixels with a cover above one half.
        present: Whether the component is large enough to be an object, in [0, 1]: a sigmoid of the
            sum of its cover, 0.018 at 5 pixels and 0.982 at 12.
        color: Whether the component has each color of `scenes.COLORS`, soft, in [0, 1].
        color_distance: Distance of the component's color at full cover, fitted to all of its
            pixels, from each color, in RGB with channels in [0, 1].
        peak: Cover of the most covered pixel, in [0, 1].
        iou: Intersection over union with an ideal circle, square and triangle (`scenes.SHAPES`).
        shape: Whether the component has each shape, soft, in [0, 1].
        diameter: Side of the bounding box, a square around the ideal shape of the component's area.
        center: (x, y) of the center of the bounding box, with y growing downwards.
        centroid: (x, y) of the centroid of the pixels, weighted by cover. It depends on no choice
            of a shape.
        specks: Area of all components that are no objects: those of fewer than 8 pixels, and those
            that are not among the k largest.
    """

    area: Float[Array, " k"]
    present: Float[Array, " k"]
    color: Float[Array, "k colors"]
    color_distance: Float[Array, "k colors"]
    peak: Float[Array, " k"]
    iou: Float[Array, "k shapes"]
    shape: Float[Array, "k shapes"]
    diameter: Float[Array, " k"]
    center: Float[Array, "k 2"]
    centroid: Float[Array, "k 2"]
    specks: Float[Array, ""]


def parse_targets(captions: Sequence[str]) -> Targets:
    """Returns the objects that captions ask for, as indices.

    Args:
        captions: n captions; n may be 0.

    Returns:
        `Targets` of JAX arrays with one row per caption: int32 [n, 2] for each field of its two
        groups, and int32 [n] for the relation.

    Raises:
        ValueError: If `scenes.parse_caption` refuses a caption.
    """
    parsed = [scenes.parse_caption(caption) for caption in captions]
    shape = (len(parsed), 2)
    count = np.zeros(shape, np.int32)
    color = np.zeros(shape, np.int32)
    kind = np.zeros(shape, np.int32)
    size = np.zeros(shape, np.int32)
    relation = np.full(len(parsed), -1, np.int32)
    for i, scene in enumerate(parsed):
        if scene.relation is not None:
            relation[i] = scenes.RELATIONS.index(scene.relation)
        for j, group in enumerate(scene.groups):
            count[i, j] = group.count
            color[i, j] = scenes.COLORS.index(group.color)
            kind[i, j] = scenes.SHAPES.index(group.shape)
            size[i, j] = -1 if group.size is None else scenes.SIZES.index(group.size)
    return Targets(*map(jnp.asarray, (count, color, kind, size, relation)))


@jax.jit
def verify(images: Float[Array, "n h w 3"], targets: Targets) -> Verdict:
    """Judges each image against the objects that its caption asks for. Compiled for each shape.

    Args:
        images: Finite RGB in [0, 1], of any floating-point dtype and size. Thresholds of areas and
            lengths scale with the size of the image.
        targets: The objects that the captions of the images ask for, one row per image.

    Returns:
        The `score` in [0, 1] (float32) and the verdict `strict` (bool) of each image, [n].
    """

    def verify_one(image: Float[Array, "h w 3"], target: Targets) -> Verdict:
        return judge(measure(image.astype(jnp.float32)), target)

    return jax.vmap(verify_one)(images, targets)


@jax.jit
def detect(images: Float[Array, "n h w 3"]) -> Detections:
    """Finds the objects in images, whatever their captions ask for. Compiled for each shape.

    Args:
        images: Finite RGB in [0, 1], of any floating-point dtype and size. Thresholds of areas and
            lengths scale with the size of the image.

    Returns:
        Arrays [n, 8] with the 8 largest components of each image (connected sets of pixels of one
        color), the largest first. Those that are too small for an object have the color, shape
        and size -1.
    """

    def detect_one(image: Float[Array, "h w 3"]) -> Detections:
        components = measure(image.astype(jnp.float32))
        names = jnp.stack(_classify_components(components))
        color, shape, size = jnp.where(components.area >= MIN_AREA, names, -1)
        return Detections(color, shape, size, components.center, components.diameter)

    return jax.vmap(detect_one)(images)


def measure(image: Float[Array, "h w 3"]) -> Components:
    """Finds the components of one image, connected sets of pixels of one color, and measures them.

    The mask of a component is the share of its color in its own pixels and in the background pixels
    among their eight neighbors, which are mixtures at its edge. It is 0 in all other pixels, also
    in those of another component that it touches.

    Args:
        image: RGB in [0, 1], float32 [h, w, 3].

    Returns:
        The measurements of the 8 largest components, the largest first, and the area of all
        components that are too small for an object or not among the 8. Lengths and areas are scaled
        as if the image had the area 32 x 32 pixels.
    """
    unit = math.sqrt(image.shape[0] * image.shape[1]) / scenes.BASE
    # One plane per channel, because arrays whose last axis is three long are slow.
    offset = [image[..., channel] - _BACKGROUND[channel] for channel in range(3)]
    pixel_color = _classify_pixels(offset)
    labels = label_components(pixel_color)
    area, roots = largest_components(labels, pixel_color >= 0, _NUM_COMPONENTS)
    solid = (labels == roots[:, None, None]) & (pixel_color >= 0)
    # The soft mask of an object is the cover by its color, of its pixels and of background pixels
    # around them, at its edge.
    reach = dilate(solid) & (solid | (pixel_color < 0))
    unit_tints = jnp.asarray(_TINTS / np.sum(_TINTS**2, -1, keepdims=True))
    tint = unit_tints[jnp.maximum(pixel_color.ravel()[roots], 0)]
    cover = sum(offset[channel] * tint[:, channel, None, None] for channel in range(3))
    mask = jnp.where(reach, jnp.clip(cover, 0, 1), 0)
    mass = jnp.maximum(mask.sum((1, 2)), 1e-3)
    ys, xs = (jnp.arange(side) + 0.5 for side in image.shape[:2])
    centroid_x = (mask.sum(1) * xs).sum(-1)
    centroid_y = (mask.sum(2) * ys).sum(-1)
    centroid = jnp.stack([centroid_x, centroid_y], -1) / mass[:, None]
    # Least squares over the object's pixels gives its color at full cover. Pixels at the edge
    # contribute too.
    power = jnp.maximum((mask**2).sum((1, 2)), 1e-3)
    color = jnp.stack([(mask * plane).sum((1, 2)) / power for plane in offset], -1)
    color_distance = jnp.sqrt(jnp.sum((color[:, None] - _TINTS) ** 2, -1) + 1e-12)
    peak = mask.max((1, 2))
    nearness = jax.nn.softmax(-0.5 * (color_distance / _COLOR_SCALE) ** 2, -1)
    likeness = nearness * ramp(color_distance, *_COLOR_RAMP)
    # Diameters of the circle, square and triangle of this area.
    diameters = jnp.sqrt(mass[:, None] * jnp.asarray([4 / np.pi, 1.0, 2.0]))
    iou = _iou_with_shapes(mask, centroid, diameters)
    shape_share = jax.nn.softmax(iou / _IOU_TEMPERATURE, -1)
    diameter = (shape_share * diameters).sum(-1)
    # The centroid of a triangle is a sixth of its height below the middle of its bounding box.
    raised = shape_share[:, 2] * diameter / 6
    center = centroid - jnp.stack([jnp.zeros_like(diameter), raised], -1)
    object_area = jnp.where(area >= MIN_AREA * unit**2, area, 0).sum()
    return Components(
        area=area / unit**2,
        present=ramp(mass / unit**2, 5.0, 12.0) * (area > 0),
        color=likeness * ramp(peak, *_PEAK_RAMP)[:, None],
        color_distance=color_distance,
        peak=peak,
        iou=iou,
        shape=shape_share * ramp(iou, *_IOU_RAMP),
        diameter=diameter / unit,
        center=center / unit,
        centroid=centroid / unit,
        specks=((pixel_color >= 0).sum() - object_area) / unit**2,
    )


def judge(components: Components, target: Targets) -> Verdict:
    """Judges one image against the objects that its caption asks for.

    Args:
        components: Measurements of the components of the image.
        target: The objects that the caption asks for: arrays [2], one entry per group (count 0 for
            an absent second group), and a scalar relation (-1 for none).

    Returns:
        The `score` in [0, 1] (float32) and the verdict `strict` (bool), both scalars.
    """
    return Verdict(_score(components, target), _strict_verdict(components, target))


def _classify_pixels(offset: list[Float[Array, "h w"]]) -> Int[Array, "h w"]:
    """Returns the index of each pixel's color, or -1 for the background.

    A pixel at an edge is a mixture of a color and the background, so its RGB value lies between
    both. It gets the color whose line segment is nearest, at whatever distance; the first color
    wins a tie. The segment begins at the background and ends beyond the color, by a tenth of the
    distance between the two. A pixel that projects to at most half of the way from the background
    to its color gets -1.

    Args:
        offset: The image minus the background color, light gray (`scenes.BACKGROUND`), one plane
            per channel (red, green, blue).

    Returns:
        Indices into `scenes.COLORS`, int32. A pixel with NaN has -1.
    """
    color = jnp.full(offset[0].shape, -1)
    cover = jnp.zeros(offset[0].shape)
    smallest = jnp.full(offset[0].shape, jnp.inf)
    for i, tint in enumerate(_TINTS):
        power = float(np.sum(tint**2))
        along = sum(plane * float(t / power) for plane, t in zip(offset, tint, strict=True))
        on_line = jnp.clip(along, 0, 1.1)
        # Squared distance from the line, less the square of the pixel's own offset, which is the
        # same for all colors.
        distance = power * on_line * (on_line - 2 * along)
        closer = distance < smallest
        color = jnp.where(closer, i, color)
        cover = jnp.where(closer, along, cover)
        smallest = jnp.where(closer, distance, smallest)
    return jnp.where(cover > 0.5, color, -1)


def _iou_with_shapes(
    mask: Float[Array, "k h w"], centroid: Float[Array, "k 2"], diameters: Float[Array, "k shapes"]
) -> Float[Array, "k shapes"]:
    """Returns the soft intersection over union of each component with ideal shapes of its area.

    The ideal shapes have soft edges. The result is the largest over three widths of the edge: 1,
    1.7 and 2.4 pixels (`_EDGE_WIDTHS`).

    Args:
        mask: The share of each pixel that each of the k components covers, in [0, 1].
        centroid: (x, y) of the centroid of each component in pixels, where the ideal shapes are
            centered.
        diameters: The sizes of the ideal shapes in pixels of the image: the diameter of the circle,
            the side of the square, and the base (and height) of the triangle, which points up. The
            square of the side must be the area of the mask, and is used as such.

    Returns:
        Values in [0, 1] for the circle, the square and the triangle, in this order.
    """
    ys, xs = (jnp.arange(side) + 0.5 for side in mask.shape[1:])
    x = (xs - centroid[:, :1])[:, None, :]
    y = (ys - centroid[:, 1:])[:, :, None]
    circle, square, triangle = (diameters[:, i, None, None] for i in range(3))
    radius = jnp.sqrt(x**2 + y**2 + 1e-12)
    # Distance below the apex of the triangle, whose flanks fall by two pixels for each pixel
    # across.
    depth = y + 2 * triangle / 3
    slope = 2 / np.sqrt(5)
    ious = []
    for width in _EDGE_WIDTHS:
        ideals = [
            _edge_cover(circle / 2 - radius, width),
            _edge_cover(square / 2 - jnp.abs(x), width)
            * _edge_cover(square / 2 - jnp.abs(y), width),
            _edge_cover(slope * (depth / 2 - jnp.abs(x)), width)
            * _edge_cover(triangle - depth, width),
        ]
        overlap = jnp.stack([jnp.minimum(mask, ideal).sum((1, 2)) for ideal in ideals], -1)
        ideal_area = jnp.stack([ideal.sum((1, 2)) for ideal in ideals], -1)
        mask_area = diameters[:, 1:2] ** 2
        ious.append(overlap / jnp.maximum(ideal_area + mask_area - overlap, 1e-3))
    return jnp.stack(ious).max(0)


def _edge_cover(inside: Array, width: float) -> Array:
    """Returns the share of each pixel that a shape with a soft straight edge covers.

    The share rises linearly from 0 to 1 across the edge.

    Args:
        inside: Distance of the pixel's center from the edge in pixels, positive within the shape.
            At 0 the share is one half.
        width: Width of the edge in pixels, over which the share rises from 0 to 1.

    Returns:
        Values in [0, 1], of the shape of `inside`.
    """
    return jnp.clip(0.5 + inside / width, 0, 1)


def ramp(x: Array, low: float, high: float) -> Array:
    """Returns a sigmoid of `x` that is 0.018 at `low`, 0.5 in the middle and 0.982 at `high`.

    Args:
        x: Any values.
        low: The value where the ramp is about 0. If it is greater than `high`, the ramp falls.
        high: The value where the ramp is about 1. It differs from `low`.

    Returns:
        Values between 0 and 1, of the shape of `x`.
    """
    return jax.nn.sigmoid(8 * (x - (low + high) / 2) / (high - low))


def _score(components: Components, target: Targets) -> Float[Array, ""]:
    """Returns the soft score of one image: the weighted mean of up to five terms in [0, 1].

    Without a relation, the mean is over the other four terms. Numbers of objects are sums over the
    components of how much each one fits, in [0, 1]: the product of its soft values of presence
    (large enough to be an object), color, shape and, if the caption gives one, size. The
    completeness of a group is its number of objects over the number that the caption asks for, at
    most 1. Distances and areas are in pixels of an image scaled to the area 32 x 32.

      1. "objects" (weight 0.4): for each group, 1 less the relative error of its number of objects,
         at least 0; the mean over the groups.
      2. "colors" (0.12): the same, counting all objects of the group's color, whatever their shape
         and group, against the number that the caption asks for in this color.
      3. "shapes" (0.12): the same for the objects of the group's shape, whatever their color.
      4. "relation" (0.26, only for captions with one): `0.7 sigmoid((along - across) / 0.5) + 0.3
         sigmoid((along - 1) / 2)`, times the completeness of each of the two groups. `along` is the
         distance of their mean positions along the axis of the relation, negative if they lie the
         other way round, and `across` the distance across it (`_displacement`).
      5. "alone" (0.1): `exp(-n)` times the mean completeness of the groups, where n is the number
         of objects that belong to no group plus a twentieth of the area of specks, the components
         that are no objects.

    Args:
        components: Measurements of the components of the image.
        target: The objects that the caption asks for: arrays [2], one entry per group (count 0 for
            an absent second group), and a scalar relation (-1 for none).

    Returns:
        The score, a float32 scalar.
    """
    asked = target.count > 0
    wanted = target.count.astype(jnp.float32)
    color = components.color[:, target.color]
    shape = components.shape[:, target.shape]
    large = ramp(components.diameter, _SIZE_THRESHOLD - 1.2, _SIZE_THRESHOLD + 1.2)[:, None]
    size = jnp.where(target.size < 0, 1.0, jnp.where(target.size == 1, large, 1 - large))
    # How far each component is an object of each group, [k, 2].
    match = components.present[:, None] * color * shape * size * asked
    num_matches = match.sum(0)
    num_groups = jnp.maximum(asked.sum(), 1)

    def count_score(totals: Array, expected: Array) -> Array:
        """1 less the relative error of the numbers of objects, the mean over the groups."""
        hits = jnp.clip(1 - jnp.abs(expected - totals) / jnp.maximum(expected, 1), 0, 1)
        return jnp.where(asked, hits, 0).sum() / num_groups

    # Two groups of the same color ask for the sum of their objects in this color. The same holds
    # for shapes.
    same_color = (target.color[:, None] == target.color) & asked
    same_shape = (target.shape[:, None] == target.shape) & asked
    wanted_of_color = jnp.where(same_color, wanted, 0).sum(-1)
    wanted_of_shape = jnp.where(same_shape, wanted, 0).sum(-1)
    complete = jnp.minimum(num_matches / jnp.maximum(wanted, 1), 1)
    num_extra = jnp.maximum(components.present.sum() - num_matches.sum(), 0)
    num_extra = num_extra + components.specks / 20
    along, across = _displacement(match, components.center, target.relation)
    related = 0.7 * jax.nn.sigmoid((along - across) / 0.5) + 0.3 * jax.nn.sigmoid((along - 1) / 2)
    present = components.present[:, None]
    terms = {
        "objects": count_score(num_matches, wanted),
        "colors": count_score((present * color).sum(0), wanted_of_color),
        "shapes": count_score((present * shape).sum(0), wanted_of_shape),
        "relation": related * complete[0] * complete[1],
        "alone": jnp.exp(-num_extra) * jnp.where(asked, complete, 0).sum() / num_groups,
    }
    relation_weight = jnp.where(target.relation < 0, 0, _WEIGHTS["relation"])
    weights = _WEIGHTS | {"relation": relation_weight}
    total = sum(terms[name] * weights[name] for name in terms)
    return jnp.clip(total / sum(weights.values()), 0, 1)


def _strict_verdict(components: Components, target: Targets) -> Bool[Array, ""]:
    """Returns whether one image shows exactly the objects that its caption asks for.

    Every group must have exactly its number of objects of its color, shape and, if given, size.
    There must be no further object, even without a clear color or shape, and less than 8 pixels (of
    an image scaled to the area 32 x 32) in components that are no objects. For the relation "above"
    the center of every object of the first group must be above that of every object of the second,
    and the mean centers of the groups must be farther apart vertically than horizontally; likewise
    for the others.

    Args:
        components: Measurements of the components of the image.
        target: The objects that the caption asks for: arrays [2], one entry per group (count 0 for
            an absent second group), and a scalar relation (-1 for none).

    Returns:
        The verdict, a Boolean scalar.
    """
    is_object = components.area >= MIN_AREA
    color, shape, size = _classify_components(components)
    same_kind = (color[:, None] == target.color) & (shape[:, None] == target.shape)
    same_size = (target.size < 0) | (size[:, None] == target.size)
    member = is_object[:, None] & same_kind & same_size & (target.count > 0)
    exact = (
        (member.sum(0) == target.count).all()
        & (is_object.sum() == target.count.sum())
        & (components.specks < MIN_AREA)
    )
    along, across = _displacement(member.astype(jnp.float32), components.center, target.relation)
    x, y = components.center.T
    # The coordinate along the relation's axis, which grows from the first group to the second.
    position = jnp.stack([y, -y, x, -x])[target.relation]
    end_of_first = jnp.where(member[:, 0], position, -jnp.inf).max()
    start_of_second = jnp.where(member[:, 1], position, jnp.inf).min()
    related = (along > across) & (end_of_first < start_of_second)
    return exact & ((target.relation < 0) | related)


def _classify_components(
    components: Components,
) -> tuple[Int[Array, " k"], Int[Array, " k"], Int[Array, " k"]]:
    """Returns the color, shape and size of each component as indices, int32 [k] each.

    Args:
        components: Measurements of the k components of one image. Small ones are classified too.

    Returns:
        A tuple. The color, an index into `scenes.COLORS`: the nearest one, or -1 if it is 0.3 or
        more away in RGB (channels in [0, 1]) or the component fills no pixel by more than 0.6. The
        shape, an index into `scenes.SHAPES`: that of the largest intersection over union, or -1 if
        this is at most 0.6. The size, an index into `scenes.SIZES`: 1 (large) for a diameter above
        8.5 pixels of an image scaled to the area 32 x 32, else 0 (small).
    """
    near = components.color_distance.min(-1) < _COLOR_STRICT
    colored = near & (components.peak > _PEAK_STRICT)
    color = jnp.where(colored, jnp.argmin(components.color_distance, -1), -1)
    shaped = components.iou.max(-1) > _IOU_STRICT
    shape = jnp.where(shaped, jnp.argmax(components.iou, -1), -1)
    size = (components.diameter > _SIZE_THRESHOLD).astype(jnp.int32)
    return color, shape, size


def _displacement(
    member: Float[Array, "k 2"], center: Float[Array, "k 2"], relation: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns how far the mean positions of the two groups are apart.

    Args:
        member: How much each of the k components belongs to each group, in [0, 1]. The position of
            a group is the mean of the centers with these weights; (0, 0) for a group without
            members.
        center: (x, y) of the center of each component, in any unit, with y growing downwards.
        relation: Index into `scenes.RELATIONS`: the relation that the first group should have to
            the second. With -1 the result has no meaning.

    Returns:
        The distance along the axis of the relation, positive if the groups lie as asked, and the
        absolute distance across it. Both have the unit of `center`.
    """
    # A sum instead of a dot product, because accelerators round the operands of a float32 dot
    # product.
    sums = (member[:, :, None] * center[:, None]).sum(0)
    middles = sums / jnp.maximum(member.sum(0), 1e-3)[:, None]
    dx, dy = middles[1] - middles[0]
    along = jnp.stack([dy, -dy, dx, -dx])[relation]
    return along, jnp.where(relation < 2, jnp.abs(dx), jnp.abs(dy))
