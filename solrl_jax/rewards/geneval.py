"""GenEval (arXiv 2310.11513): does an image show the right objects, numbers, colors and positions?

It is scored as in DiffusionNFT and Flow-GRPO. The metadata of a prompt is a line of GenEval's own
files:

    {"tag": "position",
     "include": [{"class": "bench", "count": 1},
                 {"class": "dog", "count": 1, "color": "brown", "position": ["left of", 0]}]}

It may also have "exclude": [{"class": ..., "count": ...}]. A position names an earlier clause by
its index.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.config.values import brief_repr
from solrl_jax.rewards.detectors import Detection, Vocabulary, open_detector, vocabulary
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite_images

RELATIONS = ("left of", "right of", "above", "below")
# The most objects of a class that are counted.
MAX_OBJECTS = 16
# An offset between two objects counts beyond this fraction of the sum of their sizes.
MIN_OFFSET = 0.1
# The least fraction of the distance that must lie along the axis of a relation.
MIN_AXIS_FRACTION = 0.5

# The objects of an image by class, the most confident first.
Objects = Mapping[str, Sequence[Detection]]


@dataclasses.dataclass(frozen=True)
class Clause:
    """A request for a number of objects of one class, or in `Request.exclude` a limit on it.

    Attributes:
        name: The class of the objects, e.g. "dog".
        count: A number of objects, at least 1. In `Request.include`, the image must show exactly
            this many; in `Request.exclude`, fewer.
        color: Their color, e.g. "brown", or None for any.
        position: A relation ("left of", "right of", "above" or "below") and the index, from 0 in
            `Request.include`, of the earlier clause whose objects it refers to. None: any position.
    """

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """The objects that an image should show, from the metadata of its prompt.

    Attributes:
        tag: GenEval's name of the task, e.g. "position". Only "counting" matters: `geneval` then
            takes another threshold of confidence.
        include: The objects that must be there, at least one clause.
        exclude: Clauses without color and position. The image must show fewer objects of the class
            than the count of the clause. It may be empty.
    """

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...]


def geneval(
    images: Images,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    detector: str = "shapes",
    threshold: float = 0.3,
    counting_threshold: float = 0.9,
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores images against the metadata of their prompts.

    The detector is called once, with the images whose values are all finite, and not at all if
    there are none.

    Args:
        images: Images [n, H, W, 3] in [0, 1], which are not clipped. One with a non-finite value
            has NaN for both scores.
        prompts: The prompt of each image, for messages.
        metadata: GenEval's metadata of each prompt, a mapping. "tag": the name of the task, e.g.
            "position". "include": a list of the requested objects, e.g. {"class": "dog", "count":
            1, "color": "brown", "position": ["left of", 0]}, where color and position are optional,
            and the position is relative to the objects of an earlier entry, here that of index 0.
            "exclude", optional: a list of objects with "class" and "count", of which there must be
            fewer. Other keys of the mapping are ignored, but an object may have no others.
        detector: "shapes", which finds the objects of the embedded world in square images, or
            "module.path:function", which is imported: a function from images [m, H, W, 3] to one
            sequence of `detectors.Detection`s per image.
        threshold: An object counts if its confidence is greater.
        counting_threshold: The confidence that an object must exceed for prompts with the tag
            "counting", in place of `threshold`.

    Returns:
        A dict of two float32 arrays [n]. "reward", the partial score: the mean closeness of
        numbers, colors and positions to the request (`score_request` lists its terms), at most 1
        and possibly negative. "strict": 1 if everything is exactly as requested, else 0.

    Raises:
        ValueError: If the numbers of images, prompts and metadata differ or images are not RGB; if
            there is no such detector, or it does not return one list per image; if images for
            "shapes" are not square; or if metadata is not GenEval's or asks for a class or color
            that the detector does not know, in which case the message names the prompt.
        Exception: Whatever a user's detector raises.
    """
    check_arguments("geneval", images, prompts, metadata)
    detect = open_detector(detector)
    known = vocabulary(detector)
    requests = [
        parse_request(prompt, mapping, known)
        for prompt, mapping in zip(prompts, metadata, strict=True)
    ]
    finite = np.flatnonzero(finite_images(images))
    detections = detect(images[finite]) if len(finite) else []
    if len(detections) != len(finite):
        raise ValueError(
            f"reward 'geneval': detector {detector!r} returned {len(detections)} lists for "
            f"{len(finite)} images"
        )
    reward = np.full(len(images), np.nan, np.float32)
    strict = np.full(len(images), np.nan, np.float32)
    for i, in_image in zip(finite, detections, strict=True):
        least = counting_threshold if requests[i].tag == "counting" else threshold
        reward[i], strict[i] = score_request(group_by_class(in_image, least), requests[i])
    return {"reward": reward, "strict": strict}


