"""Detectors of objects for the `geneval` reward: the verifier of the embedded world, or a function of the user's."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from solrl_jax.data.shapes import scenes, verifier
from solrl_jax.rewards.host import imported

BLOCK = 16  # pictures in each call of the verifier: one number, so it is compiled once


@dataclasses.dataclass(frozen=True)
class Detection:
    """One object. box: x0, y0, x1, y1 in pixels, y grows downwards. color: None if unclear. confidence: in [0, 1]."""

    name: str
    box: tuple[float, float, float, float]
    color: str | None
    confidence: float


Detect = Callable[
    [Float[np.ndarray, "n H W 3"]], Sequence[Sequence[Detection]]
]  # pictures to a list of objects for each


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """All classes and colours that a detector can find; None: unknown."""

    classes: tuple[str, ...] | None = None
    colors: tuple[str, ...] | None = None


def vocabulary(name: str) -> Vocabulary:
    """What the detector of this name can find."""
    sized = (f"{size} {shape}" for size in scenes.SIZES for shape in scenes.SHAPES)
    return (
        Vocabulary((*scenes.SHAPES, *sized), scenes.COLOURS) if name == "shapes" else Vocabulary()
    )


@functools.cache
def open_detector(name: str) -> Detect:
    """The detector "shapes", or the function that "module.path:function" names. Raises ValueError in one line."""
    if name == "shapes":
        return detect_shapes
    try:
        if ":" not in name:  # a module of that name is not imported
            raise ValueError("it has no ':'")
        detect = imported(name)
        if not callable(detect):
            raise TypeError(f"{name.rpartition(':')[2]} is no function")
        return detect
    except Exception as error:  # an imported module may do anything
        said = f"expected 'shapes' or 'module.path:function' ({' '.join(str(error).split())})"
        raise ValueError(f"reward 'geneval': detector={name!r}: {said}") from error


def detect_shapes(images: Float[np.ndarray, "n H W 3"]) -> list[list[Detection]]:
    """The objects of the embedded world as the strict verdict sees them: each twice, as "circle" and as "small circle".

    Their confidence is 1. A component without a clear shape is no object. Raises ValueError for pictures that are no squares.
    """
    n, height, width, _ = images.shape
    if height != width:
        raise ValueError(f"detector 'shapes': pictures {width} x {height}; expected squares")
    found: list[list[Detection]] = []
    for start in range(0, n, BLOCK):
        rows = np.minimum(np.arange(start, start + BLOCK), n - 1)
        colour, shape, size, centre, diameter = map(np.asarray, verifier.detect(images[rows]))
        lo, hi = (
            (centre + sign * diameter[..., None] / 2) * (width / scenes.BASE) for sign in (-1, 1)
        )
        for i in range(min(BLOCK, n - start)):
            objects = []
            for j in np.flatnonzero(shape[i] >= 0):
                tint = scenes.COLOURS[colour[i, j]] if colour[i, j] >= 0 else None
                box = (
                    float(lo[i, j, 0]),
                    float(lo[i, j, 1]),
                    float(hi[i, j, 0]),
                    float(hi[i, j, 1]),
                )
                plain = scenes.SHAPES[shape[i, j]]
                objects += [
                    Detection(name, box, tint, 1.0)
                    for name in (plain, f"{scenes.SIZES[size[i, j]]} {plain}")
                ]
            found.append(objects)
    return found
