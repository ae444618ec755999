"""Object detectors for the `geneval` reward: the embedded world's verifier or a user's function."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from solrl_jax.data.shapes import scenes, verifier
from solrl_jax.rewards.host import import_object

# Images in each call of the verifier. It is always the same number, so that it is compiled once.
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Detection:
    """One object in an image.

    Attributes:
        name: The class of the object, e.g. "dog".
        box: x0, y0, x1, y1 (the left, upper, right and lower edge) in pixels, where x grows to the
            right and y downwards.
        color: The color of the object, e.g. "red". None: unclear.
        confidence: The confidence of the detector, in [0, 1].
    """

    name: str
    box: tuple[float, float, float, float]
    color: str | None
    confidence: float


# A function from images in [0, 1] to the objects in each.
Detect = Callable[[Float[np.ndarray, "n H W 3"]], Sequence[Sequence[Detection]]]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The names that a detector can find. `geneval` refuses a prompt that asks for another.

    Attributes:
        classes: All classes of objects. None: unknown, so prompts may ask for any class.
        colors: All colors. None: unknown, so prompts may ask for any color.
    """

    classes: tuple[str, ...] | None = None
    colors: tuple[str, ...] | None = None


def vocabulary(name: str) -> Vocabulary:
    """Returns what a detector can find, without importing it.

    Args:
        name: The option `detector` of GenEval: "shapes", or any other name, whose vocabulary is
            unknown.

    Returns:
        For "shapes", `classes` are the objects of the embedded world, the synthetic images of
        `data.shapes`: "circle", "square" and "triangle", then each with its size ("small circle",
        "large circle"); `colors` are its six colors (`scenes.COLORS`). Otherwise both are None.
    """
    if name != "shapes":
        return Vocabulary()
    sized = (f"{size} {shape}" for size in scenes.SIZES for shape in scenes.SHAPES)
    return Vocabulary((*scenes.SHAPES, *sized), scenes.COLORS)


@functools.cache
def open_detector(name: str) -> Detect:
    """Opens a detector. The result is cached for each name, for the life of the process.

    Args:
        name: "shapes", for the colored shapes of the embedded world in square images
            (`detect_shapes`), or a function "module.path:function", whose module is imported.

    Returns:
        A function from images [n, H, W, 3] in [0, 1] to one sequence of `Detection`s per image. A
        user's function is returned as it is, without a call.

    Raises:
        ValueError: If `name` is another text without a colon, the import raises, or the object is
            missing or cannot be called. The message is one line.
    """
    if name == "shapes":
        return detect_shapes
    try:
        if ":" not in name:  # a module of that name is not imported
            raise ValueError("it has no ':'")
        detect = import_object(name)
        if not callable(detect):
            raise TypeError(f"{name.rpartition(':')[2]} is no function")
        return detect
    except Exception as error:  # an imported module may raise anything
        message = " ".join(str(error).split())
        raise ValueError(
            f"reward 'geneval': detector={name!r}: expected 'shapes' or 'module.path:function' "
            f"({message})"
        ) from error


def detect_shapes(images: Float[np.ndarray, "n H W 3"]) -> list[list[Detection]]:
    """Detects the colored shapes of the embedded world (synthetic images of circles, squares, ...).

    Each shape yields two detections with the same box: one by shape, e.g. "circle", then one by
    size and shape, e.g. "small circle". The confidence is always 1. Two kinds of connected regions
    of one color are left out: those of fewer than 8 pixels in an image scaled to 32 x 32
    (`verifier.MIN_AREA`), and those without a clear shape.

    Args:
        images: Square images [n, H, H, 3] of any size, with finite values in [0, 1], which are not
            checked; n may be 0.

    Returns:
        One list per image with the detections of the shapes among its eight largest regions, the
        largest first; [] if it shows none. A box is a square, in pixels of the image, and may
        reach beyond its edge. The color is None where it is not clear.

    Raises:
        ValueError: If the images are not square, or have not four axes.
    """
    num_images, height, width, _ = images.shape
    if height != width:
        raise ValueError(f"detector 'shapes': images {width} x {height}; expected squares")
    scale = width / scenes.BASE
    detections: list[list[Detection]] = []
    for start in range(0, num_images, BLOCK):
        # The last block is filled up with copies of the last image.
        rows = np.minimum(np.arange(start, start + BLOCK), num_images - 1)
        objects = verifier.detect(images[rows])
        color_index, shape, size, center, diameter = map(np.asarray, objects)
        lower = (center - diameter[..., None] / 2) * scale
        upper = (center + diameter[..., None] / 2) * scale
        for i in range(min(BLOCK, num_images - start)):
            in_image = []
            for j in np.flatnonzero(shape[i] >= 0):
                color = scenes.COLORS[color_index[i, j]] if color_index[i, j] >= 0 else None
                x0, y0 = map(float, lower[i, j])
                x1, y1 = map(float, upper[i, j])
                name = scenes.SHAPES[shape[i, j]]
                sized_name = f"{scenes.SIZES[size[i, j]]} {name}"
                in_image.append(Detection(name, (x0, y0, x1, y1), color, 1.0))
                in_image.append(Detection(sized_name, (x0, y0, x1, y1), color, 1.0))
            detections.append(in_image)
    return detections