def check(prompt: str, metadata: Metadata, detector: str = "shapes", **options: Any) -> None:
    """Checks the metadata of a prompt. The detector is not imported for that.

    Args:
        prompt: The prompt, for messages.
        metadata: The metadata of the prompt: a mapping with "tag", "include" and possibly
            "exclude", of the form that `geneval` scores.
        detector: "shapes", whose classes and colors are known, or another detector, with which any
            are accepted.
        **options: The options `threshold` and `counting_threshold` of `geneval`, which have no
            effect here.

    Raises:
        ValueError: If the metadata is not GenEval's, or asks for a class or color that the detector
            does not know.
    """
    parse_request(prompt, metadata, vocabulary(detector))


geneval.check = check  # type: ignore[attr-defined]


def group_by_class(detections: Sequence[Detection], threshold: float) -> Objects:
    """Groups the objects of an image by class.

    Args:
        detections: The objects of one image as the detector returned them, in any order.
        threshold: Only objects with a greater confidence count.

    Returns:
        For each class its 16 (`MAX_OBJECTS`) most confident objects, the most confident first.
        Objects of equal confidence keep their order. Classes without such an object are not in the
        mapping.
    """
    groups: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.confidence):
        if detection.confidence > threshold:
            group = groups.setdefault(detection.name, [])
            if len(group) < MAX_OBJECTS:
                group.append(detection)
    return groups


def score_request(objects: Objects, request: Request) -> tuple[float, bool]:
    """Scores one image.

    The partial score is the mean of terms. Each clause of `request.include` adds, where n is the
    number of detected objects of its class:

      1. Number: 1 - |n - count| / count, which is below 0 for more than twice the count.
      2. If n is not the count, and the clause has a color or a position: one 0 in place of the
         terms 3 and 4.
      3. Color, if the clause has one and n is the count: 1 - |m - count| / count, where m is the
         number of objects of the class in this color.
      4. Position, if the clause has one and both n and m (if it has a color) are the count. It
         refers to an earlier clause. If that clause was not met, in number, color or position: 0.
         If every object of this clause has the relation to every object of that one: 1. Otherwise:
         two terms, 0 and 1, as in Flow-GRPO's code. With a wrong m, the position adds no term.

    `request.exclude` only affects the strict verdict.

    Args:
        objects: The objects of the image by class, as `group_by_class` returns them.
        request: The objects that the image should show.

    Returns:
        A tuple: the partial score, at most 1; and the strict verdict, true if every clause is met
        and every excluded class has fewer objects than its clause says.
    """
    terms: list[float] = []
    # The objects of each clause so far. None: the clause was not met.
    groups: list[Sequence[Detection] | None] = []
    for clause in request.include:
        group = objects.get(clause.name, ())
        terms.append(_closeness(clause.count, len(group)))
        met = len(group) == clause.count
        if not met and (clause.color or clause.position):
            terms.append(0.0)
        if met and clause.color:
            num_colored = sum(detection.color == clause.color for detection in group)
            terms.append(_closeness(clause.count, num_colored))
            met = num_colored == clause.count
        if met and clause.position:
            relation, index = clause.position
            others = groups[index]
            met = others is not None and all(
                relation in relations(a, b) for a in group for b in others
            )
            if met:
                terms.append(1.0)
            elif others is None:
                terms.append(0.0)
            else:
                terms += [0.0, 1.0]
        groups.append(group if met else None)
    has_excluded = any(
        len(objects.get(clause.name, ())) >= clause.count for clause in request.exclude
    )
    return sum(terms) / len(terms), None not in groups and not has_excluded


