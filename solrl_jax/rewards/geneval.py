"""GenEval (arXiv 2310.11513): whether a picture shows the right number of objects, in the right colours and places.

It is scored as in DiffusionNFT and Flow-GRPO. The metadata of a prompt is a line of GenEval's own files:

    {"tag": "position", "include": [{"class": "bench", "count": 1},
                                    {"class": "dog", "count": 1, "color": "brown", "position": ["left of", 0]}]}

It may also have "exclude": [{"class": ..., "count": ...}]. A position names an earlier clause by its index.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.config.values import brief_repr
from solrl_jax.rewards.detectors import Detection, Vocabulary, open_detector, vocabulary
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite

RELATIONS = ("left of", "right of", "above", "below")
MOST = 16  # objects of a class that are counted
NEAR = 0.1  # an offset counts beyond this share of the sum of both sizes
LEAN = 0.5  # least share of the distance along the axis of a relation

Objects = Mapping[str, Sequence[Detection]]  # by class, the most confident first


@dataclasses.dataclass(frozen=True)
class Clause:
    """`count` objects of class `name`, perhaps in a colour. position: (relation, index of an earlier clause)."""

    name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What a picture should show, from the metadata of its prompt."""

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
    """Scores pictures against the metadata of their prompts.

    detector: "shapes", which finds the objects of the embedded world, or "module.path:function", a `detectors.Detect`.
    threshold: an object counts if its confidence is greater. counting_threshold: the same where the tag is "counting".

    Returns "reward", the partial score, at most 1, and "strict", 1 if all is exactly as asked, else 0. A picture with values
    that are not finite scores NaN. Raises ValueError in one line that names the prompt if its metadata is not GenEval's.
    """
    check_arguments("geneval", images, prompts, metadata)
    detect = open_detector(detector)
    known = vocabulary(detector)
    requests = [
        request(prompt, extra, known) for prompt, extra in zip(prompts, metadata, strict=True)
    ]
    sound = np.flatnonzero(finite(images))
    found = detect(images[sound]) if len(sound) else []
    if len(found) != len(sound):
        raise ValueError(
            f"reward 'geneval': detector {detector!r} gave {len(found)} lists for {len(sound)} pictures"
        )
    reward, strict = np.full((2, len(images)), np.nan, np.float32)
    for i, detections in zip(sound, found, strict=True):
        least = counting_threshold if requests[i].tag == "counting" else threshold
        reward[i], strict[i] = judge(by_class(detections, least), requests[i])
    return {"reward": reward, "strict": strict}


# A detector of the user's is not imported for this check. The other options are thresholds.
geneval.check = lambda prompt, metadata, detector="shapes", **_: request(  # type: ignore[attr-defined]
    prompt, metadata, vocabulary(detector)
)


