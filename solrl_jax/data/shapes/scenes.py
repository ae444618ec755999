"""The embedded world: captions of one or two groups of coloured shapes, and 32 x 32 pictures of them.

    caption = group [relation group]
    group = count [size] colour shape(s)
    relation = above | below | left of | right of

This is what prompts, rewards and the verifier know of it. `scripts/pretrain/drawing.py` draws captions and pictures.
"""

import dataclasses

from solrl_jax.config.values import brief_repr

COLOURS: tuple[str, ...] = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
SIZES: tuple[str, ...] = ("small", "large")
RELATIONS: tuple[str, ...] = ("above", "below", "left of", "right of")
COUNTS: tuple[str, ...] = ("a", "two", "three")
MAX_OBJECTS = 4

GRAMMAR = (
    "GROUP or GROUP above|below|left of|right of GROUP, where GROUP is a|one|two|three [small|large] "
    f"{'|'.join(COLOURS)} {'|'.join(s + '(s)' for s in SHAPES)}; at most {MAX_OBJECTS} objects; the two groups differ in "
    "colour or shape; no three large shapes beside a second group"
)

# Seen from the background, the directions of the six colours are at least 40 degrees apart (subtractive axes and face
# diagonals). A pixel at an edge mixes its object with the background. It keeps the object's direction, so it cannot be taken
# for another colour.
BACKGROUND: tuple[int, int, int] = (238, 238, 238)
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 25),
    "green": (25, 190, 35),
    "blue": (30, 45, 230),
    "yellow": (240, 220, 10),
    "purple": (205, 20, 220),
    "cyan": (10, 210, 230),
}

# Lengths are in pixels of a picture 32 pixels wide. In a picture of another width they are scaled.
BASE = 32
DIAMETERS: dict[str, tuple[float, ...]] = {"small": (6.0, 6.5, 7.0), "large": (10.0, 10.5, 11.0)}


@dataclasses.dataclass(frozen=True)
class Group:
    """`count` (1 to 3) objects of one kind. With `size` None, both sizes are right. Raises ValueError for other values."""

    count: int
    size: str | None
    colour: str
    shape: str

    def __post_init__(self) -> None:
        sound = self.count in (1, 2, 3) and self.size in (None, *SIZES)
        if not (sound and self.colour in COLOURS and self.shape in SHAPES):
            raise ValueError(f"not a group of this world: {self}; want {GRAMMAR}")


@dataclasses.dataclass(frozen=True)
class Scene:
    """One group without a relation, or two groups: the first is `relation` (above, below, ...) the second.

    Raises ValueError for what the grammar does not allow.
    """

    groups: tuple[Group, ...]
    relation: str | None

    def __post_init__(self) -> None:
        paired = len(self.groups) == 2
        sound = len(self.groups) in (1, 2) and (
            self.relation in RELATIONS if paired else self.relation is None
        )
        if sound and paired:
            a, b = self.groups
            # Three large shapes leave no strip 32 pixels long for a second group.
            crowded = any(g.count == 3 and g.size == "large" for g in self.groups)
            sound = (
                a.count + b.count <= MAX_OBJECTS
                and (a.colour, a.shape) != (b.colour, b.shape)
                and not crowded
            )
        if not sound:
            raise ValueError(f"not a scene of this world: {self}; want {GRAMMAR}")


def parse(text: str) -> Scene:
    """The scene of a caption. Case and spacing do not matter, and "one" means "a".

    Raises ValueError that quotes the caption and the grammar, if the caption does not follow the grammar.
    """
    normal = " ".join(text.lower().split())
    try:
        for relation in RELATIONS:
            first, found, second = normal.partition(f" {relation} ")
            if found:
                return Scene((_parse_group(first), _parse_group(second)), relation)
        return Scene((_parse_group(normal),), None)
    except ValueError as error:
        raise ValueError(f"cannot parse the caption {brief_repr(text)}; want {GRAMMAR}") from error


def _parse_group(text: str) -> Group:
    words = text.split(" ")
    size = words.pop(1) if len(words) == 4 else None
    if len(words) != 3 or (size is not None and size not in SIZES):
        raise ValueError(f"not a group: {text!r}")
    count = COUNTS.index("a" if words[0] == "one" else words[0]) + 1
    if count > 1 and not words[2].endswith("s"):
        raise ValueError(f"not a plural: {text!r}")
    return Group(count, size, words[1], words[2][:-1] if count > 1 else words[2])