def relations(a: Detection, b: Detection) -> set[str]:
    """Returns the relations that `a` has to `b`, by GenEval's rule.

    The offset between the centers of the boxes is first reduced along each axis by 0.1
    (`MIN_OFFSET`) times the sum of both boxes' sizes along this axis; a shorter offset becomes 0. A
    relation holds if the reduced offset in its direction ("below" is that of growing y) is more
    than half (`MIN_AXIS_FRACTION`) of the distance between the centers, which is the length of the
    original offset.

    Args:
        a: The object whose position is described.
        b: The object that this position is relative to.

    Returns:
        Some of "left of", "right of", "above" and "below": at most two (`a` diagonal to `b`). The
        set is empty if neither reduced offset is that long, as for boxes that overlap much, or if
        both are below 0.001 pixels.
    """
    ax0, ay0, ax1, ay1 = a.box
    bx0, by0, bx1, by1 = b.box
    offset = np.array([ax0 + ax1 - bx0 - bx1, ay0 + ay1 - by0 - by1]) / 2
    sizes = np.abs([ax1 - ax0, ay1 - ay0]) + np.abs([bx1 - bx0, by1 - by0])
    revised = np.sign(offset) * np.maximum(np.abs(offset) - MIN_OFFSET * sizes, 0)
    if np.all(np.abs(revised) < 1e-3):
        return set()
    x, y = revised / np.linalg.norm(offset)
    holds = {
        "left of": x < -MIN_AXIS_FRACTION,
        "right of": x > MIN_AXIS_FRACTION,
        "above": y < -MIN_AXIS_FRACTION,
        "below": y > MIN_AXIS_FRACTION,
    }
    return {relation for relation, is_true in holds.items() if is_true}


def parse_request(prompt: str, metadata: Metadata, known: Vocabulary) -> Request:
    """Reads the objects that an image should show from the metadata of its prompt.

    Args:
        prompt: The prompt, for messages.
        metadata: The metadata of the prompt: "tag", a text; "include", a list of mappings such as
            {"class": "dog", "count": 1, "color": "brown", "position": ["left of", 0]} (only color
            and position are optional, and 0 is the index of an earlier entry); and possibly
            "exclude", a list of mappings with "class" and "count". Null counts as missing for
            "color" and "position" alone. Other keys of `metadata` are ignored, but an entry may
            have no others.
        known: The classes and colors that the detector can find.

    Returns:
        The request, with its clauses in the order of the metadata.

    Raises:
        ValueError: If "tag" is no text, "include" is missing or empty, "include" or "exclude" is no
            list of mappings, or one of these is no valid clause (an unknown key, a missing or wrong
            value, or a class or color that is not in `known`). The message names the prompt, the
            field and what is accepted.
    """
    tag = metadata.get("tag")
    include = _parse_clauses(prompt, metadata, "include", known)
    if not isinstance(tag, str):
        raise _refusal(prompt, "tag", tag, "metadata that names a task of GenEval's")
    if not include:
        raise _refusal(
            prompt, "include", metadata.get("include"), "metadata with at least one clause"
        )
    return Request(tag, include, _parse_clauses(prompt, metadata, "exclude", known))


