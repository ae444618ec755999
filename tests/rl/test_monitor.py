"""The exploration setting of the next iteration, by the correlations of those before."""

import math

import pyarrow.parquet as parquet
import pytest

from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.explore.monitor import FIRST_RETURN, WINDOW, next_level, setting_ladder
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.runs import metrics
from solrl_jax.runs import trainer as trainer
from solrl_jax.runs.progress import TerminalProgress
from tests.small import small_config


def run(quality, floor=0.8, highest=3):
    """The levels of as many iterations as `quality(iteration, level)` is asked for."""
    history = []
    for iteration in range(120):
        level = next_level(history, floor, highest)
        history.append((level, quality(iteration, level)))
    return [level for level, _ in history]


def test_the_ladder_has_more_steps_and_then_finer_formats():
    names = [(x.precision, x.steps) for x in setting_ladder(FORMATS["nvfp4"], 6, 10, "bf16")]
    assert names == [("nvfp4", 6), ("nvfp4", 10), ("fp8", 10), ("bf16", 10)]
    assert setting_ladder(FORMATS["fp8"], 10, 10, "bf16") == (
        ExplorationSetting("fp8", 10),
        ExplorationSetting("bf16", 10),
    )
    assert setting_ladder(FORMATS["bf16"], 6, 10, "bf16") == (
        ExplorationSetting("bf16", 6),
        ExplorationSetting("bf16", 10),
    )
    assert setting_ladder(FORMATS["bf16"], 10, 10, "bf16") == (ExplorationSetting("bf16", 10),)
    # a format that quantizes nothing is the training precision by another name
    for other, trained in (("bf16", "fp32"), ("fp32", "bf16")):
        ladder = setting_ladder(FORMATS[other], 6, 10, trained)
        assert ladder == (ExplorationSetting(trained, 6), ExplorationSetting(trained, 10))


def test_a_good_proxy_is_left_alone():
    assert set(run(lambda iteration, level: 0.8)) == {0}


def test_it_rises_until_it_does_and_no_further():
    got = run(lambda iteration, level: [0.5, 0.6, 0.9, 0.95][level])
    assert got[: WINDOW * 2 + 1] == [0] * WINDOW + [1] * WINDOW + [2]
    assert max(got) == 2


def test_it_stays_at_the_highest_when_nothing_does():
    got = run(lambda iteration, level: 0.1)
    assert got[3 * WINDOW :] == [3] * (120 - 3 * WINDOW)


def test_one_bad_iteration_is_no_reason():
    assert set(run(lambda iteration, level: 0.3 if iteration == 7 else 0.99)) == {0}


def test_it_comes_back_when_it_can():
    got = run(lambda iteration, level: 0.9 if level or iteration > 5 else 0.5)
    assert got == [0] * WINDOW + [1] * FIRST_RETURN + [0] * (120 - WINDOW - FIRST_RETURN)


def test_it_tries_more_and_more_seldom():
    got = run(lambda iteration, level: 0.9 if level else 0.5)
    stays = [len(run_) for run_ in "".join(map(str, got)).strip("0").split("0") if run_]
    assert stays[:3] == [FIRST_RETURN, 2 * FIRST_RETURN, 4 * FIRST_RETURN]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_says_nothing(value):
    assert set(run(lambda iteration, level: value)) == {0}
    got = run(lambda iteration, level: value if iteration % 2 else 0.5)
    assert got[: 2 * WINDOW] == [0] * (2 * WINDOW - 1) + [1]


def test_a_history_of_other_levels_is_taken_as_it_is():
    """A run that went on with a floor, after a start without one; and one whose ladder has become
    shorter.
    """
    assert next_level([(0, 0.1)] * 21, 0.8, 3) == 1
    assert next_level([(2, 0.9)] * 3, 0.8, 1) == 1


@pytest.mark.exhaustive
def test_a_run_explores_better_below_the_floor(tmp_path, capsys):
    """The floor is out of reach: two steps do not rank eight kept ones without a fault.

    The run is stopped in between.
    """
    settings = (
        "rollout.explore.min_rank_correlation=1.0",
        "rollout.candidates=24",
        "rollout.kept=8",
    )
    for iterations in (2, 5):
        with TerminalProgress() as report:
            trainer.run(small_config(tmp_path, *settings, f"train.iterations={iterations}"), report)
    rows = metrics.read(tmp_path)[1:]
    assert [row["fidelity/level"] for row in rows] == [0, 0, 0, 1, 1]
    assert max(row["fidelity/spearman"] for row in rows[:3]) < 1
    explored = [
        parquet.read_table(tmp_path / "ledger" / f"iteration-{i:06d}.parquet").to_pylist()[0]
        for i in range(1, 6)
    ]
    assert [(row["precision"], row["steps"]) for row in explored] == [("nvfp4", 2)] * 3 + [
        ("nvfp4", 3)
    ] * 2
    assert "exploring in nvfp4, 3 steps from now on" in capsys.readouterr().err
    assert not [name for row in rows for name in row if name.startswith("fidelity/pool")]
