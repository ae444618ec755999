"""GenEval (arXiv 2310.11513): are the objects that were asked for there, as many, in their colours and places?

Scored as DiffusionNFT and Flow-GRPO train on it. The metadata of a prompt is a line of GenEval's own files:

    {"tag": "position", "include": [{"class": "bench", "count": 1},
                                    {"class": "dog", "count": 1, "color": "brown", "position": ["left of", 0]}]}

and perhaps "exclude": [{"class": ..., "count": ...}]. A position refers to a clause before it by its index.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.config.schema import shown
from solrl_jax.rewards.detectors import Detection, Detector, open_detector
from solrl_jax.rewards.outside import Metadata, check, finite

RELATIONS = ("left of", "right of", "above", "below")
MOST = 16  # objects of a class
NEAR = 0.1  # share of both sizes that does not count as an offset
LEAN = 0.5  # least share of the distance that lies along a relation's axis

Objects = Mapping[str, Sequence[Detection]]  # by class, the most certain first


@dataclasses.dataclass(frozen=True)
class Clause:
    """`count` objects of a class, of a colour if one is asked; position: a relation to the objects of an earlier clause."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What a picture should show."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...]


def geneval(
    images: Float[np.ndarray, "n H W 3"],
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    detector: str = "shapes",
    threshold: float = 0.3,
    counting_threshold: float = 0.9,
) -> dict[str, Float[np.ndarray, " n"]]:
    """The partial score, at most 1, under "reward"; under "strict" 1 where all is exactly as asked, else 0.

    detector: "shapes" (the embedded world's) or "module.path:function", a `detectors.Detect`. threshold: confidence that an
    object must exceed, `counting_threshold` where the tag is "counting". NaN for a picture that holds other than numbers.
    Raises ValueError in one line that names the prompt when its metadata is not GenEval's.
    """
    check("geneval", images, prompts, metadata)
    find = open_detector(detector)
    requests = [request(prompt, extra, find) for prompt, extra in zip(prompts, metadata, strict=True)]
    sound = np.flatnonzero(finite(images))
    found = find.detect(images[sound]) if len(sound) else []
    if len(found) != len(sound):
        raise ValueError(f"reward 'geneval': detector {detector!r} gave {len(found)} lists for {len(sound)} pictures")
    reward, strict = np.full((2, len(images)), np.nan, np.float32)
    for i, detections in zip(sound, found, strict=True):
        least = counting_threshold if requests[i].tag == "counting" else threshold
        reward[i], strict[i] = judge(by_class(detections, least), requests[i])
    return {"reward": reward, "strict": strict}


