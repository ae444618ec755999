"""The GenEval reward: its rule on given detections, and the verifier of the embedded world as its
detector.
"""

import dataclasses
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from pretrain import drawing

from solrl_jax.data.prompts import EMBEDDED_FOLDER
from solrl_jax.data.shapes import scenes, verifier
from solrl_jax.rewards.detectors import Detection, Vocabulary, detect_shapes
from solrl_jax.rewards.geneval import geneval, parse_request, relations
from tests.cases import first_is_quick

HERE = __name__


def thing(name, x=0.0, y=0.0, color=None, confidence=0.95, side=10.0):
    """A detection, given the center of its box."""
    return Detection(
        name, (x - side / 2, y - side / 2, x + side / 2, y + side / 2), color, confidence
    )


BENCH = {"class": "bench", "count": 1}
DOG = {"class": "dog", "count": 1}
CLOCKS = [{"class": "clock", "count": 3}]
BUS = [{"class": "bus", "count": 1, "color": "red"}]
RIGHT = [BENCH, DOG | {"position": ["right of", 0]}]
APPLE = [
    {"class": "glass", "count": 1, "color": "purple"},
    {"class": "apple", "count": 1, "color": "black"},
]
BROWN = [BENCH, DOG | {"color": "brown", "position": ["above", 0]}]

# (tag, include, what the detector finds, partial score, strict)
CASES = {
    "single": ("single_object", [BENCH], [thing("bench"), thing("dog")], 1, 1),
    "single, absent": ("single_object", [BENCH], [thing("dog")], 0, 0),
    "single, three": ("single_object", [BENCH], [thing("bench", x) for x in (0, 20, 40)], -1, 0),
    "single, hardly": (
        "single_object",
        [BENCH],
        [thing("bench", confidence=0.31), thing("bench", confidence=0.3)],
        1,
        1,
    ),
    "two": ("two_object", [BENCH, DOG], [thing("bench"), thing("dog")], 1, 1),
    "two, one absent": ("two_object", [BENCH, DOG], [thing("dog")], 1 / 2, 0),
    "two, one twice": (
        "two_object",
        [BENCH, DOG],
        [thing("bench"), thing("dog"), thing("dog", 50)],
        1 / 2,
        0,
    ),
    "counting": ("counting", CLOCKS, [thing("clock", x) for x in (0, 20, 40)], 1, 1),
    "counting, two": ("counting", CLOCKS, [thing("clock", x) for x in (0, 20)], 2 / 3, 0),
    "counting, four": ("counting", CLOCKS, [thing("clock", x) for x in (0, 20, 40, 60)], 2 / 3, 0),
    "counting, doubtful": (
        "counting",
        CLOCKS,
        [thing("clock", confidence=c) for c in (0.95, 0.91, 0.9)],
        2 / 3,
        0,
    ),
    "counting, sixteen are looked at": (
        "counting",
        [{"class": "clock", "count": 16}],
        [thing("clock", x) for x in range(20)],
        1,
        1,
    ),
    "colors": ("colors", BUS, [thing("bus", color="red")], 1, 1),
    "colors, wrong": ("colors", BUS, [thing("bus", color="blue")], 1 / 2, 0),
    "colors, unclear": ("colors", BUS, [thing("bus")], 1 / 2, 0),
    "colors, absent": ("colors", BUS, [], 0, 0),
    "colors, one of two": (
        "colors",
        [BUS[0] | {"count": 2}],
        [thing("bus", color="red"), thing("bus", 50, color="pink")],
        3 / 4,
        0,
    ),
    "position": ("position", RIGHT, [thing("bench"), thing("dog", 50)], 1, 1),
    "position, wrong": (
        "position",
        RIGHT,
        [thing("bench", 50), thing("dog")],
        3 / 4,
        0,
    ),  # terms 1, 1, 0, 1
    "position, second absent": ("position", RIGHT, [thing("bench")], 1 / 3, 0),  # 1, 0, 0
    "position, first twice": (
        "position",
        RIGHT,
        [thing("bench"), thing("bench", 9), thing("dog", 50)],
        1 / 3,
        0,
    ),  # 0, 1, 0
    "position, for every pair": (
        "position",
        [BENCH, {"class": "dog", "count": 2, "position": ["right of", 0]}],
        [thing("bench"), thing("dog", 50), thing("dog", -50)],
        3 / 4,
        0,
    ),
    "position and color": (
        "position",
        BROWN,
        [thing("bench", 0, 50), thing("dog", color="brown")],
        1,
        1,
    ),
    "position, wrong color": (
        "position",
        BROWN,
        [thing("bench", 0, 50), thing("dog", color="black")],
        2 / 3,
        0,
    ),  # 1, 1, 0
    "color_attr": (
        "color_attr",
        APPLE,
        [thing("glass", color="purple"), thing("apple", color="black")],
        1,
        1,
    ),
    "color_attr, swapped": (
        "color_attr",
        APPLE,
        [thing("glass", color="black"), thing("apple", color="purple")],
        1 / 2,
        0,
    ),
    "color_attr, one absent": ("color_attr", APPLE, [thing("glass", color="purple")], 1 / 2, 0),
}


