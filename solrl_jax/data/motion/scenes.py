"""The embedded world of clips: captions of one moving object, and what their clips look like.

    caption = a color shape motion
    motion = moves left to right | moves right to left | moves up | moves down | stays still

Colors, shapes and background are those of the embedded world of images (`data.shapes.scenes`).
Prompts, rewards and the verifier share these definitions. `scripts/pretrain/clips.py` draws clips.
"""

import dataclasses

from solrl_jax.config.values import brief_repr
from solrl_jax.data.shapes.scenes import COLORS, SHAPES

# The motions, and the direction (x, y) of each in an image, whose y grows downwards.
DIRECTIONS: dict[str, tuple[int, int]] = {
    "moves left to right": (1, 0),
    "moves right to left": (-1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "stays still": (0, 0),
}
MOTIONS: tuple[str, ...] = tuple(DIRECTIONS)

GRAMMAR = f"a|one {'|'.join(COLORS)} {'|'.join(SHAPES)} {'|'.join(MOTIONS)}"

FRAMES = 5  # of a clip in training
# In pixels of a clip 32 wide: the smallest and the largest diameter of an object, and the smallest
# and the largest distance that a moving object covers in a clip, whatever its number of frames.
DIAMETERS: tuple[float, float] = (10.0, 12.0)
DISTANCES: tuple[float, float] = (8.0, 16.0)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a caption describes: one object and its motion.

    Attributes:
        color: A name of `COLORS`: "red", "green", "blue", "yellow", "purple" or "cyan".
        shape: A name of `SHAPES`: "circle", "square" or "triangle".
        motion: A name of `MOTIONS`: "moves left to right", "moves right to left", "moves up",
            "moves down" or "stays still".

    Raises:
        ValueError: If a field has another value.
    """

    color: str
    shape: str
    motion: str

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: If `color` is not in `COLORS`, `shape` not in `SHAPES` or `motion` not in
                `MOTIONS`.
        """
        if self.color not in COLORS or self.shape not in SHAPES or self.motion not in MOTIONS:
            raise ValueError(f"{self}: not a scene of the embedded world; expected {GRAMMAR}")

    @property
    def caption(self) -> str:
        """The caption, e.g. "a red circle moves left to right"."""
        return f"a {self.color} {self.shape} {self.motion}"


def parse_caption(text: str) -> Scene:
    """Returns the scene that a caption describes.

    Args:
        text: The caption: "a" or "one", and the color, shape and motion of a `Scene`, e.g. "a red
            circle moves left to right". Case and the amount of white space do not matter.

    Raises:
        ValueError: If the caption does not follow the grammar. The message quotes the caption and
            the grammar.
    """
    number, *words = text.lower().split() or [""]
    if number not in ("a", "one") or len(words) < 3:
        raise ValueError(f"cannot parse the caption {brief_repr(text)}; expected {GRAMMAR}")
    try:
        return Scene(words[0], words[1], " ".join(words[2:]))
    except ValueError as error:
        raise ValueError(
            f"cannot parse the caption {brief_repr(text)}; expected {GRAMMAR}"
        ) from error