def by_class(detections: Sequence[Detection], threshold: float) -> Objects:
    """The objects of each class whose confidence exceeds `threshold`, the most certain first, MOST at most."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.confidence):
        if detection.confidence > threshold and len(found.setdefault(detection.name, [])) < MOST:
            found[detection.name].append(detection)
    return found


def judge(found: Objects, asked: Request) -> tuple[float, bool]:
    """The partial score, a mean of terms, and the strict verdict on one picture.

    A clause's terms: how close its count is; then, as far as it asks, a 0 if the count is wrong, else how close the number of
    that colour is, and the relation: 1 if it holds for every pair, a 0 and a 1 if it does not (as the peers' loop leaves
    them), 0 if the earlier clause was not met. The relation is looked at only if the colour is right. A term falls below 0
    when more than twice the number is there. `exclude` fails the strict verdict alone.
    """
    terms: list[float] = []
    groups: list[Sequence[Detection] | None] = []  # what met each clause
    for clause in asked.include:
        objects = found.get(clause.name, ())
        terms.append(_closeness(clause.count, len(objects)))
        met = len(objects) == clause.count
        if not met and (clause.color or clause.position):
            terms.append(0.0)
        if met and clause.color:
            coloured = sum(thing.color == clause.color for thing in objects)
            terms.append(_closeness(clause.count, coloured))
            met = coloured == clause.count
        if met and clause.position:
            relation, index = clause.position
            others = groups[index]
            met = others is not None and all(relation in relations(a, b) for a in objects for b in others)
            terms += [1.0] if met else [0.0] if others is None else [0.0, 1.0]
        groups.append(objects if met else None)
    barred = any(len(found.get(clause.name, ())) >= clause.count for clause in asked.exclude)
    return sum(terms) / len(terms), None not in groups and not barred


def relations(a: Detection, b: Detection) -> set[str]:
    """How `a` lies to `b`: two relations at once for a diagonal, none for boxes about the same centre."""
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = a.box, b.box
    offset = np.array([ax0 + ax1 - bx0 - bx1, ay0 + ay1 - by0 - by1]) / 2
    sizes = np.abs([ax1 - ax0, ay1 - ay0]) + np.abs([bx1 - bx0, by1 - by0])
    revised = np.sign(offset) * np.maximum(np.abs(offset) - NEAR * sizes, 0)
    if np.all(np.abs(revised) < 1e-3):
        return set()
    x, y = revised / np.linalg.norm(offset)
    holds = {"left of": x < -LEAN, "right of": x > LEAN, "above": y < -LEAN, "below": y > LEAN}
    return {relation for relation, true in holds.items() if true}


def request(prompt: str, metadata: Metadata, detector: Detector) -> Request:
    """What the metadata asks for. Raises ValueError in one line that names the prompt, the field and what is accepted."""

    def refuse(field: str, value: Any, accepted: str) -> ValueError:
        return ValueError(f"reward 'geneval': prompt {shown(prompt)}: {field}={shown(value)}: expected {accepted}")

    def clauses(kind: str, allowed: tuple[str, ...]) -> tuple[Clause, ...]:
        listed = metadata.get(kind, [])
        if not isinstance(listed, list | tuple) or not all(isinstance(clause, Mapping) for clause in listed):
            raise refuse(kind, listed, "a list of mappings")
        return tuple(clause(f"{kind}[{i}]", listed[i], i, allowed) for i in range(len(listed)))

    def clause(field: str, given: Mapping[str, Any], index: int, allowed: tuple[str, ...]) -> Clause:
        if strange := [key for key in given if key not in allowed]:
            raise refuse(field, given, f"no other keys than {', '.join(allowed)}, got {', '.join(map(repr, strange))}")
        name, count, color, position = (given.get(key) for key in ("class", "count", "color", "position"))
        if not isinstance(name, str) or (detector.classes and name not in detector.classes):
            raise refuse(f"{field}.class", name, f"one of {', '.join(detector.classes)}" if detector.classes else "a name")
        if type(count) is not int or count < 1:
            raise refuse(f"{field}.count", count, "a count of at least 1")
        if color is not None and (not isinstance(color, str) or (detector.colors and color not in detector.colors)):
            raise refuse(f"{field}.color", color, f"one of {', '.join(detector.colors)}" if detector.colors else "a colour")
        if position is None:
            return Clause(name, count, color)
        sound = isinstance(position, list | tuple) and len(position) == 2 and position[0] in RELATIONS
        if not sound or type(position[1]) is not int or not 0 <= position[1] < index:
            raise refuse(f"{field}.position", position, f"one of {', '.join(RELATIONS)}, and the index of an earlier clause")
        return Clause(name, count, color, (position[0], position[1]))

    tag, include = metadata.get("tag"), clauses("include", ("class", "count", "color", "position"))
    if not isinstance(tag, str):
        raise refuse("tag", tag, "metadata that names a task of GenEval's")
    if not include:
        raise refuse("include", metadata.get("include"), "metadata with at least one clause")
    return Request(tag, include, clauses("exclude", ("class", "count")))


def _closeness(want: int, found: int) -> float:
    return 1 - abs(want - found) / want