def by_class(detections: Sequence[Detection], threshold: float) -> Objects:
    """The objects of each class with a confidence above `threshold`: the MOST most confident, in this order."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.confidence):
        if detection.confidence > threshold and len(found.setdefault(detection.name, [])) < MOST:
            found[detection.name].append(detection)
    return found


def judge(found: Objects, asked: Request) -> tuple[float, bool]:
    """The partial score of one picture, which is a mean of terms, and the strict verdict.

    Each clause gives these terms:
      1. how close the number of its objects is to its count. This is below 0 for more than twice the count.
      2. a 0 if this number is wrong and the clause asks for a colour or a position. There are no further terms then.
      3. if it asks for a colour: how close the number of objects of this colour is.
      4. if it asks for a position, and the colours are right: 1 if the relation holds for every pair; a 0 and a 1 if it does
         not, as in Flow-GRPO's code; 0 if the earlier clause was not met.
    `exclude` only affects the strict verdict.
    """
    terms: list[float] = []
    groups: list[
        Sequence[Detection] | None
    ] = []  # the objects of each clause; None: it was not met
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
            met = others is not None and all(
                relation in relations(a, b) for a in objects for b in others
            )
            terms += [1.0] if met else [0.0] if others is None else [0.0, 1.0]
        groups.append(objects if met else None)
    barred = any(len(found.get(clause.name, ())) >= clause.count for clause in asked.exclude)
    return sum(terms) / len(terms), None not in groups and not barred


def relations(a: Detection, b: Detection) -> set[str]:
    """The relations that `a` has to `b`: two if it is diagonal to it, none if their centres are nearly the same."""
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = a.box, b.box
    offset = np.array([ax0 + ax1 - bx0 - bx1, ay0 + ay1 - by0 - by1]) / 2
    sizes = np.abs([ax1 - ax0, ay1 - ay0]) + np.abs([bx1 - bx0, by1 - by0])
    revised = np.sign(offset) * np.maximum(np.abs(offset) - NEAR * sizes, 0)
    if np.all(np.abs(revised) < 1e-3):
        return set()
    x, y = revised / np.linalg.norm(offset)
    holds = {"left of": x < -LEAN, "right of": x > LEAN, "above": y < -LEAN, "below": y > LEAN}
    return {relation for relation, true in holds.items() if true}


def request(prompt: str, metadata: Metadata, known: Vocabulary) -> Request:
    """Reads what the metadata asks for. Raises ValueError in one line that names the prompt, the field and what is accepted."""

    def refuse(field: str, value: Any, accepted: str) -> ValueError:
        return ValueError(
            f"reward 'geneval': prompt {brief_repr(prompt)}: {field}={brief_repr(value)}: expected {accepted}"
        )

    def clauses(kind: str, allowed: tuple[str, ...]) -> tuple[Clause, ...]:
        listed = metadata.get(kind, [])
        if not isinstance(listed, list | tuple) or not all(
            isinstance(clause, Mapping) for clause in listed
        ):
            raise refuse(kind, listed, "a list of mappings")
        return tuple(clause(f"{kind}[{i}]", listed[i], i, allowed) for i in range(len(listed)))

    def clause(
        field: str, given: Mapping[str, Any], index: int, allowed: tuple[str, ...]
    ) -> Clause:
        if strange := [key for key in given if key not in allowed]:
            raise refuse(
                field,
                given,
                f"no other keys than {', '.join(allowed)}, got {', '.join(map(repr, strange))}",
            )
        name, count, color, position = (
            given.get(key) for key in ("class", "count", "color", "position")
        )
        if not isinstance(name, str) or (known.classes and name not in known.classes):
            raise refuse(
                f"{field}.class",
                name,
                f"one of {', '.join(known.classes)}" if known.classes else "a name",
            )
        if type(count) is not int or count < 1:
            raise refuse(f"{field}.count", count, "a count of at least 1")
        if color is not None and (
            not isinstance(color, str) or (known.colors and color not in known.colors)
        ):
            raise refuse(
                f"{field}.color",
                color,
                f"one of {', '.join(known.colors)}" if known.colors else "a colour",
            )
        if position is None:
            return Clause(name, count, color)
        sound = (
            isinstance(position, list | tuple) and len(position) == 2 and position[0] in RELATIONS
        )
        if not sound or type(position[1]) is not int or not 0 <= position[1] < index:
            raise refuse(
                f"{field}.position",
                position,
                f"one of {', '.join(RELATIONS)}, and the index of an earlier clause",
            )
        return Clause(name, count, color, (position[0], position[1]))

    tag = metadata.get("tag")
    include = clauses("include", ("class", "count", "color", "position"))
    if not isinstance(tag, str):
        raise refuse("tag", tag, "metadata that names a task of GenEval's")
    if not include:
        raise refuse("include", metadata.get("include"), "metadata with at least one clause")
    return Request(tag, include, clauses("exclude", ("class", "count")))


def _closeness(want: int, found: int) -> float:
    return 1 - abs(want - found) / want
