"""The warnings: the trained reward rises by more than chance, and a watched one falls or stops
rising.
"""

import json
from pathlib import Path

import pytest

from solrl_jax.runs.hacking import hacking_alarms


def row(iteration, reward, clip, error=0.01, **more):
    errors = {"eval/reward/standard_error": error, "eval/clip/standard_error": error}
    return {"iteration": iteration, "eval/reward": reward, "eval/clip": clip, **errors, **more}


@pytest.mark.parametrize(
    ("now", "flagged"),
    [
        (row(9, 0.6, 0.4), True),
        (row(9, 0.6, 0.5), False),  # the watched one stays
        (row(9, 0.6, 0.6), False),  # both rise
        (row(9, 0.5, 0.4), False),  # the trained one stays
        (row(9, 0.4, 0.4), False),  # both fall
        (row(9, 0.515, 0.485), True),  # sqrt(2) standard errors of 0.01 are 0.0141
        (row(9, 0.513, 0.485), False),
        (row(9, 0.515, 0.487), False),
        (row(9, 0.6, None), False),
        (row(9, 0.6, float("nan")), False),
    ],
)
def test_what_is_flagged(now, flagged):
    assert bool(hacking_alarms([row(0, 0.5, 0.5)], now, ["clip"])) == flagged


def test_the_line_names_the_watched_reward_and_both_changes():
    rows = [
        {"iteration": 0, "loss": 1.0},
        row(5, 0.5, 0.5, **{"eval/ocr": 0.7, "eval/ocr/standard_error": 0.01}),
        row(7, 0.7, 0.1),
    ]
    now = row(9, 0.6, 0.4, **{"eval/ocr": 0.8, "eval/ocr/standard_error": 0.01})
    assert hacking_alarms(rows, now, ["ocr", "clip"]) == [
        "reward hacking? since the evaluation after iteration 5 the trained reward rose from"
        " 0.500 to 0.600, the watched 'clip' fell from 0.500 to 0.400"
    ]


def test_a_score_that_is_watched_since_later_is_compared_with_its_first():
    rows = [row(0, 0.1, None), row(5, 0.5, 0.5)]
    assert not hacking_alarms(rows, row(9, 0.5, 0.4), ["clip"])
    assert hacking_alarms(rows, row(9, 0.6, 0.4), ["clip"])
    assert not hacking_alarms([], row(9, 0.6, 0.4), ["clip"])


def test_a_score_that_stops_rising_is_compared_with_its_highest_value():
    rows = [row(0, 0.5, 0.5), row(4, 0.6, 0.7), row(8, 0.61, 0.69), {"iteration": 9, "loss": 1.0}]
    assert hacking_alarms(rows, row(12, 0.65, 0.7), ["clip"]) == [
        "reward hacking? since the evaluation after iteration 4 the trained reward rose from"
        " 0.600 to 0.650, the watched 'clip' no longer rises: 0.700, now 0.700"
    ]
    assert not hacking_alarms(rows, row(12, 0.65, 0.71), ["clip"])  # it still rises
    assert not hacking_alarms(rows, row(12, 0.61, 0.7), ["clip"])  # neither rises
    never = [row(0, 0.5, 0.5), row(4, 0.6, 0.51)]
    assert not hacking_alarms(
        never, row(8, 0.7, 0.5), ["clip"]
    )  # it never rose by more than chance
    no_error = {"iteration": 12, "eval/reward": 0.65, "eval/clip": 0.6}
    assert not hacking_alarms(rows, no_error, ["clip"])
    for value in (None, float("nan")):
        assert not hacking_alarms(rows, row(12, 0.65, value), ["clip"])
    assert not hacking_alarms(
        rows, row(12, 0.65, 0.6, **{"eval/clip/standard_error": None}), ["clip"]
    )
    absent = row(12, 0.65, 0.6)
    del absent["eval/clip"]
    assert not hacking_alarms(rows, absent, ["clip"])
    unknown = [*rows, row(10, 0.62, float("nan"))]
    assert hacking_alarms(unknown, row(12, 0.65, 0.7), ["clip"])


def test_a_score_that_falls_and_stopped_before_gives_one_line():
    rows = [row(0, 0.5, 0.5), row(4, 0.6, 0.7)]
    (line,) = hacking_alarms(rows, row(8, 0.7, 0.4), ["clip"])
    assert "fell from 0.500 to 0.400" in line


def test_runs_of_the_study_warn_as_the_docstring_says():
    """The reward gradient's runs stop raising the watched score; those of `nft` and `awm` do
    not.
    """
    study = json.loads((Path(__file__).parents[2] / "benchmarks/study-learning.json").read_text())
    errors = {"eval/reward/standard_error": 0.0055, "eval/shapes/standard_error": 0.0185}
    warned = set()
    for name, run in study["runs"].items():
        columns = zip(run["iterations"], run["reward"], run["shapes"], strict=True)
        rows = [
            {"iteration": i, "eval/reward": r, "eval/shapes": s, **errors} for i, r, s in columns
        ]
        if any(hacking_alarms(rows[:n], rows[n], ["shapes"]) for n in range(len(rows))):
            warned.add(name)
    assert warned == {"opsd-0", "opsd-2", "opsd-3", "draft-2"}
