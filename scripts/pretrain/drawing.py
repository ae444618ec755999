"""Draws the training data of the embedded pipelines: scenes, their captions and their images.

This file uses NumPy, not JAX. Every random choice comes from the `numpy.random.Generator` of the
caller.
"""

import functools
import hashlib

import numpy as np
from jaxtyping import Float, UInt8

from solrl_jax.data.shapes.scenes import (
    BACKGROUND,
    BASE,
    COLORS,
    COUNTS,
    DIAMETERS,
    MAX_OBJECTS,
    PALETTE,
    RELATIONS,
    SHAPES,
    SIZES,
    Group,
    Scene,
    parse_caption,
)

VOCABULARY: tuple[str, ...] = (
    *("a", "one", "two", "three"),
    *SIZES,
    *COLORS,
    *SHAPES,
    *(shape + "s" for shape in SHAPES),
    *("above", "below", "left", "right", "of"),
)

GAP = 2.0  # smallest distance in pixels between the bounding boxes of two objects
# The distance of two groups is larger along the axis of their relation than across it, by at least
# this many pixels, so that no second relation holds.
LEAD = 2.0
GRID = 4  # corners lie on quarter pixels, so that masks can be cached
SUPERSAMPLE = 8
CANDIDATES = 64  # layouts per round of rejection sampling
ROUNDS = 200  # at most 10 % of the rounds fail: if all do, no layout exists


