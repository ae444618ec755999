"""The embedded world: captions of colored shapes, and what their images look like.

    caption = group [relation group]
    group = count [size] color shape(s)
    relation = above | below | left of | right of

Prompts, rewards and the verifier share these definitions. `scripts/pretrain/drawing.py` draws
captions and images.
"""

import dataclasses

from solrl_jax.config.values import brief_repr

COLORS: tuple[str, ...] = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
SIZES: tuple[str, ...] = ("small", "large")
RELATIONS: tuple[str, ...] = ("above", "below", "left of", "right of")
COUNTS: tuple[str, ...] = ("a", "two", "three")
MAX_OBJECTS = 4  # in one image

GRAMMAR = (
    "GROUP or GROUP above|below|left of|right of GROUP, where GROUP is a|one|two|three"
    f" [small|large] {'|'.join(COLORS)} {'|'.join(shape + '(s)' for shape in SHAPES)};"
    f" at most {MAX_OBJECTS} objects; the two groups differ in color or shape;"
    " no three large shapes beside a second group"
)

# RGB of the background and of the colors. Seen from the background, the directions of the six
# colors are at least 40 degrees apart (subtractive axes and face diagonals). A pixel at an edge
# mixes its object with the background and keeps the direction of the object's color, so it cannot
# be taken for another color.
BACKGROUND: tuple[int, int, int] = (238, 238, 238)
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 25),
    "green": (25, 190, 35),
    "blue": (30, 45, 230),
    "yellow": (240, 220, 10),
    "purple": (205, 20, 220),
    "cyan": (10, 210, 230),
}

# Width of an image in pixels. Lengths are for this width and are scaled in images of another one.
BASE = 32
# Diameters of objects by size. An object has one of the three.
DIAMETERS: dict[str, tuple[float, ...]] = {"small": (6.0, 6.5, 7.0), "large": (10.0, 10.5, 11.0)}


@dataclasses.dataclass(frozen=True)
class Group:
    """Objects of one kind in a caption, e.g. "two small red circles".

    Attributes:
        count: The number of objects, 1 to 3.
        size: "small" or "large" (`SIZES`), or None if the caption leaves it open.
        color: A name of `COLORS`: "red", "green", "blue", "yellow", "purple" or "cyan".
        shape: A name of `SHAPES`, in the singular: "circle", "square" or "triangle".

    Raises:
        ValueError: If a field has another value.
    """

    count: int
    size: str | None
    color: str
    shape: str

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: If `count` is not 1, 2 or 3, `size` is neither None nor in `SIZES`, `color`
                is not in `COLORS`, or `shape` is not in `SHAPES`.
        """
        valid_size = self.size is None or self.size in SIZES
        valid_kind = self.color in COLORS and self.shape in SHAPES
        if self.count not in (1, 2, 3) or not valid_size or not valid_kind:
            raise ValueError(f"{self}: not a group of the embedded world; expected {GRAMMAR}")


@dataclasses.dataclass(frozen=True)
class Scene:
    """The objects that a caption describes.

    Attributes:
        groups: One group of equal objects, or two. Two groups differ in color or shape, have at
            most 4 objects together, and neither is "three large ..." (there would be no room).
        relation: "above", "below", "left of" or "right of" (`RELATIONS`): where the first group is
            relative to the second. None for one group.

    Raises:
        ValueError: If the fields are not as described.
    """

    groups: tuple[Group, ...]
    relation: str | None

    def __post_init__(self) -> None:
        """Checks the fields together.

        Raises:
            ValueError: If there is no group or more than two, one group with a relation, or two
                without a known one; or if two groups have the same color and shape or more than 4
                objects together, or one of them is "three large ...".
        """
        if not self._is_valid():
            raise ValueError(f"{self}: not a scene of the embedded world; expected {GRAMMAR}")

    def _is_valid(self) -> bool:
        """Returns whether the fields obey the rules of the embedded world, for the constructor.

        One group has no relation; two groups have a known one. Two groups differ in color or
        shape, have at most 4 (`MAX_OBJECTS`) objects together, and neither has three objects called
        large.
        """
        if len(self.groups) == 1:
            return self.relation is None
        if len(self.groups) != 2 or self.relation not in RELATIONS:
            return False
        first, second = self.groups
        if first.count + second.count > MAX_OBJECTS:
            return False
        # Three large shapes leave no strip as long as the image for a second group.
        if any(group.count == 3 and group.size == "large" for group in self.groups):
            return False
        return (first.color, first.shape) != (second.color, second.shape)


def parse_caption(text: str) -> Scene:
    """Returns the scene that a caption describes.

    Args:
        text: The caption: one group, or two with a relation between them, e.g. "two small red
            circles above a blue square". Case and the amount of white space do not matter, and
            "one" means "a".

    Raises:
        ValueError: If the caption does not follow `GRAMMAR`, or its groups break a rule of `Scene`.
            The message quotes the caption and the grammar.
    """
    normal = " ".join(text.lower().split())
    try:
        for relation in RELATIONS:
            first, separator, second = normal.partition(f" {relation} ")
            if separator:
                return Scene((_parse_group(first), _parse_group(second)), relation)
        return Scene((_parse_group(normal),), None)
    except ValueError as error:
        raise ValueError(
            f"cannot parse the caption {brief_repr(text)}; expected {GRAMMAR}"
        ) from error


def _parse_group(text: str) -> Group:
    """Parses the caption of one group, e.g. "two small red circles".

    Args:
        text: The caption, in lower case with single spaces: "a", "one", "two" or "three"; then,
            optionally, "small" or "large"; a color of `COLORS`; and a shape of `SHAPES`, with an
            "s" for two or three.

    Returns:
        The group. Its size is None if the caption has none.

    Raises:
        ValueError: If the text does not follow the grammar.
    """
    words = text.split(" ")
    size = words.pop(1) if len(words) == 4 else None
    if len(words) != 3 or (size is not None and size not in SIZES):
        raise ValueError(f"not a group: {text!r}")
    number, color, shape = words
    count = COUNTS.index("a" if number == "one" else number) + 1
    if count > 1:
        if not shape.endswith("s"):
            raise ValueError(f"not a plural: {text!r}")
        shape = shape[:-1]
    return Group(count, size, color, shape)