def _parse_clauses(
    prompt: str, metadata: Metadata, kind: str, known: Vocabulary
) -> tuple[Clause, ...]:
    """Reads the clauses of a request.

    Args:
        prompt: The prompt, for messages.
        metadata: The metadata of the prompt. `metadata[kind]` is a list with one mapping per
            clause, e.g. {"class": "dog", "count": 1}.
        kind: The key of the clauses in `metadata`, "include" or "exclude".
        known: The classes and colors that the detector can find.

    Returns:
        The clauses in order; () if there is no such key or the list is empty.

    Raises:
        ValueError: If the value is no list of mappings, or a mapping is no valid clause
            (`_parse_clause`), such as one with a class or color that is not in `known`.
    """
    values = metadata.get(kind, [])
    is_list = isinstance(values, list | tuple)
    if not is_list or not all(isinstance(value, Mapping) for value in values):
        raise _refusal(prompt, kind, values, "a list of mappings")
    return tuple(_parse_clause(prompt, value, kind, i, known) for i, value in enumerate(values))


def _parse_clause(
    prompt: str, value: Mapping[str, Any], kind: str, index: int, known: Vocabulary
) -> Clause:
    """Reads one clause of a request from the metadata of a prompt.

    Args:
        prompt: The prompt, for messages.
        value: The clause, a mapping. "class": a text. "count": an integer of at least 1, no
            Boolean. Only in the list "include", and optional: "color", a text, and "position", a
            pair of a relation (e.g. "left of") and the index of an earlier clause.
        kind: The list that the clause is in, "include" or "exclude".
        index: The index of the clause in this list, from 0. A position may refer only to smaller
            ones.
        known: The classes and colors that the detector can find.

    Returns:
        The clause. Its color and position are None where they are missing or null.

    Raises:
        ValueError: If there is another key, "class" or "count" is missing, or a value is not as
            above or is a class or color that is not in `known`. The message names the prompt and
            the field.
    """
    field = f"{kind}[{index}]"
    allowed: tuple[str, ...] = ("class", "count")
    if kind == "include":
        allowed += ("color", "position")
    unknown = [repr(key) for key in value if key not in allowed]
    if unknown:
        accepted = f"no other keys than {', '.join(allowed)}, got {', '.join(unknown)}"
        raise _refusal(prompt, field, value, accepted)

    name = value.get("class")
    if not isinstance(name, str) or not name or (known.classes and name not in known.classes):
        accepted = f"one of {', '.join(known.classes)}" if known.classes else "a name"
        raise _refusal(prompt, f"{field}.class", name, accepted)
    count = value.get("count")
    if type(count) is not int or count < 1:
        raise _refusal(prompt, f"{field}.count", count, "a count of at least 1")
    color = value.get("color")
    is_known = isinstance(color, str) and color and (not known.colors or color in known.colors)
    if color is not None and not is_known:
        accepted = f"one of {', '.join(known.colors)}" if known.colors else "a color"
        raise _refusal(prompt, f"{field}.color", color, accepted)
    position = value.get("position")
    if position is None:
        return Clause(name, count, color)
    is_pair = isinstance(position, list | tuple) and len(position) == 2
    if (
        not is_pair
        or position[0] not in RELATIONS
        or type(position[1]) is not int
        or not 0 <= position[1] < index
    ):
        accepted = f"one of {', '.join(RELATIONS)}, and the index of an earlier clause"
        raise _refusal(prompt, f"{field}.position", position, accepted)
    return Clause(name, count, color, (position[0], position[1]))


def _refusal(prompt: str, field: str, value: Any, accepted: str) -> ValueError:
    """Returns, and does not raise, the error for a value in the metadata of a prompt.

    Args:
        prompt: The prompt. The message shows at most 80 characters of it.
        field: The name of the value in the metadata, e.g. "include[0].count".
        value: The value that is not accepted, of which the message shows at most 80 characters.
        accepted: A description of the accepted values.

    Returns:
        A ValueError with a message of one line.
    """
    return ValueError(
        f"reward 'geneval': prompt {brief_repr(prompt)}: {field}={brief_repr(value)}: "
        f"expected {accepted}"
    )


def _closeness(count: int, num_objects: int) -> float:
    """Returns 1 less the relative error of a number of objects.

    It is 1 for the right number, 0 for none or twice as many, and negative for more.

    Args:
        count: The right number, at least 1.
        num_objects: The number of objects in the image.
    """
    return 1 - abs(count - num_objects) / count
