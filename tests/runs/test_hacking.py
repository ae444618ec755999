"""The alarm: the trained reward rises while a watched one falls, each by more than chance."""

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
        "reward hacking? since the evaluation after iteration 5 the trained reward rose from 0.500 to 0.600,"
        " the watched 'clip' fell from 0.500 to 0.400"
    ]


def test_a_score_that_is_watched_since_later_is_compared_with_its_first():
    rows = [row(0, 0.1, None), row(5, 0.5, 0.5)]
    assert not hacking_alarms(rows, row(9, 0.5, 0.4), ["clip"])
    assert hacking_alarms(rows, row(9, 0.6, 0.4), ["clip"])
    assert not hacking_alarms([], row(9, 0.6, 0.4), ["clip"])