def from_the_table(images):
    """A detector for pictures whose pixels all have the number of a case."""
    detections = [case[2] for case in CASES.values()]
    return [detections[round(float(image.mean()))] for image in images]


def one_list(images):
    return [[]]


def test_hand_made_pictures_score_as_the_rule_says():
    images = np.stack([np.full((4, 4, 3), i, np.float32) for i in range(len(CASES))])
    metadata = [{"tag": tag, "include": include} for tag, include, *_ in CASES.values()]
    scores = geneval(images, list(CASES), metadata, detector=f"{HERE}:from_the_table")
    assert {name: values.dtype for name, values in scores.items()} == {
        "reward": np.float32,
        "strict": np.float32,
    }
    expected = {
        name: (pytest.approx(reward, abs=1e-6), strict)
        for name, (*_, reward, strict) in CASES.items()
    }
    assert dict(zip(CASES, zip(*scores.values(), strict=True), strict=True)) == expected


def test_what_is_excluded_fails_the_strict_verdict():
    image = np.zeros((1, 4, 4, 3), np.float32)
    bench = {"tag": "single_object", "include": [BENCH]}

    def judge(extra):
        return geneval(
            image, ["p"], [bench | extra], detector=f"{HERE}:from_the_table"
        )  # finds a bench and a dog

    assert judge({"exclude": [{"class": "dog", "count": 2}, {"class": "cat", "count": 1}]})[
        "strict"
    ] == [1]
    scores = judge({"exclude": [{"class": "dog", "count": 1}]})
    assert (scores["reward"], scores["strict"]) == ([1], [0])


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (100, 0, {"right of"}),
        (-100, 10, {"left of"}),
        (10, -100, {"above"}),
        (0, 100, {"below"}),
        (50, -50, {"right of", "above"}),
        (100, 60, {"right of"}),  # (60 - 2) / 117 is just below a half
        (100, 61, {"right of", "below"}),
        (1.5, 0, set()),  # within a tenth of the sizes
        (3.9, 0, set()),
        (4.1, 0, {"right of"}),
        (0, 0, set()),
    ],
)
def test_a_relation_holds_where_most_of_the_distance_lies_along_its_axis(x, y, expected):
    assert relations(thing("dog", x + 7, y - 3), thing("bench", 7, -3)) == expected


def test_a_picture_that_holds_other_than_numbers_has_no_score():
    images = np.zeros((3, 4, 4, 3), np.float32)
    images[1, 0, 0, 0] = np.nan
    scores = geneval(
        images, ["p"] * 3, [{"tag": "x", "include": [BENCH]}] * 3, detector=f"{HERE}:from_the_table"
    )
    np.testing.assert_array_equal(scores["reward"], [1, np.nan, 1])
    np.testing.assert_array_equal(scores["strict"], [1, np.nan, 1])


# the embedded world


def lines(name):
    return [
        json.loads(line)
        for line in (EMBEDDED_FOLDER / f"geneval-shapes-{name}.jsonl").read_text().splitlines()
    ]


