"""Draws the training data of `tiny-wan`: clips of one moving object and their captions.

This file uses NumPy, not JAX. Many clips are drawn at once.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, UInt8

from solrl_jax.data.motion.scenes import DIAMETERS, DIRECTIONS, DISTANCES, FRAMES, MOTIONS, Scene
from solrl_jax.data.shapes.scenes import BACKGROUND, BASE, COLORS, PALETTE, SHAPES

VOCABULARY: tuple[str, ...] = (
    *("a", "one"),
    *COLORS,
    *SHAPES,
    *("moves", "stays", "left", "right", "to", "up", "down", "still"),
)
SCENES: tuple[Scene, ...] = tuple(
    Scene(color, shape, motion) for color, shape, motion in product(COLORS, SHAPES, MOTIONS)
)
WINDOW = 16  # side in pixels of the square in which an object is drawn
LINES = 4  # sampled lines per row of pixels; coverage along each line is exact
CHUNK = 200  # clips drawn at once, so few that they stay in the caches of a core


def held_out(scene: Scene) -> bool:
    """Whether a caption is held out from training.

    One motion of every object is held out, another one for objects that differ in color or shape
    alone, so that a network has seen every pair of words of a held-out caption.
    """
    color = COLORS.index(scene.color)
    shape = SHAPES.index(scene.shape)
    return (color + 2 * shape + MOTIONS.index(scene.motion)) % len(MOTIONS) == 0


def make_clips(count: int, seed: int) -> tuple[UInt8[np.ndarray, "n t 32 32 3"], list[str]]:
    """Draws clips of the scenes that are not held out.

    The numbers of clips of two scenes differ by at most one.

    Args:
        count: The number of clips.
        seed: The seed of positions, sizes and distances.

    Returns:
        The clips and their captions.
    """
    train = [scene for scene in SCENES if not held_out(scene)]
    scenes = [train[i % len(train)] for i in range(count)]

    def draw(start: int) -> np.ndarray:
        return render(scenes[start : start + CHUNK], np.random.default_rng((seed, 8, start)))

    with ThreadPoolExecutor() as pool:
        clips = np.concatenate(list(pool.map(draw, range(0, count, CHUNK))))
    return clips, [scene.caption for scene in scenes]


def write_prompt_sets(folder: Path) -> None:
    """Writes `motion-train`, the captions used in pretraining, and `motion-test`, all others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("motion-train", False), ("motion-test", True)):
        captions = [scene.caption for scene in SCENES if held_out(scene) == wanted]
        (folder / f"{name}.txt").write_text("\n".join(captions) + "\n")


def render(scenes: list[Scene], rng: np.random.Generator) -> UInt8[np.ndarray, "n t 32 32 3"]:
    """Renders one clip of each scene: an anti-aliased object on a plain background, fully inside
    the frame, which moves along a straight line with constant speed or stays still.

    Args:
        scenes: The scenes.
        rng: The source of positions, diameters and distances, all uniform.

    Returns:
        RGB bytes.
    """
    n = len(scenes)
    diameter = rng.uniform(*DIAMETERS, size=n)
    room = BASE - diameter
    direction = np.array([DIRECTIONS[scene.motion] for scene in scenes])
    travel = direction * np.minimum(rng.uniform(*DISTANCES, size=n), room)[:, None]
    # The object must be inside the frame at the start and at the end.
    low = np.maximum(0, -travel)
    start = low + rng.uniform(size=(n, 2)) * (room[:, None] - np.abs(travel))
    time = np.linspace(0, 1, FRAMES)[:, None]
    corner = start[:, None] + time * travel[:, None]  # [n, t, (x, y)]
    shape = np.array([SHAPES.index(scene.shape) for scene in scenes])
    cover = _cover(
        corner.reshape(-1, 2).astype(np.float32),
        np.repeat(diameter, FRAMES).astype(np.float32),
        np.repeat(shape, FRAMES),
    ).reshape(n, FRAMES, BASE, BASE, 1)
    color = np.array([PALETTE[scene.color] for scene in scenes], np.float32)
    background = np.array(BACKGROUND, np.float32)
    clips = cover * (color - background)[:, None, None, None]
    clips += background + np.float32(0.5)
    return clips.astype(np.uint8)


def _cover(
    corner: Float[np.ndarray, "n 2"],
    diameter: Float[np.ndarray, " n"],
    shape: Int[np.ndarray, " n"],
) -> Float[np.ndarray, "n 32 32"]:
    """Returns the share of each pixel that an object covers.

    Args:
        corner: (x, y) of the top left corner of the bounding box in pixels.
        diameter: The side of the bounding box in pixels.
        shape: Index into `SHAPES`.
    """
    n = len(corner)
    origin = np.floor(corner).astype(int)
    left, top = (corner - origin).T
    lines = (np.arange(WINDOW * LINES, dtype=np.float32) + 0.5) / LINES
    depth = (lines - top[:, None]) / diameter[:, None]  # of a line in the box, 0 to 1
    # The half width of the object along each line, as a share of the diameter.
    circle = np.sqrt(np.maximum(0.25 - (depth - 0.5) ** 2, 0))
    square = np.full_like(depth, 0.5)
    half = np.select([shape[:, None] == i for i in range(2)], [circle, square], depth / 2)
    half = np.where((depth >= 0) & (depth <= 1), half, 0) * diameter[:, None]
    middle = (left + diameter / 2)[:, None]
    pixels = np.arange(WINDOW, dtype=np.float32)
    covered = np.minimum(pixels + 1, (middle + half)[..., None])
    covered -= np.maximum(pixels, (middle - half)[..., None])
    np.maximum(covered, 0, out=covered)
    cover = covered.reshape(n, WINDOW, LINES, WINDOW).mean(2)
    # Windows may reach beyond the frame, where they are empty.
    frames = np.zeros((n, BASE + WINDOW, BASE + WINDOW), np.float32)
    rows = origin[:, 1, None] + np.arange(WINDOW)
    columns = origin[:, 0, None] + np.arange(WINDOW)
    frames[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]] = cover
    return frames[:, :BASE, :BASE]