def caption(scene: Scene) -> str:
    """Describes a scene in words of VOCABULARY: "two red circles above a small blue square"."""
    words = [_group_words(scene.groups[0])]
    if scene.relation is not None:
        words += [scene.relation, _group_words(scene.groups[1])]
    return " ".join(words)


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draws a scene: with probability 0.3 one group, else two groups and a relation."""
    if rng.random() < 0.3:
        return Scene((_draw_group(rng, 3),), None)
    while True:
        first = _draw_group(rng, 3)
        second = _draw_group(rng, MAX_OBJECTS - first.count)
        groups = (first, second) if rng.random() < 0.5 else (second, first)
        try:
            return Scene(groups, RELATIONS[rng.integers(len(RELATIONS))])
        except ValueError:
            continue  # equal groups, or three large shapes


def held_out(text: str) -> bool:
    """Whether a caption is held out from training. About 10 % are, by a hash."""
    return _held_out(caption(parse_caption(text)))


def draw_prompts(rng: np.random.Generator, n: int, held_out: bool) -> list[str]:
    """Draws distinct captions.

    Args:
        rng: The source of random numbers.
        n: The number of captions.
        held_out: Whether all of them are held out from training, or none.

    Raises:
        ValueError: If fewer than `n` are found.
    """
    drawn: dict[str, None] = {}
    for _ in range(1000 + 200 * n):
        if len(drawn) == n:
            return list(drawn)
        text = caption(draw_scene(rng))
        if _held_out(text) == held_out:
            drawn[text] = None
    raise ValueError(
        f"cannot draw {n} distinct captions with held_out={held_out}: got {len(drawn)}"
    )


def render(
    scene: Scene, rng: np.random.Generator, size: int = BASE
) -> UInt8[np.ndarray, "size size 3"]:
    """Renders a scene: anti-aliased objects on a plain background, fully inside the image.

    Along the axis of their relation, the bounding boxes of two groups do not overlap, and the
    distance of the groups is larger than across it by at least LEAD. All objects of a group have
    the same size, which is random if the scene does not name it.

    Returns:
        RGB bytes [size, size, 3].
    """
    scale = size / BASE
    diameters = [scale * _draw_diameter(scene, group, rng) for group in scene.groups]
    picture = np.empty((size, size, 3), np.float32)
    picture[:] = BACKGROUND
    for group, diameter, corners in zip(
        scene.groups, diameters, _layout(scene, diameters, size, rng), strict=True
    ):
        tint = np.asarray(PALETTE[group.color], np.float32)
        for x, y in corners:
            mask = _mask(group.shape, diameter, float(x % 1), float(y % 1))[..., None]
            left = int(x)
            top = int(y)
            window = picture[top : top + mask.shape[0], left : left + mask.shape[1]]
            # Beyond the edge of the image a mask is empty.
            cut = mask[: window.shape[0], : window.shape[1]]
            window += cut * (tint - window)
    return np.rint(picture).astype(np.uint8)


def _group_words(group: Group) -> str:
    size = [] if group.size is None else [group.size]
    return " ".join(
        [
            COUNTS[group.count - 1],
            *size,
            group.color,
            group.shape + ("s" if group.count > 1 else ""),
        ]
    )


def _draw_group(rng: np.random.Generator, most: int) -> Group:
    count = int(rng.integers(1, most + 1))
    size = (None, *SIZES)[rng.integers(3)]
    return Group(count, size, COLORS[rng.integers(len(COLORS))], SHAPES[rng.integers(len(SHAPES))])


def _held_out(normal: str) -> bool:
    digest = hashlib.sha256(normal.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _draw_diameter(scene: Scene, group: Group, rng: np.random.Generator) -> float:
    # Three large shapes would leave no room for the other group.
    crowded = len(scene.groups) == 2 and group.count == 3
    size = group.size or ("small" if crowded else SIZES[rng.integers(2)])
    return DIAMETERS[size][rng.integers(len(DIAMETERS[size]))]


def _layout(
    scene: Scene, diameters: list[float], size: int, rng: np.random.Generator
) -> list[Float[np.ndarray, "_ 2"]]:
    """Draws the positions of all objects by rejection sampling.

    Returns:
        The top left corners (x, y) of each group's objects in pixels, on the quarter-pixel grid.
    """
    scale = size / BASE
    for _ in range(ROUNDS):
        if scene.relation is None:
            places = _place(
                scene.groups[0].count,
                diameters[0],
                np.zeros(2),
                np.full(2, float(size)),
                scale * GAP,
                rng,
            )
            if len(places):
                return [places[0]]
            continue
        axis = int(scene.relation in ("above", "below"))  # 0: x; 1: y, downwards
        order = (0, 1) if scene.relation in ("above", "left of") else (1, 0)
        # A line across the axis divides the image. Each group is placed on one side of it.
        near, far = (diameters[i] for i in order)
        line = np.floor((near + rng.random() * (size - scale * GAP - far - near)) * GRID) / GRID
        # The corners of both sides: [side of the line, (x, y)].
        low = np.zeros((2, 2))
        high = np.full((2, 2), float(size))
        high[0, axis] = line
        low[1, axis] = line + scale * GAP
        sides = [
            _place(scene.groups[i].count, diameters[i], low[j], high[j], scale * GAP, rng)
            for j, i in enumerate(order)
        ]
        pairs = min(map(len, sides))
        middles = [
            side[:pairs].mean(1) + diameters[i] / 2 for i, side in zip(order, sides, strict=True)
        ]
        apart = np.abs(middles[1] - middles[0])
        good = np.flatnonzero(apart[:, axis] >= apart[:, 1 - axis] + scale * LEAD)
        if len(good):
            chosen = [side[good[0]] for side in sides]
            return [chosen[order.index(i)] for i in (0, 1)]
    raise RuntimeError(f"no layout for {caption(scene)!r} at {size} pixels in {ROUNDS} rounds")


def _place(
    count: int,
    diameter: float,
    low: Float[np.ndarray, " 2"],
    high: Float[np.ndarray, " 2"],
    gap: float,
    rng: np.random.Generator,
) -> Float[np.ndarray, "layouts {count} 2"]:
    """Draws CANDIDATES layouts of `count` boxes between the corners `low` and `high`, uniformly.

    Returns:
        The top left corners of the boxes, for the layouts whose boxes are at least `gap` apart.
    """
    low = np.ceil(low * GRID) / GRID
    corners = (
        np.floor((low + rng.random((CANDIDATES, count, 2)) * (high - diameter - low)) * GRID) / GRID
    )
    i, j = np.triu_indices(count, 1)
    return corners[(np.abs(corners[:, i] - corners[:, j]).max(-1) >= diameter + gap).all(-1)]


@functools.lru_cache(maxsize=4096)
def _mask(shape: str, diameter: float, dx: float, dy: float) -> Float[np.ndarray, "side side"]:
    """Returns the share of each pixel that a shape covers, in [0, 1].

    Args:
        shape: The name of the shape.
        diameter: The side of its bounding box in pixels.
        dx: The left edge of the bounding box, in [0, 1) pixels.
        dy: The top edge of the bounding box, in [0, 1) pixels.
    """
    side = int(np.ceil(diameter)) + 1
    ticks = (np.arange(side * SUPERSAMPLE) + 0.5) / SUPERSAMPLE
    # Coordinates in which the bounding box is the unit square.
    u, v = np.meshgrid((ticks - dx) / diameter, (ticks - dy) / diameter)
    if shape == "circle":
        inside = (u - 0.5) ** 2 + (v - 0.5) ** 2 <= 0.25
    elif shape == "square":
        inside = (np.abs(u - 0.5) <= 0.5) & (np.abs(v - 0.5) <= 0.5)
    else:
        inside = (np.abs(u - 0.5) <= v / 2) & (v <= 1)
    return inside.reshape(side, SUPERSAMPLE, side, SUPERSAMPLE).mean((1, 3)).astype(np.float32)