def rendered(drawn, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([drawing.render(scene, rng) for scene in drawn]).astype(np.float32) / 255


def scene_line(scene):
    """The line for a scene, by the script that made the sets."""
    return LINE(scene)


LINE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_prompt_sets.py"))["line"]


def one_word_changed(scene, rng):
    """The scene with one attribute of one group changed, or the opposite relation."""
    while True:
        i = rng.integers(len(scene.groups))
        attribute = ("color", "shape", "size", "count", "relation")[rng.integers(5)]
        every = {
            "count": (1, 2, 3),
            "color": scenes.COLORS,
            "shape": scenes.SHAPES,
            "size": scenes.SIZES,
        }
        if attribute == "relation":
            opposite = {
                "above": "below",
                "below": "above",
                "left of": "right of",
                "right of": "left of",
                None: None,
            }
            other = scenes.Scene(scene.groups, opposite[scene.relation])
        else:
            old = getattr(scene.groups[i], attribute)
            new = every[attribute][rng.integers(len(every[attribute]))] if old is not None else None
            groups = [
                dataclasses.replace(g, **{attribute: new}) if j == i else g
                for j, g in enumerate(scene.groups)
            ]
            try:
                other = scenes.Scene(tuple(groups), scene.relation)
            except ValueError:
                continue
        if other != scene:
            return other


@pytest.mark.exhaustive
def test_right_pictures_of_the_embedded_sets_pass_and_those_of_a_word_changed_do_not():
    entries = lines("train") + lines("test")
    assert len({line["prompt"] for line in entries}) == len(entries) == 282
    drawn = [scenes.parse_caption(line["prompt"]) for line in entries]
    assert [scene_line(scene) for scene in drawn] == entries
    images = rendered(drawn)
    prompts = [line["prompt"] for line in entries]
    right = geneval(images, prompts, entries)
    strict = np.asarray(verifier.verify(images, verifier.parse_targets(prompts)).strict)
    np.testing.assert_array_equal(right["strict"], strict)
    np.testing.assert_array_equal(right["strict"], 1)
    np.testing.assert_array_equal(right["reward"], 1)

    rng = np.random.default_rng(1)
    wrong = [scene_line(one_word_changed(scene, rng)) for scene in drawn]
    scores = geneval(images, [line["prompt"] for line in wrong], wrong)
    np.testing.assert_array_equal(scores["strict"], 0)
    assert scores["reward"].max() < 1
    assert 0.1 < scores["reward"].mean() < 0.8

    few = geneval(
        images[-3:], prompts[-3:], wrong[-3:]
    )  # the score does not depend on the other pictures
    np.testing.assert_array_equal(few["reward"], scores["reward"][-3:])


def test_the_sets_that_are_tested_on_are_held_out():
    assert all(drawing.held_out(line["prompt"]) for line in lines("test"))
    assert not any(drawing.held_out(line["prompt"]) for line in lines("train"))


@pytest.mark.slow
@pytest.mark.parametrize("side", first_is_quick([64, 32]))
def test_the_verifier_says_where_things_are(side):
    image = np.full((side, side, 3), scenes.BACKGROUND, np.float32)
    unit = side // 32
    image[4 * unit : 10 * unit, 18 * unit : 24 * unit] = scenes.PALETTE["green"]
    image[14 * unit : 25 * unit, 3 * unit : 14 * unit] = scenes.PALETTE["purple"]
    (detections,) = detect_shapes(image[None] / 255)
    assert [(d.name, d.color, d.confidence) for d in detections] == [
        *(("square", "purple", 1), ("large square", "purple", 1)),
        *(("square", "green", 1), ("small square", "green", 1)),
    ]
    for detection, box in zip(detections[::2], [(3, 14, 14, 25), (18, 4, 24, 10)], strict=True):
        np.testing.assert_allclose(detection.box, np.multiply(box, unit), atol=0.3 * unit)


# what is refused

GOOD = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
FIRST = GOOD["include"][0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tag=None: expected metadata that names a task of GenEval's"),
        ({"tag": "colors"}, "include=None: expected metadata with at least one clause"),
        (
            GOOD | {"include": FIRST},
            "include={'class': 'circle', 'count': 1, 'color': 'red'}: expected a list of mappings",
        ),
        (
            GOOD | {"include": [FIRST | {"class": "dog"}]},
            "include[0].class='dog': expected one of circle, square, triangle, small",
        ),
        (
            GOOD | {"include": [FIRST | {"count": 0}]},
            "include[0].count=0: expected a count of at least 1",
        ),
        (
            GOOD | {"include": [FIRST, FIRST | {"color": "brown"}]},
            "include[1].color='brown': expected one of red, green, blue",
        ),
        (
            GOOD | {"include": [FIRST | {"position": ["above", 0]}]},
            "include[0].position=['above', 0]: expected one of left of",
        ),
        (
            GOOD | {"include": [FIRST, FIRST | {"position": ["near", 0]}]},
            "include[1].position=['near', 0]: expected one of left",
        ),
        (GOOD | {"include": [{"class": "circle", "cuont": 1}]}, "got 'cuont'"),
        (
            GOOD | {"exclude": [{"class": "circle"}]},
            "exclude[0].count=None: expected a count of at least 1",
        ),
    ],
)
def test_metadata_that_is_not_genevals_is_refused_with_the_prompt(metadata, message):
    images = np.zeros((2, 32, 32, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"^reward 'geneval': prompt 'a blue dog': .*" + re.escape(message)
    ) as error:
        geneval(images, ["a red circle", "a blue dog"], [GOOD, metadata])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["class", "color"])
def test_an_empty_name_is_refused_where_any_name_is_accepted(field):
    request = GOOD | {"include": [FIRST | {field: ""}]}
    with pytest.raises(ValueError, match=re.escape(f"include[0].{field}=''")):
        parse_request("a dog", request, Vocabulary())


@pytest.mark.parametrize(
    ("detector", "message"),
    [
        ("shape", "detector='shape': expected 'shapes' or 'module.path:function'"),
        (
            f"{HERE}:absent",
            f"detector='{HERE}:absent': expected 'shapes' or 'module.path:function' (module",
        ),
        ("no.such.module:f", "expected 'shapes' or 'module.path:function' (No module named 'no')"),
        (f"{HERE}:HERE", "(HERE is no function)"),
        (f"{HERE}:one_list", f"detector '{HERE}:one_list' returned 1 lists for 2 images"),
    ],
)
def test_a_detector_that_is_none_is_refused(detector, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        geneval(
            np.zeros((2, 32, 32, 3), np.float32),
            ["a red circle"] * 2,
            [GOOD] * 2,
            detector=detector,
        )


def test_the_verifier_refuses_pictures_that_it_cannot_judge():
    with pytest.raises(ValueError, match="detector 'shapes': images 48 x 32; expected squares"):
        detect_shapes(np.zeros((1, 32, 48, 3), np.float32))
